"""Selective, full and sub-module checkpointing of layer lists, under the names of NeMo Automodel.

Layers are not wrapped here. The modules in `layers`, and the model's tree and names, stay the same objects, so a list
that a caller holds is still right after the call. KV-shared models are treated like all others, because no attention
code runs a second time: `has_kv_sharing` changes nothing. Calls for different layers of one model add up. What tensor
and sequence parallelism gather is recomputed, as in NeMo: `collectives="save"` saves it. NEMO_SELECTIVE_AC_TRACE=1 logs
each operator's decision once. See docs/compat_nemo.md.
"""

# ruff: noqa: F401
# pyright: reportUnusedFunction=false, reportUnusedImport=false, reportPrivateUsage=false, reportUnknownVariableType=false
# Names are re-exported, including those with an underscore, for code that reads them from NeMo's module.

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts as _torchs_contexts

from actmem.applying import Applied, Collectives
from actmem.compat._calls import RuleMode, apply_once
from actmem.compat._nemo_models import (
    _ALTERNATING,
    _SELECTIVE_AC_MATMUL_OPS,
    _SELECTIVE_AC_TO_COPY_OP,
    Contexts,
    _default_compute_intensive_ops,
    _existing_ops,
    _ffpa_forward_ops,
    _get_transformer_engine_attention_backend_cache,
    _is_cuda_to_cpu_copy,
    _replace_child_module,
    _resolve_op_attr,
    _resolve_torch_op,
    changes_nothing_here,
    detect_kv_sharing_and_maybe_disable_cache,
    ensure_fsdp_ops_sac_ignored,
    ensure_profiler_ops_sac_ignored,
    ignore_sac_ops,
    is_selective_activation_checkpointing,
    layers_in_scope,
    normalize_activation_checkpointing_scope,
    parts_mode,
    restored_cache,
    save_ops,
    sdpa_backend_snapshot_context_fn,
    unwrap_checkpoint_wrapper,
)
from actmem.compat._translation import disable_lru_cache, install_note, selective
from actmem.compat.configs import FromConfig, read_config
from actmem.decisions import Decision
from actmem.errors import ApplyError, ModeError
from actmem.modes import Full
from actmem.torchcompat import named_modules

logger = logging.getLogger(__name__)
_decisions = logging.getLogger("actmem.decisions")

SELECTIVE_AC_WRAPPER_FLAG = "_nemo_selective_ac"
"""The attribute that is True on a layer under selective checkpointing; on the layer itself, as there is no wrapper."""
_SELECTIVE_AC_TRACE = os.environ.get("NEMO_SELECTIVE_AC_TRACE", "0").lower() not in ("0", "", "false", "no")
_SELECTIVE_AC_TRACE_SEEN: set[str] = set()


def _build_selective_ac_save_ops() -> frozenset[Any]:
    """Return the operators whose results are saved; for those in `_SELECTIVE_AC_MATMUL_OPS`, every second result."""
    return save_ops(_ffpa_forward_ops())


_SELECTIVE_AC_MUST_SAVE_OPS = _build_selective_ac_save_ops()
_disable_dynamo_lru_cache = disable_lru_cache
create_selective_checkpoint_contexts = cast(Any, _torchs_contexts)


def apply_selective_checkpointing_to_layers(
    model: nn.Module,
    layers: list[nn.Module],
    has_kv_sharing: bool,
    *,
    enable_compile: bool = False,
    collectives: Collectives = "recompute",
) -> Applied | None:
    """Change layers to save expensive operators and every second matrix product, and to recompute the rest.

    Raises:
        ApplyError: a layer is not in the model, or another plan is applied to it.
    """
    del has_kv_sharing  # see the module's docstring
    if enable_compile:
        _disable_dynamo_lru_cache()
    if _SELECTIVE_AC_TRACE and not any(isinstance(f, _Trace) for f in _decisions.filters):
        _decisions.addFilter(_Trace(passing=_decisions.isEnabledFor(logging.DEBUG)))
        _decisions.setLevel(logging.DEBUG)
    saved = _SELECTIVE_AC_MUST_SAVE_OPS | _SELECTIVE_AC_MATMUL_OPS
    mode = selective(model, saved, alternate=[f"aten.{name}" for name in _ALTERNATING])
    applied = _apply(model, layers, mode, collectives)
    for layer in layers:
        install_note(layer, SELECTIVE_AC_WRAPPER_FLAG, True)
    return applied


def apply_selective_activation_checkpointing(
    model: nn.Module,
    *,
    enable_compile: bool = False,
    activation_checkpointing_scope: object = "all",
    collectives: Collectives = "recompute",
) -> Applied | None:
    """Find the layers of a model, in the towers of the scope, and apply selective checkpointing to them.

    The scope is "all", or some of "language", "vision", "audio" and "multimodal" (vision and audio together). Frozen
    layers are skipped, as in NeMo. If no layer remains, None is returned and a warning is logged.
    """
    layers = layers_in_scope(model, normalize_activation_checkpointing_scope(activation_checkpointing_scope))
    if not layers:
        logger.warning("no trainable layers in the scope %r: nothing is changed", activation_checkpointing_scope)
        return None
    has_kv_sharing = detect_kv_sharing_and_maybe_disable_cache(model)
    return apply_selective_checkpointing_to_layers(
        model, layers, has_kv_sharing, enable_compile=enable_compile, collectives=collectives
    )


