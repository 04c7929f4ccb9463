"""What an optimizer takes: the state it keeps, and what its step needs for a moment."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmem.measuring.meter import measure
from actmem.modes import check_optimizer
from actmem.torchcompat import FakeTensor, FakeTensorMode

__all__ = ["optimizer_bytes"]

_CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def optimizer_bytes(
    parameters: Iterable[Tensor], name: str | None, *, dtype: torch.dtype | None = None, together: bool = False
) -> tuple[int, int]:
    """Return the bytes of an optimizer's state, and the most that its step needs besides.

    The real optimizer is run, on fake tensors, once for each shape.

    Args:
        parameters: what is trained.
        name: one of `modes.OPTIMIZERS`; None for no optimizer.
        dtype: of the state, if it is not that of the parameters.
        together: the step works on all parameters at once (`foreach`), as torch does on an accelerator.

    >>> optimizer_bytes([nn.Parameter(torch.empty(256, 256))], "adamw")[0] // (256 * 256 * 4)
    2
    """
    check_optimizer(name)
    if name is None:
        return 0, 0
    trained = [p for p in parameters if p.requires_grad]
    counts = Counter((tuple(p.shape), p.dtype) for p in trained)
    state = transient = 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for (shape, kind), count in counts.items():
            its_state, its_transient = _of(_CLASSES[name], [(shape, kind)], mode, together=together)
            state += (its_state if dtype is None else its_state * dtype.itemsize // kind.itemsize) * count
            transient += its_transient * count
        if not together and counts:  # one after the other, and what the last one left is still there
            transient = _of(_CLASSES[name], _pairs(trained), mode, together=False)[1]
    return state, transient


def _pairs(trained: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return a short list of shapes in which those stand side by side that do so among the parameters."""
    shapes = [(tuple(p.shape), p.dtype) for p in trained]
    found = shapes[:1]
    seen: set[Any] = set()
    for before, after in itertools.pairwise(shapes):
        if (before, after) not in seen:
            seen.add((before, after))
            found += [after] if found[-1] == before else [before, after]
    return found


def _of(
    kind: Any, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], mode: Any, *, together: bool
) -> tuple[int, int]:
    parameters = [_parameter(shape, dtype, mode) for shape, dtype in shapes]
    optimizer = kind(parameters, foreach=together)
    optimizer.step()  # makes the state
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
    return state, measure(optimizer.step, optimizer=optimizer).step_bytes


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, mode: Any) -> nn.Parameter:
    bare = torch.empty(shape, dtype=dtype, device="meta")
    parameter = nn.Parameter(FakeTensor(mode, bare, torch.device("cpu")))
    parameter.grad = torch.empty_like(parameter)
    return parameter
