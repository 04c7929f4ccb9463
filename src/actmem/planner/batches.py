"""Compare a batch with the one that a plan was made for, and say what differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Shape", "differences", "is_covered", "read_shape"]


class Shape(NamedTuple):
    """One tensor of a batch."""

    name: str
    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.dims)}"


def read_shape(text: str) -> Shape:
    """Read a tensor as a profile describes it.

    >>> read_shape("input_ids int64 [1, 128]")
    Shape(name='input_ids', dtype='int64', dims=(1, 128))
    """
    name, dtype, dims = text.split(" ", 2)
    return Shape(name, dtype, tuple(int(n) for n in re.findall(r"\d+", dims)))


def is_covered(found: Iterable[Shape], planned: Sequence[Shape]) -> bool:
    """Return whether every tensor was planned for: by its name, with its dtype, and no smaller in any dimension."""
    return all(any(_covers(p, shape) for p in planned) for shape in found)


def differences(found: Sequence[Shape], planned: Sequence[Shape]) -> list[str]:
    """Say what differs, tensor by tensor: those that are new, missing, of another dtype, or of other sizes.

    >>> planned = [read_shape("input_ids int64 [4, 128]"), read_shape("labels int64 [4, 128]")]
    >>> found = [read_shape("input_ids int64 [2, 256]"), read_shape("mask bool [2, 256]")]
    >>> differences(found, planned)
    ['input_ids int64 [2, 256] is larger than [4, 128]', 'mask bool [2, 256] is new', 'labels is missing']
    """
    said: list[str] = []
    for shape in found:
        known = [p for p in planned if p.name == shape.name]
        if any(_covers(p, shape) for p in known):
            continue
        if not known:
            said.append(f"{shape} is new")
        elif known[0].dtype != shape.dtype:
            said.append(f"{shape} has another dtype than {known[0].dtype} {list(known[0].dims)}")
        elif len(known[0].dims) != len(shape.dims):
            said.append(f"{shape} has another number of dimensions than {list(known[0].dims)}")
        else:
            said.append(f"{shape} is larger than {list(known[0].dims)}")
    present = {shape.name for shape in found}
    return said + [f"{p.name} is missing" for p in planned if p.name not in present]


def _covers(planned: Shape, found: Shape) -> bool:
    return (
        planned.name == found.name
        and planned.dtype == found.dtype
        and len(planned.dims) == len(found.dims)
        and all(a <= b for a, b in zip(found.dims, planned.dims, strict=True))
    )
