"""Whether several partial writes together fill a storage.

A program that builds a tensor piece by piece (`out = x.new_empty(...); out[..., :n] = a; out[..., n:] = b`) leaves
nothing of the uninitialised bytes. Each piece is a box in the index space of the tensor that was born; the storage is
full when disjoint boxes add up to all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Coverage", "fills"]

Box = tuple[tuple[int, int], ...]
_MAX_BOXES = 16


class Coverage:
    """What recorded operators have written of a storage that was born uninitialised. Each version has its own."""

    __slots__ = ("boxes", "itemsize", "shape", "strides")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, boxes: tuple[Box, ...] = ()
    ) -> None:
        self.shape = shape
        self.strides = strides
        self.itemsize = itemsize
        """Bytes of an element. A write through a view of another size counts other elements, and is not tracked."""
        self.boxes = boxes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Coverage | None:
        """Return an empty coverage of a newborn tensor, or None if it does not fill its storage."""
        if not tensor.numel() or not fills(tensor):
            return None
        dims = sorted(((st, n) for n, st in zip(tensor.size(), tensor.stride(), strict=True) if n > 1), reverse=True)
        return cls(tuple(n for _, n in dims), tuple(st for st, _ in dims), tensor.element_size())

    def with_write(self, tensor: torch.Tensor) -> Coverage | None:
        """Return the coverage after all of `tensor`, a view of the storage, was written; None if it cannot be told."""
        box = self._box(tensor)
        if box is None or any(_overlap(box, other) for other in self.boxes):
            return None
        boxes = [*self.boxes]
        merged = True
        while merged:
            merged = False
            for other in boxes:
                joined = _join(box, other)
                if joined is not None:
                    boxes.remove(other)
                    box, merged = joined, True
                    break
        boxes.append(box)
        return Coverage(self.shape, self.strides, self.itemsize, tuple(boxes)) if len(boxes) <= _MAX_BOXES else None

    @property
    def full(self) -> bool:
        """Whether nothing is left unwritten."""
        return sum(math.prod(hi - lo for lo, hi in box) for box in self.boxes) == math.prod(self.shape)

    def _box(self, tensor: torch.Tensor) -> Box | None:
        if tensor.element_size() != self.itemsize:
            return None
        sizes: dict[int, int] = {}
        for n, st in zip(tensor.size(), tensor.stride(), strict=True):
            if n > 1:
                if st in sizes:
                    return None
                sizes[st] = n
        box: list[tuple[int, int]] = []
        rest: Any = tensor.storage_offset()
        for n, st in zip(self.shape, self.strides, strict=True):
            start, rest = divmod(rest, st)
            stop = start + sizes.pop(st, 1)
            if stop > n:
                return None
            box.append((start, stop))
        return None if sizes or rest else tuple(box)


def fills(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers every byte of its storage. An equal element count is not enough: some may overlap.

    >>> fills(torch.zeros(2, 3).t()), fills(torch.zeros(9)[1:]), fills(torch.zeros(9).as_strided((3, 3), (1, 1)))
    (True, False, False)
    """
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, n in sorted((st, n) for n, st in zip(tensor.size(), tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= n
    return True


def _overlap(a: Box, b: Box) -> bool:
    return all(lo < other_hi and other_lo < hi for (lo, hi), (other_lo, other_hi) in zip(a, b, strict=True))


def _join(a: Box, b: Box) -> Box | None:
    """Return the union of two boxes if it is a box."""
    different = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if len(different) != 1:
        return None
    i = different[0]
    (lo, hi), (other_lo, other_hi) = a[i], b[i]
    if hi == other_lo:
        return (*a[:i], (lo, other_hi), *a[i + 1 :])
    return (*a[:i], (other_lo, hi), *a[i + 1 :]) if other_hi == lo else None
