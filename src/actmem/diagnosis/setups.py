"""Read training settings: trainer arguments, configurations of accelerate, DeepSpeed and axolotl."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = ["Setup", "Source", "kind_of", "read_settings", "read_setup", "unknown_keys"]

Source = Mapping[str, Any] | str | Path | object
"""A mapping, the path to a JSON or YAML file, or an object with attributes such as `TrainingArguments`."""

_DDP = frozenset({"MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU"})


@dataclass(frozen=True)
class Setup:
    """What the given settings say. A string names the setting and its file; None means that nothing was said."""

    trainer: str | None = None
    """Settings of transformers' Trainer or of accelerate."""
    checkpointing: str | None = None
    """The trainer turns checkpointing on."""
    fsdp: str | None = None
    fsdp_checkpointing: str | None = None
    deepspeed_block: str | None = None
    """DeepSpeed's block for activation checkpointing."""
    zero_stage: int | None = None
    ddp: str | None = None
    find_unused: bool = False
    reentrant: str | None = None
    """The reentrant form is chosen, or not specified, in which case torch uses it."""
    preserve_rng_state: bool | None = None
    autocast: str | None = None
    compile_mode: str | None = None
    use_cache: bool | None = None
    every_nth: str | None = None
    """Only every n-th layer is checkpointed."""
    offloaders: tuple[str, ...] = ()
    """Settings that offload saved tensors to host memory or disk."""
    inert_offloader: str | None = None
    """DeepSpeed's offloading, which works only if its block is read."""
    unknown: tuple[str, ...] = ()
    """Keys that nothing reads, with the key that was probably meant."""
    unread: tuple[str, ...] = ()
    """Files that the settings refer to and that could not be read."""


def read_setup(
    trainer_args: Source | None = None,
    accelerate: Source | None = None,
    deepspeed: Source | None = None,
    axolotl: Source | None = None,
) -> Setup:
    """Read settings in any of their forms. A file may be of another kind than the argument it is passed as.

    axolotl uses the Trainer's names for these settings; its other keys are ignored.

    >>> setup = read_setup({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}})
    >>> setup.checkpointing, setup.reentrant
    ('gradient_checkpointing = True in trainer_args', 'use_reentrant = True in trainer_args')

    Raises:
        ModeError: a file cannot be read, or does not contain settings.
    """
    setup = Setup()
    sources = {"trainer_args": trainer_args, "accelerate": accelerate, "deepspeed": deepspeed, "axolotl": axolotl}
    for name, source in sources.items():
        if source is None:
            continue
        given = fields_of(name, source)
        where = name if not isinstance(source, str | Path) else str(source)
        kind = "axolotl" if name == "axolotl" else kind_of(given)
        setup = _READERS[kind](setup, given, where)
        if isinstance(source, Mapping | str | Path):  # the attributes of an object are checked by its class
            setup = replace(setup, unknown=(*setup.unknown, *unknown_keys(kind, given, where)))
    return setup


def fields_of(name: str, source: Source) -> Mapping[str, Any]:
    """Return the settings as a mapping."""
    if isinstance(source, Mapping):
        return cast("Mapping[str, Any]", source)
    if isinstance(source, str | Path):
        return read_settings(name, Path(source))
    try:
        return vars(source)
    except TypeError:
        raise ModeError(
            f"{name} = {source!r} does not contain settings. Pass TrainingArguments, a dict, or the path to a JSON or "
            "YAML file."
        ) from None


