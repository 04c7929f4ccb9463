"""Sending values away and getting them back: tickets, bounds, prefetch, and the ledger of bytes.

NOTE [ Tickets ]
What was sent is a `Ticket`. It owns a slot of the store as long as somebody holds it; when nobody does, the slot is
given back, whether the value was fetched or not. So a graph that dies without a backward pass leaves nothing behind,
and there is no table of tensors that could be forgotten, or that could mix up two tensors which the allocator put in
the same place.

- A storage is sent once, however many views or values show it, for as long as its version stays the same.
- Until its copy is done, the tensor is kept alive and counts as in flight. `in_flight_bytes` bounds that: whoever
  would exceed it waits for the oldest copy.
- If the program writes on the tensor before its copy is done, the copy may be torn. The version counter tells, and the
  fetch raises, as plain autograd would.
- What is fetched before its copy is done is simply taken back.
- Fetches follow an order that repeats from step to step. After the first step it is known, and what comes next is
  fetched ahead, again within `in_flight_bytes`. Where it is not known, the order of sending is taken backwards.
"""

# pyright: reportPrivateUsage=false
# `_version` is read as the engine reads it.

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from actmem.errors import OffloadError, VersionError
from actmem.torchcompat import storage_key

if TYPE_CHECKING:
    from actmem.offloading.lanes import Copy, Lane
    from actmem.offloading.stores import Slot, Store

__all__ = ["Ledger", "Offloader", "Ticket"]


@dataclass
class Ledger:
    """The bytes that moved. Out is always back, dropped and waiting together."""

    out_bytes: int = 0
    """Sent away."""
    back_bytes: int = 0
    """Fetched; a value that is fetched again counts once."""
    dropped_bytes: int = 0
    """Never fetched: the graph died."""
    waiting_bytes: int = 0
    """Still away, and not fetched yet."""
    again_bytes: int = 0
    """Fetched more than once, by a second backward pass or a second holder."""
    store_bytes: int = 0
    """What the store occupies now, in host memory or on disk, in use or not."""


class Ticket:
    """One storage that was sent away. See NOTE [ Tickets ]."""

    def __init__(self, owner: Offloader, index: int, tensor: Tensor, slot: Slot, num_bytes: int) -> None:
        self.owner = owner
        self.index = index
        """Its place in the order of sending, counted anew in each step."""
        self.slot = slot
        self.num_bytes = num_bytes
        self.device = tensor.device
        self.version = None if tensor.is_inference() else tensor._version
        self.source: Tensor | None = tensor
        """The tensor itself, until its copy is done."""
        self.out: Copy | None = None
        self.torn = False
        """It was written on before its copy was done."""
        self.error: OffloadError | None = None
        """Its copy failed."""
        self.back: tuple[Tensor, Copy] | None = None
        """Fetched ahead: where to, and the copy."""
        self.fetched = False
        self._shared: weakref.ref[Any] | None = None
        self.alive = True

    def fetch(self) -> Tensor:
        """Return the bytes, as one dimension of uint8 on the device that they came from."""
        return self.owner.fetch(self)

    def fetch_shared(self) -> Tensor:
        """Return the same, for holders that may share it, as views of one tensor do in plain autograd."""
        storage = None if self._shared is None else self._shared()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (self.num_bytes,), (1,))
        fetched = self.owner.fetch(self)
        self._shared = weakref.ref(fetched.untyped_storage())
        return fetched

    def leave(self) -> None:
        """Let go of the source: nothing but the copy counts from now on."""
        if self.source is not None:
            self.torn = self.version is not None and self.source._version != self.version
            self.source = None

    def __del__(self) -> None:
        if self.alive:
            self.owner.forget(self)


