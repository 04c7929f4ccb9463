"""The bytes that a step's tapes keep alive on top of what the program itself keeps alive.

What holds a value is an object here as it is in the tape: when nothing refers to it any more, its bytes are free. So
the lifetimes of a prediction are those of the tape, by reference count alone.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from actmem.engine import Value

__all__ = ["REPLAYED", "SAVED", "STATES", "TRANSFERS", "Copy", "Lease", "Listener", "Room"]

SAVED, TRANSFERS, REPLAYED, STATES = "saved", "transfers", "replayed", "states"
"""What bytes are: held or copied in forward, fetched, recomputed, or states of generators."""


class Listener(Protocol):
    """Whoever wants to know each allocation by itself, and not only how many bytes there are."""

    def taken(self, num_bytes: int) -> int:
        """Note private bytes. Return the name under which they are given back."""
        ...

    def given_back(self, name: int) -> None:
        """Note that private bytes are free."""
        ...

    def freed(self, storage: int) -> None:
        """Note that nobody holds a storage of the program any more."""
        ...


class Room:
    """The bytes that are alive on top of what the program itself keeps alive, by storage."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._num_leases: dict[int, int] = {}
        self._dead: set[int] = set()
        self._values: dict[int, list[weakref.ref[Value]]] = {}
        self.extra_bytes = 0
        self.bytes_of = {SAVED: 0, TRANSFERS: 0, REPLAYED: 0, STATES: 0}
        """The same bytes, by kind."""
        self.listener: Listener | None = None

    def add(self, num_bytes: int, kind: str) -> None:
        """Count bytes, or fewer of them."""
        self.extra_bytes += num_bytes
        self.bytes_of[kind] += num_bytes

    def hold(self, storage: int) -> None:
        """Keep a storage alive."""
        self._num_leases[storage] = self._num_leases.get(storage, 0) + 1

    def release(self, storage: int) -> None:
        """Release a storage."""
        left = self._num_leases[storage] = self._num_leases[storage] - 1
        if not left and storage in self._dead:
            self.add(-self._sizes.get(storage, 0), SAVED)
            if self.listener is not None:
                self.listener.freed(storage)

    def die(self, storage: int) -> None:
        """Note that the program released a storage."""
        self._dead.add(storage)
        if self._num_leases.get(storage, 0):
            self.add(self._sizes.get(storage, 0), SAVED)
        elif self.listener is not None:
            self.listener.freed(storage)

    def is_held(self, storage: int) -> bool:
        """Return whether anybody but the program holds a storage."""
        return self._num_leases.get(storage, 0) > 0

    def is_dead(self, storage: int) -> bool:
        """Return whether the program released a storage."""
        return storage in self._dead

    def is_gone(self, storage: int) -> bool:
        """Return whether nobody holds a storage any more."""
        return storage in self._dead and not self._num_leases.get(storage, 0)

    def is_held_once(self, storage: int) -> bool:
        """Return whether a storage lives only because of one holder."""
        return storage in self._dead and self._num_leases.get(storage, 0) == 1

    def note_holder(self, storage: int, value: Value) -> None:
        """Note who holds a storage by reference, for whoever overwrites it. See NOTE [ Copies ]."""
        self._values.setdefault(storage, []).append(weakref.ref(value))

    def copy_for_holders(self, storage: int, num_bytes: int) -> None:
        """Give those who hold a storage that is about to be overwritten a copy, one for all."""
        copy: Copy | None = None
        for reference in self._values.pop(storage, ()):
            value = reference()
            if value is not None and type(value.held) is Lease and value.held.storage == storage:
                copy = copy or Copy(self, num_bytes, SAVED)
                value.held = copy


class Lease:
    """A storage of the program that is held by reference."""

    __slots__ = ("_room", "storage")

    def __init__(self, room: Room, storage: int) -> None:
        self._room, self.storage = room, storage
        room.hold(storage)

    def __del__(self) -> None:
        self._room.release(self.storage)


class Copy:
    """Private bytes: copied, fetched or recomputed."""

    __slots__ = ("_kind", "_name", "_num_bytes", "_room")

    def __init__(self, room: Room, num_bytes: int, kind: str) -> None:
        self._room, self._num_bytes, self._kind = room, num_bytes, kind
        room.add(num_bytes, kind)
        told = room.listener is not None and kind is not STATES  # a card's generators keep their states on the host
        self._name = room.listener.taken(num_bytes) if told and room.listener is not None else -1

    def __del__(self) -> None:
        room = self._room
        room.add(-self._num_bytes, self._kind)
        if self._name >= 0 and room.listener is not None:
            room.listener.given_back(self._name)
