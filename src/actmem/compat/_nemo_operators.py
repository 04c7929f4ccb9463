"""The operators that NeMo Automodel saves, under its own names. Imported from `compat.nemo`.

They are operator objects, as there. What is not installed, DeepEP for example, is left out.
"""

# pyright: reportUnusedFunction=false, reportPrivateUsage=false
# The names are NeMo's; compat.nemo hands them on.

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import Any

import torch

from actmem.compat._translating import resolved
from actmem.ops import GROUPS
from actmem.torchcompat import compute_intensive

_ALTERNATING = ("mm", "linear", "_grouped_mm", "_scaled_grouped_mm")
_SAVED = (
    *("mm", "addmm", "bmm", "linear", "_scaled_mm", "topk", "max", "_flex_attention", "scaled_dot_product_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "_scaled_dot_product_fused_attention_overrideable",
)
_SAVED_ELSEWHERE = (
    *("_c10d_functional.all_to_all_single", "_c10d_functional.reduce_scatter_tensor", "torch_attn._varlen_attn"),
    *("deepep.dispatch", "deepep.combine", "hybridep.dispatch", "hybridep.combine"),
)


def _resolve_op_attr(root: object, dotted_path: str) -> Any:
    """Follow a dotted path of attributes; None where a part of it is absent."""
    return resolved(root, dotted_path)


def _resolve_torch_op(dotted_path: str, name: str | None = None, overload: str = "default") -> Any:
    """Return an operator of `torch.ops`, by a path such as `"aten.mm"` or `"aten.cat.out"`; None if absent.

    In older versions the parts were given one by one.

    >>> _resolve_torch_op("aten.mm") is _resolve_torch_op("aten", "mm") is torch.ops.aten.mm.default
    True
    """
    path = dotted_path if name is None else f"{dotted_path}.{name}.{overload}"
    return resolved(torch.ops, f"{path}.default" if path.count(".") == 1 else path)


def _existing_ops(*ops: Any) -> frozenset[Any]:
    """Return those that are not None."""
    return frozenset(op for op in ops if op is not None)


def _default_compute_intensive_ops() -> tuple[Any, ...]:
    """Return torch's own list of dear operators; actmem's copy of it (there: nothing) where torch gives none."""
    listed = compute_intensive() or GROUPS["compute_intensive"]
    return tuple(_existing_ops(*(_resolve_torch_op(*name.split(".")) for name in sorted(listed))))


def _ffpa_forward_ops() -> tuple[Any, ...]:
    """Return the operators of FFPA attention, which its import registers; nothing where it is not installed."""
    try:
        importlib.import_module("ffpa_attn.cute")
    except Exception:  # noqa: BLE001 - a broken installation of it is none
        return ()
    return tuple(_existing_ops(*map(_resolve_torch_op, ("ffpa_attn._fwd_cute", "ffpa_attn._varlen_fwd_cute"))))


def save_ops(more: Iterable[Any]) -> frozenset[Any]:
    """Return the operators whose results are saved, with those of a back end that must be imported first."""
    return _existing_ops(
        *_default_compute_intensive_ops(),
        *(_resolve_torch_op("aten", name) for name in _SAVED),
        *map(_resolve_torch_op, _SAVED_ELSEWHERE),
        *(_resolve_op_attr(torch, f"_higher_order_ops.{n}") for n in ("flex_attention", "inductor_compiled_code")),
        *more,
    )


_SELECTIVE_AC_MATMUL_OPS = _existing_ops(*(_resolve_torch_op("aten", name) for name in _ALTERNATING))
_SELECTIVE_AC_TO_COPY_OP = _resolve_torch_op("aten", "_to_copy")


def _is_cuda_to_cpu_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call copies from the accelerator to the host. The tape never replays such a copy."""
    target = kwargs.get("device")
    if func != _SELECTIVE_AC_TO_COPY_OP or not args or target is None:
        return False
    source = getattr(getattr(args[0], "device", None), "type", None)
    with contextlib.suppress(TypeError, RuntimeError):
        return source == "cuda" and torch.device(target).type == "cpu"
    return False
