"""The memory of an optimizer: the state it keeps, and what its step needs temporarily."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from actmem.measuring import measure
from actmem.modes import check_optimizer
from actmem.profiling.chronicle import Allocated, Chronicle, Freed
from actmem.profiling.optimizer_trial import Factory, OptimizerTrial, try_optimizer
from actmem.torchcompat import FakeTensor, FakeTensorMode

__all__ = ["OptimizerLike", "optimizer_bytes", "optimizer_of", "optimizer_on_card"]

_NUM_ELEMENTS = 1024
"""Of a parameter that stands for all of its dtype: enough to tell tensors of its shape from counters."""
_CLASSES: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw_fused": functools.partial(torch.optim.AdamW, fused=True),
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


OptimizerLike = str | Optimizer | Factory | None
"""One of `modes.OPTIMIZERS`, an optimizer, a function that makes one of a list of parameters, or none."""


def optimizer_of(
    optimizer: OptimizerLike,
    parameters: Mapping[str, Tensor],
    unused: Collection[str] = (),
    *,
    dtype: torch.dtype | None = None,
    together: bool = False,
) -> OptimizerTrial:
    """Return what an optimizer takes.

    Args:
        optimizer: which one.
        parameters: those of the model, by their names.
        unused: names of the parameters that get no gradient.
        dtype: the dtype of the state of a named one, if it differs from that of the parameters.
        together: the model is on an accelerator.

    >>> layer = dict(nn.Linear(4, 4).named_parameters())
    >>> optimizer_of(torch.optim.SGD, layer).name, optimizer_of("sgd", layer).name
    ('SGD, no state', 'sgd, float32')
    """
    check_optimizer(optimizer)
    if optimizer is None:
        return OptimizerTrial("none", 0, 0)
    if not isinstance(optimizer, str):
        return try_optimizer(optimizer, parameters, unused, together=together)
    used = [p for name, p in parameters.items() if name not in unused]
    state, transient = optimizer_bytes(used, optimizer, dtype=dtype, together=together)
    stock, memory = optimizer_on_card(used, optimizer, dtype=dtype)
    kinds = sorted({str(dtype or p.dtype).removeprefix("torch.") for p in parameters.values() if p.requires_grad})
    called = f"{optimizer}, {' and '.join(kinds) or 'nothing to train'}"
    return OptimizerTrial(called, state, transient, stock, memory)


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


def optimizer_on_card(
    parameters: Iterable[Tensor], name: str | None, *, dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return what an optimizer takes on a card: the bytes of its state, and what a step allocates and frees.

    On a card, torch's optimizers work on all parameters at once (`foreach`) unless told otherwise: for a moment there
    is a tensor more for each of them. Counters stay on the host.

    >>> state, step = optimizer_on_card([nn.Parameter(torch.empty(256, 256))], "adamw")
    >>> state, sum(size for _, size in step)
    ((262144, 262144), 262144)
    """
    check_optimizer(name)
    if name is None:
        return (), ()
    groups: dict[torch.dtype, list[int]] = {}
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        groups.setdefault(p.dtype, []).append(p.numel())
    state: dict[torch.dtype, list[int]] = {}
    found: list[tuple[int, int]] = []
    for kind, sizes in groups.items():
        state[kind], step = _on_card(_CLASSES[name], kind)
        for nth, item_bytes in step:  # a list with a tensor for each parameter; lists are freed from their end
            numbers = range(nth * len(trained), nth * len(trained) + len(sizes))
            each = list(zip(numbers, sizes, strict=True))
            found += [(k, n * item_bytes) for k, n in each] if item_bytes else [(k, 0) for k, _ in reversed(each)]
    stock = [p.numel() * (item if dtype is None else dtype.itemsize) for p in trained for item in state[p.dtype]]
    return tuple(stock), tuple(found)


def _on_card(kind: Any, dtype: torch.dtype) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the bytes per element of an optimizer's state, and of what its step allocates and frees."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = _parameter((_NUM_ELEMENTS,), dtype, mode)
        optimizer = kind([fake], **_way(kind, together=True))
        optimizer.step()  # makes the state
        state = [t.itemsize for key, t in optimizer.state[fake].items() if isinstance(t, Tensor) and key != "step"]
        chronicle = Chronicle(torch.device("cpu"))
        chronicle.ledger.add_base(fake, "parameters")
        chronicle.ledger.begin()
        with chronicle:
            optimizer.step()
    log = [e for e in chronicle.log if isinstance(e, (Allocated, Freed))]
    names: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for e in log:
        if isinstance(e, Allocated) and e.num_bytes >= _NUM_ELEMENTS:
            found.append((names.setdefault(e.storage, len(names)), e.num_bytes // _NUM_ELEMENTS))
        elif isinstance(e, Freed) and e.storage in names:
            found.append((names[e.storage], 0))
    return state, found


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
    optimizer = kind(parameters, **_way(kind, together=together))
    optimizer.step()  # makes the state
    state = [(n, t.nbytes) for s in optimizer.state.values() for n, t in s.items() if isinstance(t, Tensor)]
    counters = sum(size for name, size in state if name == "step")
    transient = measure(optimizer.step, optimizer=optimizer).step_bytes
    return sum(size for _, size in state) - counters, counters, transient


def _way(kind: Any, *, together: bool) -> dict[str, bool]:
    """Return how an optimizer is told to step. A fused one has no other way."""
    return {} if isinstance(kind, functools.partial) else {"foreach": together}


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, mode: Any) -> nn.Parameter:
    bare = torch.empty(shape, dtype=dtype, device="meta")
    parameter = nn.Parameter(FakeTensor(mode, bare, torch.device("cpu")))
    parameter.grad = torch.empty_like(parameter)
    return parameter
