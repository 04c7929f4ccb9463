"""Decide as torch's CUDA caching allocator does: which block serves a request, and what the driver is asked for.

NOTE [ The caching allocator ]
Two pools, for requests up to 1 MiB and above, each with its free blocks in order of (stream, size, tie, address).

- A request is rounded up to 512 bytes, and gets the first free block of its stream that is large enough.
- If there is none, the driver is asked for a segment: 2 MiB for a small request, 20 MiB for one below 10 MiB, and
  otherwise the request rounded up to 2 MiB.
- The rest of the block is split off, if it is at least 512 bytes in the small pool, or more than 1 MiB in the large
  one. What is not split off is the block's *tail*: torch counts it as allocated.
- A freed block merges with its free neighbours in the segment.
- If the driver has no memory, every segment without a used block goes back to it, and it is asked once more.

With expandable segments a (stream, pool) has one range of addresses, which is mapped in units of 2 or 20 MiB as it
grows; see `address_ranges.py`.

The rules were checked against public recordings of CUDA memory, in which every decision is found again: see
docs/allocator.md.
"""

from bisect import bisect_left

from actmem.allocator.address_ranges import grow, unmap
from actmem.allocator.alloc_conf import MIB, AllocatorSettings
from actmem.allocator.driver import Driver
from actmem.allocator.free_blocks import LARGE_BYTES, SMALL_BYTES, Block, Pool, Segment

__all__ = ["CachingAllocator", "segment_bytes"]

_LARGE_REQUEST_BYTES = 10 * MIB
_UNLIMITED = 1 << 62


