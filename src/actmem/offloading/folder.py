"""Own a private directory that disappears with its process.

NOTE [ The directory of a process ]
Each store makes a directory `actmem-offload-PID-...` of its own, 0700 whatever the umask is, and holds a lock on it
(flock on the directory itself). The kernel lets go of the lock when the process dies, however it dies. So whoever
starts next and gets the lock knows that the owner is dead, and removes the one file and the directory. Only real
directories of the same user with such a name are looked at, and nothing but that file is ever deleted: a directory
with anything else in it stays.

Between making a directory and locking it, another process may find it, take its owner for dead, and remove it. So the
maker looks again once it has the lock: if the directory is no longer there, it makes another.

A forked child closes its copies of the descriptors: a lock is shared with them, and would outlive the owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import weakref
from pathlib import Path

from actmem.errors import OffloadError

__all__ = ["FILE_NAME", "PREFIX", "PrivateFolder", "file_system", "remove_dead"]

PREFIX = "actmem-offload-"
FILE_NAME = "activations"
_OURS = re.compile(re.escape(PREFIX) + r"\d+-[a-z0-9_]{8}")
_MAX_ATTEMPTS = 100


class PrivateFolder:
    """A private directory with one file under `base`. Making one also removes what dead processes left there.

    Attributes:
        path: the directory.
        file: the file in it, 0600, open for reading and writing as `fd`.
    """

    def __init__(self, base: Path) -> None:
        self._pid = os.getpid()
        self._fds: list[int] = []
        try:
            remove_dead(base)
            self.path, lock = _make_locked(base)
            self._fds.append(lock)
            self.file = self.path / FILE_NAME
            self.fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._fds.append(self.fd)
            os.fchmod(self.fd, 0o600)
        except OSError as error:
            self.remove()
            raise OffloadError(
                f"directory = {str(base)!r} cannot be used for offloading: {error.strerror}. "
                "Name a directory on a local disk that exists and that you may write to."
            ) from error
        _FOLDERS.add(self)

    def remove(self) -> None:
        """Close and delete everything. In a forked child: close only."""
        fds, self._fds = self._fds, []
        try:
            if os.getpid() == self._pid and hasattr(self, "path"):
                _delete(self.path)  # before the lock is let go
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)


_FOLDERS: weakref.WeakSet[PrivateFolder] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for folder in list(_FOLDERS):
        folder.remove()


os.register_at_fork(after_in_child=_let_go_in_child)


def remove_dead(base: Path) -> None:
    """Remove the directories under `base` whose processes are gone."""
    with os.scandir(base) as entries:
        found = [Path(entry.path) for entry in entries if _OURS.fullmatch(entry.name)]
    for path in found:
        with contextlib.suppress(OSError):  # another process may be removing it as well
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(path)
            finally:
                os.close(fd)


def _delete(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        (folder / FILE_NAME).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _make_locked(base: Path) -> tuple[Path, int]:
    for _ in range(_MAX_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base))
        try:
            path.chmod(0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.lstat().st_ino == os.fstat(fd).st_ino:
                return path, fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            os.close(fd)
            path.rmdir()
            raise
        os.close(fd)
    raise OffloadError(
        f"directory = {str(base)!r}: {_MAX_ATTEMPTS} private directories in a row were removed by another process "
        "as soon as they were created. Name another directory."
    )


def file_system(path: Path) -> str | None:
    """Return the type of the file system that a path is on, such as "ext4" or "tmpfs"; None if unknown."""
    number = path.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted:
            return kind.split()[0]
    return None
