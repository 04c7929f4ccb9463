"""Copies between an accelerator and host memory, on streams of their own.

NOTE [ Streams ]
Two streams carry the copies, one for each direction, because a link carries both at once. Events order them:

- out:  current ── event ──> out stream: copy, event. The source is held until that event is done, or until `release`
  has ordered the current stream after it. The allocator hands out memory in the host's order, so a source that waits
  for the *host* to see its copy done is freed late: the host runs far ahead. `release` frees it in the host's order,
  and the current stream waits instead.
- back: current ── event ──> back stream (the target's memory may still be in use by what ran before), out event of the
  slot ──> back stream: copy, event. `wait` orders the current stream after that event.
- A tensor is marked as used by the current stream before it is released. That costs nothing where the tensor was
  allocated on this stream; otherwise the allocator keeps its memory until this stream has passed the copy.
- Slots are returned once the host has seen that their copies are done: the next user of the memory may be on another
  stream, or another device.

Not yet run on hardware. The order of the calls is tested on a backend in Python, which has streams but no kernels; the
lane above is tested on a simulated device, and whole trainings on a device that computes on the host, late: its streams
are threads, and memory that is read out of order holds garbage (`tests/late_device`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading.lanes import TIMEOUT_SECONDS, as_bytes

if TYPE_CHECKING:
    from actmem.offloading.stores import Slot, Store

__all__ = ["AcceleratorLane", "Device", "TorchDevice"]

S = TypeVar("S")
E = TypeVar("E")


class Device(Protocol[S, E]):
    """Everything the lane needs from an accelerator. `S` is its kind of stream, `E` its kind of event."""

    def current_stream(self) -> S:
        """Return the stream that the calling thread computes on now."""
        ...

    def new_stream(self) -> S:
        """Return a stream that runs concurrently with the others."""
        ...

    def record(self, stream: S) -> E:
        """Return an event that is done once all work queued on `stream` so far is done."""
        ...

    def wait(self, stream: S, event: E) -> None:
        """Make all work queued on `stream` from now on wait for the event. Does not block the host."""
        ...

    def synchronise(self, event: E, timeout_seconds: float) -> bool:
        """Block the host until the event is done; return whether it was in time."""
        ...

    def done(self, event: E) -> bool:
        """Return whether the event is done."""
        ...

    def copy(self, stream: S, target: Tensor, source: Tensor) -> None:
        """Queue a copy of `source` to `target` on `stream`: one of them in host memory, both contiguous bytes."""
        ...

    def keep_alive(self, tensor: Tensor, stream: S) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`, so that it is reused only after that."""
        ...


class _StreamCopy(Generic[S, E]):
    """A copy on a stream. It holds its tensor; nothing but the lane and the caller holds it."""

    __slots__ = ("_device", "_event", "_is_done", "_num_bytes", "_outward", "_tensor", "_timeout_seconds", "slot")

    def __init__(
        self, device: Device[S, E], event: E, tensor: Tensor, slot: Slot, *, outward: bool, timeout_seconds: float
    ) -> None:
        self._device = device
        self._event = event
        self._tensor: Tensor | None = tensor
        self._num_bytes = slot.num_bytes
        self._outward = outward
        self._timeout_seconds = timeout_seconds
        self._is_done = False
        self.slot = slot

    @property
    def event(self) -> E:
        return self._event

    def wait(self) -> None:
        if self._outward:
            self.synchronise(self._timeout_seconds)
        else:
            self.release()

    def release(self) -> None:
        if self.done():
            return
        current = self._device.current_stream()
        self._device.wait(current, self._event)
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._device.keep_alive(tensor, current)

    def cancel(self) -> bool:
        self.release()
        return True

    def done(self) -> bool:
        if not self._is_done and self._device.done(self._event):
            self._is_done = True
            self._tensor = None
        return self._is_done

    def synchronise(self, timeout_seconds: float) -> None:
        if self._is_done:
            return
        if not self._device.synchronise(self._event, timeout_seconds):
            raise OffloadError(
                f"a copy of {self._num_bytes} bytes {'to' if self._outward else 'from'} host memory did not finish "
                f"within {self._timeout_seconds:g} s. The device may hang; look for an earlier kernel error, or give "
                "the lane more time with timeout_seconds=."
            )
        self._is_done = True
        self._tensor = None


