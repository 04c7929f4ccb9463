"""Find the state at the start of a recording from the state at its end, by walking its trace backwards.

NOTE [ The start of a recording ]
A snapshot has every block of its last moment, and a trace of what led there. Read backwards, an allocation takes a
block away, a free brings one back, and the events of segments are undone likewise. What remains is the start.

One thing is lost: a free says what was *requested*, not how large the block was. In the large pool a block may have
a tail of up to 1 MiB. It ends
- where the next used block starts, or the segment ends, if that is no more than 1 MiB behind the request: a free
  block of the large pool is always larger than that;
- else where another block started, no more than 1 MiB behind it, while it was alive;
- else at the request's own end.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from actmem.allocator.alloc_conf import MIB
from actmem.allocator.caching_allocator import CachingAllocator
from actmem.allocator.free_blocks import LARGE_BYTES, SMALL_BYTES, Block
from actmem.allocator.snapshot_file import SnapshotSegment, TraceEvent

__all__ = ["StartState", "restore", "start_of"]

_GRAIN = 2 * MIB
_FAR = 4 * 2**30
"""More than the small pool ever has, and less than the distance of two ranges, which are longer than the memory."""
_END = 1 << 62
"""Where ranges end: no training reaches it."""


@dataclass
class Area:
    """A segment at the start, or a range with the parts of it that are mapped."""

    address: int
    size: int
    stream: int
    is_small: bool
    is_range: bool
    pool: tuple[int, int] = (0, 0)
    mapped: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Start and end of the mapped parts, by address."""


@dataclass
class StartState:
    """Segments and used blocks at the start of a trace."""

    areas: list[Area]
    used: dict[int, tuple[int, int]]
    """Request and size of each used block, by address."""


def start_of(
    segments: Sequence[SnapshotSegment], trace: Sequence[TraceEvent], allocator: CachingAllocator
) -> StartState:
    """Return the state at the start of a trace. See NOTE [ The start of a recording ].

    Args:
        segments: The segments of the device at the end.
        trace: What happened before.
        allocator: Says how requests are rounded.
    """
    plain = {
        each.address: Area(each.address, each.size, each.stream, each.is_small, False, each.pool)
        for each in segments
        if not each.is_range
    }
    ranges = _Ranges(segments, trace)
    used: dict[int, tuple[int, int | None]] = {
        block.address: (block.requested, block.size) for each in segments for block in each.blocks if block.is_used
    }
    freed_at: dict[int, int] = {}
    for index in range(len(trace) - 1, -1, -1):
        action, address, num_bytes, stream, _ = trace[index]
        if action == "alloc":
            used.pop(address, None)
        elif action == "free_completed":
            used[address] = (num_bytes, None)
            freed_at[address] = index
        elif action == "segment_alloc":
            plain.pop(address, None)
        elif action == "segment_free":
            plain[address] = Area(address, num_bytes, stream, num_bytes <= 2 * MIB, False)
        elif action == "segment_map":
            ranges.unmap(address, num_bytes)
        elif action == "segment_unmap":
            ranges.map(address, num_bytes, stream)
    areas = sorted([*plain.values(), *ranges.areas(trace)], key=lambda area: area.address)
    return StartState(areas, _with_tails(areas, used, freed_at, trace, allocator))


def _with_tails(
    areas: list[Area],
    used: dict[int, tuple[int, int | None]],
    freed_at: dict[int, int],
    trace: Sequence[TraceEvent],
    allocator: CachingAllocator,
) -> dict[int, tuple[int, int]]:
    known: dict[int, tuple[int, int]] = {}
    open_ended: dict[int, int] = {}
    addresses = sorted(used)
    starts = [area.address for area in areas]
    never_split = allocator.settings.max_split_bytes
    for place, address in enumerate(addresses):
        requested, size = used[address]
        if size is None:
            size = allocator.rounded(requested)
            owner = bisect_right(starts, address) - 1
            area = areas[owner] if owner >= 0 else None
            if area is not None and not area.is_small and not area.is_range:
                end = area.address + area.size
                following = addresses[place + 1] if place + 1 < len(addresses) else end
                gap = min(following, end) - address - size
                if gap <= SMALL_BYTES or (never_split is not None and size >= never_split):
                    size += max(gap, 0)
                else:
                    open_ended[address] = size
        known[address] = (requested, size)
    for address, size in _seen_ends(open_ended, freed_at, trace).items():
        known[address] = (known[address][0], size)
    return known


def _seen_ends(open_ended: dict[int, int], freed_at: dict[int, int], trace: Sequence[TraceEvent]) -> dict[int, int]:
    """Return the sizes of blocks behind which another one started while they were alive."""
    addresses = sorted(open_ended)
    sizes: dict[int, int] = {}
    if not addresses:
        return sizes
    for index, event in enumerate(trace):
        if event.action != "alloc":
            continue
        place = bisect_left(addresses, event.address) - 1
        if place < 0:
            continue
        owner = addresses[place]
        tail = event.address - owner - open_ended[owner]
        if 0 <= tail <= SMALL_BYTES and index < freed_at[owner]:
            sizes.setdefault(owner, event.address - owner)
    return sizes


