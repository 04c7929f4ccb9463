"""Reading the settings of a training: arguments of a trainer, configurations of accelerate and of DeepSpeed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from actmem.diagnosis.unknown import kind_of, unknown_keys
from actmem.errors import ModeError

__all__ = ["Setup", "Source", "read_settings", "read_setup"]

Source = Mapping[str, Any] | str | Path | object
"""A mapping, the path of a JSON or YAML file, or an object with attributes such as `TrainingArguments`."""

_DDP = frozenset({"MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_HPU"})


@dataclass(frozen=True)
class Setup:
    """What the settings say, as far as they were given. A text says where; None that nothing was said."""

    trainer: str | None = None
    """Settings of transformers' Trainer or of accelerate."""
    checkpointing: str | None = None
    """The trainer switches checkpointing on."""
    fsdp: str | None = None
    fsdp_checkpointing: str | None = None
    deepspeed_block: str | None = None
    """DeepSpeed's block for activation checkpointing."""
    zero_stage: int | None = None
    ddp: str | None = None
    find_unused: bool = False
    reentrant: str | None = None
    """The reentrant form is chosen, or left to torch, which takes it."""
    preserve_rng_state: bool | None = None
    autocast: str | None = None
    compile_mode: str | None = None
    use_cache: bool | None = None
    every_nth: str | None = None
    """Only every n-th layer is checkpointed."""
    offloaders: tuple[str, ...] = ()
    """What takes saved tensors away to host memory or disk, each with the place that asks for it."""
    inert_offloader: str | None = None
    """DeepSpeed's, which works only where its block is read."""
    unknown: tuple[str, ...] = ()
    """Keys that nothing reads, with what was probably meant."""
    unread: tuple[str, ...] = ()
    """Files that are named inside the settings and could not be read."""


def read_setup(
    trainer_args: Source | None = None,
    accelerate: Source | None = None,
    deepspeed: Source | None = None,
    axolotl: Source | None = None,
) -> Setup:
    """Read settings, whatever form they come in. A file may be of another kind than the argument it is given as.

    axolotl's names for these are those of the Trainer; its other keys are not looked at.

    >>> setup = read_setup({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}})
    >>> setup.checkpointing, setup.reentrant
    ('gradient_checkpointing = True in trainer_args', 'use_reentrant = True in trainer_args')

    Raises:
        ModeError: a file cannot be read, or holds no settings.
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
        if isinstance(source, Mapping | str | Path):  # an object has the attributes that its class gives it
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
            f"{name} = {source!r} holds no settings. Give TrainingArguments, a dict, or the path of a JSON or YAML "
            f"file."
        ) from None


def read_settings(name: str, path: Path) -> Mapping[str, Any]:
    """Read a JSON, TOML or YAML file of settings.

    Raises:
        ModeError: it cannot be read, or holds no settings.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parse = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix) or _yaml(name, path)
        read: Any = parse(text)
    except (OSError, ValueError) as error:
        raise ModeError(
            f"{name} = {str(path)!r} cannot be read: {error}. Give the path of a JSON, TOML or YAML file of settings."
        ) from error
    if not isinstance(read, Mapping):
        raise ModeError(
            f"{name} = {str(path)!r} holds a {type(read).__name__}, expected settings by name, as in "
            '{"gradient_checkpointing": true}.'
        )
    return cast("Mapping[str, Any]", read)


def _yaml(name: str, path: Path) -> Callable[[str], Any]:
    try:
        import yaml
    except ImportError:
        raise ModeError(
            f"{name} = {str(path)!r} is read as YAML, which needs pyyaml: pip install pyyaml, or give it as JSON."
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
    """Take out what transformers takes for itself before it hands the rest to torch's checkpoint."""
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
        return f"use_reentrant is left out of gradient_checkpointing_kwargs in {where}, and torch takes True"
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
    """Read settings inside settings: a mapping, or the path of a file."""
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
