"""Copies between CPU tensors and any store, on threads of their own.

Writers and readers are separate, so that a fetch in the backward pass does not queue behind what the forward pass still
has to write. A read of a slot whose write is still queued or under way waits for that write, and for no other.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading.lanes import TIMEOUT_SECONDS, as_bytes

if TYPE_CHECKING:
    from actmem.offloading.stores import Slot, Store

__all__ = ["ThreadLane"]


class _ThreadCopy:
    """A copy on a thread: queued, running or ended. It holds its tensor until it has ended."""

    def __init__(
        self, store: Store, slot: Slot, tensor: Tensor, after: list[_ThreadCopy], *, outward: bool, seconds: float
    ) -> None:
        self.slot = slot
        self._num_bytes = slot.num_bytes
        self._work: tuple[Store, Tensor, list[_ThreadCopy]] | None = (store, tensor, after)
        self.outward = outward
        self._timeout_seconds = seconds
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._begun = False
        self._pid = os.getpid()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.join(self._timeout_seconds)
        if self.error is not None:
            raise OffloadError(f"{self._what()} failed: {self.error}") from self.error

    def release(self) -> None:
        self.wait()

    def cancel(self) -> bool:
        if not self._begins():
            return self._ended.is_set()
        self._end()
        return True

    def done(self) -> bool:
        return self._ended.is_set()

    def join(self, timeout_seconds: float) -> None:
        """Wait until the copy has ended, successfully or not."""
        if self._ended.is_set():
            return
        _same_process(self._pid)
        if not self._ended.wait(timeout_seconds):
            raise OffloadError(
                f"{self._what()} did not finish within {self._timeout_seconds:g} s. The disk may hang; look at the "
                "system log, or give the lane more time with timeout_seconds=."
            )

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Do the copy, unless it was cancelled. Called on a worker thread."""
        if not self._begins():
            return
        try:
            self._move()  # its frame, which holds the tensor, is gone before anybody learns of the end
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits must learn of it
            self.error = error.with_traceback(None)  # its frames would keep the tensor alive
            on_error(self.error)  # before anybody waiting can continue
        self._end()

    def _move(self) -> None:
        assert self._work is not None
        store, tensor, after = self._work
        for copy in after:
            copy.join(self._timeout_seconds)
        if self.outward:
            store.write(self.slot, tensor)
        elif after and after[0].error is not None:
            self.error = after[0].error  # already reported
        else:
            store.read(self.slot, tensor)

    def refuse(self, error: BaseException) -> None:
        """End the copy without performing it."""
        if self._begins():
            self.error = error
            self._end()

    def _begins(self) -> bool:
        """Return whether nobody has started or cancelled the copy before."""
        with self._lock:
            was, self._begun = self._begun, True
        return not was

    def _end(self) -> None:
        self._work = None
        self._ended.set()

    def _what(self) -> str:
        return f"a copy of {self._num_bytes} bytes {'to' if self.outward else 'from'} the store"


