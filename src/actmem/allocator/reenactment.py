"""Repeat the decisions of a recorded allocator, and count how many come out as recorded.

The simulation is told what a recording cannot tell of itself: the state at its start, the addresses that the driver
returned and whether it failed, and when memory was freed and the cache emptied. Which block serves a request, when the
driver is asked and for how much, and what goes back to it, the simulation decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from actmem.allocator.alloc_conf import AllocatorSettings
from actmem.allocator.caching_allocator import CachingAllocator
from actmem.allocator.free_blocks import LARGE_BYTES, SMALL_BYTES, Block
from actmem.allocator.simulated_memory import MemoryAtPeak, PeakWatch
from actmem.allocator.snapshot_file import Frame, Snapshot, SnapshotSegment, TraceEvent, frames_of
from actmem.allocator.start_state import restore, start_of
from actmem.allocator.step_curves import find_steps

__all__ = ["DeviceRecording", "LiveTensor", "place_of", "reenact"]

_REQUESTS = ("segment_alloc", "segment_map")
_RELEASES = ("segment_free", "segment_unmap")
_ELSEWHERE = 1 << 61
"""Addresses of segments that the recording does not have."""


@dataclass(frozen=True)
class LiveTensor:
    """Memory that is in use at the peak."""

    address: int
    num_bytes: int
    """As requested."""
    stream: int
    is_older: bool
    """It was allocated before the recording began."""
    frames: tuple[Frame, ...]
    """Where it was allocated, innermost first, as far as the recording has it."""

    @property
    def place(self) -> Frame | None:
        """Return the innermost line of Python outside torch, or the innermost line that says something.

        What autograd's own threads allocate has no Python line: there it is the backward step, or the operator.
        """
        return _telling(self.frames)


def _telling(frames: Sequence[Frame]) -> Frame | None:
    python = [frame for frame in frames if frame.file.endswith(".py")]
    own = [frame for frame in python if "/torch/" not in frame.file.replace("\\", "/")]
    steps = [frame for frame in frames if "Backward" in frame.function]
    operators = [frame for frame in frames if frame.function.startswith("at::")]
    return next(iter([*own, *python, *steps, *operators, *frames]), None)


def place_of(snapshot: Snapshot, device: int, place: int) -> Frame | None:
    """Return the line that caused an event of a trace, as `LiveTensor.place` does."""
    return _telling(tuple(frames_of(snapshot.traces[device][place].frames)))


@dataclass(frozen=True)
class DeviceRecording:
    """One device of a snapshot, and what the simulation makes of it."""

    device: int
    settings: AllocatorSettings
    num_events: int
    allocations: int
    at_recorded_address: int
    """How many of the allocations the simulation puts where the recording has them."""
    device_requests: int
    device_requests_right: int
    """How many of the requests to the driver the simulation makes too, at the same moment and of the same size."""
    releases: int
    releases_right: int
    out_of_memory: int
    """How many requests failed."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    start_allocated_bytes: int
    start_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    is_end_right: bool
    """Whether the simulation ends with the blocks that the snapshot has."""
    at_peak: MemoryAtPeak
    """What was reserved when most was."""
    curve: tuple[tuple[int, int], ...]
    """Allocated and reserved bytes at the start, and after each allocation."""
    requests: tuple[int, ...]
    """The bytes of each of these allocations, as requested; 0 where memory was only given back."""
    places: tuple[int, ...]
    """Where in the trace each of them is."""
    largest: tuple[LiveTensor, ...]
    """What was in use when most was allocated, largest first."""

    @property
    def steps(self) -> list[range]:
        """Return the steps that the recording has, as ranges of its allocations."""
        return find_steps(self.requests, [allocated for allocated, _ in self.curve[1:]])

    @property
    def is_exact(self) -> bool:
        """Return whether every decision came out as recorded."""
        return (
            self.at_recorded_address == self.allocations
            and self.device_requests_right == self.device_requests
            and self.releases_right == self.releases
            and self.is_end_right
        )


def reenact(snapshot: Snapshot, device: int, *, num_largest: int = 20) -> DeviceRecording:
    """Simulate what a snapshot recorded of one device, and compare.

    A snapshot does not say which rule its version of torch has for blocks of equal size. The newer rule is tried where
    the older one does not lead to what was recorded.

    Args:
        snapshot: The snapshot.
        device: One of its `devices`.
        num_largest: How many of the tensors at the peak to return.
    """
    segments = [segment for segment in snapshot.segments if segment.device == device]
    trace = snapshot.traces[device] if device < len(snapshot.traces) else ()
    first = _Reenactment(device, segments, trace, snapshot.settings, num_largest).run()
    if first.at_recorded_address == first.allocations:
        return first
    newer = replace(snapshot.settings, tie="age")
    second = _Reenactment(device, segments, trace, newer, num_largest).run()
    return max(first, second, key=lambda each: each.at_recorded_address)


