"""The thread lane on the virtual accelerator: its threads are simulated, and the checker knows what each of them knows.

NOTE [ Simulated threads ]
All of `ThreadLane` runs as it is but its crews. A crew is one more stream of the virtual device: the seeded scheduler
begins a copy whenever it likes, and goes on with it whenever it likes where it pauses, before and while the disk is at
work. Nothing else runs meanwhile, so a seed is a schedule. While a crew runs, the clock of the host is that of the
crew.

A thread learns what another one knew as real threads do: by what it takes out of a queue, by an event that it sees set,
by a lock or a block of memory that it takes, and by being the last that holds something.

An access of a thread gets a tick of its own, so the checker compares it with copies of the device and with accesses of
other threads in the same way, whatever schedule was drawn.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from actmem.offloading.accelerator import AcceleratorLane, _StreamCopy
from actmem.offloading.threads import ThreadLane
from tests.offloading.programs import ArenaSlot, ArenaStore
from tests.offloading.virtual import Block, Clock, Event, VirtualDevice, Work, _join
from tests.patience import PATIENCE_SECONDS

_numbers = itertools.count(1)


def touches(device: VirtualDevice, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Check an access by the thread that runs now."""
    number = -next(_numbers)
    device._clock[number] = 1
    device.touch(Work(what, False, number, 1, lambda: None), device._clock, reads, writes)


class Ended:
    """The end of a copy. Who sees it knows all that its thread knew; who waits for it lets the others run."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._clock: Clock | None = None

    def set(self) -> None:
        self._clock = dict(self._device._clock)

    def is_set(self) -> bool:
        if self._clock is None:
            return False
        _join(self._device._clock, self._clock)
        return True

    def wait(self, timeout_seconds: float) -> bool:
        while not self.is_set():
            if not self._device._step():
                return False  # nothing can run any more: a real thread would hang
        return True


class _All:
    """What a copy waits for before it does anything. It is not begun before: nothing can go on below it."""

    def __init__(self, ends: list[Ended]) -> None:
        self._ends = ends

    @property
    def done(self) -> bool:
        return all(end._clock is not None for end in self._ends)


class _Strand:
    """Something that runs beside the rest, but only while somebody lets it: one of all goes on at a time."""

    running: ClassVar[list[_Strand]] = []

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._turn, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.ended = False

    def go_on(self) -> None:
        """Let it run until it pauses or ends."""
        self.running.append(self)
        self._turn.release()
        assert self._paused.acquire(timeout=PATIENCE_SECONDS)
        self.running.pop()
        if self.ended:
            self._thread.join()

    def pause(self) -> None:
        """Let whoever made it go on go on instead. Called by itself."""
        self._paused.release()
        self._turn.acquire()

    def _serve(self) -> None:
        self._turn.acquire()
        try:
            self._body()
        finally:
            self.ended = True
            self._paused.release()


class Crew:
    """One simulated thread."""

    threads = ()

    def __init__(self, device: VirtualDevice, on_error: Any) -> None:
        self._device, self._on_error = device, on_error
        self._stream = device.new_stream()
        self._clock: Clock = {}

    def put(self, copy: Any) -> None:
        copy._ended, begun = Ended(self._device), dict(self._device._clock)
        _, _, after = copy._work
        self._device._put(self._stream, ("after", _All([other._ended for other in after])))
        self._device._put(self._stream, self._work(lambda: self._begin(copy, begun)))

    def stop(self) -> None:
        pass

    def join(self, timeout_seconds: float) -> bool:
        while self._stream.queue and self._device._step():
            pass
        return not self._stream.queue

    def _work(self, action: Callable[[], None]) -> Work:
        self._device._num_launched += 1
        return Work("thread", False, self._stream.number, 0, action, self._device._num_launched)

    def _begin(self, copy: Any, begun: Clock) -> None:
        _join(self._clock, begun)
        self._go_on(_Strand(lambda: copy.run(self._on_error)))

    def _go_on(self, strand: _Strand) -> None:
        outer, self._device._clock = self._device._clock, self._clock
        self._stream.queue.appendleft(("busy", Event({}, 0.0)))  # a thread does one thing after the other
        strand.go_on()
        self._stream.queue.popleft()
        self._device._clock = outer
        if not strand.ended:
            self._stream.queue.appendleft(self._work(lambda: self._go_on(strand)))


class SimulatedThreads(ThreadLane):
    """The thread lane, with crews that the virtual device runs."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._stop()  # the real threads
        self._writers: Any = Crew(device, self._errors.append)
        self._readers: Any = Crew(device, self._errors.append)


