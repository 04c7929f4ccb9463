"""Offload values and fetch them back: tickets, bounds, prefetch, and the ledger of bytes.

NOTE [ Tickets ]
An offloaded storage is represented by a `Ticket`. It owns a slot of the store as long as somebody holds it; when
nobody does, the slot is returned, whether the value was fetched or not. So a graph that dies without a backward pass
leaves nothing behind, and there is no table of tensors to leak entries, or to mix up two tensors that the allocator
put in the same place.

- A storage is sent once, however many views or values show it, for as long as its version stays the same.
- The tensor is kept alive until newer ones push it out of the window, and its copy is waited for then. See
  NOTE [ The window ].
- A value fetched while it is in the window is taken back: the same storage is returned, and the copy is cancelled. What
  was taken back in the previous step is not copied at all, unless it has to leave the window after all.
- If the program writes to the tensor before its copy is done, the copy may be torn. The version counter shows it, and
  the fetch raises, as plain autograd would.
- Fetches follow an order that repeats from step to step. It is known after the first step, and what comes next is
  prefetched as far as the window has room. Until it is known, the reverse of the sending order is assumed.
"""

# pyright: reportPrivateUsage=false
# `_version` is read as the engine reads it.

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actmem.errors import OffloadError, VersionError
from actmem.torchcompat import storage_key

if TYPE_CHECKING:
    from actmem.offloading.lanes import Copy, Lane
    from actmem.offloading.stores import Slot, Store
    from actmem.offloading.window import Window

__all__ = ["Offloader", "Ticket", "TransferCounts"]


@dataclass
class TransferCounts:
    """The bytes moved. Out always equals back, dropped and waiting together."""

    out_bytes: int = 0
    """Sent away."""
    back_bytes: int = 0
    """Fetched; a value that is fetched again counts once."""
    stayed_bytes: int = 0
    """Of those, bytes that were still in memory and were taken back."""
    dropped_bytes: int = 0
    """Never fetched: the graph died."""
    waiting_bytes: int = 0
    """Offloaded and not fetched yet."""
    again_bytes: int = 0
    """Fetched more than once, by a second backward pass or a second holder."""
    store_bytes: int = 0
    """Bytes that the store occupies now, in host memory or on disk, in use or not."""


class Ticket:
    """One offloaded storage. See NOTE [ Tickets ]."""

    def __init__(self, owner: Offloader, index: int, tensor: Tensor, num_bytes: int) -> None:
        self.owner = owner
        self.index = index
        """Its place in the order of sending, counted from 0 in each step."""
        self.num_bytes = num_bytes
        self.device = tensor.device
        self.version = None if tensor.is_inference() else tensor._version
        self.source: Tensor | None = tensor
        """The tensor itself, while it is in the window or after it was taken back."""
        self.leaving = _Leaving(weakref.ref(self), num_bytes)
        self.slot: Slot | None = None
        """Where it is copied to, once its copy has started."""
        self.is_whole = False
        """Its copy is done, and it was not written to before that."""
        self.torn = False
        """It was written to before its copy was done."""
        self.error: OffloadError | None = None
        """Its copy failed."""
        self.back: tuple[Tensor, Copy] | None = None
        """If prefetched: the target, and the copy."""
        self.fetched = False
        self._shared: weakref.ref[Any] | None = None
        self.alive = True

    def fetch(self) -> Tensor:
        """Return the bytes, as one dimension of uint8 on the device they came from."""
        return self.owner.fetch(self)

    def fetch_shared(self) -> Tensor:
        """Return the same, for holders that may share it, as views of one tensor do in plain autograd."""
        storage = None if self._shared is None else self._shared()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (self.num_bytes,), (1,))
        fetched = self.owner.fetch(self)
        self._shared = weakref.ref(fetched.untyped_storage())
        return fetched

    @property
    def is_written(self) -> bool:
        """Whether the source was written to since it was sent."""
        return self.source is not None and self.version not in (None, self.source._version)

    def check_copy(self, error: OffloadError | None) -> None:
        """Note that the copy is done: it is intact unless the source has been written to by now."""
        self.error = error
        self.is_whole = not self.is_written
        self.torn = not self.is_whole

    def leave(self) -> None:
        """Release the source: only the copy counts from now on."""
        self.source = None

    def __del__(self) -> None:
        if self.alive:
            self.owner.forget(self)


