"""Autocast as it is on a card, for steps that run on fake CPU tensors.

torch has a list of operators for each kind of device: on a CPU, `exp` or `sum` run in bfloat16 under autocast, on a
card they run in float32, and what they make takes twice the bytes. While `card_autocast` is active, autocast for the
CPU also follows the card's list.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["card_autocast"]

# ATen/autocast_mode.h of torch 2.13: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, less what the CPU's list has.
_IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "group_norm"),
    *("cosine_similarity", "kl_div", "l1_loss", "dist", "renorm", "logsumexp"),
)
_SUMMED_IN_FLOAT32 = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    "linalg_vector_norm",
)
"""These take the dtype as an argument: no copy is made of what they read."""


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _raised(value: Any) -> Any:
    return value.to(torch.float32) if _is_low(value) else value


def _cast(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            given: Any = pytree.tree_map(_raised, (args, kwargs))
            return operator(*given[0], **given[1])

    return run


def _told(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_low(args[0]) and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        with torch.autocast("cpu", enabled=False):
            return operator(*args, **kwargs)

    return run


@contextlib.contextmanager
def card_autocast(dtype: torch.dtype = torch.bfloat16) -> Generator[None]:
    """Run operators in the dtypes in which a card runs them under `torch.autocast("cuda", dtype)`.

    >>> x = torch.ones(2, 2)
    >>> with card_autocast():
    ...     (x @ x).dtype, (x @ x).exp().dtype
    (torch.bfloat16, torch.float32)
    """
    library: Any = torch.library.Library("aten", "IMPL", "AutocastCPU")  # it is destroyed below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _IN_FLOAT32:
                library.impl(name, _cast(_operator(name)))
            for name in _SUMMED_IN_FLOAT32:
                library.impl(name, _told(_operator(name)))
        with torch.autocast("cpu", dtype):
            yield
    finally:
        library._destroy()
