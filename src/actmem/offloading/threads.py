"""Copies between CPU tensors and any store, on threads of their own.

Writers and readers are apart, so that a fetch in the backward pass does not queue behind what the forward pass still
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
    """A copy on a thread: queued, under way, ended. It holds its tensor until it has ended."""

    def __init__(
        self, store: Store, slot: Slot, tensor: Tensor, after: list[_ThreadCopy], *, outward: bool, seconds: float
    ) -> None:
        self.slot = slot
        self._num_bytes = slot.num_bytes
        self._work: tuple[Store, Tensor, list[_ThreadCopy]] | None = (store, tensor, after)
        self.outward = outward
        self._timeout_seconds = seconds
        self._ended = threading.Event()
        self._pid = os.getpid()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.join(self._timeout_seconds)
        if self.error is not None:
            raise OffloadError(f"{self._what()} failed: {self.error}") from self.error

    def release(self) -> None:
        self.wait()

    def done(self) -> bool:
        return self._ended.is_set()

    def join(self, timeout_seconds: float) -> None:
        """Wait until the copy has ended, well or not."""
        if self._ended.is_set():
            return
        _same_process(self._pid)
        if not self._ended.wait(timeout_seconds):
            raise OffloadError(
                f"{self._what()} did not end within {self._timeout_seconds:g} s. The disk may hang; look at the "
                "machine's log, or give the lane more time with timeout_seconds=."
            )

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Do the copy. Called on a worker thread."""
        try:
            assert self._work is not None
            store, tensor, after = self._work
            for copy in after:
                copy.join(self._timeout_seconds)
            if self.outward:
                store.write(self.slot, tensor)
            elif after and after[0].error is not None:
                self.error = after[0].error  # already told
            else:
                store.read(self.slot, tensor)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the one who waits must hear of it
            self.error = error.with_traceback(None)  # its frames would keep the tensor alive
            on_error(self.error)  # before anybody who waits can go on
        self._end()

    def refuse(self, error: BaseException) -> None:
        """End the copy without doing it."""
        self.error = error
        self._end()

    def _end(self) -> None:
        self._work = None
        self._ended.set()

    def _what(self) -> str:
        return f"a copy of {self._num_bytes} bytes {'to' if self.outward else 'from'} the store"


class _Crew:
    """The threads of one direction. They hold this, and not the lane, so a lane that nobody holds can die."""

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
        """Have the threads end after what they are doing now. What is queued is not done any more."""
        self._stopping = True
        for _ in self.threads:
            self._queue.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the threads to end; tell whether they did."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(t.is_alive() for t in self.threads if t is not threading.current_thread())

    def _serve(self) -> None:
        while (copy := self._queue.get()) is not None:
            if self._stopping:
                copy.refuse(OffloadError("the lane was closed before the copy was begun"))
            else:
                copy.run(self._on_error)
            del copy  # or the last one and its tensor would live until the next one comes


class ThreadLane:
    """Copy between CPU tensors and a store on background threads. See NOTE [ Lanes ].

    A copy that failed raises in its own `wait`, and once at the next `out`: who only sends must hear of it too. What it
    should have written cannot be read. The threads are daemons; they end with `close`, with the lane itself, and with
    the interpreter.

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
        """Begin to write a contiguous CPU tensor to a slot."""
        if self._errors and not self._closed:
            error = self._errors.popleft()
            raise OffloadError(f"an earlier copy failed: {error}") from error
        return self._begin(source, store, slot, outward=True)

    def back(self, store: Store, slot: Slot, target: Tensor) -> _ThreadCopy:
        """Begin to fill a contiguous CPU tensor from a slot."""
        return self._begin(target, store, slot, outward=False)

    def give(self, store: Store, slot: Slot) -> None:
        """Give a slot back to its store when no copy touches it: now, at a later call of the lane, or at `settle`."""
        if self._pid != os.getpid():
            return  # a finalizer in a forked child: the slot is the parent's
        self._given.append((store, slot))
        # A finalizer may come here in any thread, so it never waits: what cannot be done now is done at the next call.
        if self._lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._lock.release()

    def settle(self) -> None:
        """Wait until every copy has ended and every slot that was given is back in its store."""
        _same_process(self._pid)
        with self._lock:
            deadline = time.monotonic() + self._timeout_seconds
            for copy in [copy for copies in self._begun.values() for copy in copies]:
                copy.join(max(0.0, deadline - time.monotonic()))
            self._reap()

    def close(self) -> None:
        """End the threads after what they are doing now; what is queued is given up. May be called twice.

        Raises:
            OffloadError: a thread did not end in time.
        """
        if self._pid != os.getpid():
            return  # the threads are the parent's
        crews = (self._writers, self._readers)
        with self._lock:  # no copy may be queued behind the end
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
                f"threads {', '.join(names)} did not end within {self._timeout_seconds:g} s: a read or write hangs. "
                "They end with the process."
            )

    def _begin(self, tensor: Tensor, store: Store, slot: Slot, *, outward: bool) -> _ThreadCopy:
        _same_process(self._pid)
        if tensor.device.type != "cpu":
            raise OffloadError(
                f"tensor.device = {tensor.device}: this lane copies CPU tensors. Use an AcceleratorLane for the others."
            )
        data = as_bytes(tensor, slot)
        with self._lock:
            if self._closed:
                raise OffloadError("this lane is closed: it takes no more copies. Make a new one.")
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
        """Forget copies that have ended, and give back the slots that no copy touches."""
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
