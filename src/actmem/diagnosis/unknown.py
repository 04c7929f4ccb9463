"""Keys of settings that nothing reads: a slip of the pen must not be taken in silence."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, cast

from actmem.ops import did_you_mean

__all__ = ["kind_of", "unknown_keys"]

_OF_CHECKPOINT = frozenset(
    {
        *("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"),
        *("respect_saved_tensors_hooks", "every_n_layers", "offload"),
    }
)
"""What `gradient_checkpointing_kwargs` may hold: the arguments of torch's checkpoint, and two of transformers."""
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
"""What DeepSpeed's block for activation checkpointing may hold."""
_TRL = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig")


def kind_of(given: Mapping[str, Any]) -> str:
    """Tell whose settings these are by what is in them.

    >>> kind_of({"zero_optimization": {"stage": 3}}), kind_of({"distributed_type": "FSDP"}), kind_of({"bf16": True})
    ('deepspeed', 'accelerate', 'trainer')
    """
    if "zero_optimization" in given or isinstance(given.get("activation_checkpointing"), Mapping):
        return "deepspeed"
    if "distributed_type" in given or "compute_environment" in given:
        return "accelerate"
    return "trainer"


def unknown_keys(kind: str, given: Mapping[str, Any], where: str) -> Iterator[str]:
    """Name the keys that nothing reads, each with what was probably meant.

    Those of a trainer are looked up in the classes of transformers and TRL, where these are installed; where they are
    not, only a key that is nearly one of those that matter here is named. Of accelerate's and DeepSpeed's settings,
    and of axolotl's, only the parts about checkpointing are looked at.
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
            known |= _fields_of_trl()  # only then: its import takes seconds
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
    """Return the fields of some classes of a package, as far as it is there and can be imported."""
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
