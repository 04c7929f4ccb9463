"""What the tests of the disk store share."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
import torch

from actmem.offloading.disk import DiskSlot, DiskStore

MIB = 2**20


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read_back(store: DiskStore, slot: DiskSlot) -> torch.Tensor:
    back = torch.zeros(slot.num_bytes, dtype=torch.uint8)
    store.read(slot, back)
    return back


def full_slot(store: DiskStore, num_bytes: int, seed: int = 0) -> DiskSlot:
    slot = store.take(num_bytes)
    store.write(slot, some_bytes(num_bytes, seed))
    return slot


def folders(base: Path) -> list[str]:
    return sorted(p.name for p in base.iterdir())


def open_files() -> set[str]:
    return {str(p) for p in Path("/proc/self/fd").iterdir()}


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int):
    """Mount a file system in memory that is soon full, or skip."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "actmem-test", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=20)