class _Reenactment:
    """One pass through a trace. It is the simulated allocator's driver too: it answers as the recorded one did."""

    def __init__(
        self,
        device: int,
        segments: Sequence[SnapshotSegment],
        trace: Sequence[TraceEvent],
        settings: AllocatorSettings,
        num_largest: int,
    ) -> None:
        self._device = device
        self._segments = segments
        self._trace = trace
        self._num_largest = num_largest
        self._at = 0
        """The place in the trace: what is before it has happened."""
        self._until = 0
        """The allocation that is being served: the driver's answers are before it."""
        self._num_elsewhere = 0
        self._addresses_right = self._requests_right = self._releases_right = 0
        self._allocator = CachingAllocator(settings, self)
        self._private = [segment for segment in segments if segment.pool != (0, 0)]
        self._start = start_of(segments, trace, self._allocator)
        self._blocks: dict[int, Block | None] = {**restore(self._start, self._allocator)}

    def run(self) -> DeviceRecording:
        allocator, trace = self._allocator, self._trace
        start = allocator.allocated_bytes, allocator.reserved_bytes
        watch = PeakWatch(allocator)
        peak_at = 0
        curve, requests, places = [start], list[int](), list[int]()
        while self._at < len(trace):
            event = trace[self._at]
            if event.action == "free_completed":
                self._free(event)
                self._at += 1
            elif event.action in {"alloc", "oom"}:
                self._allocate(self._at)
            elif event.action in _REQUESTS:
                index = self._served_next(across_frees=True)
                if index < len(trace):
                    self._allocate(index)
                else:  # the recording does not say for what: it is not found again
                    self._at += 1
            elif event.action in _RELEASES:
                self._give_back()
            else:
                self._at += 1
                continue
            before = watch.peak_allocated_bytes
            watch.look()
            if watch.peak_allocated_bytes > before:
                peak_at = self._at
            if event.action != "free_completed":
                curve.append((allocator.allocated_bytes, allocator.reserved_bytes))
                last = trace[self._at - 1]
                requests.append(last.num_bytes if last.action == "alloc" else 0)
                places.append(self._at - 1)
        count = [event.action for event in trace].count
        return DeviceRecording(
            device=self._device,
            settings=allocator.settings,
            num_events=len(trace),
            allocations=count("alloc"),
            at_recorded_address=self._addresses_right,
            device_requests=sum(map(count, _REQUESTS)),
            device_requests_right=self._requests_right,
            releases=sum(map(count, _RELEASES)),
            releases_right=self._releases_right,
            out_of_memory=count("oom"),
            peak_allocated_bytes=watch.peak_allocated_bytes,
            peak_reserved_bytes=watch.peak_reserved_bytes,
            peak_requested_bytes=watch.peak_requested_bytes,
            start_allocated_bytes=start[0],
            start_reserved_bytes=start[1],
            final_allocated_bytes=allocator.allocated_bytes,
            final_reserved_bytes=allocator.reserved_bytes,
            is_end_right=self._is_end_right(),
            at_peak=watch.moment,
            curve=tuple(curve),
            requests=tuple(requests),
            places=tuple(places),
            largest=self._largest(peak_at),
        )

    # ---------------------------------------------------------------- events

    def _free(self, event: TraceEvent) -> None:
        block = self._blocks.pop(event.address, None)
        if block is not None:
            self._allocator.free(block)

    def _allocate(self, index: int) -> None:
        """Serve the allocation at a place of the trace; what the driver did for it is between here and there."""
        self._until = index
        event = self._trace[index]
        block = self._allocator.allocate(event.num_bytes, event.stream, self._pools_at(event.address))
        if event.action == "alloc":
            self._addresses_right += block is not None and block.address == event.address
            self._blocks[event.address] = block
        elif block is not None:  # the recorded request failed
            self._allocator.free(block)
        while self._at < index:
            if self._trace[self._at].action == "free_completed":
                self._free(self._trace[self._at])
            self._at += 1
        self._at = index + 1

    def _give_back(self) -> None:
        """Give memory back to the driver: for a request that failed, if one follows that finds no block, or for all."""
        index = self._served_next(across_frees=False)
        if index < len(self._trace) and not self._is_found(self._trace[index]):
            self._allocate(index)
            return
        self._until = len(self._trace)
        self._allocator.empty_cache()
        while self._at < len(self._trace) and self._trace[self._at].action in _RELEASES:
            self._at += 1

    def _served_next(self, *, across_frees: bool) -> int:
        """Return the place of the allocation for which the driver is asked here; the end of the trace if for none."""
        passed = (*_REQUESTS, *_RELEASES, *(("free_completed",) if across_frees else ()))
        index = self._at
        while index < len(self._trace) and self._trace[index].action in passed:
            index += 1
        if index < len(self._trace) and self._trace[index].action in {"alloc", "oom"}:
            return index
        return len(self._trace)

    def _is_found(self, event: TraceEvent) -> bool:
        allocator = self._allocator
        size = allocator.rounded(event.num_bytes)
        pool = allocator.pool_of(self._pools_at(event.address), is_small=size <= SMALL_BYTES)
        block = allocator.find(pool, size, event.stream)
        if block is not None:
            pool.insert(block)
        return block is not None

    def _pools_at(self, address: int) -> tuple[int, int]:
        for segment in self._private:
            if segment.address <= address < segment.address + segment.size:
                return segment.pool
        return (0, 0)

    # ---------------------------------------------------------------- the driver, as recorded

    def _upcoming(self) -> TraceEvent | None:
        return self._trace[self._at] if self._at < min(self._until, len(self._trace)) else None

    def _fails(self) -> bool:
        """Return whether the recorded driver had no memory: then something is given back, or the request fails."""
        event = self._upcoming()
        if event is not None:
            return event.action not in _REQUESTS
        return self._until < len(self._trace) and self._trace[self._until].action == "oom"

    def segment(self, num_bytes: int) -> int | None:
        event = self._upcoming()
        if event is not None and event.action == "segment_alloc":
            self._at += 1
            self._requests_right += event.num_bytes == num_bytes
            return event.address
        if self._fails():
            return None
        return self._elsewhere(num_bytes)

    def address_range(self, unit: int) -> tuple[int, int]:
        """Return the range in which the recording next maps memory for this stream and pool, now or after a failure."""
        stream = self._trace[self._until].stream
        for event in self._trace[self._at :]:
            is_large = event.num_bytes % LARGE_BYTES == 0
            if event.action == "segment_map" and event.stream == stream and is_large == (unit == LARGE_BYTES):
                return event.address, _ELSEWHERE - event.address
        return self._elsewhere(1 << 44), 1 << 44

    def map(self, address: int, num_bytes: int) -> bool:
        event = self._upcoming()
        if event is not None and event.action == "segment_map" and event.address == address:
            self._at += 1
            self._requests_right += event.num_bytes == num_bytes
            return True
        return not self._fails()

    def release(self, address: int, num_bytes: int) -> None:
        if self._at < len(self._trace):
            event = self._trace[self._at]
            if event.action in _RELEASES and (event.address, event.num_bytes) == (address, num_bytes):
                self._at += 1
                self._releases_right += 1

    def synchronize(self) -> None:
        while (event := self._upcoming()) is not None and event.action == "free_completed":
            self._free(event)
            self._at += 1

    def _elsewhere(self, num_bytes: int) -> int:
        self._num_elsewhere += num_bytes
        return _ELSEWHERE + self._num_elsewhere

    # ---------------------------------------------------------------- the end, and the peak

    def _is_end_right(self) -> bool:
        recorded = {(block.address, block.size) for each in self._segments for block in each.blocks if block.is_used}
        return recorded == {(block.address, block.size) for block in self._blocks.values() if block is not None}

    def _largest(self, end: int) -> tuple[LiveTensor, ...]:
        """Return the largest tensors that were in use after the first events of the trace."""
        at_end = {block.address: block.frames for each in self._segments for block in each.blocks}
        last_freed = {event.address for event in self._trace if event.action == "free_completed"}
        live = {
            address: (requested, -1, [] if address in last_freed else at_end.get(address, []))
            for address, (requested, _) in self._start.used.items()
        }
        for event in self._trace[:end]:
            if event.action == "alloc":
                live[event.address] = (event.num_bytes, event.stream, event.frames)
            elif event.action == "free_completed":
                live.pop(event.address, None)
        largest = sorted(live.items(), key=lambda item: (-item[1][0], item[0]))[: self._num_largest]
        return tuple(
            LiveTensor(address, requested, max(stream, 0), stream < 0 and bool(self._trace), tuple(frames_of(frames)))
            for address, (requested, stream, frames) in largest
        )
