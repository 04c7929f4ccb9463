"""Reading the settings of a training: arguments of a trainer, configurations of accelerate and of DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from actmem.errors import ModeError

__all__ = ["Setup", "Source", "read_setup"]

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
    unread: tuple[str, ...] = ()
    """Files that are named inside the settings and could not be read."""


def read_setup(
    trainer_args: Source | None = None, accelerate: Source | None = None, deepspeed: Source | None = None
) -> Setup:
    """Read settings, whatever form they come in. A file may be of another kind than the argument it is given as.

    >>> setup = read_setup({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}})
    >>> setup.checkpointing, setup.reentrant
    ('gradient_checkpointing = True in trainer_args', 'use_reentrant = True in trainer_args')

    Raises:
        ModeError: a file cannot be read, or holds no settings.
    """
    setup = Setup()
    for name, source in (("trainer_args", trainer_args), ("accelerate", accelerate), ("deepspeed", deepspeed)):
        if source is not None:
            setup = _with(setup, fields_of(name, source), name if not isinstance(source, str | Path) else str(source))
    return setup


def fields_of(name: str, source: Source) -> Mapping[str, Any]:
    """Return the settings as a mapping."""
    if isinstance(source, Mapping):
        return cast("Mapping[str, Any]", source)
    if isinstance(source, str | Path):
        return _parsed(name, Path(source))
    try:
        return vars(source)
    except TypeError:
        raise ModeError(
            f"{name} = {source!r} holds no settings. Give TrainingArguments, a dict, or the path of a JSON or YAML "
            f"file."
        ) from None


def _parsed(name: str, path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        read: Any = json.loads(text) if path.suffix == ".json" else _yaml(name, path)(text)
    except (OSError, ValueError) as error:
        raise ModeError(
            f"{name} = {str(path)!r} cannot be read: {error}. Give the path of a JSON or YAML file of settings."
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
            f"{name} = {str(path)!r} is no .json file, and YAML needs pyyaml: pip install pyyaml, or give it as JSON."
        ) from None

    def load(text: str) -> Any:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error

    return load


def _with(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
    if "zero_optimization" in given or isinstance(given.get("activation_checkpointing"), Mapping):
        return _with_deepspeed(setup, given, where)
    if "distributed_type" in given or "compute_environment" in given:
        return _with_accelerate(setup, given, where)
    return _with_trainer(setup, given, where)


def _with_trainer(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
    setup = replace(setup, trainer=where)
    if _on(given.get("gradient_checkpointing")):
        options = _options(given.get("gradient_checkpointing_kwargs"))
        preserve = (options or {}).get("preserve_rng_state")
        setup = replace(
            setup,
            checkpointing=f"gradient_checkpointing = True in {where}",
            reentrant=_reentrant(options, where),
            preserve_rng_state=None if preserve is None else _on(preserve),
        )
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
        return setup

    return _nested(setup, "fsdp_config", config, where, read)


def _with_deepspeed(setup: Setup, given: Mapping[str, Any], where: str) -> Setup:
    if given.get("activation_checkpointing"):
        setup = replace(setup, deepspeed_block=f"activation_checkpointing in {where}")
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
        return read(setup, _parsed(name, path), str(inner))
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
