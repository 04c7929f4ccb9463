"""The class of an object, exchanged for a while, whatever its `__class__` says. See NOTE [ How a block is applied ]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

__all__ = ["Exchanged", "set_class"]

set_class: Callable[[object, type], None] = vars(object)["__class__"].__set__
"""Swap the real class, whatever `__class__` and `__setattr__` of the object do."""


class Exchanged:
    """A block under another class until this is closed, iterated over (as the list items of a pickle) or forgotten."""

    def __init__(self, block: object, kind: type) -> None:
        self._block: object = block
        self._kind, self._before = kind, type(block)
        self._is_kept = False
        self._items: Iterator[Any] = iter(())
        set_class(block, kind)

    @contextlib.contextmanager
    def unless_kept(self) -> Generator[None]:
        """Close this in the end, unless the list items of a pickle are to do it."""
        try:
            yield
        finally:
            if not self._is_kept:
                self.close()

    def kept_by_items(self, func: Any, args: Any, state: Any = None, items: Any = None, *rest: Any) -> tuple[Any, ...]:
        """Return what `__reduce_ex__` returned, wrapped so that the swap ends once its list items have been read."""
        self._is_kept, self._items = True, items or self._items
        return func, args, state, self, *rest

    def __iter__(self) -> Exchanged:
        return self

    def __next__(self) -> Any:
        self.close()
        return next(self._items)

    def close(self) -> None:
        """Give the block its class back, unless it was given another in the meantime."""
        if type(self._block) is self._kind:
            set_class(self._block, self._before)
        self._block = None

    __del__ = close
