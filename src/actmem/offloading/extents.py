"""Keep book of which parts of a file are free: first fit, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Extents"]


class Extents:
    """Hand out parts of a range that can grow at its end.

    >>> parts = Extents()
    >>> parts.grow(100)
    >>> parts.take(30), parts.take(50), parts.take(30)
    (0, 30, None)
    >>> parts.give(0, 30); parts.give(30, 50); parts.free
    [(0, 100)]
    """

    def __init__(self) -> None:
        self.end = 0
        self.free: list[tuple[int, int]] = []
        """Start and length of each free part, in order; no two of them touch."""

    def take(self, length: int) -> int | None:
        """Return the start of the first free part that is long enough, or None."""
        for i, (start, free) in enumerate(self.free):
            if free > length:
                self.free[i] = (start + length, free - length)
                return start
            if free == length:
                del self.free[i]
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Free a part, and join it with its neighbours."""
        i = bisect_left(self.free, (start, 0))
        if i < len(self.free) and start + length == self.free[i][0]:
            length += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == start:
            i -= 1
            before, more = self.free.pop(i)
            start, length = before, length + more
        self.free.insert(i, (start, length))

    def missing(self, length: int) -> int:
        """Return how much must be added at the end before `length` can be taken there."""
        tail = self.free[-1][1] if self.free and sum(self.free[-1]) == self.end else 0
        return max(0, length - tail)

    def grow(self, length: int) -> None:
        """Add a free part at the end."""
        self.end += length
        self.give(self.end - length, length)