def read_settings(name: str, path: Path) -> Mapping[str, Any]:
    """Read a JSON, TOML or YAML file of settings.

    Raises:
        ModeError: it cannot be read, or does not contain settings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parse = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix) or _yaml(name, path)
        read: Any = parse(text)
    except (OSError, ValueError) as error:
        raise ModeError(
            f"{name} = {str(path)!r} cannot be read: {error}. Pass the path to a JSON, TOML or YAML file of settings."
        ) from error
    if not isinstance(read, Mapping):
        raise ModeError(
            f"{name} = {str(path)!r} contains a {type(read).__name__}. Expected settings by name, as in "
            '{"gradient_checkpointing": true}.'
        )
    return cast("Mapping[str, Any]", read)


def _yaml(name: str, path: Path) -> Callable[[str], Any]:
    try:
        import yaml
    except ImportError:
        raise ModeError(
            f"{name} = {str(path)!r} is a YAML file, and reading it needs pyyaml: pip install pyyaml, or use JSON."
        ) from None

    def load(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return load


def _with_trainer(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
    setup = replace(setup, trainer=where)
    switch = given.get("gradient_checkpointing")
    if _on(switch) or switch in ("offload", "offload_disk"):  # the two of axolotl
        options = _options(given.get("gradient_checkpointing_kwargs"))
        setup, options = _with_transformers_own(setup, options, where)
        preserve = (options or {}).get("preserve_rng_state")
        setup = replace(
            setup,
            checkpointing=f"gradient_checkpointing = True in {where}",
            reentrant=_reentrant(options, where),
            preserve_rng_state=None if preserve is None else _on(preserve),
        )
    away = given.get("activation_offloading")
    if switch in ("offload", "offload_disk"):
        setup = replace(setup, offloaders=(*setup.offloaders, f"gradient_checkpointing = {switch} in {where}"))
    elif _on(away) or away in ("legacy", "disk", "hidden_states"):
        setup = replace(setup, offloaders=(*setup.offloaders, f"activation_offloading = {away} in {where}"))
    if given.get("fsdp") not in (None, "", [], False):
        setup = _with_fsdp(replace(setup, fsdp=f"fsdp in {where}"), given.get("fsdp_config"), where)
    if given.get("ddp_find_unused_parameters") is not None:
        found = f"ddp_find_unused_parameters = {given['ddp_find_unused_parameters']} in {where}"
        setup = replace(setup, ddp=found, find_unused=_on(given["ddp_find_unused_parameters"]))
    for precision in ("bf16", "fp16"):
        if _on(given.get(precision)):
            setup = replace(setup, autocast=f"{precision} = True in {where}")
    if _on(given.get("torch_compile")) or given.get("torch_compile_mode"):
        setup = replace(setup, compile_mode=given.get("torch_compile_mode") or "default")
    if "use_cache" in given:
        setup = replace(setup, use_cache=_on(given["use_cache"]))
    return _nested(setup, "deepspeed", given.get("deepspeed"), where, _with_deepspeed)


def _with_transformers_own(
    setup: Setup, options: Mapping[str, Any] | None, where: str
) -> tuple[Setup, Mapping[str, Any] | None]:
    """Handle the options that transformers reads itself; return the rest, which it passes to torch's checkpoint."""
    if options is None or not options.keys() & {"every_n_layers", "offload"}:
        return setup, options
    place = f"gradient_checkpointing_kwargs of {where}"
    every = options.get("every_n_layers", 1)
    if every != 1:
        setup = replace(setup, every_nth=f"every_n_layers = {every} in {place}")
    if _on(options.get("offload")):
        setup = replace(setup, offloaders=(*setup.offloaders, f"offload = True in {place}"))
    rest = {name: value for name, value in options.items() if name not in ("every_n_layers", "offload")}
    return setup, rest or None  # nothing left: transformers chooses the non-reentrant form


def _reentrant(options: Mapping[str, Any] | None, where: str) -> str | None:
    if options is None:
        return None
    if "use_reentrant" not in options:
        return f"use_reentrant is missing from gradient_checkpointing_kwargs in {where}, and torch's default is True"
    return f"use_reentrant = True in {where}" if _on(options["use_reentrant"]) else None


