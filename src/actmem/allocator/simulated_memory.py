"""Run a program's allocations through the simulated allocator, and say what they take."""

from collections.abc import Iterable
from dataclasses import dataclass

from actmem.allocator.alloc_conf import AllocatorSettings
from actmem.allocator.allocation_events import Alloc, EmptyCache, Event, FreeRequested
from actmem.allocator.caching_allocator import CachingAllocator
from actmem.allocator.driver import EndlessDriver
from actmem.allocator.free_blocks import Block
from actmem.errors import ModeError

__all__ = ["MemoryAtPeak", "OutOfMemory", "PeakWatch", "SimulatedMemory", "simulate"]


@dataclass(frozen=True)
class MemoryAtPeak:
    """What the reserved bytes consist of at one moment. The five parts add up to `reserved_bytes`."""

    reserved_bytes: int = 0
    requested_bytes: int = 0
    """What the program asked for."""
    rounding_bytes: int = 0
    """Each request rounded up, mostly to 512 bytes."""
    tail_bytes: int = 0
    """Ends of used blocks that are too small to be split off: up to 1 MiB each. torch counts them as allocated."""
    split_bytes: int = 0
    """Free pieces of segments that are in use elsewhere: only requests that fit into one of them can use them."""
    idle_bytes: int = 0
    """Free segments: `empty_cache`, or a request that finds no other memory, gives them back to the driver."""

    @property
    def allocated_bytes(self) -> int:
        """Return what torch counts as allocated."""
        return self.requested_bytes + self.rounding_bytes + self.tail_bytes

    @property
    def parts(self) -> tuple[tuple[str, int, str], ...]:
        """Return name, bytes and meaning of each part, in the order in which they add up."""
        return (
            ("requested", self.requested_bytes, "what the program asked for"),
            ("rounding", self.rounding_bytes, "every request is rounded up, mostly to 512 bytes"),
            ("tails", self.tail_bytes, "ends of used blocks, up to 1 MiB each, too small to be split off"),
            (
                "free pieces",
                self.split_bytes,
                "gaps in segments that are in use: only a request that fits into one can have it",
            ),
            ("free segments", self.idle_bytes, "go back to the driver with empty_cache(), or when it has no more"),
        )

    @property
    def unusable_bytes(self) -> int:
        """Return what is reserved, and neither requested nor ready to be given back."""
        return self.rounding_bytes + self.tail_bytes + self.split_bytes


@dataclass(frozen=True)
class OutOfMemory:
    """The request that failed, even after everything unused was given back."""

    index: int
    """The event's place among the events."""
    name: int | str
    num_bytes: int
    reserved_bytes: int
    """What was reserved when the request failed."""
    allocated_bytes: int


@dataclass(frozen=True)
class SimulatedMemory:
    """What a sequence of events takes."""

    peak_allocated_bytes: int
    """The most that torch counts as allocated (`torch.cuda.max_memory_allocated`): whole blocks, with their tails."""
    peak_reserved_bytes: int
    """The most that is taken from the driver (`torch.cuda.max_memory_reserved`)."""
    peak_requested_bytes: int
    at_peak: MemoryAtPeak
    """The moment at which most is reserved; of several, the one at which most is allocated."""
    final_allocated_bytes: int
    final_reserved_bytes: int
    num_device_requests: int
    num_retries: int
    """How often a request to the driver failed and everything unused was given back."""
    out_of_memory: OutOfMemory | None
    """The simulation ends there."""
    curve: tuple[tuple[int, int], ...] = ()
    """Allocated and reserved bytes after each event, where asked for."""