class Offloader:
    """Send storages to a store through a lane, and fetch them back.

    Args:
        store: where the bytes go.
        lane: what moves them.
        in_flight_bytes: how much may be on its way out, and how much may be fetched ahead.
        max_in_flight: how many copies may be on their way out, besides.
        overlap: without, each send waits for its copy, and nothing is fetched ahead.
    """

    def __init__(
        self,
        store: Store,
        lane: Lane,
        *,
        in_flight_bytes: int,
        max_in_flight: int | None = None,
        overlap: bool = True,
    ) -> None:
        self.store = store
        self.lane = lane
        self._ledger = Ledger()
        self._bound = in_flight_bytes
        self._max_in_flight = max_in_flight
        self._overlap = overlap
        self._lock = threading.RLock()
        self._leaving: deque[_Leaving] = deque()
        """What is on its way out, oldest first."""
        self._leaving_bytes = 0
        self._ahead_bytes = 0
        self._sent: dict[int, tuple[Any, weakref.ref[Ticket]]] = {}
        """Storage key -> the storage and its ticket, for what is away now."""
        self._tickets: dict[int, weakref.ref[Ticket]] = {}
        """The tickets of this step, by index."""
        self._fetched: list[int] = []
        """Indices in the order in which they were fetched in this step."""
        self._next: dict[int, int] = {}
        """Index -> the index that was fetched after it, in an earlier step."""
        self._count = 0
        self._num_alive = 0
        self._orphans: deque[tuple[Slot, int, bool, bool]] = deque()
        """What is left of tickets that nobody holds any more."""
        self._closing = False
        self._error: OffloadError | None = None
        """A copy out that failed: no more is sent."""

    @property
    def ledger(self) -> Ledger:
        """What moved so far."""
        self._bury_if_free()
        return replace(self._ledger, store_bytes=self.store.held_bytes)

    # ------------------------------------------------------------------ sending

    def send(self, tensor: Tensor) -> Ticket:
        """Send the whole storage of a tensor away. Whoever holds the ticket holds the value."""
        storage = tensor.untyped_storage()
        key, num_bytes = storage_key(storage), storage.nbytes()
        with self._lock:
            self._reap()
            if self._error is not None:
                raise OffloadError(f"an earlier copy failed: {self._error}") from self._error
            found = self._sent.get(key)
            if found is not None and found[0]() is storage:
                known = found[1]()
                if known is not None and known.version is not None and known.version == tensor._version:
                    return known
            if self._fetched:
                self._begin_step()
            self._make_room(num_bytes)
            slot = self._slot(num_bytes)
            ticket = Ticket(self, self._count, tensor, slot, num_bytes)
            self._num_alive += 1
            self._tickets[self._count] = weakref.ref(ticket)
            self._count += 1
            self._ledger.out_bytes += num_bytes
            self._ledger.waiting_bytes += num_bytes
            ticket.out = self.lane.out(_bytes_of(tensor), self.store, slot)
            self._leaving.append(_Leaving(weakref.ref(ticket), ticket.out, num_bytes))
            self._leaving_bytes += num_bytes
            self._sent[key] = weakref.ref(storage), weakref.ref(ticket)
            if not self._overlap:
                ticket.out.wait()
                self._reap()
        self._bury_if_free()
        return ticket

    def _begin_step(self) -> None:
        """Learn the order of the fetches so far, and count anew. Called at the first send after a fetch."""
        self._next = dict(zip(self._fetched, self._fetched[1:], strict=False))
        self._fetched.clear()
        self._sent = {key: pair for key, pair in self._sent.items() if pair[1]() is not None}
        self._tickets = {index: found for index, found in self._tickets.items() if found() is not None}
        if not self._tickets:  # else another microbatch is under way: its tickets keep their numbers
            self._count = 0

    def _slot(self, num_bytes: int) -> Slot:
        """Take a slot. If there is none, wait for those that only a copy still touches, and try once more."""
        try:
            return self.store.take(num_bytes)
        except OffloadError:
            self.lane.settle()
            return self.store.take(num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        while self._leaving and (
            self._leaving_bytes + num_bytes > self._bound or len(self._leaving) >= (self._max_in_flight or 2**30)
        ):
            self._leaving[0].out.release()
            self._let_go()

    def _reap(self) -> None:
        """Take note of copies that are done, and of tickets that are gone."""
        self._bury()
        while self._leaving and self._leaving[0].out.done():
            error = _error_of(self._leaving[0].out)
            self._let_go(error)
            self._error = self._error or error

    def _let_go(self, error: OffloadError | None = None) -> None:
        left = self._leaving.popleft()
        self._leaving_bytes -= left.num_bytes
        ticket = left.ticket()
        if ticket is not None:
            ticket.leave()
            ticket.error = error

    # ------------------------------------------------------------------ fetching

    def fetch(self, ticket: Ticket) -> Tensor:
        """Bring a ticket's bytes back, and begin to fetch what will be wanted next."""
        with self._lock:
            self._reap()
            self._note(ticket)
            taken = ticket.source
            if ticket.torn or (taken is not None and ticket.version not in (None, taken._version)):
                raise VersionError(
                    f"a tensor of {ticket.num_bytes} bytes was written on after autograd had saved it and before it "
                    "was offloaded, so what was there is lost. Do not write in place on what backward needs, or keep "
                    "it out of offloading with a rule of its own: Rule('save', module=...)."
                )
            if ticket.error is not None:
                raise OffloadError(str(ticket.error)) from ticket.error
            if taken is not None:
                self._ahead(ticket)
                return _bytes_of(taken)
            begun = ticket.back or self._begin(ticket)
            if ticket.back is not None:
                ticket.back = None
                self._ahead_bytes -= ticket.num_bytes
            self._ahead(ticket)
        self._bury_if_free()
        target, copy = begun
        copy.wait()
        return target

    def _begin(self, ticket: Ticket) -> tuple[Tensor, Copy]:
        target = torch.empty(ticket.num_bytes, dtype=torch.uint8, device=ticket.device)
        return target, self.lane.back(self.store, ticket.slot, target)

    def _note(self, ticket: Ticket) -> None:
        if ticket.fetched:
            self._ledger.again_bytes += ticket.num_bytes
            return
        ticket.fetched = True
        self._fetched.append(ticket.index)
        self._ledger.back_bytes += ticket.num_bytes
        self._ledger.waiting_bytes -= ticket.num_bytes

    def _ahead(self, ticket: Ticket) -> None:
        """Begin to fetch what was wanted after this ticket in the step before, as far as the bound permits."""
        index = ticket.index
        for _ in range(len(self._tickets) if self._overlap else 0):
            index = self._next.get(index, index - 1)
            found = self._tickets.get(index)
            if found is None:
                return
            coming = found()
            if coming is None or coming.fetched or coming.back is not None or coming.source is not None:
                continue
            if self._ahead_bytes + coming.num_bytes > self._bound:
                return
            coming.back = self._begin(coming)
            self._ahead_bytes += coming.num_bytes

    # ------------------------------------------------------------------ the end of a ticket, and of all

    def forget(self, ticket: Ticket) -> None:
        """Give back the slot of a ticket that nobody holds any more.

        The garbage collector may call this anywhere, also in a thread that somebody waits for under the lock. So it
        never waits for the lock: what it cannot do now is done at the next occasion.
        """
        ticket.alive = False
        self._orphans.append((ticket.slot, ticket.num_bytes, ticket.fetched, ticket.back is not None))
        self._bury_if_free()

    def _bury_if_free(self) -> None:
        """Bury, unless somebody holds the lock, who will do it. Never waits."""
        while self._orphans and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._orphans:
            slot, num_bytes, fetched, ahead = self._orphans.popleft()
            self._num_alive -= 1
            if not fetched:
                self._ledger.dropped_bytes += num_bytes
                self._ledger.waiting_bytes -= num_bytes
            if ahead:  # fetched ahead for nothing
                self._ahead_bytes -= num_bytes
            self.lane.give(self.store, slot)  # as soon as no copy touches it
        if self._closing and self._num_alive == 0:
            if threading.current_thread() is threading.main_thread():
                self._close()
            else:  # perhaps one of the lane's own threads, which cannot wait for itself to end
                threading.Thread(target=self._close, name="actmem-closing", daemon=True).start()

    def close(self) -> None:
        """End the threads and give up the store, as soon as nothing is away any more. May be called twice."""
        with self._lock:
            self._closing = True
            self._bury()

    def _close(self) -> None:
        self.lane.close()
        self._leaving.clear()
        self._sent.clear()
        self.store.close()


class _Leaving(NamedTuple):
    """A copy that is under way."""

    ticket: weakref.ref[Ticket]
    out: Copy
    num_bytes: int


def _error_of(done: Copy) -> OffloadError | None:
    """Return what a copy that has ended failed of, or None."""
    try:
        done.wait()
    except OffloadError as error:
        return error.with_traceback(None)  # its frames would keep tensors alive
    return None


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as one dimension of bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
