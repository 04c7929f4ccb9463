"""How much of what was sent is still in memory: a rule that the offloader and every prediction follow.

NOTE [ The window ]
A value that was sent stays in memory until others push it out, whether its copy is done or not. What two blocks send
stays; that, or the given number, bounds what was sent and is still in memory together with what is prefetched. So:

- The peak of a step does not depend on how fast the copies are. A slow disk makes a step longer, not larger, and a
  prediction needs no speed.
- The backward pass begins with what was sent last, and that is still there: it is taken back without a copy.
- Until more is known, the bound is twice what the largest block so far has sent, including the current one. After that
  the previous step counts too.

It does not import torch, so that a prediction can use the same class as the offloader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["NUM_BLOCKS", "Window", "bound_of"]

NUM_BLOCKS = 2
"""Number of blocks whose sends may be in flight."""

K = TypeVar("K")


def bound_of(in_flight_bytes: int | None, sent_by_block: Iterable[int]) -> int:
    """Return how many bytes may be in flight: the given number, or what two blocks send.

    >>> bound_of(None, [100, 300, 200]), bound_of(50, [100, 300, 200])
    (600, 50)
    """
    return NUM_BLOCKS * max(sent_by_block, default=0) if in_flight_bytes is None else in_flight_bytes


class Window(Generic[K]):
    """What was sent and is still in memory, oldest first. See NOTE [ The window ].

    Args:
        in_flight_bytes: how many bytes may be in flight; None for what two blocks send.
        max_in_flight: how many values may be in flight, in addition.

    >>> window = Window[str](250)
    >>> window.admit("a", 100), window.admit("b", 100), window.admit("c", 100)
    ([], [], ['a'])
    >>> window.remove("b"), window.num_bytes, window.has_room(200), window.admit("larger than the bound", 300)
    (True, 100, False, ['c', 'larger than the bound'])
    """

    def __init__(self, in_flight_bytes: int | None, max_in_flight: int | None = None) -> None:
        self._given = in_flight_bytes
        self._max_in_flight = max_in_flight
        self._entries: dict[K, int] = {}
        self.num_bytes = 0
        """Sent, and still in memory."""
        self.ahead_bytes = self.num_ahead = 0
        """Memory of other values in flight: prefetched, or cancelled and not yet released."""
        self._block = self._largest = self._before = 0

    @property
    def bound_bytes(self) -> int:
        """How many bytes may be in flight now."""
        return bound_of(self._given, (self._block, self._largest, self._before))

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def admit(self, key: K, num_bytes: int) -> list[K]:
        """Admit a value that is being sent, and return those that must leave memory now, oldest first."""
        self._block += num_bytes
        self._entries[key] = num_bytes
        self.num_bytes += num_bytes
        out: list[K] = []
        while self._entries and self._is_over():
            oldest = next(iter(self._entries))
            self.remove(oldest)
            out.append(oldest)
        return out

    def remove(self, key: K) -> bool:
        """Remove a value; return whether it was there."""
        num_bytes = self._entries.pop(key, None)
        self.num_bytes -= num_bytes or 0
        return num_bytes is not None

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes can be prefetched."""
        num_values = len(self._entries) + self.num_ahead
        fits = self.num_bytes + self.ahead_bytes + num_bytes <= self.bound_bytes
        return fits and (self._max_in_flight is None or num_values < self._max_in_flight)

    def occupy(self, num_bytes: int) -> None:
        """Count a prefetched value."""
        self.ahead_bytes += num_bytes
        self.num_ahead += 1

    def vacate(self, num_bytes: int) -> None:
        """Stop counting it."""
        self.ahead_bytes -= num_bytes
        self.num_ahead -= 1

    def end_block(self) -> None:
        """Note that a block has sent everything."""
        self._largest, self._block = max(self._largest, self._block), 0

    def begin_step(self) -> None:
        """Note that a new step begins: the one that ended becomes the previous one."""
        self.end_block()
        self._before, self._largest = self._largest, 0

    def _is_over(self) -> bool:
        if self.num_bytes + self.ahead_bytes > self.bound_bytes:
            return True
        return self._max_in_flight is not None and len(self._entries) + self.num_ahead > self._max_in_flight
