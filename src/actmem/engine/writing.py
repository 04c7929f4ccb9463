"""What an operator writes, and what becomes of the storage it writes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from actmem.engine.coverage import Coverage, fills
from actmem.engine.holding import storage_of
from actmem.engine.operators import Operator
from actmem.engine.trees import tensors
from actmem.engine.values import Value

__all__ = ["Write", "promote", "written_by"]


class Write:
    """One tensor that an operator writes."""

    def __init__(
        self,
        where: int | str,
        item: int,
        tensor: Tensor,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.where = where
        self.item = item
        self.tensor = tensor
        self.overwrites = where in operator.overwritten
        """All of the tensor is overwritten, and none of it read."""
        self.whole = self.overwrites and fills(tensor) and _alone(tensor, args, kwargs)
        """The same of all of the storage."""
        self.old: Value | None = None
        self.fate: str | None = None
        """Why the new version cannot be made by this node; None if it can."""
        self.early: Value | None = None
        """The new version, if handles were given out before the operator made it."""

    def inherited(self) -> str | None:
        """Tell why the new version cannot be replayed from the old one, or None if it can."""
        value = self.old
        if value is None:
            return "external"
        if (self.whole and value.why not in ("external", "parameter")) or value.node is not None:
            return None
        return value.why or "external"

    def coverage(self) -> Coverage | None:
        """Return what will have been written of a storage that was born uninitialised, if that can be told."""
        value = self.old
        if self.fate != "uninitialised" or not self.overwrites or value is None or value.held is not None:
            return None
        return None if value.coverage is None or value.pending is None else value.coverage.with_write(self.tensor)


def _alone(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    storage = tensor.untyped_storage()
    return sum(storage_of(t) is storage for t in tensors(args, kwargs)) <= 1


def written_by(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[int | str, int, Tensor]]:
    """Yield each tensor that a call writes: position or name of the argument, position in a list or -1, the tensor."""
    for position, name in operator.written(args, kwargs):
        where: int | str = position if position < len(args) else name
        x: Any = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(x, Tensor):
            if storage_of(x) is not None:
                yield where, -1, x
        elif isinstance(x, (list, tuple)):
            items: list[Any] = list(x)  # pyright: ignore[reportUnknownArgumentType]
            yield from (
                (where, j, t) for j, t in enumerate(items) if isinstance(t, Tensor) and storage_of(t) is not None
            )


def promote(value: Value) -> None:
    """Make a storage that was filled piece by piece replayable, from the call that gave birth to it on."""
    current: Value | None = value
    storage = value.storage()
    while current is not None and current.pending is not None:
        node, current.pending = current.pending, None
        current.node, current.why, current.coverage, current.tensor = node, None, None, None
        if current.row is not None:
            current.row.why, current.row.parents = None, node.parents
        reads = [ref[2] for ref in node.refs if ref[2] is not None and ref[2].pending is not None]
        current = next((v for v in reads if v.storage() is storage), None)
