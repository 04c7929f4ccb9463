"""What an operator writes, and what becomes of the storage that it writes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from actmem.decisions import Reason
from actmem.engine.coverage import Coverage, fills
from actmem.engine.holding_rules import is_piece
from actmem.engine.holdings import storage_of
from actmem.engine.operators import Operator
from actmem.engine.values import Value, tensors

__all__ = ["Write", "written_by"]


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
        """The same for the whole storage."""
        self.old: Value | None = None
        self.fate: Reason | None = None
        """Why the new version cannot be made by this node; None if it can."""
        self.early: Value | None = None
        """The new version, if handles were given out before the operator made it."""

    def coverage(self) -> Coverage | None:
        """Return what will have been written of a storage that was born uninitialised, if that is known."""
        value = self.old
        if not self.overwrites or value is None or value.coverage is None or not is_piece(value, self.fate):
            return None
        return value.coverage.with_write(self.tensor)


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
