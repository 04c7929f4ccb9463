"""The tensors in nested arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

__all__ = ["put_together", "take_apart", "tensors"]


def take_apart(x: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested lists, tuples and dicts, and return what `put_together` needs. Makes no cycles."""
    kind = cast("Any", type(x))
    if kind is list or kind is tuple:
        return kind, [take_apart(y, leaves) for y in x]
    if kind is dict:
        return list(x), [take_apart(y, leaves) for y in x.values()]
    leaves.append(x)
    return None


def put_together(spec: Any, leaves: Iterator[Any]) -> Any:
    """Undo `take_apart`.

    >>> leaves = []
    >>> spec = take_apart({"a": [1, (2, 3)]}, leaves)
    >>> leaves, put_together(spec, iter(leaves))
    ([1, 2, 3], {'a': [1, (2, 3)]})
    """
    if spec is None:
        return next(leaves)
    kind, parts = spec
    items = [put_together(part, leaves) for part in parts]
    if kind is list:
        return items
    return tuple(items) if kind is tuple else dict(zip(kind, items, strict=True))


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
