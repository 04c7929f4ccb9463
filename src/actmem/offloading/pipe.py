"""Move bytes between memory and a file, with copying, checking and the disk at work at the same time.

NOTE [ The way to the disk ]
Bytes go past the page cache (O_DIRECT) wherever the file system permits it. What is left in the page cache is memory,
and memory is what offloading is to free. `benchmarks/disk_ways.py` compares the ways, each with the bytes on the disk
and out of the cache in the end. On a virtual disk with ext4, writing through the cache was as fast at best and half as
fast at worst, and took a third more processor time; reading through it was fast from 4 MiB on, but what is read ahead
stays behind; writing to a mapped file was slowest. The raw disk did 2 GiB/s, summing 5 GiB/s, copying 5 GiB/s: one
after the other they would be half as fast as the disk alone.

O_DIRECT wants memory that starts at a multiple of 512 or 4096 bytes; tensors start at multiples of 64. So bytes pass
through a ring of three aligned buffers of up to 2 MiB. Copying and summing one piece goes on while the disk works on
the others: the kernel's asynchronous I/O (io_submit) needs no thread for that, and its waits can be bounded. Where it
is missing, pieces are moved one after the other.

A buffer is the kernel's until its piece is done. So an error is raised only after all pieces have ended; and if the
disk does not answer in time, the ring is never used nor freed again.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from actmem.errors import OffloadError
from actmem.offloading.stores import size
from actmem.torchcompat import without_dispatch_modes

__all__ = ["ALIGN_BYTES", "Pipe", "drop_cached", "takes_direct"]

ALIGN_BYTES = 4096
TIMEOUT_SECONDS = 120.0
_NUM_BUFFERS = 3
_SMALLEST_PIECE_BYTES = 512 * 2**10
_LARGEST_PIECE_BYTES = 2 * 2**20
_READ, _WRITE = 0, 1
_WORD = 2**64
_WEIGHTS = [pow(6364136223846793005, k + 1, _WORD) for k in range(_LARGEST_PIECE_BYTES // ALIGN_BYTES)]

_SYSCALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}.get(platform.machine())
"""The numbers of io_setup, io_destroy, io_submit and io_getevents."""
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Request(ctypes.Structure):
    """The kernel's `struct iocb` of a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("fd", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("eventfd", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_STUCK: list[Pipe] = []
"""Rings that the kernel may still write to."""