class AcceleratorLane(Generic[S, E]):
    """Copy between device tensors and slots in host memory. See NOTE [ Lanes ] and NOTE [ Streams ].

    Args:
        device: the device to drive; `TorchDevice` for `torch.accelerator`.
        use_streams: if False, each copy runs on the current stream and the host waits for it.
        timeout_seconds: how long the host waits for one copy.
    """

    def __init__(
        self, device: Device[S, E], *, use_streams: bool = True, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._streams = (device.new_stream(), device.new_stream()) if use_streams else None
        self._lock = threading.RLock()
        self._busy = False
        """Set while the tables change: a finalizer in the same thread must leave them alone then."""
        self._outs: deque[_StreamCopy[S, E]] = deque()
        self._backs: deque[_StreamCopy[S, E]] = deque()
        """Copies that the host has not yet seen done, oldest first: each stream ends them in this order."""
        self._last: dict[int, tuple[_StreamCopy[S, E] | None, _StreamCopy[S, E] | None]] = {}
        """Identity of a slot -> its last copy out and its last copy back. Each of them holds the slot."""
        self._given: deque[tuple[Store, Slot]] = deque()
        self._closed = False

    def out(self, source: Tensor, store: Store, slot: Slot) -> _StreamCopy[S, E]:  # noqa: ARG002 - the slot suffices
        """Begin to copy a contiguous device tensor into a slot in host memory."""
        return self._begin(source, slot, outward=True)

    def back(self, store: Store, slot: Slot, target: Tensor) -> _StreamCopy[S, E]:  # noqa: ARG002 - as in `out`
        """Begin to fill a contiguous device tensor from a slot in host memory."""
        return self._begin(target, slot, outward=False)

    def give(self, store: Store, slot: Slot) -> None:
        """Return a slot to its store once no copy touches it: now, at a later call of the lane, or at `settle`."""
        self._given.append((store, slot))
        # A finalizer may run this in any thread, so it never waits: what cannot be done now is done at the next call.
        if self._lock.acquire(blocking=False):
            try:
                self._reap()
            finally:
                self._lock.release()

    def settle(self) -> None:
        """Wait until every copy has ended and every returned slot is back in its store."""
        with self._lock:
            deadline = time.monotonic() + self._timeout_seconds
            for copy in (*self._outs, *self._backs):
                copy.synchronise(max(0.0, deadline - time.monotonic()))
            self._reap()

    def close(self) -> None:
        """Wait for copies in flight, and accept no more. May be called twice."""
        self._closed = True
        self.settle()

    def _begin(self, tensor: Tensor, slot: Slot, *, outward: bool) -> _StreamCopy[S, E]:
        if self._closed:
            raise OffloadError("this lane is closed and accepts no more copies. Make a new one.")
        device_bytes, host_bytes = as_bytes(tensor, slot), _host_bytes(slot)
        with self._lock:
            self._reap()
            self._busy = True
            try:
                return self._copy(device_bytes, host_bytes, slot, outward=outward)
            finally:
                self._busy = False

    def _copy(self, device_bytes: Tensor, host_bytes: Tensor, slot: Slot, *, outward: bool) -> _StreamCopy[S, E]:
        stream = self._ordered_stream(slot, outward=outward)
        target, source = (host_bytes, device_bytes) if outward else (device_bytes, host_bytes)
        self._device.copy(stream, target, source)
        copy = _StreamCopy(
            self._device,
            self._device.record(stream),
            device_bytes,
            slot,
            outward=outward,
            timeout_seconds=self._timeout_seconds,
        )
        if self._streams is None:
            copy.synchronise(self._timeout_seconds)
            return copy
        last_out, last_back = self._last.get(id(slot), (None, None))
        self._last[id(slot)] = (copy, last_back) if outward else (last_out, copy)
        (self._outs if outward else self._backs).append(copy)
        return copy

    def _ordered_stream(self, slot: Slot, *, outward: bool) -> S:
        """Return the stream for a copy, ordered after everything that must come before it."""
        current = self._device.current_stream()
        if self._streams is None:
            return current
        stream = self._streams[0 if outward else 1]
        self._device.wait(stream, self._device.record(current))
        last = self._last.get(id(slot), (None, None))[1 if outward else 0]
        if last is not None:
            self._device.wait(stream, last.event)
        return stream

    def _reap(self) -> None:
        """Forget copies that are done, and return the slots that no copy touches."""
        if self._busy:
            return
        self._busy = True
        try:
            for begun in (self._outs, self._backs):
                while begun and begun[0].done():
                    self._forget(begun.popleft())
            for _ in range(len(self._given)):
                store, slot = self._given.popleft()
                if id(slot) in self._last:
                    self._given.append((store, slot))
                else:
                    store.give(slot)
        finally:
            self._busy = False

    def _forget(self, copy: _StreamCopy[S, E]) -> None:
        left = tuple(None if one is copy else one for one in self._last[id(copy.slot)])
        if any(one is not None for one in left):
            self._last[id(copy.slot)] = (left[0], left[1])
        else:
            del self._last[id(copy.slot)]


def _host_bytes(slot: Slot) -> Tensor:
    tensor: Any = getattr(slot, "tensor", None)
    if not isinstance(tensor, Tensor):
        raise OffloadError(
            f"{type(slot).__name__} has no host memory: an accelerator copies to and from host memory only. "
            "Use a HostStore with this lane."
        )
    return tensor[: slot.num_bytes]


_held: deque[tuple[torch.Event, Tensor]] = deque()
"""Tensors that a stream uses, where the allocator cannot be told. They may outlive the lane that used them."""


class TorchDevice:
    """The `Device` of an `AcceleratorLane`, for one device of `torch.accelerator`. Not yet run on hardware.

    Args:
        device: the device whose tensors are copied, such as `torch.device("cuda", 0)`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.Stream:
        """Return the stream that the calling thread computes on now."""
        return torch.accelerator.current_stream(self._device)

    def new_stream(self) -> torch.Stream:
        """Return a stream that runs concurrently with the others."""
        return torch.Stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Return an event that is done once all work queued on `stream` so far is done."""
        event = torch.Event(self._device)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make all work queued on `stream` from now on wait for the event."""
        stream.wait_event(event)

    def synchronise(self, event: torch.Event, timeout_seconds: float) -> bool:
        """Block until the event is done; return whether it was in time. Polls: torch's own wait has no limit."""
        deadline = time.monotonic() + timeout_seconds
        pause_seconds = 1e-5
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 1e-3)
        return True

    def done(self, event: torch.Event) -> bool:
        """Return whether the event is done."""
        return event.query()

    def copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> None:
        """Queue a copy of `source` to `target` on `stream`. With pinned host memory it does not block the host."""
        with stream, torch.no_grad():
            target.copy_(source, non_blocking=True)

    def keep_alive(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`.

        Not every backend's allocator can be told. Then the tensor is held until the host sees, at a later call, that
        the stream has done all that is queued on it now.
        """
        while _held and _held[0][0].query():
            _held.popleft()
        try:
            tensor.record_stream(stream)
        except NotImplementedError:
            _held.append((self.record(stream), tensor))