_Owner = tuple[int, bool, tuple[int, int]]
"""The stream of a range, whether it is of the small pool, and the pool's number."""


class _Ranges:
    """The mapped parts of ranges, in grains of 2 MiB, while a trace is read backwards."""

    def __init__(self, segments: Sequence[SnapshotSegment], trace: Sequence[TraceEvent]) -> None:
        self._owner: dict[int, _Owner] = {}
        """The owner of each mapped grain."""
        self._seen: dict[int, _Owner] = {}
        """The same for all addresses whose pool is certain at any time, to find out about others."""
        for each in segments:
            if each.is_range:
                key = (each.stream, each.is_small, each.pool)
                self._seen[each.address] = key
                self._set(each.address, each.size, key)
        for event in trace:
            if event.action == "segment_map" or (event.action == "segment_unmap" and event.num_bytes % LARGE_BYTES):
                self._seen.setdefault(event.address, (event.stream, event.num_bytes % LARGE_BYTES != 0, (0, 0)))

    def _key(self, address: int, stream: int) -> _Owner:
        """Return the owner of an address: of the known addresses that are near, the nearest one's.

        Only large memory can be far from all of them: what goes back in other units than 20 MiB is known to be small.
        """
        near = [each for each, owner in self._seen.items() if owner[0] == stream and abs(each - address) < _FAR]
        return self._seen[min(near, key=lambda each: abs(each - address))] if near else (stream, False, (0, 0))

    def _set(self, address: int, num_bytes: int, key: _Owner) -> None:
        for grain in range(address, address + num_bytes, _GRAIN):
            self._owner[grain] = key

    def map(self, address: int, num_bytes: int, stream: int) -> None:
        self._set(address, num_bytes, self._key(address, stream))

    def unmap(self, address: int, num_bytes: int) -> None:
        for grain in range(address, address + num_bytes, _GRAIN):
            self._owner.pop(grain, None)

    def areas(self, trace: Sequence[TraceEvent]) -> list[Area]:
        areas: dict[_Owner, Area] = {}
        lowest = self._lowest(trace)
        for grain in sorted(self._owner):
            key = stream, is_small, pool = self._owner[grain]
            if key not in areas:
                base = min(grain, lowest.get(key, grain))
                areas[key] = Area(base, _END - base, stream, is_small, True, pool)
            mapped = areas[key].mapped
            if mapped and mapped[-1][1] == grain:
                mapped[-1] = (mapped[-1][0], grain + _GRAIN)
            else:
                mapped.append((grain, grain + _GRAIN))
        return list(areas.values())

    def _lowest(self, trace: Sequence[TraceEvent]) -> dict[_Owner, int]:
        """Return the lowest address at which each range of the start is mapped, until it goes back as a whole."""
        mapped = Counter(self._owner.values())
        lowest: dict[_Owner, int] = {}
        for event in trace:
            if event.action in {"segment_map", "segment_unmap"}:
                key = self._key(event.address, event.stream)
                if mapped[key] <= 0:
                    continue
                if event.action == "segment_map":
                    lowest[key] = min(lowest.get(key, _END), event.address)
                    mapped[key] += event.num_bytes // _GRAIN
                else:
                    mapped[key] -= event.num_bytes // _GRAIN
        return lowest


# ---------------------------------------------------------------- putting it into an allocator


def restore(state: StartState, allocator: CachingAllocator) -> dict[int, Block]:
    """Put a start state into an empty allocator, and return its used blocks by address."""
    blocks: dict[int, Block] = {}
    addresses = sorted(state.used)
    for area in state.areas:
        pool = allocator.pool_of(area.pool, is_small=area.is_small)
        whole = allocator.new_segment(area.address, area.size, area.stream, pool, is_range=area.is_range)
        mapped = area.mapped if area.is_range else [(area.address, area.address + area.size)]
        end, last = area.address, None
        parts: list[Block] = []
        for start, stop in mapped:
            if start > end:
                parts.append(_unmapped(end, start, whole))
            for address in addresses[bisect_left(addresses, start) : bisect_left(addresses, stop)]:
                requested, size = state.used[address]
                if address > start:
                    parts.append(Block(start, address - start, whole.segment))
                block = Block(address, size, whole.segment)
                block.is_used, block.requested = True, requested
                parts.append(block)
                blocks[address] = block
                start = address + size
            if stop > start:
                parts.append(Block(start, stop - start, whole.segment))
            end = stop
        allocator.reserved_bytes += sum(stop - start for start, stop in mapped)
        if end < area.address + area.size:
            parts.append(_unmapped(end, area.address + area.size, whole))
        for block in parts:
            block.put_between(last, None)
            last = block
        for block in parts:
            if block.is_used:
                allocator.count_used(block)
            elif block.is_mapped:
                pool.insert(block)
            else:
                pool.insert_unmapped(block)
    return blocks


def _unmapped(start: int, end: int, whole: Block) -> Block:
    block = Block(start, end - start, whole.segment)
    block.is_mapped = False
    return block
