"""Move bytes between memory and a file, overlapping copies, checksums and disk I/O.

NOTE [ The way to the disk ]
Bytes go past the page cache (O_DIRECT) wherever the file system permits it. What is left in the page cache is memory,
and memory is what offloading is meant to free. `benchmarks/disk_ways.py` compares the ways, each with the bytes on the
disk and out of the cache in the end. On a virtual disk with ext4, writing through the cache was as fast at best and
half as fast at worst, and took a third more processor time; reading through it was fast from 4 MiB on, but what is read
ahead stays behind; writing to a mapped file was slowest. The raw disk did 2 GiB/s, summing 5 GiB/s, copying 5 GiB/s:
one after the other they would be half as fast as the disk alone.

O_DIRECT wants memory that starts at a multiple of 512 or 4096 bytes; tensors start at multiples of 64. So bytes pass
through a ring of three aligned buffers of up to 2 MiB. Copying and summing one piece goes on while the disk works on
the others: a thread for each buffer waits in `pwrite` or `preadv`, where Python's lock is free. The kernel's
asynchronous I/O (io_submit) was tried in their place: it was no faster, and slower where others used the processor.

A buffer is the disk's until its piece is done. So an error is raised only after all pieces have ended; and if the disk
does not answer in time, the ring is never used again. The thread that waits holds it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from actmem.errors import OffloadError
from actmem.torchcompat import without_dispatch_modes
from actmem.units import size

__all__ = ["ALIGN_BYTES", "Pipe", "drop_cached", "takes_direct"]

ALIGN_BYTES = 4096
TIMEOUT_SECONDS = 120.0
_NUM_BUFFERS = 3
_SMALLEST_PIECE_BYTES = 512 * 2**10
_LARGEST_PIECE_BYTES = 2 * 2**20
_WORD = 2**64
_WEIGHTS = [pow(6364136223846793005, k + 1, _WORD) for k in range(_LARGEST_PIECE_BYTES // ALIGN_BYTES)]

_libc: Any = ctypes.CDLL(None, use_errno=True)


class _Piece:
    """A part of one buffer on its way to or from the file."""

    def __init__(self, place: int, num_bytes: int, offset: int, *, is_write: bool) -> None:
        self.place = place
        """Where it starts in the ring."""
        self.num_bytes, self.offset, self.is_write = num_bytes, offset, is_write
        self.is_done = threading.Event()
        self.error: OSError | None = None

    def move(self, fd: int, ring: Tensor) -> None:
        """Move all of it. Blocks until that is done, or has failed."""
        memory = (ctypes.c_char * self.num_bytes).from_address(ring.data_ptr() + self.place)
        view, done = memoryview(memory), 0
        try:
            while done < self.num_bytes:
                if self.is_write:
                    moved = os.pwrite(fd, view[done:], self.offset + done)
                else:
                    moved = os.preadv(fd, [view[done:]], self.offset + done)
                if moved == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                done += moved
        except OSError as error:
            self.error = error.with_traceback(None)
        self.is_done.set()


def _serve(tasks: SimpleQueue[_Piece | None], fd: int, ring: Tensor) -> None:
    """Move pieces until there are no more. A thread runs this; it holds the ring but not the pipe."""
    while (piece := tasks.get()) is not None:
        piece.move(fd, ring)


class Pipe:
    """Move bytes of one slot at a time through a ring of aligned buffers. See NOTE [ The way to the disk ].

    Args:
        fd: the file, opened with O_DIRECT or not.
        timeout_seconds: how long the disk may take for one piece.
        use_threads: False to move one piece after the other.
    """

    def __init__(self, fd: int, *, timeout_seconds: float = TIMEOUT_SECONDS, use_threads: bool = True) -> None:
        self._fd = fd
        self._timeout_seconds = timeout_seconds
        with torch.inference_mode(False), without_dispatch_modes():
            room = torch.empty(_NUM_BUFFERS * _LARGEST_PIECE_BYTES + ALIGN_BYTES, dtype=torch.uint8, device="cpu")
            self._ring = room[-room.data_ptr() % ALIGN_BYTES :][: _NUM_BUFFERS * _LARGEST_PIECE_BYTES]
            signed = [w - _WORD if w >= _WORD // 2 else w for w in _WEIGHTS]
            self._weights = torch.tensor(signed, dtype=torch.int64, device="cpu")
        self._address = self._ring.data_ptr()
        self._words = self._ring.view(torch.int64).view(_NUM_BUFFERS, -1, ALIGN_BYTES // 8).unbind()
        self._waiting: dict[int, _Piece] = {}
        """Buffer -> the piece that the disk is working on."""
        self._error: OSError | None = None
        self._gave_up = False
        self._use_threads = use_threads
        self._tasks: SimpleQueue[_Piece | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def is_stuck(self) -> bool:
        """Whether the disk did not answer, so that the buffers still belong to it."""
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
                self._begin(buffer, room, offset + start, is_write=True, alone=len(pieces) == 1)
                checksum = self._add(checksum, buffer, room)
        return checksum

    def read(self, address: int, num_bytes: int, offset: int) -> int:
        """Fill memory from the file. Return the checksum of what was read."""
        pieces = _pieces(num_bytes)
        checksum = 0
        with self._orderly():
            for i, (start, length) in enumerate(pieces[:_NUM_BUFFERS]):
                self._begin(i, _aligned(length), offset + start, alone=len(pieces) == 1)
            for i, (start, length) in enumerate(pieces):
                buffer = i % _NUM_BUFFERS
                self._wait_for(buffer)
                if self._error is not None:
                    break
                ctypes.memmove(address + start, self._address + buffer * _LARGEST_PIECE_BYTES, length)
                checksum = self._add(checksum, buffer, _aligned(length))
                if i + _NUM_BUFFERS < len(pieces):
                    then, more = pieces[i + _NUM_BUFFERS]
                    self._begin(buffer, _aligned(more), offset + then)
        return checksum

    def __del__(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def close(self) -> None:
        """End the threads, and wait for them unless the disk does not answer."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        for thread in threads if not self._waiting else ():
            thread.join(self._timeout_seconds)

    def _add(self, checksum: int, buffer: int, room: int) -> int:
        """Add a piece to a checksum: every word of a page, each page with a weight of its own, pieces in order."""
        num_pages = room // ALIGN_BYTES
        pages = self._words[buffer].narrow(0, 0, num_pages).sum(1)
        total = int(torch.dot(pages, self._weights.narrow(0, 0, num_pages)))
        return (checksum * 1099511628211 + total) % _WORD

    def _begin(self, buffer: int, num_bytes: int, offset: int, *, is_write: bool = False, alone: bool = False) -> None:
        if self._error is not None:
            return
        piece = _Piece(buffer * _LARGEST_PIECE_BYTES, num_bytes, offset, is_write=is_write)
        self._waiting[buffer] = piece  # before it starts: an interrupt in between must not lose track of it
        if alone or not self._use_threads:
            piece.move(self._fd, self._ring)
            return
        while len(self._threads) < _NUM_BUFFERS:
            arguments = (self._tasks, self._fd, self._ring)
            thread = threading.Thread(target=_serve, args=arguments, name="actmem-disk", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._tasks.put(piece)

    def _wait_for(self, buffer: int) -> None:
        piece = self._waiting.get(buffer)
        if piece is None:
            return
        if not piece.is_done.wait(self._timeout_seconds):
            self._gave_up = True
            raise OffloadError(
                f"the disk did not answer for {size(piece.num_bytes)} in {self._timeout_seconds:g} seconds. "
                "Look for disk errors in the system log, or name a directory on another disk."
            )
        del self._waiting[buffer]
        self._error = self._error or piece.error

    @contextmanager
    def _orderly(self) -> Generator[None]:
        """Let no piece outlive the copy it belongs to, and raise the error of any that failed."""
        self._error = None
        with torch.no_grad(), without_dispatch_modes():
            try:
                yield
            finally:
                for buffer in list(self._waiting) if not self._gave_up else ():
                    self._wait_for(buffer)
        error, self._error = self._error, None
        if error is not None:
            raise error


def takes_direct(fd: int) -> bool:
    """Check whether a file accepts one aligned page with O_DIRECT, and switch `fd` to that if so."""
    import fcntl

    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not direct:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct)
        pipe = Pipe(fd, use_threads=False)
        here = ctypes.addressof(page := (ctypes.c_char * ALIGN_BYTES)())
        if pipe.write(here, len(page), 0) == pipe.read(here, len(page), 0):
            return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return False


def drop_cached(fd: int, offset: int, num_bytes: int, *, written: bool) -> None:
    """Wait until a part of the file is on the disk, and drop its pages from the page cache."""
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
