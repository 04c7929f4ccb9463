"""Where segments come from: a device that hands out memory, up to a limit."""

from typing import Protocol

__all__ = ["Driver", "EndlessDriver"]

_BASE = 1 << 40
_ALIGNMENT = 2 * 2**20
_RANGE_BYTES = 1 << 44


class Driver(Protocol):
    """What the caching allocator asks of the device."""

    def segment(self, num_bytes: int) -> int | None:
        """Return the address of a new segment, or None if the request fails."""
        ...

    def address_range(self, unit: int) -> tuple[int, int]:
        """Return the address and the size of a new range of addresses, none of them mapped."""
        ...

    def map(self, address: int, num_bytes: int) -> bool:
        """Map part of a range to memory, and say whether there was any."""
        ...

    def release(self, address: int, num_bytes: int) -> None:
        """Take a segment, or a mapped part of a range, back."""
        ...

    def synchronize(self) -> None:
        """Wait until other streams have finished with freed memory: the last thing before everything is released."""
        ...


class EndlessDriver:
    """A device whose addresses ascend, and which fails only where a limit on the reserved bytes is given.

    >>> driver = EndlessDriver(limit_bytes=6 * 2**20)
    >>> driver.segment(4 * 2**20) is None, driver.segment(4 * 2**20) is None
    (False, True)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._reserved = 0
        self._next = _BASE

    def segment(self, num_bytes: int) -> int | None:
        """Return the next address, or None above the limit."""
        if not self.map(self._next, num_bytes):
            return None
        address = self._next
        self._next += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return address

    def address_range(self, unit: int) -> tuple[int, int]:
        """Return a range that no training fills."""
        address, size = self._next, _RANGE_BYTES // unit * unit
        self._next += size
        return address, size

    def map(self, address: int, num_bytes: int) -> bool:  # noqa: ARG002 (as Driver has it)
        """Count memory, unless it is above the limit."""
        if self._limit is not None and self._reserved + num_bytes > self._limit:
            return False
        self._reserved += num_bytes
        return True

    def release(self, address: int, num_bytes: int) -> None:  # noqa: ARG002 (as Driver has it)
        """Count memory that comes back."""
        self._reserved -= num_bytes

    def synchronize(self) -> None:
        """Do nothing: the events say when other streams have finished."""
