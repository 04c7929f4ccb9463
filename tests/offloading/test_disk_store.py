from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import random
import resource
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from actmem.errors import OffloadError
from actmem.offloading import disk, folder, pipe
from actmem.offloading.disk import DiskStore
from actmem.offloading.pipe import Pipe
from tests.offloading.disks import MIB, folders, full_slot, read_back, small_disk, some_bytes
from tests.patience import PATIENCE_SECONDS

SIZES = [1, 511, 4096, 4097, 512 * 1024 + 1, 3 * MIB + 7, 17 * MIB + 4095]
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12 and later


@pytest.fixture
def store(tmp_path):
    made = DiskStore(tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_bytes_of_any_length_come_back_as_they_went(tmp_path, way):
    store = DiskStore(tmp_path, way=way)
    slots = [full_slot(store, n, seed=i) for i, n in enumerate(SIZES)]
    for i, slot in reversed(list(enumerate(slots))):
        assert torch.equal(read_back(store, slot), some_bytes(slot.num_bytes, seed=i))
    store.close()


@pytest.mark.parametrize("use_threads", [True, False])
def test_with_and_without_threads_the_file_and_the_checksum_are_the_same(tmp_path, use_threads):
    sent = some_bytes(5 * MIB + 3)
    with (tmp_path / "file").open("w+b") as file:
        moving = Pipe(file.fileno(), use_threads=use_threads)
        written = moving.write(sent.data_ptr(), len(sent), 4096)
        back = torch.zeros_like(sent)
        assert moving.read(back.data_ptr(), len(sent), 4096) == written
        moving.close()
        assert torch.equal(back, sent)
        file.seek(4096)
        assert file.read(len(sent)) == bytes(sent.tolist())
        assert set(file.read()) == {0}  # up to the end of the page


def test_a_slot_may_be_written_again(store):
    slot = full_slot(store, 10_000, seed=1)
    store.write(slot, some_bytes(10_000, seed=2))
    assert torch.equal(read_back(store, slot), some_bytes(10_000, seed=2))


def test_reading_what_was_never_written_raises(store):
    with pytest.raises(OffloadError, match="never written"):
        read_back(store, store.take(100))


def test_any_flipped_byte_is_found(store):
    slot = full_slot(store, 6 * MIB + 100)
    for at in (0, 4095, 3 * MIB + 1, 6 * MIB + 99):
        flip(store.path, slot.offset + at)
        with pytest.raises(OffloadError, match="came back with checksum"):
            read_back(store, slot)
        flip(store.path, slot.offset + at)
        assert torch.equal(read_back(store, slot), some_bytes(slot.num_bytes))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("length", [4096, 512 * 1024, 2 * MIB])
def test_two_parts_in_each_others_place_are_found(store, length):
    slot = full_slot(store, 8 * MIB)
    with store.path.open("r+b") as file:
        file.seek(slot.offset)
        first, second = file.read(length), file.read(length)
        file.seek(slot.offset)
        file.write(second + first)
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(OffloadError, match="came back with checksum"):
        read_back(store, slot)


def test_a_file_that_was_cut_short_is_an_error_with_path_and_size(store):
    slot = full_slot(store, 3 * MIB)
    os.truncate(store.path, MIB)
    with pytest.raises(OffloadError, match=rf"cannot read 3\.0 MiB in {store.path}: the file is shorter"):
        read_back(store, slot)


def test_a_failed_write_leaves_nothing_that_can_be_read(store, monkeypatch):
    slot = full_slot(store, MIB)
    read_only = os.open(store.path, os.O_RDONLY)
    broken = Pipe(read_only)  # the kernel refuses each piece
    monkeypatch.setattr(store, "_pipes", [broken])
    with pytest.raises(OffloadError, match=r"cannot write 1\.0 MiB"):
        store.write(slot, some_bytes(MIB))
    monkeypatch.setattr(store, "_pipes", [])
    broken.close()
    os.close(read_only)
    with pytest.raises(OffloadError, match="last write failed"):
        read_back(store, slot)
    store.write(slot, some_bytes(MIB, seed=3))
    assert torch.equal(read_back(store, slot), some_bytes(MIB, seed=3))


@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_offloaded_bytes_do_not_stay_in_the_page_cache(tmp_path, way):
    if folder.file_system(tmp_path) in disk._MEMORY:
        pytest.skip("the directory for tests is held in memory")
    store = DiskStore(tmp_path, way=way)
    slots = [full_slot(store, 4 * MIB) for _ in range(4)]
    assert cached_pages(store.path) == 0
    for slot in slots:
        read_back(store, slot)
    assert cached_pages(store.path) == 0
    store.close()


def cached_pages(path: Path) -> int:
    """Count the pages of a file that are in memory, with mincore."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        anchor = ctypes.c_char.from_buffer(mapped)
        seen = (ctypes.c_ubyte * num_pages)()
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), seen) == 0
        del anchor
    return sum(page & 1 for page in seen)


def test_writes_and_reads_of_several_threads_do_not_mix(store):
    slots = [full_slot(store, 2 * MIB + i, seed=i) for i in range(4)]
    failed: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(5):
                assert torch.equal(read_back(store, slots[i]), some_bytes(2 * MIB + i, seed=i))
                store.write(slots[i], some_bytes(2 * MIB + i, seed=i))
        except BaseException as error:  # noqa: BLE001 - shown below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert failed == []


# ---------------------------------------------------------------- room


def test_a_thousand_takes_of_varying_size_leave_the_file_as_it_was(store):
    rng = random.Random(0)
    held = []
    for _ in range(100):
        slots = [store.take(rng.randint(1, 4 * MIB)) for _ in range(10)]
        rng.shuffle(slots)
        for slot in slots:
            store.give(slot)
        held.append(store.held_bytes)
    assert held[0] == held[-1]
    assert store.used_bytes == 0
    store.take(held[0])  # all of it is one part again
    assert store.held_bytes == held[0]
    assert store.path.stat().st_size == store.held_bytes


def test_parts_never_overlap_whatever_is_taken_and_given(store):
    rng = random.Random(1)
    taken: list[disk.DiskSlot] = []
    for _ in range(1000):
        if taken and rng.random() < 0.5:
            store.give(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(store.take(rng.randint(1, 300_000)))
        spans = sorted((s.offset, s.offset + s.room_bytes) for s in taken)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(start % 4096 == 0 for start, _ in spans)
        assert store.used_bytes == sum(s.num_bytes for s in taken)


def test_space_is_reserved_when_it_is_taken(store):
    store.take(10 * MIB)
    assert store.path.stat().st_blocks * 512 >= store.held_bytes >= 10 * MIB


def test_the_limit_holds_to_the_page(tmp_path):
    store = DiskStore(tmp_path, limit_bytes=2 * MIB)
    first, second = store.take(MIB), store.take(MIB)
    with pytest.raises(OffloadError, match=r"no room for 1 B .*\(2\.0 MiB in use, limit_bytes = 2\.0 MiB\)"):
        store.take(1)
    store.give(first)
    store.give(second)
    store.take(2 * MIB)
    assert store.held_bytes == 2 * MIB
    store.close()


def test_more_than_the_disk_has_raises_before_anything_is_written(store):
    with pytest.raises(OffloadError, match=r"no room for .* GiB in .* are free on the disk"):
        store.take(2**60)
    assert store.held_bytes == 0


def test_giving_twice_raises_and_frees_once(store):
    slot = store.take(5000)
    store.give(slot)
    with pytest.raises(OffloadError, match="given back before"):
        store.give(slot)
    assert store.take(5000).offset != store.take(5000).offset


def test_a_finalizer_may_give_a_slot_back_inside_take(store, monkeypatch):
    slot = store.take(5000)

    class Holder:
        def __del__(self):
            store.give(slot)

    holder = Holder()
    holder.itself = holder
    del holder
    real = os.fstatvfs
    monkeypatch.setattr(disk.os, "fstatvfs", lambda fd: (gc.collect(), real(fd))[1])  # while `take` holds its lock
    done = threading.Event()
    threading.Thread(target=lambda: (store.take(200 * MIB), done.set()), daemon=True).start()
    assert done.wait(PATIENCE_SECONDS)
    assert store.used_bytes == 200 * MIB


# ---------------------------------------------------------------- faults


def test_a_full_disk_raises_at_the_take_with_path_and_sizes_and_what_is_there_stays(tmp_path):
    with small_disk(tmp_path / "small", 8 * MIB) as base:
        store = DiskStore(base)
        assert store.is_memory
        slot = full_slot(store, 3 * MIB)
        (base / "another").write_bytes(bytes(3 * MIB))
        with pytest.raises(OffloadError, match=rf"no room for 4\.0 MiB in {store.path}: .* are free on the disk"):
            store.take(4 * MIB)
        assert torch.equal(read_back(store, slot), some_bytes(3 * MIB))
        (base / "another").unlink()
        store.take(4 * MIB)
        store.close()
        assert folders(base) == []


def test_a_disk_that_fills_up_between_the_check_and_the_growth_raises(tmp_path, monkeypatch):
    with small_disk(tmp_path / "small", 8 * MIB) as base:
        store = DiskStore(base)
        fill = base / "another"
        real = os.fstatvfs

        def race(fd):
            found = real(fd)
            fill.write_bytes(bytes(6 * MIB))
            return found

        monkeypatch.setattr(disk.os, "fstatvfs", race)
        with pytest.raises(OffloadError, match=rf"cannot reserve 5\.0 MiB in {store.path}: No space left"):
            store.take(5 * MIB)
        monkeypatch.undo()
        fill.unlink()
        assert store.held_bytes == 0
        assert torch.equal(read_back(store, full_slot(store, 5 * MIB)), some_bytes(5 * MIB))
        store.close()


def test_a_disk_that_is_full_at_the_start_says_so(tmp_path):
    with small_disk(tmp_path / "small", MIB) as base:
        with contextlib.suppress(OSError), (base / "another").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(OffloadError, match="No space left"):
            DiskStore(base).take(MIB)
        assert folders(base) == ["another"]


def test_a_limit_of_the_system_on_the_size_of_files_raises(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OffloadError, match=rf"cannot reserve .* in {store.path}: File too large"):
            store.take(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    full_slot(store, 2 * MIB)


def test_a_removed_directory_raises_at_the_next_write_and_what_was_written_can_be_read(store):
    slot, later = full_slot(store, MIB), store.take(MIB)
    store.path.unlink()
    store.path.parent.rmdir()
    with pytest.raises(OffloadError, match=rf"cannot write 1\.0 MiB to {store.path}: .* was removed"):
        store.write(later, some_bytes(MIB))
    with pytest.raises(OffloadError, match="was removed"):
        store.take(MIB)
    assert torch.equal(read_back(store, slot), some_bytes(MIB))


def test_a_disk_that_does_not_answer_raises_and_its_buffers_are_never_used_again(store, monkeypatch):
    slot = full_slot(store, 5 * MIB)
    silent, answers = Pipe(store._folder.fd, timeout_seconds=0.2), threading.Event()
    move = pipe._Piece.move
    monkeypatch.setattr(pipe._Piece, "move", lambda *piece: (answers.wait(PATIENCE_SECONDS), move(*piece)))
    monkeypatch.setattr(store, "_pipes", [silent])
    with pytest.raises(OffloadError, match=r"did not answer for .* in 0\.2 seconds"):
        store.write(slot, some_bytes(5 * MIB))
    assert store._pipes == [] and silent.is_stuck
    answers.set()
    silent.close()
    store.write(slot, some_bytes(5 * MIB))


@pytest.mark.parametrize("name", ["missing", "a_file"])
def test_a_directory_that_is_none_raises_at_once(tmp_path, name):
    (tmp_path / "a_file").touch()
    with pytest.raises(OffloadError, match=f"directory = '{tmp_path / name}' is not a directory"):
        DiskStore(tmp_path / name)


def test_a_directory_that_may_not_be_written_raises_at_once(tmp_path):
    if Path("/sys/kernel").is_dir():  # refuses everybody, root too
        with pytest.raises(OffloadError, match="cannot be used for offloading"):
            DiskStore("/sys/kernel")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(OffloadError, match="cannot be used for offloading: Permission denied"):
            DiskStore(tmp_path)


def test_temporary_files_in_memory_are_no_disk_unless_named(tmp_path, monkeypatch):
    with small_disk(tmp_path / "small", 8 * MIB) as base:
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        with pytest.raises(OffloadError, match=r"is held in memory.*directory='/var/tmp'"):
            DiskStore()
        assert folders(base) == []


@pytest.mark.parametrize("arguments", [{"limit_bytes": 0}, {"limit_bytes": -1}, {"way": "gpu"}])
def test_bad_arguments_raise_and_leave_nothing(tmp_path, arguments):
    with pytest.raises(OffloadError, match=next(iter(arguments))):
        DiskStore(tmp_path, **arguments)
    assert folders(tmp_path) == []


def test_errors_of_the_kernel_keep_their_cause(store):
    slot = full_slot(store, MIB)
    os.truncate(store.path, 0)
    with pytest.raises(OffloadError) as caught:
        read_back(store, slot)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
