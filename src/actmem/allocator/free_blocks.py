"""Blocks of device memory, and the two pools that have the free ones in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from actmem.allocator.alloc_conf import MIB

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "Block", "Pool", "Segment"]

SMALL_BYTES = 1 * MIB
"""Requests up to this size are served from the small pool."""
LARGE_BYTES = 20 * MIB
"""The least segment of the large pool, and the unit in which its ranges are mapped."""

Key = tuple[int, int, int, "Block"]
"""The order of free blocks of one stream: by size, then by the rule for ties, then by address."""


class Segment:
    """A piece of memory, or of address space, that the driver gave out at once."""

    __slots__ = ("address", "age", "is_range", "pool", "size", "stream")

    def __init__(self, address: int, size: int, stream: int, pool: "Pool", age: int, is_range: bool) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.age = age
        self.is_range = is_range
        """Whether it is a range of addresses that is mapped bit by bit (`expandable_segments`)."""


class Block:
    """A part of a segment: in use, free, or (in a range) not mapped."""

    __slots__ = ("address", "is_mapped", "is_used", "key", "next", "previous", "requested", "segment", "size")

    def __init__(self, address: int, size: int, segment: Segment) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.requested = 0
        self.is_used = False
        self.is_mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.key: Key | None = None

    def put_between(self, previous: "Block | None", following: "Block | None") -> None:
        """Link the block into its segment's list."""
        self.previous, self.next = previous, following
        if previous is not None:
            previous.next = self
        if following is not None:
            following.previous = self

    def unlink(self) -> None:
        """Take the block out of its segment's list."""
        if self.previous is not None:
            self.previous.next = self.next
        if self.next is not None:
            self.next.previous = self.previous

    def whole_bytes(self) -> int:
        """Return how many bytes of a free block could go back to the driver."""
        if not self.segment.is_range:
            return self.size if self.previous is None and self.next is None else 0
        start, end = self.whole_units()
        return max(end - start, 0)

    def whole_units(self) -> tuple[int, int]:
        """Return start and end of the whole units of a range inside this block."""
        unit, base = self.segment.pool.unit, self.segment.address
        start = base + -(-(self.address - base) // unit) * unit
        end = base + (self.address + self.size - base) // unit * unit
        return start, end


class Pool:
    """The free blocks for small or for large requests, and the parts of ranges that are not mapped."""

    __slots__ = ("by_age", "free", "idle_bytes", "is_small", "unit", "unmapped")

    def __init__(self, *, is_small: bool, by_age: bool) -> None:
        self.is_small = is_small
        self.unit = 2 * MIB if is_small else LARGE_BYTES
        self.by_age = by_age
        self.free: dict[int, list[Key]] = {}
        """For each stream its free blocks, in order."""
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}
        """For each stream the parts of its ranges that are not mapped, by address."""
        self.idle_bytes = 0
        """Free bytes that could go back to the driver."""

    def insert(self, block: Block) -> None:
        """Put a free block into its place."""
        segment = block.segment
        key = block.key = (block.size, segment.age if self.by_age else 0, block.address, block)
        keys = self.free.get(segment.stream)
        if keys is None:
            self.free[segment.stream] = [key]
        else:
            insort(keys, key)
        if segment.is_range or (block.previous is None and block.next is None):
            self.idle_bytes += block.whole_bytes()

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        key = block.key
        assert key is not None
        keys = self.free[block.segment.stream]
        self.take(keys, bisect_left(keys, key))

    def take(self, keys: list[Key], index: int) -> Block:
        """Take the block at a place of a stream's list out, and return it."""
        block = keys.pop(index)[3]
        block.key = None
        if block.segment.is_range or (block.previous is None and block.next is None):
            self.idle_bytes -= block.whole_bytes()
        return block

    def insert_unmapped(self, block: Block) -> None:
        """Put a part of a range that is not mapped into its place."""
        insort(self.unmapped.setdefault(block.segment.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Take a part of a range that is not mapped out."""
        blocks = self.unmapped[block.segment.stream]
        del blocks[bisect_left(blocks, (block.address,))]  # type: ignore[type-var]

    def in_order(self) -> Iterator[Block]:
        """Yield all free blocks, stream by stream; the pool may change meanwhile."""
        for stream in sorted(self.free):
            for key in list(self.free[stream]):
                yield key[3]
