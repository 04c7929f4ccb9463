"""What the tape's own Python objects take between forward and backward, for each operator that will be replayed.

The whole is what Python's allocator gave out during the forward pass, less the same of the plain model. What it
consists of is found by walking from the handles that autograd holds: each object counts once, however many refer to it,
so what is shared is visible as such.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem.cli.demo import Size
from actmem.engine import Handle, Node, Tape, Value
from benchmarks.models import llama, train_step

KINDS: dict[type, str] = {
    Handle: "handles",
    Value: "values",
    Node: "nodes",
    weakref.ref: "weak references",
    tuple: "tuples",
    torch.Size: "sizes",
    list: "lists",
    dict: "dicts",
    str: "strings",
    Tape: "tapes",
}
"""Types of objects that belong to a tape, and what they are called. Nothing else is walked through."""
STRIDES = "strides"
OTHERS = "wrappers of tensors and storages, and others"


@dataclass(frozen=True)
class TapeBytes:
    """The Python objects of one forward pass."""

    num_replayed: int
    """How many values the backward pass replays: one for each recorded operator, more where one has several results."""
    num_handles: int
    """How many tensors autograd saved."""
    total_bytes: int
    by_kind: dict[str, int]


def tape_bytes(size: Size) -> TapeBytes:
    """Run forward under `Full()` on a Llama of equal blocks, and weigh what the tapes keep."""
    model, batch = llama(size, "plain"), size.tokens()
    plain, loss = _traced(model, batch)
    del loss
    others = _handles()  # of graphs that the caller still has
    with actmem.apply(model, actmem.Full()) as applied:
        whole, loss = _traced(model, batch)
        num_replayed = applied.report().num_replayed
    handles = [x for x in _handles() if not any(x is other for other in others)]
    by_kind: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[Any] = list(handles)
    while waiting:
        part = waiting.pop()
        if type(part) in KINDS and id(part) not in seen:
            seen.add(id(part))
            is_strides = type(part) is tuple and all(type(x) is int for x in part)
            by_kind[STRIDES if is_strides else KINDS[type(part)]] += sys.getsizeof(part)
            waiting += gc.get_referents(part)
    del loss, part
    by_kind[OTHERS] = whole - plain - sum(by_kind.values())
    return TapeBytes(num_replayed, len(handles), whole - plain, dict(by_kind.most_common()))


def _handles() -> list[Handle]:
    return [x for x in gc.get_objects() if type(x) is Handle]


def _traced(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[int, Any]:
    """Return what Python's allocator gave out in a forward pass like all later ones, and the loss, which holds it."""
    for _ in range(2):
        train_step(model, batch)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        loss = model(*batch)
        return tracemalloc.get_traced_memory()[0], loss
    finally:
        tracemalloc.stop()
        if collecting:
            gc.enable()