def segment_bytes(num_bytes: int) -> int:
    """Return the size of the segment that a rounded request asks of the driver.

    >>> [segment_bytes(size) // 2**20 for size in (512, 2**20, 3 * 2**20, 10 * 2**20, 11 * 2**20)]
    [2, 2, 20, 10, 12]
    """
    if num_bytes <= SMALL_BYTES:
        return 2 * MIB
    if num_bytes < _LARGE_REQUEST_BYTES:
        return LARGE_BYTES
    return -(-num_bytes // (2 * MIB)) * (2 * MIB)


class CachingAllocator:
    """The allocator's state on one device. Counters are torch's: with tails, and until memory can be reused."""

    def __init__(self, settings: AllocatorSettings, driver: Driver) -> None:
        self.settings = settings
        self.driver = driver
        by_age = settings.tie == "age"
        self.small = Pool(is_small=True, by_age=by_age)
        self.large = Pool(is_small=False, by_age=by_age)
        self._private: dict[tuple[int, int], tuple[Pool, Pool]] = {}
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.rounded_bytes = 0
        """Like `requested_bytes`, each request rounded up: what is allocated beyond are tails."""
        self.reserved_bytes = 0
        self.num_device_requests = 0
        self.num_retries = 0
        self.num_segments_made = 0
        self._is_expandable = settings.expandable_segments
        self._max_split = _UNLIMITED if settings.max_split_bytes is None else settings.max_split_bytes
        self._rounds_to_512 = not any(settings.roundup_power2_divisions)

    # ---------------------------------------------------------------- requests

    def allocate(self, requested: int, stream: int, pools: tuple[int, int] = (0, 0)) -> Block | None:
        """Return the block that serves a request, or None if the device is out of memory."""
        size = self.rounded(requested)
        is_small = size <= SMALL_BYTES
        if pools == (0, 0):
            pool = self.small if is_small else self.large
        else:
            pool = self.pool_of(pools, is_small=is_small)
        block = self.find(pool, size, stream) or self._new_block(pool, size, stream)
        if block is None:
            return None
        rest = block.size - size
        if pool.is_small or self._is_expandable:
            is_split = rest >= 512
        else:
            is_split = rest > SMALL_BYTES and size < self._max_split
        if is_split:
            remaining = Block(block.address + size, rest, block.segment)
            remaining.put_between(block, block.next)
            block.size = size
            pool.insert(remaining)
        block.is_used = True
        block.requested = requested
        self.allocated_bytes += block.size
        self.rounded_bytes += size
        self.requested_bytes += requested
        return block

    def pool_of(self, pools: tuple[int, int], *, is_small: bool) -> Pool:
        """Return a pool: (0, 0) are those of all programs, others those of CUDA graphs and `torch.cuda.MemPool`."""
        if pools == (0, 0):
            return self.small if is_small else self.large
        if pools not in self._private:
            by_age = self.settings.tie == "age"
            self._private[pools] = (Pool(is_small=True, by_age=by_age), Pool(is_small=False, by_age=by_age))
        return self._private[pools][0 if is_small else 1]

    def count_used(self, block: Block) -> None:
        """Count a block that was in use before the simulation began."""
        self.allocated_bytes += block.size
        self.rounded_bytes += self.rounded(block.requested)
        self.requested_bytes += block.requested

    def free(self, block: Block) -> None:
        """Take a block back, and merge it with its free neighbours."""
        self.allocated_bytes -= block.size
        self.rounded_bytes -= self.rounded(block.requested)
        self.requested_bytes -= block.requested
        block.is_used = False
        pool = block.segment.pool
        self.merge(block)
        pool.insert(block)

    def rounded(self, requested: int) -> int:
        """Return the size that a request is rounded up to."""
        if self._rounds_to_512:
            return (requested + 511) & ~511
        return self.settings.rounded(requested)

    def find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the best free block for a request out of its pool, and return it."""
        keys = pool.free.get(stream)
        if keys is None:
            return None
        index = bisect_left(keys, (size,))  # type: ignore[type-var]
        if index == len(keys):
            return None
        if self._is_expandable:
            index = _before_the_growing_end(keys, index)
        found = keys[index][0]
        if size < self._max_split:
            if found >= self._max_split:
                return None
        elif found >= size + self.settings.max_non_split_rounding_bytes:
            return None
        return pool.take(keys, index)

    def merge(self, block: Block) -> None:
        """Merge a block that is not in use with its neighbours of the same kind, which leave their pool."""
        pool = block.segment.pool
        for other in (block.previous, block.next):
            if other is None or other.is_used or other.is_mapped != block.is_mapped:
                continue
            if other.is_mapped:
                pool.remove(other)
            else:
                pool.remove_unmapped(other)
            block.address = min(block.address, other.address)
            block.size += other.size
            other.unlink()

    # ---------------------------------------------------------------- the device

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        block = self._request(pool, size, stream)
        if block is None and self._max_split < _UNLIMITED and self._release_unsplit(pool, size, stream):
            block = self._request(pool, size, stream)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._request(pool, size, stream)
        return block

    def _request(self, pool: Pool, size: int, stream: int) -> Block | None:
        if self._is_expandable:
            return grow(self, pool, size, stream)
        num_bytes = segment_bytes(size)
        address = self.driver.segment(num_bytes)
        if address is None:
            return None
        self.num_device_requests += 1
        self.reserved_bytes += num_bytes
        return self.new_segment(address, num_bytes, stream, pool, is_range=False)

    def new_segment(self, address: int, num_bytes: int, stream: int, pool: Pool, *, is_range: bool) -> Block:
        """Return the one block of a new segment; it is in no pool yet."""
        segment = Segment(address, num_bytes, stream, pool, self.num_segments_made, is_range)
        self.num_segments_made += 1
        return Block(address, num_bytes, segment)

    def empty_cache(self) -> None:
        """Give every segment without a used block back to the driver, and the whole units of ranges."""
        self.driver.synchronize()
        for pool in (self.large, self.small):
            in_ranges: list[Block] = []
            for block in pool.in_order():
                if block.segment.is_range:
                    in_ranges.append(block)
                elif block.previous is None and block.next is None:
                    self._release(block)
            for block in in_ranges:
                unmap(self, block)

    def _release(self, block: Block) -> None:
        block.segment.pool.remove(block)
        self.reserved_bytes -= block.size
        self.driver.release(block.address, block.size)

    def _release_unsplit(self, pool: Pool, size: int, stream: int) -> bool:
        """Give blocks that may not be split back until a request fits, and say whether enough were found."""
        keys = pool.free.get(stream, [])
        wanted = max(size, self._max_split)
        index = bisect_left(keys, (wanted,))  # type: ignore[type-var]
        if index < len(keys) and not keys[index][3].segment.is_range:
            self._release(keys[index][3])
            return True
        released = 0
        for key in reversed(keys[:index]):
            if released >= wanted or key[0] < self._max_split:
                break
            if not key[3].segment.is_range:
                released += key[0]
                self._release(key[3])
        return released >= wanted


def _before_the_growing_end(keys: "list[tuple[int, int, int, Block]]", index: int) -> int:
    """Return the place of the block to take: a block that could still grow counts with the bytes that it could grow by.

    So inner holes are filled before the end of a range is, although the free block at that end may be smaller.
    """
    best = _growable_bytes(keys[index][3])
    for following in range(index + 1, len(keys)):
        growable = _growable_bytes(keys[following][3])
        if growable >= best:
            break
        index, best = following, growable
    return index


def _growable_bytes(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.is_mapped else 0)