def _with_accelerate(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
    setup = replace(setup, trainer=setup.trainer or where)
    kind = str(given.get("distributed_type", "")).upper().rpartition(".")[2]
    if kind in _DDP:
        setup = replace(setup, ddp=f"distributed_type: {kind} in {where}")
    if kind == "FSDP":
        setup = _with_fsdp(replace(setup, fsdp=f"distributed_type: FSDP in {where}"), given.get("fsdp_config"), where)
    if (precision := str(given.get("mixed_precision", "no"))) in ("bf16", "fp16"):
        setup = replace(setup, autocast=f"mixed_precision: {precision} in {where}")
    dynamo = _options(given.get("dynamo_config")) or {}
    if mode := dynamo.get("dynamo_mode"):
        setup = replace(setup, compile_mode=str(mode))
    inner = _options(given.get("deepspeed_config")) or {}
    if "zero_stage" in inner:
        setup = replace(setup, zero_stage=int(inner["zero_stage"]))
    return _nested(setup, "deepspeed_config_file", inner.get("deepspeed_config_file"), where, _with_deepspeed)


def _with_fsdp(setup: Setup, config: Any, where: str) -> Setup:
    def read(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
        for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
            if _on(given.get(name)):
                setup = replace(setup, fsdp_checkpointing=f"{name} = True in {where}")
            if _on(given.get(f"{name}_offload")):
                setup = replace(setup, offloaders=(*setup.offloaders, f"{name}_offload = True in {where}"))
        return setup

    return _nested(setup, "fsdp_config", config, where, read)


def _with_deepspeed(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
    if given.get("activation_checkpointing"):
        setup = replace(setup, deepspeed_block=f"activation_checkpointing in {where}")
        if _on((_options(given["activation_checkpointing"]) or {}).get("cpu_checkpointing")):
            setup = replace(setup, inert_offloader=f"activation_checkpointing.cpu_checkpointing = True in {where}")
    if _on((_options(given.get("compile")) or {}).get("offload_activation")):
        setup = replace(setup, offloaders=(*setup.offloaders, f"compile.offload_activation = True in {where}"))
    stage = (_options(given.get("zero_optimization")) or {}).get("stage")
    if stage is not None:
        setup = replace(setup, zero_stage=int(stage))
    return setup


def _nested(setup: Setup, name: str, inner: Any, where: str, read: Callable[[Setup, Any, str], Setup]) -> Setup:
    """Read settings nested in others: a mapping, or the path to a file."""
    if not inner:
        return setup
    if isinstance(inner, Mapping):
        return read(setup, inner, f"{name} of {where}")
    beside = Path(where).parent / str(inner)
    path = beside if beside.exists() else Path(str(inner))
    try:
        return read(setup, read_settings(name, path), str(inner))
    except ModeError as error:
        return replace(setup, unread=(*setup.unread, str(error)))


def _options(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _on(value: Any) -> bool:
    return value.strip().lower() in ("true", "yes", "1", "on") if isinstance(value, str) else bool(value)


_READERS: dict[str, Callable[[Setup, Mapping[str, Any], str], Setup]] = {
    "trainer": _with_trainer,
    "accelerate": _with_accelerate,
    "deepspeed": _with_deepspeed,
    "axolotl": _with_trainer,
}


_OF_CHECKPOINT = frozenset(
    {
        *("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"),
        *("respect_saved_tensors_hooks", "every_n_layers", "offload"),
    }
)
"""Keys of `gradient_checkpointing_kwargs`: the arguments of torch's checkpoint, and two of transformers'."""
_READ_HERE = frozenset(
    {
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "fsdp", "fsdp_config", "deepspeed", "use_cache"),
        *("ddp_find_unused_parameters", "bf16", "fp16", "torch_compile", "torch_compile_mode", "activation_offloading"),
    }
)
_OF_DEEPSPEED = frozenset(
    {
        *("partition_activations", "number_checkpoints", "contiguous_memory_optimization", "cpu_checkpointing"),
        *("profile", "synchronize_checkpoint_boundary"),
    }
)
"""Keys of DeepSpeed's block for activation checkpointing."""
_TRL = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig")


def kind_of(given: Mapping[str, Any]) -> str:
    """Return which library's settings these are, judging by their keys.

    >>> kind_of({"zero_optimization": {"stage": 3}}), kind_of({"distributed_type": "FSDP"}), kind_of({"bf16": True})
    ('deepspeed', 'accelerate', 'trainer')
    """
    if "zero_optimization" in given or isinstance(given.get("activation_checkpointing"), Mapping):
        return "deepspeed"
    if "distributed_type" in given or "compute_environment" in given:
        return "accelerate"
    return "trainer"


def unknown_keys(kind: str, given: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the keys that nothing reads, each with the key that was probably meant.

    Keys of a trainer are looked up in the classes of transformers and TRL if these are installed; otherwise only keys
    that closely resemble one that matters here are reported. In the settings of accelerate, DeepSpeed and axolotl, only
    the parts about checkpointing are checked.
    """
    if kind == "trainer":
        yield from _of_trainer(given, where)
    if kind in ("trainer", "axolotl"):
        options = given.get("gradient_checkpointing_kwargs")
        yield from _unknown(_table(options), _OF_CHECKPOINT, f"gradient_checkpointing_kwargs of {where}")
    if kind == "deepspeed":
        block = given.get("activation_checkpointing")
        yield from _unknown(_table(block), _OF_DEEPSPEED, f"activation_checkpointing of {where}")


def _of_trainer(given: Mapping[str, Any], where: str) -> Iterator[str]:
    rest = {key for key in given if key not in _READ_HERE and not key.startswith("_")}
    if rest and (known := _fields_of_transformers()):
        if rest - known:
            known |= _fields_of_trl()  # only if needed: the import takes seconds
        yield from _unknown(dict.fromkeys(sorted(rest)), known | _READ_HERE, where)
        return
    for key in sorted(rest):
        if hint := did_you_mean(key, _READ_HERE):
            yield f"{key} in {where}.{hint}"


def _unknown(table: Mapping[str, Any], known: frozenset[str], where: str) -> Iterator[str]:
    for key in table:
        if key not in known:
            yield f"{key} in {where}.{did_you_mean(str(key), known)}"


def _table(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


@cache
def _fields_of_transformers() -> frozenset[str]:
    return _fields("transformers", ("TrainingArguments", "Seq2SeqTrainingArguments"))


@cache
def _fields_of_trl() -> frozenset[str]:
    return _fields("trl", _TRL)


def _fields(package: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return the fields of some of a package's classes; empty if the package cannot be imported."""
    if importlib.util.find_spec(package) is None:
        return frozenset()
    found: set[str] = set()
    for name in names:
        try:
            kind = getattr(importlib.import_module(package), name)
        except (ImportError, AttributeError, RuntimeError):
            continue
        found |= {field.name for field in dataclasses.fields(kind)} | inspect.signature(kind).parameters.keys()
    return frozenset(found)
