"""Numbers that a step on fake tensors asks for: `loss.item()` and the like.

NOTE [ Assumed numbers ]
A fake tensor has no number, but a training loop asks for some: the loss, for its log. It gets 1.0, as a float that can
be added, averaged and printed, but refuses to be compared: any decision a loop bases on such a number would be
meaningless. Numbers are assumed to be finite: `torch.isnan` finds no NaN, and a gradient scaler no overflow.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actmem.errors import UnsupportedError
from actmem.profiling.complaints import asking_line, for_real
from actmem.torchcompat import FakeTensor

__all__ = ["Assumed", "Numbers"]


def _refuse(how: str) -> NoReturn:
    raise UnsupportedError(
        f"{asking_line()} {how} a number in a tensor, and a fake tensor has none. Profile a real step: {for_real()}."
    )


class Assumed(float):
    """A stand-in for a number that a tensor would hold. See NOTE [ Assumed numbers ].

    >>> Assumed(1.0) + 2, f"{Assumed(1.0):.2f}"
    (3.0, '1.00')
    """

    __slots__ = ()

    def _compare(self, other: object) -> bool:  # noqa: ARG002
        _refuse("depends on")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare  # pyright: ignore[reportAssignmentType]
    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return self._compare(self)

    def __int__(self) -> int:
        _refuse("needs the integer value of")

    __index__ = __trunc__ = __floor__ = __ceil__ = __int__

    def __format__(self, spec: str) -> str:
        return format(1, spec) if spec.endswith("d") else format(float(self), spec)


def _derived(name: str) -> Any:
    plain = getattr(float, name)

    def method(self: float, *others: Any) -> Any:
        found = plain(self, *others)
        return Assumed(found) if isinstance(found, float) else found

    return method


for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__"),
    *("__neg__", "__pos__", "__abs__", "__rpow__"),
):
    setattr(Assumed, _name, _derived(_name))


class Numbers(TorchFunctionMode):
    """Answers code that asks a fake tensor for its number.

    Args:
        comparable: the numbers may be compared, as Adafactor does with the norm of a parameter.
    """

    def __init__(self, *, comparable: bool = False) -> None:
        super().__init__()
        self._comparable = comparable
        self._zeros: dict[int, weakref.ref[Any]] = {}
        """What a gradient scaler found: no overflow."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer, or continue as usual."""
        kwargs = kwargs or {}
        if func is _UNSCALES:
            found = func(*args, **kwargs)
            storage = args[1].untyped_storage()
            self._zeros[id(storage)] = weakref.ref(storage)
            return found
        if func in _ASKING and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._answer(func, args[0], *args[1:])
        return func(*args, **kwargs)

    def _answer(self, func: Any, tensor: FakeTensor, *rest: Any) -> Any:
        if func is _TENSOR.tolist:
            return _nested(tensor.shape)
        if func is _TENSOR.item:
            known = self._zeros.get(id(tensor.untyped_storage()))
            number = 0.0 if known is not None and known() is not None else _number(tensor)
            return float(number) if self._comparable else number
        if func is _TENSOR.__format__ and not tensor.dim():
            return format(_number(tensor), *rest)
        if func in (_TENSOR.__format__, _TENSOR.__repr__):
            return f"tensor(..., size={tuple(tensor.shape)})"
        return _refuse("depends on" if func is _TENSOR.__bool__ else "needs the Python value of")


def _number(tensor: Tensor) -> Assumed:
    if tensor.dtype == torch.bool:
        _refuse("depends on")
    return Assumed(1.0)


def _nested(shape: Any) -> Any:
    return Assumed(1.0) if not shape else [_nested(shape[1:]) for _ in range(shape[0])]


_TENSOR: Any = Tensor  # torch leaves some of its methods untyped
_UNSCALES: Any = vars(torch)["_amp_foreach_non_finite_check_and_unscale_"]
_ASKING: frozenset[Any] = frozenset(
    (
        *(_TENSOR.item, _TENSOR.tolist, _TENSOR.__format__, _TENSOR.__repr__),
        *(_TENSOR.__float__, _TENSOR.__int__, _TENSOR.__bool__, _TENSOR.__index__),
    )
)
