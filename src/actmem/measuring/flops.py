"""Floating-point operations of one operator, by torch's own formulas.

torch's registry has no entry for grouped matrix products, for `linear` or, before torch 2.15, for the CPU's fused
attention. They are counted here by the rule torch uses for their relatives. Plain matrix products are counted here
too: the registry's formulas refuse the overloads with an `out_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch.utils import flop_counter

__all__ = ["Formula", "flop_formula"]

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]

_registry: dict[Any, Any] = flop_counter.flop_registry


def flop_formula(func: Any) -> Formula | None:
    """Return the function that computes the FLOPs of a call from arguments, keywords and result; None if there is none.

    >>> import torch
    >>> formula = flop_formula(torch.ops.aten.mm.default)
    >>> formula((torch.empty(2, 3), torch.empty(3, 4)), {}, None)
    48
    """
    packet = getattr(func, "_overloadpacket", func)  # a higher-order operator is registered as itself
    own = _OWN.get(str(packet))
    if own is not None:
        return lambda args, _kwargs, _result: own(args)
    registered = _registry.get(packet)
    if registered is None:
        return None
    return lambda args, kwargs, result: int(registered(*args, **kwargs, out_val=result))


def _product(args: tuple[Any, ...]) -> int:
    return _matrix_product(args[0].shape, args[1].shape)


def _added_product(args: tuple[Any, ...]) -> int:
    return _matrix_product(args[1].shape, args[2].shape)


def _matrix_product(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return 2 * prod(left) * right[-1]


def _linear(args: tuple[Any, ...]) -> int:
    return 2 * prod(args[0].shape) * args[1].shape[0]


def _grouped_product(args: tuple[Any, ...]) -> int:
    left, right = args[0].shape, args[1].shape
    if len(left) == 3 and len(right) == 2:  # the groups divide the columns of the right side: each pays for its own
        left = left[1:]
    return _matrix_product(left, right)


def _attention(args: tuple[Any, ...]) -> int:
    rows, width, value_width = _scores(args[0].shape, args[1].shape, args[2].shape)
    return 2 * rows * (width + value_width)  # scores, weighted sum


def _attention_backward(args: tuple[Any, ...]) -> int:
    rows, width, value_width = _scores(args[1].shape, args[2].shape, args[3].shape)
    return 2 * rows * (3 * width + 2 * value_width)  # scores again, and the gradients of scores, v, q, k


def _scores(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of attention scores, and the widths of query and value. A mask saves nothing."""
    return prod(query[:-1]) * key[-2], query[-1], value[-1]


_OWN: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "aten.mm": _product,
    "aten.bmm": _product,
    "aten._scaled_mm": _product,
    "aten.addmm": _added_product,
    "aten.baddbmm": _added_product,
    "aten.linear": _linear,
    "aten._grouped_mm": _grouped_product,
    "aten._scaled_grouped_mm": _grouped_product,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
