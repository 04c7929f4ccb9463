"""The tensors in nested arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["tensors"]


def tensors(*items: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, tuples, dicts and dataclasses, in order.

    >>> import torch
    >>> [t.item() for t in tensors([torch.tensor(1), {"a": torch.tensor(2)}], 3, (torch.tensor(4),))]
    [1, 2, 4]
    """
    x: Any
    for x in items:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors(*x)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(x, dict):
            yield from tensors(*x.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            yield from tensors(*(getattr(x, field.name) for field in dataclasses.fields(x)))
