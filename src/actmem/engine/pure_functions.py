"""Declaring that a function which launches unseen kernels is pure, so that the tape may replay it.

A Triton, flash-attention or C++ kernel writes into memory that the tape sees only being born. By itself it is a
barrier (NOTE [ Barriers ]). Whoever knows that the function around it reads only its arguments and writes only its
results can say so; then the whole call is recorded as one operator. The self-check of the first step compares what a
replay gives with what the forward gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Function

from actmem.compilercompat import is_compiled_function
from actmem.engine.compiled_regions import declared_pure
from actmem.engine.operators import Operator
from actmem.engine.whole_calls import record_call, recording

__all__ = ["replayable"]

_NOT_PURE = (
    "a Function that writes into its inputs (ctx.mark_dirty) is not pure. Do not declare it with actmem.replayable: "
    "what it makes is then held."
)

F = TypeVar("F", bound=Callable[..., Any])


def replayable(fn: F) -> F:
    """Declare a function, or a `torch.autograd.Function`, to be pure: recorded and replayed as one operator.

    It may only read its arguments, and its results must depend on nothing else (random numbers from torch's
    generators are fine). A function is returned wrapped; an autograd Function class is changed in place, so that
    libraries which call it need no change. The graphs of a compiled function are recorded anyway: for one, the
    declaration says that operators of other libraries inside may run again too.

    >>> import numpy
    >>> @replayable
    ... def double(x):
    ...     out = torch.empty_like(x)
    ...     numpy.multiply(x.numpy(), 2, out=out.numpy())  # torch does not see this
    ...     return out
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    if isinstance(fn, type):
        if not issubclass(fn, Function):
            raise TypeError(f"replayable takes a function or a torch.autograd.Function, not the class {fn.__name__}.")
        _declare_function_class(fn)
        return cast(F, fn)
    if is_compiled_function(fn):
        return cast(F, declared_pure(fn))
    operator = Operator(fn, f"replayable.{fn.__qualname__}")

    @functools.wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        tape = recording()
        return fn(*args, **kwargs) if tape is None else record_call(tape, operator, fn, args, kwargs)

    return cast(F, recorded)


def _declare_function_class(kind: Any) -> None:
    original = kind.forward
    if getattr(original, "_actmem_replayable", False):
        return
    if kind.setup_context is not Function.setup_context:
        forward = replayable(original)
    else:
        forward = _with_context(original, kind.__qualname__)
    forward._actmem_replayable = True  # pyright: ignore[reportFunctionMemberAccess]
    kind.forward = staticmethod(forward)


def _with_context(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a forward that takes `ctx`. What it saves through `ctx` counts as a result too."""

    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        tape = recording()
        if tape is None:
            return original(ctx, *args, **kwargs)
        needs: tuple[bool, ...] = tuple(ctx.needs_input_grad)

        def again(*args: Any, **kwargs: Any) -> Any:
            stand_in = _Context(needs)
            return original(stand_in, *args, **kwargs), stand_in.to_save

        out = None

        def first(*args: Any, **kwargs: Any) -> Any:
            nonlocal out
            out = original(ctx, *args, **kwargs)
            if getattr(ctx, "dirty_tensors", None):
                raise TypeError(_NOT_PURE)
            return out, tuple(getattr(ctx, "to_save", None) or ())

        record_call(tape, Operator(again, f"replayable.{name}"), first, args, kwargs)
        return out

    return forward


class _Context:
    """Stands in for `ctx` in a replay, where nothing will be differentiated."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.to_save = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Accept what a forward-mode rule would need; a replay has none."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Accept what autograd would note; a replay has no graph."""

    def set_materialize_grads(self, value: bool) -> None:
        """Accept what autograd would note; a replay has no graph."""

    def mark_dirty(self, *_: torch.Tensor) -> None:
        """Refuse: a replay would write into what others may still read."""
        raise TypeError(_NOT_PURE)
