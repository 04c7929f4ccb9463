"""From an accelerator to disk: through host memory, in two legs.

The first leg is a copy between device and host on a stream, the second one of bytes between host memory and the store,
on a thread. The thread of the second leg waits for the first leg of a copy out, so the program waits for nothing. A
copy back starts with the second leg, as far ahead as the offloader prefetches; the first leg follows when the value is
needed. As on every lane, it comes after all work queued by then on the stream on which the fetch began: the memory of
the target was allocated in the order of that stream, and another one may be current when the value is needed.

The host memory in between is a loan, which both legs hold. When neither holds it any more, for whatever reason, the
device's lane returns it, once no copy on a stream touches it. So a leg that failed or was cancelled leaves nothing
behind, and no finalizer waits.

Not yet run on hardware.
"""

# pyright: reportPrivateUsage=false
# This lane combines two others: it orders the streams of the first as that lane does itself.

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from actmem.errors import OffloadError
from actmem.offloading.host import HostSlot, HostStore
from actmem.offloading.lanes import Copy, Lane

if TYPE_CHECKING:
    from torch import Tensor

    from actmem.offloading.accelerator import AcceleratorLane
    from actmem.offloading.stores import Slot, Store
    from actmem.offloading.window import Window

__all__ = ["StagedLane"]


class StagedLane:
    """Copy device tensors to and from a store of bytes, through host memory.

    Args:
        device: the lane between the device and host memory, an `AcceleratorLane`.
        threads: the lane between host memory and the store.
        staging: the host memory in between.
        window: its bound is how much host memory may be on its way to the store. Whoever would exceed it waits for the
            oldest copy; what is larger goes alone. None: no bound.
    """

    def __init__(self, device: Lane, threads: Lane, staging: HostStore, *, window: Window[Any] | None = None) -> None:
        self._device = cast("AcceleratorLane[Any, Any]", device)
        self._threads, self._staging = threads, staging
        self._window = window
        self._lock = threading.Lock()
        self._leaving: deque[tuple[Copy, int]] = deque()
        """Copies from host memory to the store that had not ended when last looked at, oldest first."""
        self._leaving_bytes = 0

    def out(self, source: Tensor, store: Store, slot: Slot) -> Copy:
        """Start copying a contiguous device tensor into a slot of the store."""
        with self._lock:
            self._make_room(slot.num_bytes)
            loan = self._borrow(slot.num_bytes)
            first = self._device.out(source, self._staging, loan.slot)
            through: Any = _Through(store, loan, first)
            second = self._threads.out(loan.slot.tensor, through, slot)
            self._leaving.append((second, slot.num_bytes))
            self._leaving_bytes += slot.num_bytes
        return _Out(first, second)

    def back(self, store: Store, slot: Slot, target: Tensor) -> Copy:
        """Start filling a contiguous device tensor from a slot of the store."""
        loan = self._borrow(slot.num_bytes)
        through: Any = _Through(store, loan)
        first = self._threads.back(through, slot, loan.slot.tensor)
        return _Back(self._device, self._staging, loan, target, first)

    def give(self, store: Store, slot: Slot) -> None:
        """Return a slot to its store as soon as no copy touches it."""
        self._threads.give(store, slot)

    def settle(self) -> None:
        """Wait until every copy has ended."""
        self._threads.settle()
        self._device.settle()

    def close(self) -> None:
        """Close both legs, and free the host memory between them."""
        self._threads.close()
        self._device.close()
        self._staging.close()

    def _borrow(self, num_bytes: int) -> _Loan:
        return _Loan(self._device, self._staging, self._staging.take(num_bytes))

    def _make_room(self, num_bytes: int) -> None:
        """Wait for the oldest copies to the store until so many more bytes fit within the bound."""
        while self._leaving:
            copy, leaving_bytes = self._leaving[0]
            if not copy.done():
                if self._window is None or self._leaving_bytes + num_bytes <= self._window.bound_bytes:
                    return
                _failed(copy)  # the thread lane reports it
            self._leaving.popleft()
            self._leaving_bytes -= leaving_bytes


class _Loan:
    """Host memory lent to a copy."""

    def __init__(self, lane: Lane, staging: HostStore, slot: HostSlot) -> None:
        self._lane, self._staging, self.slot = lane, staging, slot

    def __del__(self) -> None:
        self._lane.give(self._staging, self.slot)


class _Through:
    """The store as a thread sees it for one copy: with the leg that comes before a write, and with the loan."""

    def __init__(self, store: Store, loan: _Loan, first: Copy | None = None) -> None:
        self._store, self._first = store, first
        self._loan: _Loan | None = loan

    def write(self, slot: Slot, source: Tensor) -> None:
        assert self._first is not None
        try:
            self._first.wait()
            self._store.write(slot, source)
        finally:
            self._loan = None

    def read(self, slot: Slot, target: Tensor) -> None:
        try:
            self._store.read(slot, target)
        finally:
            self._loan = None


class _Out:
    def __init__(self, first: Copy, second: Copy) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._second.wait()

    def release(self) -> None:
        self._first.release()  # the source is free when it has left the device

    def cancel(self) -> bool:
        self._second.cancel()
        return self._first.cancel()

    def done(self) -> bool:
        return self._second.done()


class _Back:
    """A copy back, whose leg to the device starts when somebody waits for it."""

    def __init__(
        self, lane: AcceleratorLane[Any, Any], staging: HostStore, loan: _Loan, target: Tensor, first: Copy
    ) -> None:
        self._lane, self._staging = lane, staging
        self._first = first
        self._todo: tuple[_Loan, Tensor, Any] | None = (loan, target, _mark(lane))
        self._second: Copy | None = None

    def wait(self) -> None:
        if self._todo is not None:
            loan, target, mark = self._todo
            self._first.wait()
            _order(self._lane, mark)
            self._second = self._lane.back(self._staging, loan.slot, target)
            self._todo = None
        assert self._second is not None
        self._second.wait()

    def release(self) -> None:
        self.wait()

    def cancel(self) -> bool:
        return False  # only copies out are cancelled

    def done(self) -> bool:
        if self._second is None:
            return self._first.done() and _failed(self._first)
        return self._second.done()


def _mark(lane: AcceleratorLane[Any, Any]) -> Any:
    """Return an event that follows all work queued on the current stream so far."""
    return lane._device.record(lane._device.current_stream())


def _order(lane: AcceleratorLane[Any, Any], mark: Any) -> None:
    """Order the copies back that a lane starts from now on after an event."""
    stream = lane._device.current_stream() if lane._streams is None else lane._streams[1]
    lane._device.wait(stream, mark)


def _failed(copy: Copy) -> bool:
    """Wait for a copy to end, and return whether it failed. Raise if it does not end."""
    try:
        copy.wait()
    except OffloadError:
        if not copy.done():
            raise
        return True
    return False
