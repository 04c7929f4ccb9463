"""Keep bytes in one file of a private directory.

See NOTE [ The way to the disk ] and NOTE [ The directory of a process ].
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading.folder import PrivateFolder, file_system
from actmem.offloading.pipe import ALIGN_BYTES, TIMEOUT_SECONDS, Pipe, drop_cached, takes_direct
from actmem.offloading.stores import Register, Slot, check_bytes, check_limit
from actmem.units import size

__all__ = ["DiskSlot", "DiskStore", "Extents"]

_STEP_BYTES = 64 * 2**20
_MEMORY = ("tmpfs", "ramfs")


class DiskSlot(Slot):
    """A range in a store's file. `checksum` is that of the last write; None if there was none."""

    __slots__ = ("checksum", "offset", "room_bytes")

    def __init__(self, num_bytes: int, offset: int, room_bytes: int) -> None:
        super().__init__(num_bytes)
        self.offset = offset
        self.room_bytes = room_bytes
        self.checksum: int | None = None


class DiskStore:
    """Keep bytes in a file that only this process and this user can read. See NOTE [ Stores ].

    The file grows in steps with its space reserved, and is removed at `close`, at exit, or after a crash by the next
    store in the same directory. Each concurrent copy has 6 MiB of buffers.

    Args:
        directory: where to make the private directory. None: the directory for temporary files; if that is held in
            memory (a tmpfs), name one explicitly, since nothing would be gained there.
        limit_bytes: how large the file may grow; None for as much as is free.
        way: "direct" bypasses the page cache, "buffered" goes through it and drops the pages; None for direct where the
            file system permits it.

    Attributes:
        way: the way in use.
        path: the file.
        is_memory: whether the directory is held in memory.

    >>> import torch
    >>> store = DiskStore(limit_bytes=2**30)
    >>> slot = store.take(3)
    >>> store.write(slot, torch.tensor([1, 2, 3], dtype=torch.uint8))
    >>> back = torch.zeros(3, dtype=torch.uint8)
    >>> store.read(slot, back); back
    tensor([1, 2, 3], dtype=torch.uint8)
    >>> store.close()
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        *,
        limit_bytes: int | None = None,
        way: Literal["direct", "buffered"] | None = None,
    ) -> None:
        check_limit(limit_bytes)
        if way not in (None, "direct", "buffered"):
            raise OffloadError(f"way = {way!r}: expected 'direct', 'buffered' or None.")
        base = Path(tempfile.gettempdir() if directory is None else directory).absolute()
        if not base.is_dir():
            raise OffloadError(f"directory = {str(base)!r} is not a directory. Create it, or name one that exists.")
        self.is_memory = file_system(base) in _MEMORY
        if self.is_memory and directory is None:
            raise OffloadError(
                f"the directory for temporary files, {str(base)!r}, is held in memory: offloading to it frees nothing. "
                "Name one on a disk: directory='/var/tmp'."
            )
        self._register: Register[DiskSlot] = Register("DiskStore")
        self._changed = threading.Condition(threading.Lock())
        self._pipes: list[Pipe] = []
        self._num_active = 0
        self._extents = Extents()
        self._folder = PrivateFolder(base)
        self._finalizer = weakref.finalize(self, self._folder.remove)  # also at exit
        self.path = self._folder.file
        self.limit_bytes = limit_bytes
        self.way = self._choose(way)

    def take(self, num_bytes: int) -> DiskSlot:
        """Reserve a range of the file; grow the file if no free range is long enough."""
        self._register.check()
        if num_bytes <= 0:
            raise OffloadError(f"num_bytes = {num_bytes}: a slot has at least one byte. Do not offload empty tensors.")
        room_bytes = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        with self._changed:
            self._register.check()
            self._check_there(num_bytes)
            for slot in self._register.given():
                self._extents.give(slot.offset, slot.room_bytes)
            offset = self._extents.take(room_bytes)
            if offset is None:
                self._grow(num_bytes, self._extents.missing(room_bytes))
                offset = self._extents.take(room_bytes)
                assert offset is not None
            return self._register.add(DiskSlot(num_bytes, offset, room_bytes))

    def give(self, slot: Slot) -> None:
        """Free a range of the file. Never blocks; safe in a finalizer."""
        assert isinstance(slot, DiskSlot)
        self._register.give(slot)

    def write(self, slot: Slot, source: Tensor) -> None:
        """Copy bytes to the disk. On return they are on the disk and not in the page cache."""
        assert isinstance(slot, DiskSlot)
        address = check_bytes(slot, source)
        with self._pipe(slot, "write") as pipe:
            slot.checksum = None
            self._check_there(slot.num_bytes)
            checksum = pipe.write(address, slot.num_bytes, slot.offset)
            if self.way == "buffered":
                drop_cached(self._folder.fd, slot.offset, slot.room_bytes, written=True)
            slot.checksum = checksum

    def read(self, slot: Slot, target: Tensor) -> None:
        """Copy bytes from the disk, and check that they are the ones that were written."""
        assert isinstance(slot, DiskSlot)
        address = check_bytes(slot, target)
        with self._pipe(slot, "read") as pipe:
            expected = slot.checksum
            if expected is None:
                raise OffloadError(
                    f"{size(slot.num_bytes)} at {slot.offset} of {self.path} were never written, or their last write "
                    "failed: there is nothing to read."
                )
            found = pipe.read(address, slot.num_bytes, slot.offset)
            if self.way == "buffered":
                drop_cached(self._folder.fd, slot.offset, slot.room_bytes, written=False)
            if found != expected:
                raise OffloadError(
                    f"{size(slot.num_bytes)} at {slot.offset} of {self.path} came back with checksum {found:016x}, "
                    f"but {expected:016x} was written: the file was changed or the disk is faulty. Nothing was "
                    "computed with them. Name a directory on another disk."
                )

    def close(self) -> None:
        """Remove the file and its directory. A second call does nothing."""
        if self._register.is_foreign:
            return
        with self._changed:
            self._register.is_closed = True
            if not self._changed.wait_for(lambda: self._num_active == 0, timeout=TIMEOUT_SECONDS):
                raise OffloadError(
                    f"{self._num_active} copies to or from {self.path} did not finish within {TIMEOUT_SECONDS:g} s. "
                    "The file is removed when the process ends."
                )
            while self._pipes:
                self._pipes.pop().close()
            self._register.clear()
            self._extents = Extents()
            self._finalizer()

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots in use."""
        return self._register.used_bytes

    @property
    def held_bytes(self) -> int:
        """Length of the file."""
        return self._extents.end

    @contextmanager
    def _pipe(self, slot: DiskSlot, verb: str) -> Generator[Pipe]:
        """Lend a pipe to one copy. There are as many pipes as concurrent copies."""
        self._register.check()
        with self._changed:
            self._register.check(slot)
            self._num_active += 1
            pipe = self._pipes.pop() if self._pipes else None
        try:
            pipe = pipe or Pipe(self._folder.fd)
            yield pipe
        except OSError as error:
            raise self._failed(verb, slot.num_bytes, error) from error
        finally:
            with self._changed:
                self._num_active -= 1
                if pipe is not None and not pipe.is_stuck:
                    self._pipes.append(pipe)
                self._changed.notify_all()

    def _choose(self, way: Literal["direct", "buffered"] | None) -> Literal["direct", "buffered"]:
        try:
            direct = way != "buffered" and takes_direct(self._folder.fd)
        except OSError as error:
            self._finalizer()
            raise self._failed("write", ALIGN_BYTES, error) from error
        if way == "direct" and not direct:
            self._finalizer()
            raise OffloadError(
                f"way = 'direct': the file system of {str(self.path.parent.parent)!r} does not permit it. "
                "Use way='buffered', or a directory on another disk."
            )
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._folder.fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is read ahead stays in the page cache
        return "direct" if direct else "buffered"

    def _grow(self, num_bytes: int, needed_bytes: int) -> None:
        """Grow the file by at least what is needed, within the limit and the free space."""
        fd, end = self._folder.fd, self._extents.end
        space = os.fstatvfs(fd)
        free_bytes = space.f_bavail * space.f_frsize
        room_bytes = free_bytes if self.limit_bytes is None else min(free_bytes, self.limit_bytes - end)
        if needed_bytes > room_bytes:
            limit = "no limit" if self.limit_bytes is None else f"limit_bytes = {size(self.limit_bytes)}"
            raise OffloadError(
                f"no room for {size(num_bytes)} in {self.path}: the file has {size(end)} ({size(self.used_bytes)} in "
                f"use, {limit}), and {size(free_bytes)} are free on the disk. Free some, raise limit_bytes, offload "
                "less, or name a directory on a larger disk."
            )
        step_bytes = max(needed_bytes, _STEP_BYTES, end // 4)
        step_bytes = max(needed_bytes, min(step_bytes, room_bytes // 2) // ALIGN_BYTES * ALIGN_BYTES)
        try:
            os.posix_fallocate(fd, end, step_bytes)
        except OSError as error:
            raise self._failed("reserve", step_bytes, error) from error
        self._extents.grow(step_bytes)

    def _check_there(self, num_bytes: int) -> None:
        if os.fstat(self._folder.fd).st_nlink == 0:
            raise OffloadError(
                f"cannot write {size(num_bytes)} to {self.path}: the file or its directory was removed while in use. "
                "Keep the directory until training ends, or name another."
            )

    def _failed(self, verb: str, num_bytes: int, error: OSError) -> OffloadError:
        repair = "Look for disk errors in the system log, or name a directory on another disk."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            repair = "Free some space, offload less, or name a directory on a larger disk."
        return OffloadError(f"cannot {verb} {size(num_bytes)} in {self.path}: {error.strerror}. {repair}")


class Extents:
    """Allocate parts of a range that can grow at its end.

    >>> parts = Extents()
    >>> parts.grow(100)
    >>> parts.take(30), parts.take(50), parts.take(30)
    (0, 30, None)
    >>> parts.give(0, 30); parts.give(30, 50); parts.free
    [(0, 100)]
    """

    def __init__(self) -> None:
        self.end = 0
        self.free: list[tuple[int, int]] = []
        """Start and length of each free part, in order; no two of them touch."""

    def take(self, length: int) -> int | None:
        """Return the start of the first free part that is long enough, or None."""
        for i, (start, free) in enumerate(self.free):
            if free > length:
                self.free[i] = (start + length, free - length)
                return start
            if free == length:
                del self.free[i]
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Free a part, and merge it with its neighbours."""
        i = bisect_left(self.free, (start, 0))
        if i < len(self.free) and start + length == self.free[i][0]:
            length += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == start:
            i -= 1
            before, more = self.free.pop(i)
            start, length = before, length + more
        self.free.insert(i, (start, length))

    def missing(self, length: int) -> int:
        """Return how much must be added at the end before `length` can be taken there."""
        tail = self.free[-1][1] if self.free and sum(self.free[-1]) == self.end else 0
        return max(0, length - tail)

    def grow(self, length: int) -> None:
        """Add a free part at the end."""
        self.end += length
        self.give(self.end - length, length)
