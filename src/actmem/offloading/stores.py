"""What every store of bytes can do.

NOTE [ Stores ]
- `take` reserves, `give` frees, `write` and `read` move bytes and block until that is done. A store moves bytes on the
  thread that calls it; overlapping with compute is the job of a lane.
- `give` takes no lock and may be called by a finalizer, also while the same thread is inside `take`. What was given is
  sorted into the free list by the next `take`.
- Giving a slot back twice is an error. Giving one to a closed store is not: there is nothing left to free.
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

__all__ = ["Register", "Slot", "Store", "check_bytes", "check_limit"]


class Slot:
    """A place for a number of bytes in a store. Only its store creates one."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_bytes} bytes)"


class Store(Protocol):
    """Keeps bytes somewhere else. See NOTE [ Stores ]."""

    def take(self, num_bytes: int) -> Slot:
        """Reserve a place, or raise `OffloadError` if there is no room."""
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
        """Bytes of all slots in use."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes that the store occupies now, in use or not."""
        ...


S = TypeVar("S", bound=Slot)


class Register(Generic[S]):
    """Track which slots of a store are in use, without a lock. See NOTE [ Stores ].

    Each step is one call of a builtin container, which no other thread and no finalizer can interrupt.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self._pid = os.getpid()
        self._taken: dict[S, int] = {}
        self._given: deque[S] = deque()

    def add(self, slot: S) -> S:
        """Count a slot as in use."""
        self._taken[slot] = slot.num_bytes
        return slot

    def give(self, slot: S) -> None:
        """Count a slot as free; `given` returns it later."""
        if self.is_closed or self.is_foreign:
            return
        if self._taken.pop(slot, None) is None:
            raise OffloadError(
                f"{slot} does not belong to this {self.name}: it was given back before, or comes from another store. "
                "Give a slot back once, to the store it was taken from."
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
        """Raise unless the store is open and of this process, and the slot is its own."""
        if self.is_foreign:
            raise OffloadError(
                f"{self.name} was made in process {self._pid} and used in process {os.getpid()}, which was forked from "
                "it: its bytes belong to the first. Make a store in each process."
            )
        if self.is_closed:
            raise OffloadError(f"{self.name} is closed: its bytes are gone. Make a new one.")
        if slot is not None and slot not in self._taken:
            raise OffloadError(
                f"{slot} does not belong to this {self.name}: it was given back, or comes from another store. "
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
        """Bytes of all slots in use."""
        return sum(list(self._taken.values()))


def check_bytes(slot: Slot, tensor: Tensor) -> int:
    """Return the address of a tensor whose bytes can be copied as they are, or raise."""
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