def apply_full_layer_checkpointing_to_layers(
    model: nn.Module, layers: list[nn.Module], *, collectives: Collectives = "recompute"
) -> Applied | None:
    """Change layers to recompute everything."""
    return _apply(model, layers, Full(), collectives)


def apply_submodule_checkpointing(
    layers: list[nn.Module],
    has_kv_sharing: bool,
    *,
    context_fn: Callable[[], Any] | None = sdpa_backend_snapshot_context_fn,
    collectives: Collectives = "recompute",
) -> list[Applied]:
    """Change layers to recompute their attention, feed-forward and norms, and to save the rest.

    A layer that has none of these is skipped, and logged.

    Raises:
        ModeError: a `context_fn` other than NeMo's snapshots is given: there is no second run to wrap it around.
    """
    del has_kv_sharing  # see the module's docstring
    if not changes_nothing_here(context_fn):
        raise ModeError(
            f"context_fn = {context_fn!r} has no meaning here: no code runs twice. Leave it out; attention is replayed "
            "exactly as it ran."
        )
    modes = [parts_mode(layer) for layer in layers]  # all, before the first is changed
    for layer in (layer for layer, mode in zip(layers, modes, strict=True) if mode is None):
        logger.warning("%s has no part with a known name, and is left unchanged", type(layer).__name__)
    return [
        apply_once(layer, mode, blocks=".", collectives=collectives)
        for layer, mode in zip(layers, modes, strict=True)
        if mode is not None
    ]


def transformer_engine_attention_backend_snapshot_context_fn(
    context_fn: Callable[[], Contexts] | None = None,
) -> Contexts:
    """Return two contexts; the second restores the attention that Transformer Engine chose, if it is installed.

    Args:
        context_fn: what else to restore, such as `sdpa_backend_snapshot_context_fn`.
    """
    first, second = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    cache = _get_transformer_engine_attention_backend_cache()
    return first, second if cache is None else restored_cache(cache, dict(cache), second)


def make_selective_checkpoint_context_fn() -> Callable[[], Any]:
    """Return a `context_fn` with this policy for torch.utils.checkpoint, which then recomputes instead of actmem."""
    ensure_profiler_ops_sac_ignored()
    ensure_fsdp_ops_sac_ignored()

    def contexts() -> Any:
        num_products = {False: 0, True: 0}  # forward and recompute are counted separately

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            alternating = func in _SELECTIVE_AC_MATMUL_OPS
            num_products[ctx.is_recompute] += alternating
            expensive = func in _SELECTIVE_AC_MUST_SAVE_OPS or _is_cuda_to_cpu_copy(func, args, kwargs)
            save = num_products[ctx.is_recompute] % 2 == 1 if alternating else expensive
            decision = CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
            _maybe_trace_selective_ac_decision(func, decision, alternating, is_recompute=ctx.is_recompute)
            return decision

        return create_selective_checkpoint_contexts(policy)

    return contexts


def _apply(model: nn.Module, layers: list[nn.Module], mode: RuleMode, collectives: Collectives) -> Applied | None:
    path_of = {id(module): path for path, module in named_modules(model)}
    if lost := [index for index, layer in enumerate(layers) if id(layer) not in path_of]:
        raise ApplyError(f"layers {lost} are not in this {type(model).__name__}. Pass layers of the model.")
    if not layers:
        logger.warning("the list of layers is empty: nothing is changed")
        return None
    blocks = ",".join(path_of[id(layer)] or "." for layer in layers)
    return apply_once(model, mode, blocks=blocks, collectives=collectives)


def _maybe_trace_selective_ac_decision(func: Any, decision: Any, is_alternating: bool, *, is_recompute: bool) -> None:
    """Log the decision for an operator, once. Does nothing unless the trace is on."""
    verdict = "SAVE" if decision in (Decision.SAVE, CheckpointPolicy.MUST_SAVE) else "RECOMPUTE"
    _trace(str(func), "ALTERNATE (every second is saved)" if is_alternating else verdict, is_recompute=is_recompute)


def _trace(op: str, verdict: str, *, is_recompute: bool = False) -> None:
    if _SELECTIVE_AC_TRACE and not is_recompute and op not in _SELECTIVE_AC_TRACE_SEEN:
        _SELECTIVE_AC_TRACE_SEEN.add(op)
        logger.info("[selective-ac] %s -> %s", op, verdict)


class _Trace(logging.Filter):
    """Pass the engine's decisions on to the trace. They reach other handlers only if they did before."""

    def __init__(self, *, passing: bool) -> None:
        super().__init__()
        self._passing = passing

    def filter(self, record: logging.LogRecord) -> bool:
        op, decision, _, _, never = cast(tuple[Any, ...], record.args)
        if never:
            _trace(op, "SAVE where needed (never replayed)")
        else:
            names = {str(op) for op in _SELECTIVE_AC_MATMUL_OPS}
            _maybe_trace_selective_ac_decision(op, decision, op in names, is_recompute=False)
        return self._passing


def from_config(path: str | Path) -> FromConfig:
    """Read a configuration file of NeMo Automodel: `distributed.activation_checkpointing` and its scope.

    Returns:
        The translation: `mode` and `options` for `actmem.apply`, and notes. Print it.

    Raises:
        ModeError: the file cannot be read, or contains something unknown.
    """
    return read_config(path, "NeMo Automodel")
