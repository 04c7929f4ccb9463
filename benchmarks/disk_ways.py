"""Compare ways of reaching a disk, and the disk store with raw I/O: `python -m benchmarks.disk_ways [directory]`.

Every way leaves the bytes on the disk and out of the page cache, and reads them from the disk: the column "cache" says
how much of them was in the page cache afterwards. "raw" moves an aligned buffer with O_DIRECT, as `fio` would; the ways
that start at a tensor (64-byte aligned) have to copy. Speeds are the median of some rounds, which take turns.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from actmem.offloading.disk import DiskStore
from actmem.offloading.pipe import drop_cached

MIB = 2**20
TOTAL_BYTES = 256 * MIB
Move = Callable[[int], None]


def _all_of(move: Callable[..., int], fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        part = view[done:]
        done += move(fd, part if move is os.pwrite else [part], offset + done)


def _ways(path: Path, num_bytes: int) -> dict[str, tuple[int, Move, Move]]:
    """Return for each way a descriptor, and functions that write and read `num_bytes` at an offset."""
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    cached = os.open(path, os.O_RDWR)
    aligned = memoryview(mmap.mmap(-1, num_bytes))
    aligned[:] = os.urandom(num_bytes)
    tensor = torch.frombuffer(bytearray(os.urandom(num_bytes + 64)), dtype=torch.uint8)[:num_bytes]
    view = memoryview(tensor.numpy())
    mapped = mmap.mmap(cached, TOTAL_BYTES)
    pages = memoryview(mapped)

    def write_through_cache(offset: int) -> None:
        _all_of(os.pwrite, cached, view, offset)
        drop_cached(cached, offset, num_bytes, written=True)

    def read_through_cache(offset: int) -> None:
        _all_of(os.preadv, cached, view, offset)
        drop_cached(cached, offset, num_bytes, written=False)

    def write_mapped(offset: int) -> None:
        pages[offset : offset + num_bytes] = view
        mapped.flush(offset, num_bytes)
        mapped.madvise(mmap.MADV_DONTNEED, offset, num_bytes)
        drop_cached(cached, offset, num_bytes, written=False)

    def read_mapped(offset: int) -> None:
        mapped.madvise(mmap.MADV_WILLNEED, offset, num_bytes)
        view[:] = pages[offset : offset + num_bytes]
        mapped.madvise(mmap.MADV_DONTNEED, offset, num_bytes)
        drop_cached(cached, offset, num_bytes, written=False)

    def write_copied(offset: int) -> None:
        aligned[:] = view
        _all_of(os.pwrite, direct, aligned, offset)

    def read_copied(offset: int) -> None:
        _all_of(os.preadv, direct, aligned, offset)
        view[:] = aligned

    return {
        "raw": (
            direct,
            lambda offset: _all_of(os.pwrite, direct, aligned, offset),
            lambda offset: _all_of(os.preadv, direct, aligned, offset),
        ),
        "direct, copied": (direct, write_copied, read_copied),
        "page cache, dropped": (cached, write_through_cache, read_through_cache),
        "mapped, dropped": (cached, write_mapped, read_mapped),
    }


def _store_way(store: DiskStore, num_bytes: int) -> tuple[Move, Move]:
    tensor = torch.frombuffer(bytearray(os.urandom(num_bytes + 64)), dtype=torch.uint8)[:num_bytes]
    slots = [store.take(num_bytes) for _ in range(TOTAL_BYTES // num_bytes)]
    return (
        lambda offset: store.write(slots[offset // num_bytes], tensor),
        lambda offset: store.read(slots[offset // num_bytes], tensor),
    )


def _cached_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


def _seconds(move: Move, num_bytes: int) -> tuple[float, float]:
    began, worked = time.perf_counter(), time.process_time()
    for offset in range(0, TOTAL_BYTES, num_bytes):
        move(offset)
    return time.perf_counter() - began, time.process_time() - worked


def compare(directory: Path, num_bytes: int, *, num_rounds: int = 5) -> dict[str, dict[str, float]]:
    """Measure every way with blocks of one size; speeds in MiB per second, work in CPU seconds per GiB."""
    store = DiskStore(directory)
    path = store.path.parent / "ways"
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, TOTAL_BYTES)
        ways = _ways(path, num_bytes)
        moves = {name: (write, read) for name, (_, write, read) in ways.items()}
        moves[f"DiskStore, {store.way}"] = _store_way(store, num_bytes)
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in moves}
        for turn in range(num_rounds + 1):  # the first writes to space never written before, which is slower
            for name, (write, read) in moves.items():
                before = _cached_bytes()
                times = *_seconds(write, num_bytes), *_seconds(read, num_bytes)
                if turn:
                    found[name].append((*times, _cached_bytes() - before))
                drop_cached(ways["raw"][0], 0, TOTAL_BYTES, written=True)  # what one way left must not help the next
        for fd in {fd for fd, _, _ in ways.values()}:
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)
        store.close()
    result: dict[str, dict[str, float]] = {}
    for name, rows in found.items():
        write, write_work, read, read_work, cached = (statistics.median(column) for column in zip(*rows, strict=True))
        result[name] = {
            "write": TOTAL_BYTES / MIB / write,
            "read": TOTAL_BYTES / MIB / read,
            "work": (write_work + read_work) / (TOTAL_BYTES / 2**30),
            "cached": cached / MIB,
        }
    return result


def main() -> None:
    """Print a table for blocks of 1, 4, 16 and 64 MiB."""
    torch.set_num_threads(1)
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    print(" MiB way                    write MiB/s  of raw  read MiB/s  of raw  CPU s/GiB  cache")
    for num_mib in (1, 4, 16, 64):
        ways = compare(directory, num_mib * MIB)
        raw = ways["raw"]
        for name, way in ways.items():
            print(
                f"{num_mib:4} {name:22} {way['write']:11.0f} {way['write'] / raw['write']:7.2f} {way['read']:11.0f} "
                f"{way['read'] / raw['read']:7.2f} {way['work']:10.2f} {way['cached']:6.0f}"
            )


if __name__ == "__main__":
    main()
