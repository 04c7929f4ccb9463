"""How long the documents of a packed batch are: its tensors have the same shapes however it is packed.

NOTE [ Packed batches ]
A row of a packed batch holds several documents, and attention may not look beyond them. Where they begin is said by
cumulative lengths (`cu_seqlens`), by positions that start over (`position_ids`), or by a number for each document
(`seq_idx`, `document_ids`). What a step takes may depend on that: on the longest document, where attention runs
document by document, and on there being more than one, where a mask is made. So these numbers count as sizes of the
batch, next to those of its tensors. They are found by the names that libraries use.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actmem.shapes import TensorShape
from actmem.torchcompat import FakeTensor

__all__ = ["documents_of"]

_POSITIONS = ("position_ids", "positions", "input_pos")
_NUMBERED = ("seq_idx", "document_ids", "doc_ids", "segment_ids")
_LONGEST = ("max_seqlen", "max_length_", "max_seq_len")
"""How Python numbers begin that say how long the longest document is."""


def documents_of(batch: Mapping[str, Any]) -> tuple[TensorShape, ...]:
    """Return what a batch says about the documents in it, as sizes. Nothing of a batch without bytes.

    Args:
        batch: the arguments of the model, by name.

    >>> print(*documents_of({"cu_seqlens": torch.tensor([0, 3, 8])}), sep="; ")
    longest document of cu_seqlens int64 [5]; tokens of cu_seqlens int64 [8]
    >>> print(*documents_of({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}), sep="; ")
    longest document of position_ids int64 [3]; documents of position_ids int64 [2]
    """
    found: list[TensorShape] = []
    for name, value in batch.items():
        if type(value) is int and name.startswith(_LONGEST):
            found.append(TensorShape(name, "int", (value,)))
        if not isinstance(value, Tensor) or not _has_numbers(value):
            continue
        numbers = value.detach().cpu()
        if "cu_seq" in name and numbers.dim() == 1:
            lengths = numbers.diff()
            found += _sizes(name, value, longest_document=int(lengths.max()), tokens=int(numbers[-1]))
        elif name in _POSITIONS:
            found += _rows(name, value, numbers.diff(dim=-1) != 1)
        elif name in _NUMBERED:
            found += _rows(name, value, numbers.diff(dim=-1) != 0)
    return tuple(found)


def _has_numbers(value: Tensor) -> bool:
    is_whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return is_whole and not value.is_meta and not isinstance(value, FakeTensor) and value.dim() > 0 and len(value) > 0


def _rows(name: str, value: Tensor, begins: Tensor) -> list[TensorShape]:
    """Return the sizes of rows of tokens, of which it is known whether each but the first begins a document."""
    rows = begins.reshape(-1, begins.shape[-1])
    longest = 1
    for row in rows:
        edges = [-1, *map(int, row.nonzero().flatten()), len(row)]
        longest = max(longest, *(after - before for before, after in itertools.pairwise(edges)))
    return _sizes(name, value, longest_document=longest, documents=1 + int(rows.sum(1).max()))


def _sizes(name: str, value: Tensor, **sizes: int) -> list[TensorShape]:
    dtype = str(value.dtype).removeprefix("torch.")
    return [TensorShape(f"{what.replace('_', ' ')} of {name}", dtype, (size,)) for what, size in sizes.items()]
