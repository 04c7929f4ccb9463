"""Grow and shrink the address ranges of expandable segments, as torch's caching allocator does."""

from typing import TYPE_CHECKING

from actmem.allocator.free_blocks import Block, Pool

if TYPE_CHECKING:
    from actmem.allocator.caching_allocator import CachingAllocator

__all__ = ["grow", "unmap"]


def grow(allocator: "CachingAllocator", pool: Pool, size: int, stream: int) -> Block | None:
    """Return a block of at least `size` bytes, mapping what is missing; it is in no pool.

    Where the driver runs out half-way, what was mapped stays mapped, as free memory.
    """
    block = _with_room(allocator, pool, size, stream)
    if not block.is_mapped and not _map(allocator, block, min(block.size, size)):
        return None
    while block.size < size:
        behind = block.next
        assert behind is not None
        if not _map(allocator, behind, min(size - block.size, behind.size)):
            return None
        block = behind
    pool.remove(block)
    return block


def _with_room(allocator: "CachingAllocator", pool: Pool, size: int, stream: int) -> Block:
    """Return the start of the lowest run of free and unmapped blocks that holds `size`, or of a new range."""
    for _, block in pool.unmapped.get(stream, ()):
        if block.previous is not None and not block.previous.is_used:
            block = block.previous
        room, part = 0, block
        while part is not None and not part.is_used and room < size:
            room += part.size
            part = part.next
        if room >= size:
            return block
    address, num_bytes = allocator.driver.address_range(pool.unit)
    block = allocator.new_segment(address, num_bytes, stream, pool, is_range=True)
    block.is_mapped = False
    pool.insert_unmapped(block)
    return block


def _map(allocator: "CachingAllocator", block: Block, size: int) -> bool:
    """Map the start of an unmapped block, in whole units, and merge it with free neighbours."""
    pool = block.segment.pool
    num_bytes = -(-size // pool.unit) * pool.unit
    if not allocator.driver.map(block.address, num_bytes):
        return False
    allocator.num_device_requests += 1
    allocator.reserved_bytes += num_bytes
    pool.remove_unmapped(block)
    block.is_mapped = True
    if num_bytes < block.size:
        rest = Block(block.address + num_bytes, block.size - num_bytes, block.segment)
        rest.is_mapped = False
        rest.put_between(block, block.next)
        block.size = num_bytes
        pool.insert_unmapped(rest)
    allocator.merge(block)
    pool.insert(block)
    return True


def unmap(allocator: "CachingAllocator", block: Block) -> None:
    """Give the whole units of a free block back to the driver; what lies before and behind them stays free."""
    start, end = block.whole_units()
    if end <= start:
        return
    pool = block.segment.pool
    pool.remove(block)
    block_end = block.address + block.size
    if start > block.address:
        before = Block(block.address, start - block.address, block.segment)
        before.put_between(block.previous, block)
        pool.insert(before)
    if block_end > end:
        behind = Block(end, block_end - end, block.segment)
        behind.put_between(block, block.next)
        pool.insert(behind)
    block.address, block.size, block.is_mapped = start, end - start, False
    allocator.reserved_bytes -= block.size
    allocator.driver.release(block.address, block.size)
    allocator.merge(block)
    if block.previous is None and block.next is None:
        return  # the whole range goes back
    pool.insert_unmapped(block)
