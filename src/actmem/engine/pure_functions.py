"""Declaring that a function which launches unseen kernels is pure, so that the tape may replay it.

A Triton, flash-attention or C++ kernel writes into memory that the tape sees only being born. By itself it is a
barrier (NOTE [ Barriers ]). Whoever knows that the function around it reads only its arguments and writes only its
results can say so; then the whole call is recorded as one operator. The self-check of the first step compares what a
replay gives with what the forward gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Function

from actmem.compilercompat import is_compiled_function
from actmem.engine.compiled_regions import declared_pure
from actmem.engine.operators import Operator
from actmem.engine.tape import Tape
from actmem.engine.values import take_apart
from actmem.engine.whole_calls import record_call, recording
from actmem.torchcompat import is_wrapper

__all__ = ["Declaration", "declare", "replayable"]

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
    declare(kind, Declaration(kind.__qualname__))


@dataclass(frozen=True)
class Declaration:
    """Who says that an autograd Function is pure, and what it writes nevertheless."""

    name: str
    """The Function's name in reports."""
    library: str | None = None
    """The library that it belongs to, if actmem's own table declares it."""
    found: bool = False
    """It was seen launching unseen kernels, and is replayed only where `opaque="replay"` asks for that."""
    writes: tuple[int, ...] = ()
    """Positions of the arguments that its kernels overwrite."""
    in_place: int | None = None
    """Position of a flag: if it is set, the first argument is overwritten."""

    @property
    def by_user(self) -> bool:
        """Whether the user has declared it."""
        return self.library is None and not self.found

    def written(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the positions of the arguments that a call overwrites."""
        flag = self.in_place
        return (0,) if flag is not None and flag < len(args) and args[flag] else self.writes

    def taken(self, tape: Tape, args: tuple[Any, ...]) -> bool:
        """Return whether a tape records this call as one operator."""
        if self.by_user:
            return True
        if any(isinstance(a, torch.Tensor) and is_wrapper(type(a)) for a in args):
            return False  # a distributed tensor: the Function sees its parts, and may communicate
        opaque = tape.opaque
        return self.library is not None if opaque is None else opaque.takes(self)


def declare(kind: Any, declaration: Declaration) -> None:
    """Change an autograd Function class so that its calls are recorded as one operator. Does nothing a second time."""
    original = kind.forward
    before: Declaration | None = getattr(original, "_actmem_declaration", None)
    if before is not None:
        if before.by_user or not declaration.by_user:
            return
        original = original.__wrapped__
    name = f"replayable.{kind.__qualname__}"
    if kind.setup_context is not Function.setup_context:
        forward = _without_context(original, name, declaration)
    else:
        forward = _with_context(original, name, declaration)
    forward._actmem_declaration = declaration  # pyright: ignore[reportFunctionMemberAccess]
    kind.forward = staticmethod(forward)


def _without_context(original: Callable[..., Any], name: str, declaration: Declaration) -> Callable[..., Any]:
    """Wrap a forward that takes no `ctx`."""
    operator = Operator(original, name)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tape = None if torch.compiler.is_compiling() else recording()
        if tape is None or not declaration.taken(tape, args):
            return original(*args, **kwargs)
        return _recorded(tape, operator, original, args, kwargs, declaration)

    return forward


def _recorded(
    tape: Tape, operator: Operator, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], declaration: Declaration
) -> Any:
    written = _leaves_of(args, declaration.written(args))
    opaque = None if declaration.by_user else tape.opaque
    refuted = None if opaque is None else functools.partial(opaque.hold, declaration)
    return record_call(tape, operator, call, args, kwargs, written=written, refuted=refuted)


def _leaves_of(args: tuple[Any, ...], positions: tuple[int, ...]) -> list[int]:
    """Return where the arguments at these positions are among the leaves of all. They are tensors themselves.

    >>> _leaves_of((torch.ones(1), [1, 2], torch.ones(1)), (0, 2))
    [0, 3]
    """
    starts: list[int] = []
    leaves: list[Any] = []
    for a in args:
        starts.append(len(leaves))
        take_apart(a, leaves)
    return [starts[i] for i in positions if i < len(args) and isinstance(args[i], torch.Tensor)]


def _with_context(original: Callable[..., Any], name: str, declaration: Declaration) -> Callable[..., Any]:
    """Wrap a forward that takes `ctx`. What it saves through `ctx` counts as a result too."""

    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        tape = None if torch.compiler.is_compiling() else recording()
        if tape is None or not declaration.taken(tape, args):
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

        _recorded(tape, Operator(again, name), first, args, kwargs, declaration)
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
