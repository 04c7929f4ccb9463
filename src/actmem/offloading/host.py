"""Keep bytes in a pool of host memory.

NOTE [ The host pool ]
Blocks come in size classes: eight to an octave, so at most an eighth of a block is unused; powers of two where memory
is pinned, because torch's allocator of pinned memory rounds up to these anyway and the count should be honest. A
block that is given back is kept for the next slot of its class, or of one up to a quarter smaller.

The pool never holds more than was in use at one time: before it grows beyond that, it lets go of the blocks that have
been idle longest. So a run whose sizes vary from step to step does not collect blocks of every size it ever saw.

Every block is touched when it is made. The kernel gives memory on first touch, so that two blocks that are only
reserved would both pass the check against free memory, and the process would die at the copy instead of raising here.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch
from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading.stores import Register, Slot, check_bytes, check_limit
from actmem.torchcompat import without_dispatch_modes
from actmem.units import size

__all__ = ["HostSlot", "HostStore", "available_bytes", "class_bytes"]

_SMALLEST_BYTES = 4096
_RESERVE_BYTES = 256 * 2**20
"""Memory left to everything else when the pool grows."""


class HostSlot(Slot):
    """A range of host memory. `tensor` is the memory itself: uint8, of the length that was asked for."""

    __slots__ = ("block", "tensor")

    def __init__(self, num_bytes: int, block: Tensor) -> None:
        super().__init__(num_bytes)
        self.block = block
        self.tensor = block[:num_bytes]


class HostStore:
    """Keep bytes in host memory, in blocks that are reused. See NOTE [ Stores ] and NOTE [ The host pool ].

    Args:
        pin: page-locked memory, which an accelerator can copy to and from while it computes. Without an accelerator
            there is nothing to pin memory for, and `is_pinned` is False.
        limit_bytes: the most the pool may hold; None for as much as is free.

    >>> store = HostStore(pin=False, limit_bytes=2**20)
    >>> slot = store.take(3)
    >>> store.write(slot, torch.tensor([1, 2, 3], dtype=torch.uint8))
    >>> slot.tensor
    tensor([1, 2, 3], dtype=torch.uint8)
    >>> store.give(slot)
    >>> store.used_bytes, store.held_bytes
    (0, 4096)
    >>> store.close()
    """

    def __init__(self, *, pin: bool = True, limit_bytes: int | None = None) -> None:
        check_limit(limit_bytes)
        self.is_pinned = pin and torch.accelerator.is_available()
        self.limit_bytes = limit_bytes
        self._register: Register[HostSlot] = Register("HostStore")
        self._lock = threading.Lock()
        self._idle: list[Tensor] = []  # the longest idle first
        self._busy_bytes = 0
        self._held_bytes = 0
        self._most_bytes = 0

    def take(self, num_bytes: int) -> HostSlot:
        """Reserve memory: an idle block that fits, or else a new one."""
        self._register.check()
        if num_bytes <= 0:
            raise OffloadError(f"num_bytes = {num_bytes}: a slot has at least one byte. Do not offload empty tensors.")
        with self._lock, torch.inference_mode(False), without_dispatch_modes():
            self._register.check()
            self._sort_in()
            room_bytes = class_bytes(num_bytes, power_of_two=self.is_pinned)
            fitting = [b for b in self._idle if room_bytes <= b.numel() <= room_bytes + room_bytes // 4]
            if fitting:
                block = min(reversed(fitting), key=len)
                self._idle = [b for b in self._idle if b is not block]
            else:
                block = self._grow(num_bytes, room_bytes)
            self._busy_bytes += block.numel()
            self._most_bytes = max(self._most_bytes, self._busy_bytes)
            return self._register.add(HostSlot(num_bytes, block))

    def give(self, slot: Slot) -> None:
        """Keep the memory of a slot for the next one. Never blocks; safe in a finalizer."""
        assert isinstance(slot, HostSlot)
        self._register.give(slot)

    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy bytes into a slot."""
        ctypes.memmove(self._address(slot), check_bytes(slot, source), slot.num_bytes)

    def read(self, slot: Slot, target: Tensor) -> None:
        """Copy the bytes of a slot into `target`."""
        ctypes.memmove(check_bytes(slot, target), self._address(slot), slot.num_bytes)

    def close(self) -> None:
        """Release all memory. A second call does nothing."""
        if self._register.is_foreign:
            return
        with self._lock:
            self._register.is_closed = True
            self._register.clear()
            self._idle.clear()
            self._busy_bytes = self._held_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots in use."""
        return self._register.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, in use or idle."""
        return self._held_bytes

    def _address(self, slot: Slot) -> int:
        assert isinstance(slot, HostSlot)
        self._register.check(slot)
        return slot.block.data_ptr()

    def _sort_in(self) -> None:
        for slot in self._register.given():
            self._busy_bytes -= slot.block.numel()
            self._idle.append(slot.block)

    def _grow(self, num_bytes: int, room_bytes: int) -> Tensor:
        limit_bytes = self.limit_bytes
        if limit_bytes is not None and self._busy_bytes + room_bytes > limit_bytes:
            raise OffloadError(
                f"no room for {size(num_bytes)} in host memory: limit_bytes = {size(limit_bytes)}, of which "
                f"{size(self._busy_bytes)} are in use and blocks of {size(room_bytes)} are the next that fit. "
                f"Use limit_bytes >= {self._busy_bytes + room_bytes}, or offload less."
            )
        most_bytes = max(self._most_bytes, self._busy_bytes + room_bytes)
        if limit_bytes is not None:
            most_bytes = min(most_bytes, limit_bytes)
        while self._idle and self._held_bytes + room_bytes > most_bytes:
            self._held_bytes -= self._idle.pop(0).numel()
        free_bytes = available_bytes()
        if free_bytes is not None and room_bytes + _RESERVE_BYTES > free_bytes:
            raise OffloadError(
                f"no room for {size(num_bytes)} in host memory: {size(free_bytes)} are free, {size(_RESERVE_BYTES)} of "
                f"them stay free for others, and the pool holds {size(self._held_bytes)} already. "
                "Offload less (a larger min_bytes, fewer layers), or to='disk'."
            )
        try:
            block = torch.empty(room_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.is_pinned).fill_(0)
        except (RuntimeError, MemoryError) as refused:
            raise OffloadError(
                f"no {'pinned ' if self.is_pinned else ''}memory for {size(num_bytes)}, the pool holds "
                f"{size(self._held_bytes)} already: {refused}. Offload less, pin=False, or to='disk'."
            ) from refused
        self._held_bytes += room_bytes
        return block


def class_bytes(num_bytes: int, *, power_of_two: bool = False) -> int:
    """Return the size of the smallest block allocated for so many bytes.

    >>> class_bytes(1), class_bytes(4097), class_bytes(1_000_000), class_bytes(1_000_000, power_of_two=True)
    (4096, 4608, 1048576, 1048576)
    """
    if num_bytes <= _SMALLEST_BYTES:
        return _SMALLEST_BYTES
    octave = 1 << (num_bytes - 1).bit_length()
    step = octave if power_of_two else octave // 16
    return -(-num_bytes // step) * step


def available_bytes() -> int | None:
    """Return how much memory this machine or container can still use without swapping; None if unknown."""
    found = [_mem_available(), _cgroup_available()]
    return min((b for b in found if b is not None), default=None)


def _mem_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available() -> int | None:
    """Return what is left of the control group's memory limit, with its page cache counted as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = folder / own.strip("/")
        most, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, StopIteration, ValueError):
        return None
    return None if most == "max" else max(0, int(most) - used + int(stat.get("inactive_file", 0)))
