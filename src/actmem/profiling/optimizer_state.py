"""The memory of an optimizer: the state it keeps, and what its step needs temporarily."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmem.measuring import measure
from actmem.modes import check_optimizer
from actmem.torchcompat import FakeTensor, FakeTensorMode

__all__ = ["optimizer_bytes"]

_CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def optimizer_bytes(
    parameters: Iterable[Tensor], name: str | None, *, dtype: torch.dtype | None = None, together: bool = False
) -> tuple[int, int]:
    """Return the bytes of an optimizer's state, and the most that its step needs in addition.

    The real optimizer is run, on fake tensors, once for each shape.

    Args:
        parameters: the trained parameters.
        name: one of `modes.OPTIMIZERS`; None for no optimizer.
        dtype: the dtype of the state, if it differs from that of the parameters.
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
            moments, counters, its_transient = _of(_CLASSES[name], [(shape, kind)], mode, together=together)
            state += (moments if dtype is None else moments * dtype.itemsize // kind.itemsize) * count
            state += 0 if together else counters * count  # an accelerator's counters live on the CPU
            transient += its_transient * count
        if not together and counts:  # one after the other, with what the last one left still alive
            transient = _of(_CLASSES[name], _pairs(trained), mode, together=False)[2]
    return state, transient


def _pairs(trained: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return a short list of shapes in which shapes that are neighbours among the parameters are neighbours too."""
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
) -> tuple[int, int, int]:
    """Return the bytes of an optimizer's parameter-shaped state, of its counters, and of its step."""
    parameters = [_parameter(shape, dtype, mode) for shape, dtype in shapes]
    optimizer = kind(parameters, foreach=together)
    optimizer.step()  # makes the state
    state = [(n, t.nbytes) for s in optimizer.state.values() for n, t in s.items() if isinstance(t, Tensor)]
    counters = sum(size for name, size in state if name == "step")
    transient = measure(optimizer.step, optimizer=optimizer).step_bytes
    return sum(size for _, size in state) - counters, counters, transient


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, mode: Any) -> nn.Parameter:
    bare = torch.empty(shape, dtype=dtype, device="meta")
    parameter = nn.Parameter(FakeTensor(mode, bare, torch.device("cpu")))
    parameter.grad = torch.empty_like(parameter)
    return parameter
