"""The operators that torch runs in place in a backward pass, unless it is being observed.

NOTE [ in place unless watched ]

Some of torch's own code asks whether a dispatch mode is active or a tensor is a subclass, and then uses an operator
that returns a new tensor where it otherwise writes to one that it has just made: `scatter_add` for `scatter_add_` in
the backward of `gather`, `add` for `add_` where the engine sums up the gradients of a value that was used twice. Fake
tensors are subclasses. So whoever observes a step through a mode, or runs it on fake tensors, sees a tensor that
training never allocates.

This module lists these places, taken from every function of torch 2.13 that asks the question, except for the few
where it decides between formulas that have nothing in common: `cumprod`, `prod`, `max()` and `min()` over all elements,
a tensor as the value of `masked_fill`. An operator that is listed under the autograd node that runs it *takes the
place* of its first argument: its result is booked where that argument was. This must hold for it:

- No other mode is active. Under one, as in a block that a tape records, torch writes nothing in place.
- In a node's own formula: the node itself has made the argument.
- Where the engine sums up: the argument was made by an earlier node, is dense, and nothing else holds it: only one
  variable of torch's C++ code does, and no view or Python variable. How many references that makes, seen from inside a
  mode, is found by experiment (`_found_counts`). Nor did Python code make it: a tensor that Python has ever held has
  one more reference, and the engine then leaves it alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmem.torchcompat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    backward_code,
    current_autograd_node,
    current_graph_task,
    dispatch_modes,
    has_storage,
    num_storage_uses,
    without_fake_mode,
)

__all__ = ["FORMULAS", "Formulas", "called_from_python", "is_listed", "watches"]

_SELECTIONS = (
    *("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Topk", "Sort", "Aminmax"),
    *("Cummax", "Cummin", "Gather", "Msort", "Argsort"),
)

FORMULAS: dict[str, frozenset[str]] = {
    "aten.scatter_add.default": frozenset({"GatherBackward", "CummaxBackward", "CumminBackward"}),
    "aten.scatter.src": frozenset(f"{name}Backward" for name in _SELECTIONS),
    "aten.index_add.default": frozenset({"IndexSelectBackward"}),
    "aten.index_put.default": frozenset({"IndexBackward"}),
    "aten.put.default": frozenset({"TakeBackward"}),
    "aten.masked_scatter.default": frozenset({"MaskedSelectBackward"}),
    "aten.index_fill.int_Tensor": frozenset({"TraceBackward"}),
    "aten.index_fill.int_Scalar": frozenset({"TraceBackward"}),
    "aten.logical_and.default": frozenset({"ClampBackward"}),
    "aten.sub.Tensor": frozenset({"BinaryCrossEntropyWithLogitsBackward"}),
    "aten.mul.Tensor": frozenset({"BinaryCrossEntropyWithLogitsBackward"}),
}
"""Operator -> the nodes in which its result takes the place of its first argument, without the number at their end."""

_SUM = "aten.add.Tensor"


class Formulas:
    """Knows which results take the place of an argument. One for each observed step."""

    def __init__(self) -> None:
        self._node: Any = None
        self._since = 0
        for fake in (False, True):
            _found_counts(fake=fake)  # not in the middle of a step

    def enter(self, event: int) -> None:
        """Note that an operator is about to run in a backward pass."""
        node = current_autograd_node()
        key = None if node is None else (current_graph_task(), node.name(), node._sequence_nr())
        if key != self._node:
            self._node, self._since = key, event

    def takes_place(self, name: str, args: tuple[Any, ...], entry: Any) -> bool:
        """Return whether the operator that is about to run takes the place of its first argument, booked as `entry`.

        Called inside a mode's handler that holds `args` and nothing that is in it.
        """
        in_backward = current_graph_task() != -1
        if name == _SUM:
            listed = self._is_sum(args, entry) if in_backward else _is_added_to_product(entry)
        else:
            return in_backward and self._is_own(name, entry) and _unwatched()
        return listed and _owned_once(args) and _unwatched()

    def _is_own(self, name: str, entry: Any) -> bool:
        """Return whether the running node has itself made the first argument of an operator that is listed for it."""
        listed = self._node is not None and self._node[1].rstrip("0123456789") in FORMULAS[name]
        return listed and entry.birth >= self._since

    def _is_sum(self, args: tuple[Any, ...], entry: Any) -> bool:
        """Return whether the engine adds a gradient to another: `InputBuffer::add`."""
        return (
            not torch.is_grad_enabled()
            and len(args) == 2
            and isinstance(args[1], Tensor)
            and args[1].layout is torch.strided
            and entry is not None
            and not entry.held_by_python
            and entry.birth < self._since
            and _is_dense(args[0])
        )


def _is_added_to_product(entry: Any) -> bool:
    """Return whether `linear` adds its bias, or attention its mask, to a product that it has just made."""
    return entry is not None and entry.maker in ("aten.mm.default", "aten.bmm.default", "aten.mul.Tensor")


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements lie without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted((t, n) for t, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_listed(name: str) -> bool:
    """Return whether an operator can take the place of its first argument at all."""
    return name in FORMULAS or name == _SUM


def called_from_python() -> bool:
    """Return whether Python code, and not torch's engine, called the operator whose handler runs now."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    return frame is not None and frame.f_code is not backward_code


_TORCH = Path(torch.__file__).parent
_OWN_FILES = {__file__, str(_TORCH / "_compile.py"), str(_TORCH / "_dynamo" / "eval_frame.py")}
"""The files of observing modes, and of torch's wrapper around a mode's handler."""


def watches(file: str) -> None:
    """Register a file that has the handler of a mode that only observes."""
    _OWN_FILES.add(file)


def _unwatched() -> bool:
    """Return whether no mode is active but the one whose handler runs, and fake tensors'."""
    return all(isinstance(mode, FakeTensorMode) or getattr(mode, "only_watches", False) for mode in dispatch_modes())


def _owned_once(args: tuple[Any, ...]) -> bool:
    first = args[0]
    fake = isinstance(first, FakeTensor)
    del first
    return _counts(args) == _found_counts(fake=fake)


def _counts(args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Count the references to the first argument and its storage, including those of the current observers."""
    if not has_storage(args[0]):
        return None
    storage = args[0].untyped_storage()
    return args[0]._use_count(), sys.getrefcount(args[0]), num_storage_uses(storage), sys.getrefcount(storage)


class _Probe(TorchDispatchMode):
    counts: tuple[int, ...] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and current_graph_task() != -1:
            self.counts = _counts(args)
        return func(*args, **(kwargs or {}))


@functools.cache
def _found_counts(*, fake: bool) -> tuple[int, ...] | None:
    """Count the references on a sum of two gradients that torch is known to hold once."""
    kind: Any = FakeTensorMode() if fake else contextlib.nullcontext()
    with without_fake_mode(), torch.inference_mode(mode=False), torch.enable_grad(), kind:
        x = torch.ones(2, device="cpu", requires_grad=True)
        with _Probe() as probe:
            torch.autograd.backward((x * 2.0, x * 3.0), (torch.ones_like(x), torch.ones_like(x)))
    return probe.counts
