"""From an accelerator to disk: through host memory, in two legs.

The first leg is a copy between device and host on a stream, the second one of bytes between host memory and the store,
on a thread. Whoever waits for the first leg of a copy out is the thread of the second, so the program waits for
nothing. A copy back begins with the second leg, as far ahead as the offloader fetches; the first leg follows when the
value is wanted.

Not yet run on hardware.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from actmem.errors import OffloadError
from actmem.offloading.host import HostStore
from actmem.offloading.lanes import Copy, Lane

if TYPE_CHECKING:
    from torch import Tensor

    from actmem.offloading.stores import Slot, Store

__all__ = ["StagedLane"]


class StagedLane:
    """Copy device tensors to and from a store of bytes, by way of host memory.

    Args:
        device: the lane between the device and host memory.
        threads: the lane between host memory and the store.
        staging: the host memory on the way.
    """

    def __init__(self, device: Lane, threads: Lane, staging: HostStore) -> None:
        self._device, self._threads, self._staging = device, threads, staging

    def out(self, source: Tensor, store: Store, slot: Slot) -> Copy:
        """Begin to copy a contiguous device tensor into a slot of the store."""
        staged = self._staging.take(slot.num_bytes)
        first = self._device.out(source, self._staging, staged)
        after: Any = _After(store, first, self._staging, staged)
        second = self._threads.out(staged.tensor, after, slot)
        return _Out(first, second)

    def back(self, store: Store, slot: Slot, target: Tensor) -> Copy:
        """Begin to fill a contiguous device tensor from a slot of the store."""
        staged = self._staging.take(slot.num_bytes)
        return _Back(self._device, self._staging, staged, target, self._threads.back(store, slot, staged.tensor))

    def give(self, store: Store, slot: Slot) -> None:
        """Give a slot back to its store as soon as no copy touches it."""
        self._threads.give(store, slot)

    def settle(self) -> None:
        """Wait until every copy has ended."""
        self._threads.settle()
        self._device.settle()

    def close(self) -> None:
        """End both legs, and free the host memory between them."""
        self._threads.close()
        self._device.close()
        self._staging.close()


class _After:
    """The store, for one write that has to wait for the first leg, and clears up behind it."""

    def __init__(self, store: Store, first: Copy, staging: HostStore, staged: Any) -> None:
        self._store, self._first, self._staging, self._staged = store, first, staging, staged

    def write(self, slot: Slot, source: Tensor) -> None:
        try:
            self._first.wait()
            self._store.write(slot, source)
        finally:
            self._staging.give(self._staged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Out:
    def __init__(self, first: Copy, second: Copy) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._second.wait()

    def release(self) -> None:
        self._first.release()  # the source is free when it has left the device

    def done(self) -> bool:
        return self._second.done()


class _Back:
    """A copy back, of which the leg to the device is begun when somebody waits for it."""

    def __init__(self, device: Lane, staging: HostStore, staged: Any, target: Tensor, first: Copy) -> None:
        self._device, self._staging, self._staged, self._target = device, staging, staged, target
        self._first = first
        self._second: Copy | None = None

    def wait(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._device.back(self._staging, self._staged, self._target)
            self._device.give(self._staging, self._staged)
        self._second.wait()

    def release(self) -> None:
        self.wait()

    def done(self) -> bool:
        return self._second is not None and self._second.done()

    def __del__(self) -> None:
        if self._second is None:  # fetched ahead for nothing
            with contextlib.suppress(OffloadError):
                self._first.wait()
            self._staging.give(self._staged)