class PeakWatch:
    """Remember the peaks of an allocator, and what its memory consists of when most is reserved."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_requested_bytes = 0
        self._parts = (0, 0, 0, 0, 0)
        self.look()

    def look(self) -> bool:
        """Take note of the present moment, and say whether it is the one with most memory reserved so far."""
        allocator = self._allocator
        allocated, reserved = allocator.allocated_bytes, allocator.reserved_bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        if allocator.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = allocator.requested_bytes
        if reserved < self.peak_reserved_bytes or (
            reserved == self.peak_reserved_bytes and allocated <= self._parts[2]
        ):
            return False
        self.peak_reserved_bytes = reserved
        idle = allocator.small.idle_bytes + allocator.large.idle_bytes
        self._parts = (allocator.requested_bytes, allocator.rounded_bytes, allocated, reserved, idle)
        return True

    @property
    def moment(self) -> MemoryAtPeak:
        """Return what the reserved bytes consisted of when they were most."""
        requested, rounded, allocated, reserved, idle = self._parts
        return MemoryAtPeak(
            reserved_bytes=reserved,
            requested_bytes=requested,
            rounding_bytes=rounded - requested,
            tail_bytes=allocated - rounded,
            split_bytes=reserved - allocated - idle,
            idle_bytes=idle,
        )


def simulate(
    events: Iterable[Event],
    settings: AllocatorSettings | str = "",
    *,
    limit_bytes: int | None = None,
    with_curve: bool = False,
) -> SimulatedMemory:
    """Return what a sequence of allocations takes from a CUDA device, with an empty allocator at the start.

    The device's addresses are not known before a run. Here they ascend, which matters only where two free blocks have
    the same size.

    >>> from actmem.allocator import Free
    >>> memory = simulate([Alloc("a", 3 * 2**20), Alloc("b", 100), Free("a"), Alloc("c", 19 * 2**20)])
    >>> memory.peak_allocated_bytes // 2**20, memory.peak_reserved_bytes // 2**20
    (20, 22)
    >>> simulate([Alloc("a", 3 * 2**20)], limit_bytes=8 * 2**20).out_of_memory
    OutOfMemory(index=0, name='a', num_bytes=3145728, reserved_bytes=0, allocated_bytes=0)

    Args:
        events: `Alloc`, `Free`, `FreeRequested`, `FreeCompleted` and `EmptyCache`, in order.
        settings: Settings, or the value of PYTORCH_CUDA_ALLOC_CONF.
        limit_bytes: What may be reserved: the device's memory less what lies outside torch. None: any amount.
        with_curve: Also return allocated and reserved bytes after each event.

    Raises:
        ModeError: if a setting is refused, or if an event names memory that is not there, or is there already.
    """
    if isinstance(settings, str):
        settings = AllocatorSettings.parse(settings)
    allocator = CachingAllocator(settings, EndlessDriver(limit_bytes))
    watch = PeakWatch(allocator)
    blocks: dict[int | str, Block | None] = {}
    failed: OutOfMemory | None = None
    curve: list[tuple[int, int]] = []
    for index, event in enumerate(events):
        if isinstance(event, Alloc):
            name, num_bytes, stream = event
            if name in blocks:
                raise _wrong(index, event, "that name is taken: free it first, or choose another")
            if num_bytes <= 0:
                blocks[name] = None
            else:
                block = blocks[name] = allocator.allocate(num_bytes, stream)
                if block is None:
                    failed = OutOfMemory(index, name, num_bytes, allocator.reserved_bytes, allocator.allocated_bytes)
                    break
                watch.look()
        elif isinstance(event, EmptyCache):
            allocator.empty_cache()
        elif event.name not in blocks:
            raise _wrong(index, event, "nothing of that name is allocated")
        elif not isinstance(event, FreeRequested):
            block = blocks.pop(event.name)
            if block is not None:
                allocator.free(block)
        if with_curve:
            curve.append((allocator.allocated_bytes, allocator.reserved_bytes))
    return SimulatedMemory(
        peak_allocated_bytes=watch.peak_allocated_bytes,
        peak_reserved_bytes=watch.peak_reserved_bytes,
        peak_requested_bytes=watch.peak_requested_bytes,
        at_peak=watch.moment,
        final_allocated_bytes=allocator.allocated_bytes,
        final_reserved_bytes=allocator.reserved_bytes,
        num_device_requests=allocator.num_device_requests,
        num_retries=allocator.num_retries,
        out_of_memory=failed,
        curve=tuple(curve),
    )


def _wrong(index: int, event: Event, why: str) -> ModeError:
    return ModeError(
        f"event {index} is {event!r}, but {why}. A name is allocated by Alloc and freed once, by Free, or by "
        "FreeRequested and later FreeCompleted."
    )
