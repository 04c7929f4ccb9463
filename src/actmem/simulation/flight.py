"""What copies take in a simulated step: values that were sent and are still in memory, and prefetched ones.

The window is the offloader's own. See NOTE [ The window ].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from actmem.offloading import Window
from actmem.simulation.room import TRANSFERS, Copy, Lease, Room

__all__ = ["Away", "Flight", "InFlight"]


@dataclass(eq=False)
class Sent:
    """A storage that was offloaded: the ticket of the simulation."""

    index: int
    """Its place in the order of sending."""
    storage: int
    """-1 for a copy that the block made for itself."""
    num_bytes: int
    num_holders: int = 1
    was_fetched: bool = False
    is_ahead: bool = False
    """It was prefetched, and nobody has asked for it yet."""
    was_taken: bool = False
    """It was still in memory, and was given back unchanged."""
    room_taken: list[Copy] = field(default_factory=list[Copy])
    """What it takes while it is in flight, where it is not a storage of the program."""


@dataclass(frozen=True)
class InFlight:
    """How much may be in flight in a step, once the bound is known."""

    num_bytes: int
    max_values: int | None = None
    order: tuple[int, ...] = ()
    """In which order the step before fetched what it had sent, by place in the order of sending."""

    def begin(self, room: Room) -> Flight:
        """Return what is in flight at the beginning of a step: nothing."""
        return Flight(room, Window(self.num_bytes, self.max_values), self.order)


class Flight:
    """What is in flight, for all blocks of a step: the tickets of an offloader, as numbers. See NOTE [ Tickets ].

    Args:
        room: where bytes are counted.
        window: the offloader's window.
        order: see `InFlight`.
    """

    def __init__(self, room: Room, window: Window[Sent], order: Sequence[int]) -> None:
        self._room, self._window = room, window
        self._known: dict[int, Sent] = {}
        self._sent: dict[int, Sent | None] = {}
        """What was sent in this step, by index; None if nobody holds it any more."""
        self._next = _next_of(order)
        self.order: list[int] = []
        """What was fetched since the last first send, in that order."""
        self._count = self._block_bytes = 0

    @property
    def ahead_bytes(self) -> int:
        """What is being prefetched."""
        return self._window.ahead_bytes

    @property
    def in_memory(self) -> list[Sent]:
        """What was sent and is still in memory, oldest first."""
        return list(self._window)

    def send(self, storage: int, num_bytes: int) -> Sent:
        """Send a storage, or a copy of the block's own, before the block lets go of it."""
        known = self._known.get(storage)
        if known is not None and known.num_holders and not self._room.is_gone(storage):
            known.num_holders += 1
            return known
        if self.order:
            self._begin_step()
        sent = Sent(self._count, storage, num_bytes)
        self._sent[self._count] = sent
        self._count += 1
        self._block_bytes += num_bytes
        if storage >= 0:
            self._known[storage] = sent
        self._keep(sent)
        for gone in self._window.admit(sent, num_bytes):
            self._let_go(gone)
        return sent

    def fetch(self, sent: Sent) -> bool:
        """Fetch what was sent; return whether it was still there. Then the storage is held for the caller."""
        if not sent.was_fetched:
            self.order.append(sent.index)
        sent.was_fetched = True
        sent.was_taken |= self._window.remove(sent)
        if sent.is_ahead:
            self._window.vacate(sent.num_bytes)
            sent.is_ahead = False
        self._ahead(sent.index)
        self._drop(sent)
        if sent.was_taken and sent.num_holders:
            self._keep(sent)
        return sent.was_taken

    def forget(self, sent: Sent) -> None:
        """Note that a holder is gone without having asked for it."""
        self._drop(sent)
        if sent.num_holders:
            return
        if self._window.remove(sent) or sent.was_taken:
            self._let_go(sent)
        elif sent.is_ahead:
            self._window.vacate(sent.num_bytes)

    def end_block(self) -> int:
        """Note that a block has sent all that it sends, and return how many bytes."""
        sent_bytes, self._block_bytes = self._block_bytes, 0
        return sent_bytes

    def _begin_step(self) -> None:
        self._next = _next_of(self.order)
        self.order.clear()
        self._window.begin_step()
        self._sent = {index: sent for index, sent in self._sent.items() if sent is not None}
        if not self._sent:
            self._count = 0

    def _ahead(self, index: int) -> None:
        """Prefetch what is needed next, as the offloader does."""
        for _ in range(len(self._sent)):
            index = self._next.get(index, index - 1)
            if index not in self._sent:
                return
            coming = self._sent[index]
            if coming is None or coming.was_fetched or coming.is_ahead or coming in self._window:
                continue
            if not self._window.has_room(coming.num_bytes):
                return
            self._window.occupy(coming.num_bytes)
            coming.is_ahead = True

    def _drop(self, sent: Sent) -> None:
        sent.num_holders -= 1
        if not sent.num_holders:
            self._sent[sent.index] = None

    def _keep(self, sent: Sent) -> None:
        if sent.storage >= 0:
            self._room.hold(sent.storage)
        else:
            sent.room_taken.append(Copy(self._room, sent.num_bytes, TRANSFERS))

    def _let_go(self, sent: Sent) -> None:
        if sent.storage >= 0:
            self._room.release(sent.storage)
        else:
            sent.room_taken.pop()


class Away:
    """An offloaded value. It takes no room of its own until it is fetched, but may still be in flight.

    Args:
        flight: what is in flight. None: nothing is.
        held: what held the value until now.
        num_bytes: its bytes.
    """

    __slots__ = ("_flight", "_sent")

    def __init__(self, flight: Flight | None, held: Any, num_bytes: int) -> None:
        self._flight = flight
        storage = held.storage if type(held) is Lease else -1
        self._sent = None if flight is None else flight.send(storage, num_bytes)

    def take_back(self, room: Room) -> Lease | Copy | None:
        """Fetch the value. Return what holds it if it is still in memory, else None: then it comes as a new copy."""
        flight, sent, self._sent = self._flight, self._sent, None
        if flight is None or sent is None or not flight.fetch(sent):
            return None
        if sent.storage >= 0:  # the flight's own hold on it is handed over
            lease = Lease(room, sent.storage)
            room.release(sent.storage)
            return lease
        return sent.room_taken.pop()

    def __del__(self) -> None:
        if self._flight is not None and self._sent is not None:
            self._flight.forget(self._sent)


def _next_of(order: Sequence[int]) -> dict[int, int]:
    return dict(pairwise(order))