class _Crew:
    """The threads of one direction. They hold this rather than the lane, so that a lane nobody holds can die."""

    def __init__(self, name: str, num_threads: int, on_error: Callable[[BaseException], None]) -> None:
        self._queue: SimpleQueue[_ThreadCopy | None] = SimpleQueue()
        self._on_error = on_error
        self._stopping = False
        self.threads = [
            threading.Thread(target=self._serve, name=f"actmem-{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self.threads:
            thread.start()

    def put(self, copy: _ThreadCopy) -> None:
        self._queue.put(copy)

    def stop(self) -> None:
        """Make the threads end after their current copy. Queued copies are dropped."""
        self._stopping = True
        for _ in self.threads:
            self._queue.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the threads to end; return whether they did."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in self.threads if t is not threading.current_thread())

    def _serve(self) -> None:
        while (copy := self._queue.get()) is not None:
            if self._stopping:
                copy.refuse(OffloadError("the lane was closed before the copy started"))
            else:
                copy.run(self._on_error)
            del copy  # or the last one and its tensor would live until the next one comes


class ThreadLane:
    """Copy between CPU tensors and a store on background threads. See NOTE [ Lanes ].

    A copy that failed raises in its own `wait`, and once at the next `out`, so that callers that only send learn of it
    too. What it should have written cannot be read. The threads are daemons; they end with `close`, with the lane
    itself, and with the interpreter.

    Args:
        num_writers: threads that write to the store.
        num_readers: threads that read from it.
        timeout_seconds: how long the host waits for one copy, and `close` for the threads.

    Raises:
        OffloadError: used after `close`, or in a child process after a fork, where the threads do not exist.
    """

    def __init__(self, *, num_writers: int = 1, num_readers: int = 1, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if num_writers < 1 or num_readers < 1:
            raise OffloadError(
                f"num_writers = {num_writers}, num_readers = {num_readers}: a lane needs at least one of each."
            )
        self._timeout_seconds = timeout_seconds
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._busy = False
        """Set while the tables change: a finalizer in the same thread must leave them alone then."""
        self._errors: deque[BaseException] = deque(maxlen=1)
        self._writers = _Crew("write", num_writers, self._errors.append)
        self._readers = _Crew("read", num_readers, self._errors.append)
        self._begun: dict[int, list[_ThreadCopy]] = {}
        """Identity of a slot -> copies that touch it and had not ended when last looked at. Each holds the slot."""
        self._failed: dict[int, _ThreadCopy] = {}
        """Identity of a slot -> the copy that should have written it, until the slot is given back or written."""
        self._given: deque[tuple[Store, Slot]] = deque()
        self._closed = False
        self._stop = weakref.finalize(self, _stop, self._writers, self._readers, self._pid)

    def out(self, source: Tensor, store: Store, slot: Slot) -> _ThreadCopy:
        """Start writing a contiguous CPU tensor to a slot."""
        if self._errors and not self._closed:
            error = self._errors.popleft()
            raise OffloadError(f"an earlier copy failed: {error}") from error
        return self._begin(source, store, slot, outward=True)

    def back(self, store: Store, slot: Slot, target: Tensor) -> _ThreadCopy:
        """Start filling a contiguous CPU tensor from a slot."""
        return self._begin(target, store, slot, outward=False)

    def give(self, store: Store, slot: Slot) -> None:
        """Return a slot to its store once no copy touches it: now, at a later call of the lane, or at `settle`."""
        if self._pid != os.getpid():
            return  # a finalizer in a forked child: the slot is the parent's
        self._given.append((store, slot))
        # A finalizer may run this in any thread, so it never waits: what cannot be done now is done at the next call.
        if self._lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._lock.release()

    def settle(self) -> None:
        """Wait until every copy has ended and every returned slot is back in its store."""
        _same_process(self._pid)
        with self._lock:
            deadline = time.monotonic() + self._timeout_seconds
            for copy in [copy for copies in self._begun.values() for copy in copies]:
                copy.join(max(0.0, deadline - time.monotonic()))
            self._reap()

    def close(self) -> None:
        """End the threads after their current copy; queued copies are dropped. May be called twice.

        Raises:
            OffloadError: a thread did not end in time.
        """
        if self._pid != os.getpid():
            return  # the threads are the parent's
        crews = (self._writers, self._readers)
        with self._lock:  # no copy may be queued after the end
            self._closed = True
            for crew in crews:
                crew.stop()
        self._stop.detach()
        ended = [crew.join(self._timeout_seconds) for crew in crews]
        with self._lock:
            self._reap()
        if not all(ended):
            names = [t.name for crew in crews for t in crew.threads if t.is_alive()]
            raise OffloadError(
                f"threads {', '.join(names)} did not finish within {self._timeout_seconds:g} s: a read or write hangs. "
                "They end with the process."
            )

    def _begin(self, tensor: Tensor, store: Store, slot: Slot, *, outward: bool) -> _ThreadCopy:
        _same_process(self._pid)
        if tensor.device.type != "cpu":
            raise OffloadError(
                f"tensor.device = {tensor.device}: this lane copies CPU tensors. Use an AcceleratorLane for others."
            )
        data = as_bytes(tensor, slot)
        with self._lock:
            if self._closed:
                raise OffloadError("this lane is closed and accepts no more copies. Make a new one.")
            self._reap()
            self._busy = True
            try:
                touching = self._begun.setdefault(id(slot), [])
                if outward:
                    after = list(touching)
                    self._failed.pop(id(slot), None)
                else:
                    writes = [self._failed.get(id(slot)), *(copy for copy in touching if copy.outward)]
                    after = [copy for copy in writes[-1:] if copy is not None]
                copy = _ThreadCopy(store, slot, data, after, outward=outward, seconds=self._timeout_seconds)
                touching.append(copy)
                (self._writers if outward else self._readers).put(copy)
            finally:
                self._busy = False
            return copy

    def _reap(self) -> None:
        """Forget copies that have ended, and return the slots that no copy touches."""
        if self._busy:
            return
        self._busy = True
        try:
            for key in [key for key, copies in self._begun.items() if all(copy.done() for copy in copies)]:
                writes = [copy for copy in self._begun.pop(key) if copy.outward]
                if writes and writes[-1].error is not None:
                    self._failed[key] = writes[-1]
            for _ in range(len(self._given)):
                store, slot = self._given.popleft()
                if id(slot) in self._begun:
                    self._given.append((store, slot))
                else:
                    self._failed.pop(id(slot), None)
                    store.give(slot)
        finally:
            self._busy = False


def _stop(writers: _Crew, readers: _Crew, pid: int) -> None:
    """End the threads of a lane that was not closed; at exit too, when a thread inside torch must not be cut off."""
    if pid != os.getpid():
        return
    for crew in (writers, readers):
        crew.stop()
    for crew in (writers, readers):
        crew.join(5.0)


def _same_process(pid: int) -> None:
    if pid != os.getpid():
        raise OffloadError(
            f"this lane belongs to process {pid}, and its threads do not exist in process {os.getpid()}, which was "
            "forked from it. Apply the mode in the child, or start it with the spawn method."
        )
