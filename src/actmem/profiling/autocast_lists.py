"""Autocast as it is on a card, for steps that run on fake CPU tensors.

NOTE [ Autocast for a card ]
torch has a list of operators for each kind of device: on a CPU, `exp` or `sum` run in bfloat16 under autocast, on a
card they run in float32, and what they make takes twice the bytes. Where torch has no CUDA, `torch.autocast("cuda")` is
off altogether. But a profile runs on CPU tensors, whatever it is for. So while a step is profiled,

- `torch.autocast("cuda")` switches the CPU's autocast on too, and that follows the card's list: whoever writes it means
  a card;
- if the plan is for a card (`for_card`), `torch.autocast("cpu")` follows the card's list as well.

An autocast that was made before the step is profiled, such as a decorator, is off for good where torch has no CUDA.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actmem.torchcompat import cuda_autocast_on_cpu

__all__ = ["CARD_LISTS", "card_autocast", "for_card", "profiled_autocast"]

# ATen/autocast_mode.h of torch 2.13: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, less what the CPU's list has too.
_IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
    *("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)
_SUMMED_IN_FLOAT32 = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""These take the dtype as an argument: no copy is made of what they read."""
_AS_THEY_COME = (
    *("avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "reflection_pad1d"),
    *("reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "trace"),
)
"""In float32 on a CPU, and on no list of a card."""

_FOR_CARD: ContextVar[bool] = ContextVar("_FOR_CARD", default=False)


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


def _plain(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(*args, **kwargs)

    return run


CARD_LISTS = {_cast: _IN_FLOAT32, _told: _SUMMED_IN_FLOAT32, _plain: _AS_THEY_COME}
"""How the operators of each list are run."""


class _Lists:
    """The card's lists in the place of the CPU's, from `install` to `remove`."""

    def __init__(self) -> None:
        self._library: Any = None

    def install(self) -> None:
        if self._library is not None:
            return
        self._library = torch.library.Library("aten", "IMPL", "AutocastCPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some take the place of a kernel
            for rule, names in CARD_LISTS.items():
                for name in names:
                    self._library.impl(name, rule(_operator(name)))

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


@contextlib.contextmanager
def for_card(whether: bool = True) -> Generator[None]:
    """Let what is profiled be for a card. See NOTE [ Autocast for a card ]."""
    before = _FOR_CARD.set(whether)
    try:
        yield
    finally:
        _FOR_CARD.reset(before)


@contextlib.contextmanager
def profiled_autocast(device: torch.device) -> Generator[None]:
    """Let autocast do in a step on CPU tensors what it does on a card. See NOTE [ Autocast for a card ].

    >>> x = torch.ones(2, 2)
    >>> with profiled_autocast(x.device), torch.autocast("cuda", torch.bfloat16):
    ...     (x @ x).dtype, (x @ x).exp().dtype, torch.is_autocast_enabled("cuda")
    (torch.bfloat16, torch.float32, True)
    >>> with profiled_autocast(x.device), torch.autocast("cpu", torch.bfloat16):
    ...     (x @ x).exp().dtype
    torch.bfloat16
    >>> with for_card(), profiled_autocast(x.device), torch.autocast("cpu", torch.bfloat16):
    ...     (x @ x).exp().dtype
    torch.float32

    Args:
        device: that of the model. Where it is neither the CPU nor meta, torch's own autocast does what it should.
    """
    if device.type not in ("cpu", "meta"):
        yield
        return
    lists = _Lists()
    if _FOR_CARD.get():
        lists.install()
    try:
        with cuda_autocast_on_cpu(lists.install):
            yield
    finally:
        lists.remove()


@contextlib.contextmanager
def card_autocast(dtype: torch.dtype = torch.bfloat16) -> Generator[None]:
    """Run operators in the dtypes in which a card runs them under `torch.autocast("cuda", dtype)`.

    >>> x = torch.ones(2, 2)
    >>> with card_autocast():
    ...     (x @ x).dtype, (x @ x).exp().dtype
    (torch.bfloat16, torch.float32)
    """
    lists = _Lists()
    lists.install()
    try:
        with torch.autocast("cpu", dtype):
            yield
    finally:
        lists.remove()