class Lock:
    """A lock of which only one simulated thread is the owner. Who takes it knows what its last owner knew."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._owner: Clock | None = None
        self._depth = 0
        self._clock: Clock = {}

    def acquire(self, *, blocking: bool = True) -> bool:
        own = self._device._clock
        if self._owner is not None and self._owner is not own:
            assert not blocking, "the owner lies below on the stack: this would never end"
            return False
        self._owner = own
        self._depth += 1
        _join(own, self._clock)
        return True

    def release(self) -> None:
        _join(self._clock, self._device._clock)
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SharedDevice(VirtualDevice):
    """A virtual accelerator whose memory any simulated thread may free: who allocates it then knows what that knew.

    The last of those who hold a tensor frees it, and knows what the others knew when they let go of it.
    """

    def share(self) -> None:
        self._freed_by: dict[int, Clock] = {}
        self._left: dict[int, Clock] = {}

    def left(self, tensor: Tensor) -> None:
        """Note that the thread which runs now lets go of a tensor."""
        _join(self._left.setdefault(tensor.untyped_storage().data_ptr(), {}), self._clock)

    def allocate(self, num_bytes: int) -> Tensor:
        tensor = super().allocate(num_bytes)
        _join(self._clock, self._freed_by.get(tensor.data_ptr(), {}))
        return tensor

    def _freed(self, block: Block) -> None:
        _join(self._clock, self._left.pop(self._base + block.start, {}))
        super()._freed(block)
        self._freed_by[self._base + block.start] = dict(self._clock)


def shared(device: VirtualDevice) -> SharedDevice:
    """Let several simulated threads use a device that is still unused."""
    device.__class__ = SharedDevice
    assert isinstance(device, SharedDevice)
    device.share()
    return device


class _Queue(deque[Any]):
    """A queue between simulated threads: who takes something out knows what the one who put it in knew."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device

    def append(self, item: Any) -> None:
        super().append((item, dict(self._device._clock)))

    def popleft(self) -> Any:
        item, clock = super().popleft()
        _join(self._device._clock, clock)
        return item


class _SeenCopy(_StreamCopy[Any, Any]):
    """A copy that tells every thread which finds it done what its event knew, not only the first."""

    __slots__ = ()

    def done(self) -> bool:
        tensor, done = self._tensor, super().done()
        if done:
            self._seen(tensor)
        return done

    def synchronise(self, timeout_seconds: float) -> None:
        tensor = self._tensor
        super().synchronise(timeout_seconds)
        self._seen(tensor)

    def _seen(self, tensor: Tensor | None) -> None:
        device: Any = self._device
        _join(device._clock, self._event.clock)
        if tensor is not None:
            device.left(tensor)


class SharedLane(AcceleratorLane[Any, Any]):
    """The accelerator lane, for several simulated threads."""

    def __init__(self, device: VirtualDevice, *, use_streams: bool = True) -> None:
        super().__init__(device, use_streams=use_streams)
        self._lock: Any = Lock(device)
        self._given = _Queue(device)

    def _copy(self, device_bytes: Tensor, host_bytes: Tensor, slot: Any, *, outward: bool) -> Any:
        copy = super()._copy(device_bytes, host_bytes, slot, outward=outward)
        copy.__class__ = _SeenCopy
        return copy


class Staging(ArenaStore):
    """Host memory for several threads: who takes a block knows what the one who gave it back knew.

    The last of those who hold a loan gives it back, and knows what the others knew when they let go of it.
    """

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._clocks: dict[int, Clock] = {}
        self._left: dict[int, Clock] = {}

    def left(self, tensor: Tensor) -> None:
        """Note that the thread which runs now is through with some host memory."""
        _join(self._left.setdefault(tensor.data_ptr() - self._arena.data_ptr(), {}), self._device._clock)

    def take(self, num_bytes: int) -> ArenaSlot:
        slot = super().take(num_bytes)
        _join(self._device._clock, self._clocks.get(slot.start, {}))
        return slot

    def give(self, slot: ArenaSlot) -> None:
        _join(self._device._clock, self._left.pop(slot.start, {}))
        super().give(slot)
        self._clocks[slot.start] = dict(self._device._clock)


class SimulatedDisk(ArenaStore):
    """A disk. Others may run before and while it moves bytes."""

    def __init__(self, device: VirtualDevice, staging: Staging) -> None:
        super().__init__(device)
        self._staging = staging
        self.num_written = self.num_read = 0

    def write(self, slot: ArenaSlot, source: Tensor) -> None:
        _Strand.running[-1].pause()
        touches(self._device, "write to disk", [source], [slot.tensor])
        _Strand.running[-1].pause()
        slot.tensor.copy_(source)
        self._staging.left(source)
        self.num_written += 1

    def read(self, slot: ArenaSlot, target: Tensor) -> None:
        _Strand.running[-1].pause()
        touches(self._device, "read from disk", [slot.tensor], [target])
        _Strand.running[-1].pause()
        target.copy_(slot.tensor)
        self._staging.left(target)
        self.num_read += 1
