"""Selective, full and sub-module checkpointing of layer lists, under the names of NeMo Automodel.

Layers are not wrapped here. What is in `layers`, and the model's tree and names, stay the same objects, so a list that
a caller holds is right after the call as well. KV-shared models are done like all others, because no attention code
runs a second time: `has_kv_sharing` changes nothing. NEMO_SELECTIVE_AC_TRACE=1 logs each operator's decision once.
See docs/compat_nemo.md.
"""

# ruff: noqa: F401
# pyright: reportUnusedFunction=false, reportUnusedImport=false, reportPrivateUsage=false
# Names are handed on, also those with an underscore, for code that reads them in NeMo's module.

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from actmem.applying import Applied
from actmem.compat._nemo_models import (
    _disable_dynamo_lru_cache,
    _replace_child_module,
    detect_kv_sharing_and_maybe_disable_cache,
    is_selective_activation_checkpointing,
    parts_mode,
    unwrap_checkpoint_wrapper,
)
from actmem.compat._nemo_operators import (
    _ALTERNATING,
    _SELECTIVE_AC_MATMUL_OPS,
    _SELECTIVE_AC_MUST_SAVE_OPS,
    _SELECTIVE_AC_TO_COPY_OP,
    _build_selective_ac_save_ops,
    _default_compute_intensive_ops,
    _existing_ops,
    _is_cuda_to_cpu_copy,
    _resolve_op_attr,
    _resolve_torch_op,
)
from actmem.compat._translating import apply_once, install_note, selective
from actmem.errors import ApplyError, ModeError
from actmem.modes import Full, Mode
from actmem.torchcompat import named_modules

logger = logging.getLogger(__name__)
_decisions = logging.getLogger("actmem.decisions")

SELECTIVE_AC_WRAPPER_FLAG = "_nemo_selective_ac"
"""The attribute that is True on a layer under selective checkpointing: on the layer itself, as it has no wrapper."""
_SELECTIVE_AC_TRACE = os.environ.get("NEMO_SELECTIVE_AC_TRACE", "0").lower() not in ("0", "", "false", "no")
_SELECTIVE_AC_TRACE_SEEN: set[str] = set()


def apply_selective_checkpointing_to_layers(
    model: nn.Module, layers: list[nn.Module], has_kv_sharing: bool, *, enable_compile: bool = False
) -> Applied:
    """Change whole layers so that they save what is dear, of matrix products every second, and recompute the rest.

    Raises:
        ApplyError: one of the layers is not in the model, or another plan is applied to it.
    """
    del has_kv_sharing  # see the module's docstring
    if enable_compile:
        _disable_dynamo_lru_cache()
    if _SELECTIVE_AC_TRACE and not any(isinstance(h, _Trace) for h in _decisions.handlers):
        _decisions.addHandler(_Trace())
        _decisions.setLevel(logging.DEBUG)
    saved = _SELECTIVE_AC_MUST_SAVE_OPS | _SELECTIVE_AC_MATMUL_OPS
    applied = _apply(model, layers, selective(model, saved, alternate=[f"aten.{name}" for name in _ALTERNATING]))
    for layer in layers:
        install_note(layer, SELECTIVE_AC_WRAPPER_FLAG, True)
    return applied


def apply_full_layer_checkpointing_to_layers(model: nn.Module, layers: list[nn.Module]) -> Applied:
    """Change whole layers so that they recompute everything."""
    return _apply(model, layers, Full())


def apply_submodule_checkpointing(
    layers: list[nn.Module], has_kv_sharing: bool, *, context_fn: Callable[[], Any] | None = None
) -> list[Applied]:
    """Change layers so that they recompute what is in their attention, feed-forward and norms, and save the rest.

    Raises:
        ModeError: a layer has none of these, or a `context_fn` is given: there is no second run for it to enclose.
    """
    del has_kv_sharing  # see the module's docstring
    if context_fn is not None:
        raise ModeError(f"context_fn = {context_fn!r} has no meaning here: no code runs twice. Leave it out.")
    modes = [parts_mode(layer) for layer in layers]  # all, before the first is changed
    return [apply_once(layer, mode, blocks=".") for layer, mode in zip(layers, modes, strict=True)]


def make_selective_checkpoint_context_fn() -> Callable[[], Any]:
    """Return a `context_fn` with this policy for torch.utils.checkpoint, which then recomputes, not actmem."""

    def contexts() -> Any:
        num_products = {False: 0, True: 0}  # forward and recompute are counted apart

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            alternating = func in _SELECTIVE_AC_MATMUL_OPS
            num_products[ctx.is_recompute] += alternating
            dear = func in _SELECTIVE_AC_MUST_SAVE_OPS or _is_cuda_to_cpu_copy(func, args, kwargs)
            save = num_products[ctx.is_recompute] % 2 == 1 if alternating else dear
            decision = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
            _maybe_trace_selective_ac_decision(func, decision, alternating, is_recompute=ctx.is_recompute)
            return decision

        return cast(Any, torch_checkpoint).create_selective_checkpoint_contexts(policy)

    return contexts


def _apply(model: nn.Module, layers: list[nn.Module], mode: Mode) -> Applied:
    path_of = {id(module): path for path, module in named_modules(model)}
    if lost := [index for index, layer in enumerate(layers) if id(layer) not in path_of]:
        raise ApplyError(f"layers {lost} are not in this {type(model).__name__}. Give layers of the model.")
    if not layers:
        raise ApplyError("layers is empty, so that nothing would be done. Give layers of the model.")
    return apply_once(model, mode, blocks=",".join(path_of[id(layer)] or "." for layer in layers))


def _maybe_trace_selective_ac_decision(func: Any, decision: Any, is_alternating: bool, *, is_recompute: bool) -> None:
    """Log the decision for an operator, once. Does nothing unless the trace is on."""
    key = str(func)
    if _SELECTIVE_AC_TRACE and not is_recompute and key not in _SELECTIVE_AC_TRACE_SEEN:
        _SELECTIVE_AC_TRACE_SEEN.add(key)
        verdict = "SAVE" if decision in ("save", CheckpointPolicy.MUST_SAVE) else "RECOMPUTE"
        logger.info("[selective-ac] %s -> %s", key, "ALTERNATE (every second is saved)" if is_alternating else verdict)


class _Trace(logging.Handler):
    """Hand the engine's decisions on to the trace."""

    def emit(self, record: logging.LogRecord) -> None:
        op, decision, *_ = cast(tuple[Any, ...], record.args)
        names = {str(op) for op in _SELECTIVE_AC_MATMUL_OPS}
        _maybe_trace_selective_ac_decision(op, decision, op in names, is_recompute=False)