class Pipe:
    """Move bytes of one slot at a time through a ring of aligned buffers. See NOTE [ The way to the disk ].

    Args:
        fd: the file, opened with O_DIRECT or not.
        timeout_seconds: how long the disk may take for one piece.
        use_queue: False for one piece after the other, also where the kernel has asynchronous I/O.
    """

    def __init__(self, fd: int, *, timeout_seconds: float = TIMEOUT_SECONDS, use_queue: bool = True) -> None:
        self._fd = fd
        self._timeout_seconds = timeout_seconds
        with torch.inference_mode(False), without_dispatch_modes():
            room = torch.empty(_NUM_BUFFERS * _LARGEST_PIECE_BYTES + ALIGN_BYTES, dtype=torch.uint8, device="cpu")
            self._ring = room[-room.data_ptr() % ALIGN_BYTES :][: _NUM_BUFFERS * _LARGEST_PIECE_BYTES]
            signed = [w - _WORD if w >= _WORD // 2 else w for w in _WEIGHTS]
            self._weights = torch.tensor(signed, dtype=torch.int64, device="cpu")
        self._address = self._ring.data_ptr()
        self._words = self._ring.view(torch.int64).view(_NUM_BUFFERS, -1, ALIGN_BYTES // 8).unbind()
        self._requests = (_Request * _NUM_BUFFERS)()
        self._events = (_Event * _NUM_BUFFERS)()
        self._waiting: dict[int, int] = {}  # buffer -> bytes that the disk is busy with
        self._error: OSError | None = None
        self._queue = ctypes.c_ulong(0)
        if use_queue and sys.byteorder == "little" and _SYSCALLS is not None:
            _libc.syscall(_SYSCALLS[0], ctypes.c_uint(_NUM_BUFFERS), ctypes.byref(self._queue))

    @property
    def has_queue(self) -> bool:
        """Whether the disk works on several pieces at once."""
        return bool(self._queue.value)

    @property
    def is_stuck(self) -> bool:
        """Whether the disk did not answer, so that the buffers are still the kernel's."""
        return bool(self._waiting)

    def write(self, address: int, num_bytes: int, offset: int) -> int:
        """Write memory to the file at an aligned offset, with zeros up to the next aligned end. Return a checksum."""
        pieces = _pieces(num_bytes)
        checksum = 0
        with self._orderly():
            for i, (start, length) in enumerate(pieces):
                buffer, room = i % _NUM_BUFFERS, _aligned(length)
                self._wait_for(buffer)
                place = self._address + buffer * _LARGEST_PIECE_BYTES
                ctypes.memmove(place, address + start, length)
                ctypes.memset(place + length, 0, room - length)
                self._begin(_WRITE, buffer, room, offset + start)
                checksum = self._add(checksum, buffer, room)
        return checksum

    def read(self, address: int, num_bytes: int, offset: int) -> int:
        """Fill memory from the file. Return the checksum of what was read."""
        pieces = _pieces(num_bytes)
        checksum = 0
        with self._orderly():
            for i, (start, length) in enumerate(pieces[:_NUM_BUFFERS]):
                self._begin(_READ, i, _aligned(length), offset + start)
            for i, (start, length) in enumerate(pieces):
                buffer = i % _NUM_BUFFERS
                self._wait_for(buffer)
                if self._error is not None:
                    break
                ctypes.memmove(address + start, self._address + buffer * _LARGEST_PIECE_BYTES, length)
                checksum = self._add(checksum, buffer, _aligned(length))
                if i + _NUM_BUFFERS < len(pieces):
                    then, more = pieces[i + _NUM_BUFFERS]
                    self._begin(_READ, buffer, _aligned(more), offset + then)
        return checksum

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the queue."""
        queue, self._queue = self._queue, ctypes.c_ulong(0)
        if queue.value and _SYSCALLS is not None and not self._waiting:
            _libc.syscall(_SYSCALLS[1], queue)

    def _add(self, checksum: int, buffer: int, room: int) -> int:
        """Add a piece to a checksum: every word of a page, each page with a weight of its own, pieces in order."""
        num_pages = room // ALIGN_BYTES
        pages = self._words[buffer].narrow(0, 0, num_pages).sum(1)
        total = int(torch.dot(pages, self._weights.narrow(0, 0, num_pages)))
        return (checksum * 1099511628211 + total) % _WORD

    def _begin(self, opcode: int, buffer: int, num_bytes: int, offset: int) -> None:
        if self._error is not None:
            return
        request = self._requests[buffer]
        request.data, request.opcode, request.fd = buffer, opcode, self._fd
        request.address, request.num_bytes, request.offset = (
            self._address + buffer * _LARGEST_PIECE_BYTES,
            num_bytes,
            offset,
        )
        if self.has_queue and _SYSCALLS is not None:
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(request))
            self._waiting[buffer] = num_bytes  # before: an interrupt in between must not lose sight of it
            if _libc.syscall(_SYSCALLS[2], self._queue, ctypes.c_long(1), pointers) == 1:
                return
            del self._waiting[buffer]
        self._move(buffer, 0)

    def _move(self, buffer: int, done: int) -> None:
        """Move what is left of a piece without the queue."""
        request = self._requests[buffer]
        memory = (ctypes.c_char * request.num_bytes).from_address(request.address)
        view = memoryview(memory)
        try:
            while done < request.num_bytes:
                if request.opcode == _WRITE:
                    moved = os.pwrite(self._fd, view[done:], request.offset + done)
                else:
                    moved = os.preadv(self._fd, [view[done:]], request.offset + done)
                if moved == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                done += moved
        except OSError as error:
            self._error = self._error or error

    def _wait_for(self, buffer: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while buffer in self._waiting and _SYSCALLS is not None:
            left = max(0.0, deadline - time.monotonic())
            moment = _Time(int(left), int(left % 1 * 1e9))
            found = _libc.syscall(
                _SYSCALLS[3],
                self._queue,
                ctypes.c_long(1),
                ctypes.c_long(_NUM_BUFFERS),
                self._events,
                ctypes.byref(moment),
            )
            refused = found < 0 and ctypes.get_errno() != errno.EINTR
            if refused or (found <= 0 and time.monotonic() >= deadline):
                _STUCK.append(self)
                raise OffloadError(
                    f"the disk did not answer for {size(self._waiting[buffer])} in {self._timeout_seconds:g} seconds. "
                    "Look for errors of the disk in the system's log, or name a directory on another one."
                )
            for event in self._events[: max(0, found)]:
                self._note(event.data, event.result)

    def _note(self, buffer: int, result: int) -> None:
        num_bytes = self._waiting.pop(buffer)
        if result < 0:
            self._error = self._error or OSError(-result, os.strerror(-result))
        elif result < num_bytes:
            self._move(buffer, result)

    @contextmanager
    def _orderly(self) -> Generator[None]:
        """Let no piece outlive the copy it belongs to, and raise what befell one."""
        self._error = None
        with torch.no_grad(), without_dispatch_modes():
            try:
                yield
            finally:
                try:
                    for buffer in list(self._waiting) if self not in _STUCK else ():
                        self._wait_for(buffer)
                finally:
                    if self._waiting and self not in _STUCK:  # a second interrupt
                        _STUCK.append(self)
        error, self._error = self._error, None
        if error is not None:
            raise error


def takes_direct(fd: int) -> bool:
    """Try whether a file takes one aligned page past the page cache, and switch `fd` to that if so."""
    import fcntl

    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not direct:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct)
        pipe = Pipe(fd, use_queue=False)
        here = ctypes.addressof(page := (ctypes.c_char * ALIGN_BYTES)())
        if pipe.write(here, len(page), 0) == pipe.read(here, len(page), 0):
            return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return False


def drop_cached(fd: int, offset: int, num_bytes: int, *, written: bool) -> None:
    """Wait until a part of the file is on the disk, and let go of the pages that hold it in memory."""
    if written:
        sync: Any = getattr(_libc, "sync_file_range", None)
        if sync is None or sync(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), ctypes.c_uint(7)) != 0:
            os.fdatasync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _pieces(num_bytes: int) -> list[tuple[int, int]]:
    """Cut a slot into pieces: start and length."""
    piece = min(max(_aligned(num_bytes // 4), _SMALLEST_PIECE_BYTES), _LARGEST_PIECE_BYTES)
    return [(start, min(piece, num_bytes - start)) for start in range(0, num_bytes, piece)]
