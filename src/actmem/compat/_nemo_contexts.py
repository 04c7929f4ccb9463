"""Contexts that NeMo Automodel hands to torch.utils.checkpoint, under its own names. Imported from `compat.nemo`.

They are for torch's checkpoint, which runs code twice and must find the second time what it found the first. The tape
replays operators, so the back end of attention is that of the forward pass by itself, and these change nothing there.
"""

# pyright: reportUnusedFunction=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as torch_checkpoint

from actmem.compat._translating import resolved

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_FSDP_OPS = (
    *("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "fsdp.chunk_cat", "fsdp.copy_", "c10d._allgather_base_"),
    *("aten.empty.memory_format", "aten.empty_like", "aten.view", "aten.split.Tensor", "aten.cat.out"),
)
"""What FSDP2 runs to gather a unit's parameters, which may happen in one of the two runs only."""


@contextmanager
def _restored_sdpa(function: Any, backends: list[SDPBackend]) -> Generator[None]:
    now, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, function
    try:
        with sdpa_kernel(backends):
            yield
    finally:
        functional.scaled_dot_product_attention = now


def sdpa_backend_snapshot_context_fn() -> Contexts:
    """Return contexts of which the second brings back SDPA as it is now: the function, and the back ends that are on.

    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(1, 2, 4, requires_grad=True)
    >>> options = {"use_reentrant": False, "context_fn": sdpa_backend_snapshot_context_fn}
    >>> checkpoint(functional.scaled_dot_product_attention, x, x, x, **options).sum().backward()
    """
    cuda = torch.backends.cuda
    state = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return nullcontext(), _restored_sdpa(functional.scaled_dot_product_attention, [b for b, on in state.items() if on])


def _get_transformer_engine_attention_backend_cache() -> dict[Any, Any] | None:
    """Return where Transformer Engine remembers which attention it chose; None where it is not installed."""
    try:
        module = importlib.import_module(_TE_ATTENTION)
    except Exception:  # noqa: BLE001 - a broken installation of it is none
        return None
    cache = getattr(module, "_attention_backends", None)
    return cast("dict[Any, Any]", cache) if isinstance(cache, dict) else None


@contextmanager
def restored_cache(cache: dict[Any, Any], as_it_was: dict[Any, Any], inner: Any) -> Generator[None]:
    """Fill a cache with what it held before, and afterwards with what it holds now."""
    now = dict(cache)
    cache.clear()
    cache.update(as_it_was)
    try:
        with inner:
            yield
    finally:
        cache.clear()
        cache.update(now)


def ignore_sac_ops(ops: Iterable[object | None]) -> None:
    """Have torch's selective checkpointing leave operators out of its count. None stands for one that is not there."""
    ignored: set[Any] | None = getattr(torch_checkpoint, "SAC_IGNORED_OPS", None)
    if ignored is not None:
        ignored.update(op for op in ops if op is not None)


def ensure_profiler_ops_sac_ignored() -> None:
    """Have torch's selective checkpointing leave the marks of `record_function` out of its count."""
    for name in ("_record_function_enter", "_record_function_enter_new", "_record_function_exit"):
        packet = resolved(torch.ops, f"profiler.{name}")
        if packet is not None:
            ignore_sac_ops([getattr(packet, overload) for overload in packet.overloads()])


def ensure_fsdp_ops_sac_ignored() -> None:
    """Have torch's selective checkpointing leave what FSDP2 gathers parameters by out of its count."""
    ignore_sac_ops(resolved(torch.ops, op if op.count(".") > 1 else f"{op}.default") for op in _FSDP_OPS)


def changes_nothing_here(context_fn: Callable[..., Any] | None) -> bool:
    """Tell whether a context function only brings back what a replay of operators has by itself."""
    parts = [context_fn, getattr(context_fn, "func", None), *getattr(context_fn, "args", ())]
    known = {"sdpa_backend_snapshot_context_fn", "transformer_engine_attention_backend_snapshot_context_fn", "partial"}
    return all(getattr(part, "__name__", type(part).__name__) in known for part in parts if part is not None)
