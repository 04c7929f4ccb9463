from __future__ import annotations

import fcntl
import gc
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from actmem.errors import OffloadError
from actmem.offloading import folder
from actmem.offloading.disk import DiskStore
from tests.children import child, ended
from tests.offloading.disks import MIB, folders, full_slot, open_files, read_back, some_bytes
from tests.patience import PATIENCE_SECONDS

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12 and later


@pytest.fixture
def store(tmp_path):
    made = DiskStore(tmp_path)
    yield made
    made.close()


def test_nobody_else_can_read_it_whatever_the_umask_is(tmp_path):
    for mask in (0, 0o777):
        before = os.umask(mask)
        try:
            store = DiskStore(tmp_path)
        finally:
            os.umask(before)
        full_slot(store, 100)
        assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
        store.close()


def test_close_removes_everything_leaves_no_descriptor_and_may_be_called_twice(tmp_path):
    gc.collect()
    before = open_files()
    store = DiskStore(tmp_path)
    slot = full_slot(store, MIB)
    assert len(folders(tmp_path)) == 1
    store.close()
    store.close()
    assert folders(tmp_path) == []
    assert open_files() == before
    assert (store.used_bytes, store.held_bytes) == (0, 0)
    store.give(slot)  # finalizers come late
    for use in (lambda: store.take(1), lambda: store.write(slot, some_bytes(MIB)), lambda: read_back(store, slot)):
        with pytest.raises(OffloadError, match="is closed"):
            use()


def test_a_store_that_nobody_holds_removes_its_file(tmp_path):
    before = open_files()
    full_slot(DiskStore(tmp_path), MIB)
    gc.collect()
    assert folders(tmp_path) == []
    assert open_files() == before


OTHER = """
import sys, time, torch
from actmem.offloading.disk import DiskStore
store = DiskStore(sys.argv[1])
store.write(store.take(100_000), torch.ones(100_000, dtype=torch.uint8))
print(store.path, flush=True)
{then}
"""


@contextmanager
def other_process(base: Path, then: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that writes something and then does as told; give it and its file."""
    with child("-c", OTHER.format(then=then), str(base)) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_process_that_ends_leaves_nothing(tmp_path, then):
    with other_process(tmp_path, then) as (process, _):
        ended(process)
    assert folders(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_a_living_one_keeps_its_own(tmp_path):
    mine = tmp_path / f"{folder.PREFIX}12-abcdefgh"
    mine.mkdir()
    (mine / "my data").write_text("kept")
    (tmp_path / "actmem-results").mkdir()
    sleeps, waits = "time.sleep(600)", "sys.stdin.readline()"
    with other_process(tmp_path, sleeps) as (killed, left), other_process(tmp_path, waits) as (living, kept):
        killed.kill()
        ended(killed)
        assert left.stat().st_size > 0
        store = DiskStore(tmp_path)
        assert not left.parent.exists()
        assert kept.exists()
        assert (mine / "my data").exists() and (tmp_path / "actmem-results").exists()
        store.close()
        ended(living, "\n")
        assert not kept.parent.exists()


def test_a_directory_that_is_taken_for_dead_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    real, removed = fcntl.flock, []

    def be_late(fd, how):
        if not removed:
            removed.append(folders(tmp_path))
            (tmp_path / removed[0][0]).rmdir()  # as another process does that starts just now
        return real(fd, how)

    monkeypatch.setattr(folder.fcntl, "flock", be_late)
    store = DiskStore(tmp_path)
    assert removed[0] and folders(tmp_path) == [store.path.parent.name] != removed[0]
    assert torch.equal(read_back(store, full_slot(store, 100)), some_bytes(100))
    store.close()


def in_child(work) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@forks
def test_a_forked_child_can_neither_use_nor_remove_the_file_of_its_parent(store):
    slot = full_slot(store, MIB)

    def child() -> int:
        num_raised = 0
        for use in (lambda: store.take(1), lambda: store.write(slot, some_bytes(MIB)), lambda: read_back(store, slot)):
            try:
                use()
            except OffloadError as error:
                num_raised += "forked" in str(error)
        store.give(slot)
        store.close()
        store._finalizer()
        holds = any(str(store.path.parent) in str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.exists())
        return 50 if holds else num_raised

    assert in_child(child) == 3
    assert torch.equal(read_back(store, slot), some_bytes(MIB))
    store.write(slot, some_bytes(MIB, seed=1))
    assert store.path.exists()


@forks
def test_a_child_that_lives_on_does_not_keep_the_lock_of_a_dead_parent(tmp_path):
    then = "import os\nif not os.fork():\n    print(os.getpid(), flush=True)\ntime.sleep(600)"
    with other_process(tmp_path, then) as (parent, left):
        assert parent.stdout is not None
        forked = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait(PATIENCE_SECONDS)
            DiskStore(tmp_path).close()
            assert not left.parent.exists()
        finally:
            os.kill(forked, signal.SIGKILL)


@forks
def test_a_child_may_make_a_store_of_its_own(store, tmp_path):
    slot = full_slot(store, 1000)

    def child() -> int:
        own = DiskStore(tmp_path)
        same = torch.equal(read_back(own, full_slot(own, 1000, seed=5)), some_bytes(1000, seed=5))
        own.close()
        return 0 if same else 1

    assert in_child(child) == 0
    assert torch.equal(read_back(store, slot), some_bytes(1000))
