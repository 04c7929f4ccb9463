"""A simulated accelerator: streams that run late and in any order, memory that is reused at once, and a checker.

NOTE [ The virtual accelerator ]
Its tensors are torch tensors in an arena of this process, so the lane runs on it unchanged. What the host enqueues is
not done at once: streams hold it back, and a seeded scheduler runs the head of any stream that events permit, whenever
it likes. Copies and kernels then really move bytes, so a race can also be seen as a wrong number.

The checker does not depend on the schedule that was drawn. Each operation carries a vector clock: one count a stream
and one for the host. An enqueued operation comes after what the host knew and what its stream was given before; a wait
joins the clock of the event; the host learns an event's clock when it sees it done. Two operations that touch the same
bytes, one of them writing, must be ordered by these clocks. If not, some schedule runs them the wrong way round.

The allocator is a caching one. A block goes back the moment that the last tensor on it dies, and the next allocation on
the stream that allocated it gets it, whatever is still under way. `keep_alive` defers that, as `record_stream` does.
"""

from __future__ import annotations

import ctypes
import functools
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actmem.errors import OffloadError

CELL = 64
"""Blocks begin at multiples of this, and the checker looks at memory in units of it."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Compute = Callable[[list[Bytes], list[Bytes]], None]
Clock = dict[int, int]
HOST = 0


@dataclass
class Stream:
    number: int
    clock: Clock = field(default_factory=dict)
    queue: deque[Any] = field(default_factory=deque)
    seconds: float = 0.0
    """When all that it was given is done, in simulated time."""


@dataclass(eq=False)
class Event:
    clock: Clock
    seconds: float
    done: bool = False


@dataclass(eq=False)
class Work:
    """One kernel or copy, or an access by the host."""

    what: str
    is_copy: bool
    stream: int
    tick: int
    action: Callable[[], None]
    number: int = 0
    """Its place in the order in which the host enqueued."""


@dataclass
class Cell:
    """What the checker knows of `CELL` bytes."""

    written: Work | None = None
    reads: list[Work] = field(default_factory=list)
    filled: bool = False
    """Something was written since the block was allocated."""


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(eq=False)
class Block:
    start: int
    num_bytes: int
    stream: Stream
    used_by: list[Stream] = field(default_factory=list)


class VirtualDevice:
    """Simulate a device and check what it is asked to do. Implements the lane's `Device`.

    Args:
        seed: decides what runs when.
        eager: the chance that a stream moves on at a call of the host; 0 runs nothing before somebody waits.
        check: keep vector clocks. The timing does without.
    """

    def __init__(self, seed: int = 0, *, eager: float = 0.3, check: bool = True, arena_bytes: int = 1 << 18) -> None:
        self._random = random.Random(seed)
        self._eager = eager
        self._check = check
        arena = np.zeros(arena_bytes + CELL, dtype=np.uint8)
        self._arena = arena[-int(arena.ctypes.data) % CELL :][:arena_bytes]
        self._base = int(self._arena.ctypes.data)
        self._end = 0
        self._free: dict[tuple[int, int], list[int]] = {}
        self._deferred: list[tuple[Block, list[Event]]] = []
        self._blocks: dict[int, Block] = {}
        self._cells: dict[int, Cell] = {}
        self._clock: Clock = {HOST: 0}
        self.streams: list[Stream] = []
        self.compute = self.new_stream()
        """The current stream."""
        self.findings: list[Finding] = []
        self.num_done = 0
        self._num_launched = self._latest = 0
        self.num_overtaken = 0
        """How often something ran although something older, on another stream, had not."""
        self.peak_bytes = 0
        self.host_seconds = 0.0
        self.calls: Counter[str] = Counter()

    # ------------------------------------------------------------------ what the lane calls

    def current_stream(self) -> Stream:
        return self.compute

    def new_stream(self) -> Stream:
        stream = Stream(len(self.streams) + 1)
        self.streams.append(stream)
        return stream

    def record(self, stream: Stream) -> Event:
        self.calls["record"] += 1
        event = Event(dict(self._enqueued(stream)), stream.seconds)
        self._put(stream, event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self.calls["wait"] += 1
        _join(self._enqueued(stream), event.clock)
        stream.seconds = max(stream.seconds, event.seconds)
        self._put(stream, ("wait", event))

    def done(self, event: Event) -> bool:
        self._run_some()
        if event.done:
            _join(self._clock, event.clock)
        return event.done

    def synchronise(self, event: Event, timeout_seconds: float) -> bool:
        while not event.done:
            if not self._step():
                return False  # nothing can run any more: a real device would hang
        _join(self._clock, event.clock)
        self.host_seconds = max(self.host_seconds, event.seconds)
        return True

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        what = "copy out" if self.owns(source) else "copy back"
        self.launch(stream, what, [source], [target], _move, is_copy=True)

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        block = self.block_of(tensor)
        if block is not None and stream is not block.stream and stream not in block.used_by:
            block.used_by.append(stream)

    # ------------------------------------------------------------------ what a program calls

    def allocate(self, num_bytes: int) -> Tensor:
        """Return uninitialised bytes in device memory, from the current stream's free blocks if there are any."""
        for block, events in list(self._deferred):
            if all(event.done for event in events):
                for event in events:
                    _join(self._clock, event.clock)
                self._deferred.remove((block, events))
                self._free.setdefault((block.stream.number, block.num_bytes), []).append(block.start)
        size = -(-num_bytes // CELL) * CELL
        free = self._free.get((self.compute.number, size))
        if free:
            start = free.pop()
        else:
            start, self._end = self._end, self._end + size
            if self._end > len(self._arena):
                raise OffloadError("the simulated device is out of memory")
        block = Block(start, size, self.compute)
        self._blocks[start] = block
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._check:
            for cell in self._cells_in(self._base + start, size):
                cell.filled = False
        memory = self._arena[start : start + size]
        weakref.finalize(memory, self._freed, block).atexit = False
        return torch.from_numpy(memory)[:num_bytes]

    def kernel(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], compute: Compute) -> None:
        """Enqueue work on the current stream, as a well-behaved program does: other streams' memory is marked.

        `compute` gets the bytes of what it reads and of what it writes, when its turn has come.
        """
        for tensor in (*reads, *writes):
            self.keep_alive(tensor, self.compute)
        self.launch(self.compute, what, reads, writes, compute)

    def owns(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in device memory."""
        return self._base <= tensor.data_ptr() < self._base + len(self._arena)

    @property
    def live_bytes(self) -> int:
        return sum(block.num_bytes for block in self._blocks.values())

    def drain(self) -> None:
        """Run all that is left."""
        while self._step():
            pass
        if any(stream.queue for stream in self.streams):
            self.report("deadlock", "streams wait for events that never come")

    def report(self, kind: str, text: str) -> None:
        self.findings.append(Finding(kind, text))

    # ------------------------------------------------------------------ the checker

    def launch(
        self,
        stream: Stream,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        compute: Compute,
        *,
        is_copy: bool = False,
    ) -> None:
        """Enqueue work on a stream. It gets addresses, not tensors: nothing is kept alive by being enqueued."""
        clock = self._enqueued(stream)
        clock[stream.number] = clock.get(stream.number, 0) + 1
        action = functools.partial(compute, [_borrowed(t) for t in reads], [_borrowed(t) for t in writes])
        self._num_launched += 1
        work = Work(what, is_copy, stream.number, clock[stream.number], action, self._num_launched)
        stream.seconds += self.seconds_of(work)
        if self._check:
            self.touch(work, clock, reads, writes)
        self._put(stream, work)

    def host_touches(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Check an access by the host itself."""
        self._clock[HOST] += 1
        self.touch(Work(what, False, HOST, self._clock[HOST], lambda: None), self._clock, reads, writes)

    def seconds_of(self, work: Work) -> float:
        """Return how long something takes, for those who want to know."""
        return 0.0

    def in_flight(self, tensor: Tensor) -> list[str]:
        """Name what touches the bytes of a tensor and may not be done, as far as the host knows."""
        cells = self._cells_in(tensor.data_ptr(), tensor.nbytes)
        works = {id(w): w for cell in cells for w in (*cell.reads, cell.written) if w is not None}
        return [w.what for w in works.values() if not _before(w, self._clock)]

    def touch(self, work: Work, clock: Clock, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for tensor in reads:
            for cell in self._cells_of(tensor, work):
                if self.owns(tensor) and not cell.filled:
                    self.report("read before its copy", f"{work.what} reads memory that nothing has filled")
                if cell.written is not None and not _before(cell.written, clock):
                    self.report(self._kind_of_read(work, cell.written, tensor), f"{cell.written.what} | {work.what}")
                cell.reads = [r for r in cell.reads if r.stream != work.stream or r.tick > work.tick] + [work]
        for tensor in writes:
            for cell in self._cells_of(tensor, work):
                late = [r for r in cell.reads if not _before(r, clock) and r is not work]
                if late:
                    kind = "reuse before its read" if self.owns(tensor) else "host slot overwritten in flight"
                    self.report(kind, f"{late[0].what} | {work.what}")
                if cell.written is not None and not _before(cell.written, clock):
                    kind = "overwrite" if self.owns(tensor) else "host slot overwritten in flight"
                    self.report(kind, f"{cell.written.what} | {work.what}")
                cell.written, cell.reads, cell.filled = work, [], True

    def _kind_of_read(self, reader: Work, writer: Work, tensor: Tensor) -> str:
        if not self.owns(tensor):
            return "host slot read in flight"
        if reader.is_copy and not writer.is_copy:
            return "copy before its kernel"
        return "read before its copy" if writer.is_copy else "read before its kernel"

    def _cells_of(self, tensor: Tensor, work: Work) -> list[Cell]:
        if self.owns(tensor) and self.block_of(tensor) is None:
            self.report("use after free", f"{work.what} touches memory that is not allocated")
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return self._cells_in(tensor.data_ptr(), span * tensor.element_size())

    def _cells_in(self, address: int, num_bytes: int) -> list[Cell]:
        first, last = address // CELL, (address + max(1, num_bytes) - 1) // CELL
        return [self._cells.setdefault(i, Cell()) for i in range(first, last + 1)]

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the living block that a tensor's storage begins with, or None in host memory."""
        return self._blocks.get(tensor.untyped_storage().data_ptr() - self._base)

    # ------------------------------------------------------------------ memory and time

    def _freed(self, block: Block) -> None:
        del self._blocks[block.start]
        if block.used_by:
            self._deferred.append((block, [self.record(stream) for stream in block.used_by]))
        else:
            self._free.setdefault((block.stream.number, block.num_bytes), []).append(block.start)

    def _enqueued(self, stream: Stream) -> Clock:
        """Return the clock of a stream, moved on to what the host knows."""
        stream.seconds = max(stream.seconds, self.host_seconds)
        _join(stream.clock, self._clock)
        return stream.clock

    def _put(self, stream: Stream, item: Any) -> None:
        stream.queue.append(item)
        self._run_some()

    def _run_some(self) -> None:
        while self._random.random() < self._eager and self._step():
            pass

    def _step(self) -> bool:
        """Run the head of one stream, chosen among those that may go on."""
        ready = [s for s in self.streams if s.queue and not (isinstance(s.queue[0], tuple) and not s.queue[0][1].done)]
        if not ready:
            return False
        item = self._random.choice(ready).queue.popleft()
        if isinstance(item, Event):
            item.done = True
        elif isinstance(item, Work):
            item.action()
            self.num_overtaken += item.number < self._latest
            self._latest = max(self._latest, item.number)
        self.num_done += 1
        return True


def _join(clock: Clock, other: Clock) -> None:
    for key, value in other.items():
        if clock.get(key, 0) < value:
            clock[key] = value


def _before(work: Work, clock: Clock) -> bool:
    return clock.get(work.stream, 0) >= work.tick


def _borrowed(tensor: Tensor) -> Bytes:
    """Return the elements of a uint8 tensor without a hold on its storage."""
    assert tensor.dtype == torch.uint8
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * span).from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), np.uint8, memory, strides=tensor.stride())


def _move(reads: list[Bytes], writes: list[Bytes]) -> None:
    writes[0][...] = reads[0]