class Offloader:
    """Send storages to a store through a lane, and fetch them back.

    Args:
        store: where the bytes go.
        lane: what moves them.
        window: how much may be in flight.
        overlap: if False, each send waits for its copy, and nothing is prefetched.
    """

    def __init__(self, store: Store, lane: Lane, *, window: Window[Any], overlap: bool = True) -> None:
        self.store = store
        self.lane = lane
        self.window = window
        self._ledger = TransferCounts()
        self._overlap = overlap
        self._lock = threading.RLock()
        self._ending: deque[_Leaving] = deque()
        """Copies that were cancelled but could not be stopped: the lane holds their tensors until they end."""
        self._sent: dict[int, tuple[Any, weakref.ref[Ticket]]] = {}
        """Storage key -> the storage and its ticket, for what is offloaded now."""
        self._tickets: dict[int, weakref.ref[Ticket]] = {}
        """The tickets of this step, by index."""
        self._fetched: list[int] = []
        """Indices in the order of their fetches in this step."""
        self._next: dict[int, int] = {}
        """Index -> the index that was fetched after it, in an earlier step."""
        self._stayed: set[int] = set()
        """Indices that were taken back from the window in this step."""
        self._will_stay: set[int] = set()
        """Those of the previous step."""
        self._count = 0
        self._num_alive = 0
        self._num_open = 0
        """Blocks that have started and not ended."""
        self._orphans: deque[tuple[_Leaving, Slot | None, bool, bool]] = deque()
        """What is left of tickets that nobody holds any more."""
        self._closing = False
        self._error: OffloadError | None = None
        """A copy out failed: nothing more is sent."""

    @property
    def ledger(self) -> TransferCounts:
        """What has moved so far."""
        self._bury_if_free()
        return replace(self._ledger, store_bytes=self.store.held_bytes)

    # ------------------------------------------------------------------ sending

    def send(self, tensor: Tensor) -> Ticket:
        """Offload the whole storage of a tensor. Whoever holds the ticket holds the value."""
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
            ticket = Ticket(self, self._count, tensor, num_bytes)
            try:
                for leaving in self.window.admit(ticket.leaving, num_bytes):
                    if leaving is not ticket.leaving:
                        self._push_out(leaving)
                if ticket.index not in self._will_stay or not self._overlap or ticket.leaving not in self.window:
                    self._begin_out(ticket)
            except BaseException:
                self.window.remove(ticket.leaving)
                ticket.alive = False  # nobody has seen it
                raise
            self._num_alive += 1
            self._tickets[self._count] = weakref.ref(ticket)
            self._count += 1
            self._ledger.out_bytes += num_bytes
            self._ledger.waiting_bytes += num_bytes
            self._sent[key] = weakref.ref(storage), weakref.ref(ticket)
            if not self._num_open:
                self.window.end_block()
            if not self._overlap or ticket.leaving not in self.window:
                self.window.remove(ticket.leaving)
                self._push_out(ticket.leaving)
        self._bury_if_free()
        return ticket

    def begin_block(self) -> None:
        """Note that whatever is sent from now on belongs to one block. A send outside counts as a block of its own."""
        with self._lock:
            self._num_open += 1

    def end_block(self) -> None:
        """Note that the block has sent everything."""
        with self._lock:
            self._num_open -= 1
            self.window.end_block()

    def _begin_step(self) -> None:
        """Learn the order of the fetches so far, and count from 0 again. Called at the first send after a fetch."""
        self._next = dict(pairwise(self._fetched))
        self._fetched.clear()
        self._will_stay, self._stayed = self._stayed, set()
        self._sent = {key: pair for key, pair in self._sent.items() if pair[1]() is not None}
        self._tickets = {index: found for index, found in self._tickets.items() if found() is not None}
        self.window.begin_step()
        if not self._tickets:  # else another microbatch is in progress: its tickets keep their numbers
            self._count = 0

    def _begin_out(self, ticket: Ticket) -> Copy:
        """Start copying what a ticket holds to the store."""
        assert ticket.source is not None
        slot = self._slot(ticket.num_bytes)
        try:
            ticket.leaving.out = out = self.lane.out(_bytes_of(ticket.source), self.store, slot)
        except BaseException:
            self.lane.give(self.store, slot)
            raise
        ticket.slot = slot
        return out

    def _slot(self, num_bytes: int) -> Slot:
        """Take a slot. If there is none, wait for those held only by a copy, and try once more."""
        try:
            return self.store.take(num_bytes)
        except OffloadError:
            self.lane.settle()
            return self.store.take(num_bytes)

    def _push_out(self, leaving: _Leaving) -> None:
        """Wait for the copy of a value that left the window, and release its memory."""
        ticket = leaving.ticket()
        if ticket is None:
            self._give_up(leaving)
            return
        out = leaving.out or self._begin_out(ticket)
        try:
            out.release()
        except OffloadError as error:
            ticket.error = self._error = OffloadError(str(error))  # the raised one holds this frame
            raise
        else:
            if not leaving.is_noted:
                ticket.check_copy(None)
        finally:
            leaving.is_noted = True
            ticket.leave()

    def _give_up(self, leaving: _Leaving) -> None:
        """Cancel the copy of a value that is in memory and needed there, or that nobody needs."""
        if leaving.out is not None and not leaving.is_noted and not leaving.out.cancel():
            self.window.occupy(leaving.num_bytes)
            self._ending.append(leaving)
        leaving.is_noted = True

    def _reap(self) -> None:
        """Process copies that are done, and tickets that are gone."""
        self._bury()
        for leaving in [one for one in self.window if one.out is not None and not one.is_noted]:
            assert leaving.out is not None
            if not leaving.out.done():
                break
            leaving.is_noted = True
            error, ticket = _error_of(leaving.out), leaving.ticket()
            self._error = self._error or error
            if ticket is None:
                continue
            ticket.check_copy(error)
            if error is not None or ticket.torn or ticket.version is None:  # the copy is useless, or unchecked
                self.window.remove(leaving)
                ticket.leave()
        while self._ending and self._ending[0].out is not None and self._ending[0].out.done():
            self.window.vacate(self._ending.popleft().num_bytes)

    # ------------------------------------------------------------------ fetching

    def fetch(self, ticket: Ticket) -> Tensor:
        """Bring a ticket's bytes back, and prefetch what will be needed next."""
        with self._lock:
            self._reap()
            self._note(ticket)
            if ticket.torn or (ticket.is_written and not ticket.is_whole):
                raise VersionError(
                    f"a tensor of {ticket.num_bytes} bytes was modified in place after autograd had saved it and "
                    "before it was offloaded, so its value is lost. Do not modify in place what backward needs, or "
                    "keep it out of offloading with a rule of its own: Rule('save', module=...)."
                )
            if ticket.error is not None:
                raise OffloadError(str(ticket.error)) from ticket.error
            if ticket.source is not None:
                if self.window.remove(ticket.leaving) and not ticket.is_written:
                    self._give_up(ticket.leaving)
                    self._stayed.add(ticket.index)
                    self._ledger.stayed_bytes += ticket.num_bytes
                taken = None if ticket.is_written else _bytes_of(ticket.source)
                if ticket.is_whole:
                    ticket.leave()  # whoever asks again gets the copy
                if taken is not None:
                    self._ahead(ticket)
                    return taken
            begun = ticket.back or self._begin(ticket)
            if ticket.back is not None:
                ticket.back = None
                self.window.vacate(ticket.num_bytes)
            self._ahead(ticket)
        self._bury_if_free()
        target, copy = begun
        copy.wait()
        return target

    def _begin(self, ticket: Ticket) -> tuple[Tensor, Copy]:
        assert ticket.slot is not None
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
        """Prefetch what followed this ticket in the previous step, as far as there is room."""
        index = ticket.index
        for _ in range(len(self._tickets) if self._overlap else 0):
            index = self._next.get(index, index - 1)
            found = self._tickets.get(index)
            if found is None:
                return
            coming = found()
            if coming is None or coming.fetched or coming.back is not None or coming.source is not None:
                continue
            if not self.window.has_room(coming.num_bytes):
                return
            coming.back = self._begin(coming)
            self.window.occupy(coming.num_bytes)

    # ------------------------------------------------------------------ the end of a ticket, and of all

    def forget(self, ticket: Ticket) -> None:
        """Return the slot of a ticket that nobody holds any more.

        The garbage collector may call this anywhere, even in a thread that another waits for while holding the lock. So
        it never waits for the lock: what it cannot do now is done at the next opportunity.
        """
        ticket.alive = False
        self._orphans.append((ticket.leaving, ticket.slot, ticket.fetched, ticket.back is not None))
        self._bury_if_free()

    def _bury_if_free(self) -> None:
        """Bury, unless somebody else holds the lock and will do it. Never waits."""
        while self._orphans and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._orphans:
            leaving, slot, fetched, ahead = self._orphans.popleft()
            num_bytes = leaving.num_bytes
            self._num_alive -= 1
            if self.window.remove(leaving):
                self._give_up(leaving)
            if not fetched:
                self._ledger.dropped_bytes += num_bytes
                self._ledger.waiting_bytes -= num_bytes
            if ahead:  # prefetched for nothing
                self.window.vacate(num_bytes)
            if slot is not None:
                self.lane.give(self.store, slot)  # as soon as no copy touches it
        if self._closing and self._num_alive == 0:
            if threading.current_thread() is threading.main_thread():
                self._close()
            else:  # perhaps one of the lane's own threads, which cannot wait for itself to end
                threading.Thread(target=self._close, name="actmem-closing", daemon=True).start()

    def close(self) -> None:
        """End the threads and close the store as soon as nothing is offloaded any more. May be called twice."""
        with self._lock:
            self._closing = True
            self._bury()

    def _close(self) -> None:
        self.lane.close()
        self._ending.clear()
        self._sent.clear()
        self.store.close()


class _Leaving:
    """A value in the window, or one that has just left it."""

    __slots__ = ("is_noted", "num_bytes", "out", "ticket")

    def __init__(self, ticket: weakref.ref[Ticket], num_bytes: int) -> None:
        self.ticket = ticket
        self.num_bytes = num_bytes
        self.out: Copy | None = None
        """Its copy, if it was started."""
        self.is_noted = False
        """The copy was seen to be done, or was cancelled."""


def _error_of(done: Copy) -> OffloadError | None:
    """Return the error of a copy that has ended, or None."""
    try:
        done.wait()
    except OffloadError as error:
        return error.with_traceback(None)  # its frames would keep tensors alive
    return None


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as one dimension of bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
