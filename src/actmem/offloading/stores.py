"""What every place for bytes can do.

NOTE [ Stores ]
- `take` reserves, `give` frees, `write` and `read` move bytes and block until that is done. A store moves bytes on the
  thread that calls it; to overlap with compute is the work of a lane.
- `give` takes no lock and may be called by a finalizer, also while the same thread is inside `take`. What was given is
  sorted into the free list by the next `take`.
- Giving a slot twice is an error. Giving one to a closed store is none: there is nothing left to free.
- On disk, a slot that was never written, or whose last write failed, cannot be read.
- A store belongs to the process that made it. In a forked child all but `give` and `close` raise, and these do nothing.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from actmem.errors import OffloadError

__all__ = ["Register", "Slot", "Store", "check_bytes", "check_limit", "size"]


class Slot:
    """Be a place for a number of bytes in a store. Only its store makes one."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_bytes} bytes)"


class Store(Protocol):
    """Keep bytes somewhere else. See NOTE [ Stores ]."""

    def take(self, num_bytes: int) -> Slot:
        """Reserve a place, or raise `OffloadError` where there is no room."""
        ...

    def give(self, slot: Slot) -> None:
        """Free a place. Never blocks; safe in a finalizer."""
        ...

    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy a contiguous one-dimensional uint8 CPU tensor of `slot.num_bytes` into the slot."""
        ...

    def read(self, slot: Slot, target: Tensor) -> None:
        """Fill a contiguous one-dimensional uint8 CPU tensor of `slot.num_bytes` from the slot."""
        ...

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        ...

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots that are taken."""
        ...

    @property
    def held_bytes(self) -> int:
        """The bytes that the store occupies now, in use or not."""
        ...


S = TypeVar("S", bound=Slot)


class Register(Generic[S]):
    """Know which slots of a store are taken, without a lock. See NOTE [ Stores ].

    Each step is one call of a builtin container, which no other thread and no finalizer can interrupt.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self._pid = os.getpid()
        self._taken: dict[S, int] = {}
        self._given: deque[S] = deque()

    def add(self, slot: S) -> S:
        """Count a slot as taken."""
        self._taken[slot] = slot.num_bytes
        return slot

    def give(self, slot: S) -> None:
        """Count a slot as free; `given` hands it out later."""
        if self.is_closed or self.is_foreign:
            return
        if self._taken.pop(slot, None) is None:
            raise OffloadError(
                f"{slot} is not taken from this {self.name}: it was given back before, or is of another store. "
                "Give a slot back once, to the store that it was taken from."
            )
        self._given.append(slot)

    def given(self) -> list[S]:
        """Return, once, the slots that were given back since the last call."""
        out: list[S] = []
        while True:
            try:
                out.append(self._given.popleft())
            except IndexError:
                return out

    def check(self, slot: S | None = None) -> None:
        """Raise unless the store is open, of this process, and the slot one of its own."""
        if self.is_foreign:
            raise OffloadError(
                f"{self.name} was made in process {self._pid} and used in process {os.getpid()}, which was forked from "
                "it: its bytes belong to the first. Make a store in each process."
            )
        if self.is_closed:
            raise OffloadError(f"{self.name} is closed: its bytes are gone. Make a new one.")
        if slot is not None and slot not in self._taken:
            raise OffloadError(
                f"{slot} is not taken from this {self.name}: it was given back, or is of another store. "
                "Keep a slot until nothing reads or writes it any more."
            )

    def clear(self) -> None:
        """Forget every slot."""
        self._taken.clear()
        self._given.clear()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that made the store."""
        return os.getpid() != self._pid

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots that are taken."""
        return sum(list(self._taken.values()))


def check_bytes(slot: Slot, tensor: Tensor) -> int:
    """Return the address of a tensor that can be moved as it is, or raise."""
    plain = tensor.dtype is torch.uint8 and tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous()
    if not plain or tensor.numel() != slot.num_bytes:
        raise OffloadError(
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device} for a slot of {slot.num_bytes} "
            "bytes: expected contiguous uint8 of that length on the CPU. Pass tensor.flatten().view(torch.uint8)."
        )
    return tensor.data_ptr()


def check_limit(limit_bytes: int | None) -> None:
    """Raise unless a limit is None or positive."""
    if limit_bytes is not None and limit_bytes <= 0:
        raise OffloadError(f"limit_bytes = {limit_bytes}: expected a positive number of bytes, or None for no limit.")


def size(num_bytes: int) -> str:
    """Write a number of bytes for a reader.

    >>> size(512), size(3 * 2**20), size(5 * 2**30)
    ('512 bytes', '3.0 MiB', '5.00 GiB')
    """
    if num_bytes < 2**16:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"
