"""Operators whose result has another layout on a CPU than on fake tensors: other strides, or another storage.

The shape that torch infers is right. Where the strides are not, a copy that a later `contiguous()` makes, or does not
make, is missed, and the plan is for other operators than the ones that run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actmem.torchcompat import suggested_format

__all__ = ["LAYOUTS"]


def _grouped(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give the result of a grouped product its shape: torch's own rule supports bfloat16 only."""
    left, right = args[0], args[1]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    if left.dtype is torch.bfloat16:
        return func(*args, **kwargs)
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 3 and right.dim() == 3:
        groups: tuple[int, ...] = (left.shape[0],)
    elif left.dim() == 2 and right.dim() == 2:
        groups = (offsets.shape[0],)
    else:
        groups = ()
    width = 16 // left.element_size()
    padded = -(-columns // width) * width
    strides = (rows * padded, padded, 1)[-2 - len(groups) :]
    return left.new_empty_strided((*groups, rows, columns), strides)


def _reduced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a reduced loss the storage it has on a CPU: torch computes it in the storage of all its terms."""
    found = func(*args, **kwargs)
    if found.dim() or found.device.type != "cpu":
        return found
    return args[0].new_empty(args[0].numel()).as_strided((), ())


def _contiguous(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make the results contiguous, whatever the layout of the arguments."""
    found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return _laid(found, torch.contiguous_format)
    return tuple(_laid(t, torch.contiguous_format) for t in found)


def _as_suggested(index: int) -> Callable[[Any, Any, dict[str, Any]], Any]:
    """Make the first result contiguous, or channels-last if the argument at `index` is."""

    def laid_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        wanted = suggested_format(args[index])
        return _laid(found, wanted) if isinstance(found, Tensor) else (_laid(found[0], wanted), *found[1:])

    return laid_out


def _laid(tensor: Tensor, wanted: torch.memory_format) -> Tensor:
    if tensor.device.type != "cpu" or tensor.is_contiguous(memory_format=wanted):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=wanted)


def _same(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
    """Return the argument itself, as the real operator does."""
    return args[0]


def _in_flight(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
    """Wrap the result of a collective that nobody has waited for, as the real operator does."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(args[0])


_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
_PADDINGS = tuple(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (2, 3))
_REDUCED = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
_IN_ORDER = (
    "_log_softmax_backward_data",
    "huber_loss_backward",
    "log_sigmoid_forward",
    "mse_loss_backward",
    "smooth_l1_loss_backward",
)

LAYOUTS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "aten._grouped_mm": _grouped,
    "_c10d_functional.wait_tensor": _same,
    "_c10d_functional._wrap_tensor_autograd": _in_flight,
    **{f"aten.{name}": _reduced for name in _REDUCED},
    **{f"aten.{name}": _contiguous for name in _IN_ORDER},
    **{f"aten.{name}": _as_suggested(0) for name in (*_BATCH_NORMS, *_PADDINGS, "max_unpool2d", "channel_shuffle")},
    **{f"aten.{name}_backward": _as_suggested(1) for name in _PADDINGS},
}
"""Operator -> the function that runs it on fake tensors, so that the result has its CPU layout."""
