"""From the device to disk and back, through host memory: right bytes under every schedule, no leak, errors told.

The first half runs on simulated threads, where the checker sees every race: see NOTE [ Simulated threads ]. The second
half has real threads and a real disk store; only the device is simulated.
"""

from __future__ import annotations

import gc
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading import staged
from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.disk import DiskStore
from actmem.offloading.host import HostStore
from actmem.offloading.staged import StagedLane
from actmem.offloading.threads import ThreadLane
from actmem.offloading.window import Window
from tests.offloading.disks import folders
from tests.offloading.programs import Outcome, Program, Saved, Tickets
from tests.offloading.simulated_threads import SharedLane, SimulatedDisk, SimulatedThreads, Staging, shared
from tests.offloading.virtual import Event, VirtualDevice
from tests.patience import PATIENCE_SECONDS, eventually

# ---------------------------------------------------------------------- simulated threads: every race is seen


class StagedProgram(Program):
    """A random program whose values go to a simulated disk."""

    def __init__(self, seed: int, *, use_streams: bool = True) -> None:
        self.use_streams, self.num_given_up = use_streams, 0
        self.bound = random.Random(seed).choice([None, None, 1, 200])
        super().__init__(seed, self._make_lane, self._make_tickets)
        self.store: Any = self.disk

    def _make_lane(self, device: VirtualDevice) -> Any:
        device = shared(device)
        self.staging: Any = Staging(device)
        self.disk = SimulatedDisk(device, self.staging)
        lane: Any = SharedLane(device, use_streams=self.use_streams)
        return StagedLane(
            lane, SimulatedThreads(device), self.staging, window=None if self.bound is None else Window(self.bound)
        )

    def _make_tickets(self, device: VirtualDevice, lane: Any, _: Any, bound: int) -> Tickets:
        disk: Any = self.disk
        return Tickets(device, lane, disk, bound)

    def use(self, one: Saved) -> None:
        if one.ticket.parcel is not None and self.random.random() < 0.3:
            self.tickets.prefetch(one.ticket)
            one.ticket.parcel.coming = None  # given up, and fetched again below
            self.num_given_up += 1
            if self.random.random() < 0.5:
                self.make()
                self.send(place=0)
        if self.random.random() < 0.4:
            self.switch()  # another stream than the one on which a fetch began
        super().use(one)

    def run(self, num_steps: int = 2) -> Outcome:
        outcome = super().run(num_steps)
        if self.staging.used_bytes:
            self.device.report("leak", f"{self.staging.used_bytes} bytes between the device and the disk")
        return outcome


def search(num_programs: int, *, first_seed: int = 0, use_streams: bool = True) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_programs):
        program = StagedProgram(seed, use_streams=use_streams)
        outcome = program.run()
        assert not outcome.findings, f"seed {seed}: {outcome.findings[0]}"
        counts.update(
            observed=outcome.num_observed,
            written=program.disk.num_written,
            read=program.disk.num_read,
            unordered=program.device.num_overtaken,
            given_up=program.num_given_up,
            reused=program.disk.num_written + program.disk.num_read - program.staging.held_bytes // 64,
        )
    return counts


def test_random_programs_under_random_schedules_are_free_of_races_leaks_and_wrong_bytes() -> None:
    counts = search(250)
    assert counts["observed"] > 1000 and counts["written"] > 1000 and counts["read"] > 1000
    assert counts["unordered"] > 1000, "all ran in the order in which it was asked for: no schedule was tried"
    assert counts["given_up"] > 200, "no fetch was given up"
    assert counts["reused"] > 500, "host memory was never reused: no early reuse could be seen"


@pytest.mark.slow
def test_thousands_of_random_schedules_are_free_of_races_leaks_and_wrong_bytes() -> None:
    assert search(3000, first_seed=10_000)["observed"] > 10_000


def test_without_streams_the_same_programs_are_free_of_races_too() -> None:
    assert search(60, use_streams=False)["observed"] > 200


class NoWaitForTheDevice(staged._Through):
    """The disk is written from host memory that the device has not filled yet."""

    def write(self, slot: Any, source: Tensor) -> None:
        self._store.write(slot, source)
        self._loan = None


class GivenBeforeTheWrite(staged._Through):
    """Host memory goes back before the disk has it."""

    def write(self, slot: Any, source: Tensor) -> None:
        assert self._first is not None
        self._first.wait()
        self._loan = None
        self._store.write(slot, source)


class GivenBeforeTheRead(staged._Through):
    """Host memory goes back with a fetch that is given up, while the disk still fills it."""

    def read(self, slot: Any, target: Tensor) -> None:
        self._loan = None
        self._store.read(slot, target)


class NoWaitForTheDisk(staged._Back):
    """The device copies from host memory that the disk has not filled yet."""

    def wait(self) -> None:
        first, self._first = self._first, _Nothing()
        super().wait()
        self._first = first


class _Nothing:
    def wait(self) -> None:
        pass

    release = wait

    def done(self) -> bool:
        return True


class ReleasedAtOnce(staged._Out):
    """A tensor may be written on before it has left the device."""

    def release(self) -> None:
        pass


class GivenBeforeTheCopyBack(staged._Loan):
    """Host memory goes back to its pool, whatever the device still copies."""

    def __del__(self) -> None:
        self._staging.give(self.slot)


class NeverGiven(staged._Loan):
    """Host memory grows."""

    def __del__(self) -> None:
        pass


def no_order(lane: Any, mark: Any) -> None:
    """Leave out that a copy back comes after what the stream was given on which its fetch began."""


DEFECTS: dict[str, tuple[str, Any, set[str]]] = {
    "a write to disk that does not wait for the device": (
        "_Through",
        NoWaitForTheDevice,
        {"host slot read in flight", "wrong bytes"},
    ),
    "host memory given back before the disk has it": (
        "_Through",
        GivenBeforeTheWrite,
        {"host slot overwritten in flight"},
    ),
    "host memory given back while the disk fills it": (
        "_Through",
        GivenBeforeTheRead,
        {"host slot overwritten in flight"},
    ),
    "a copy to the device that does not wait for the disk": (
        "_Back",
        NoWaitForTheDisk,
        {"host slot read in flight", "wrong bytes"},
    ),
    "host memory given back while the device reads it": (
        "_Loan",
        GivenBeforeTheCopyBack,
        {"slot given in flight", "host slot overwritten in flight"},
    ),
    "a copy back behind another stream than the one on which its fetch began": (
        "_order",
        no_order,
        {"reuse before its read"},
    ),
    "a tensor written on before it has left": ("_Out", ReleasedAtOnce, {"reuse before its read"}),
    "host memory that grows": ("_Loan", NeverGiven, {"leak"}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, broken, kinds = DEFECTS[name]
    monkeypatch.setattr(staged, part, broken)
    found: Counter[str] = Counter()
    for seed in range(300):
        found.update(StagedProgram(seed).run().kinds)
        if kinds <= set(found):
            return
    pytest.fail(f"not found: {kinds - set(found)}; found {dict(found)}")


# ---------------------------------------------------------------------- real threads, a real disk


class LockedDevice(VirtualDevice):
    """A virtual accelerator that several threads may use. The checker knows one thread only, so it is off."""

    def __init__(self, seed: int = 0, *, eager: float = 0.3) -> None:
        self._guard = threading.RLock()
        super().__init__(seed, eager=eager, check=False, arena_bytes=1 << 20)


def _guarded(name: str) -> Callable[..., Any]:
    def call(self: LockedDevice, *arguments: Any, **options: Any) -> Any:
        with self._guard:
            return getattr(super(LockedDevice, self), name)(*arguments, **options)

    return call


for _name in ("record", "wait", "done", "synchronise", "launch", "keep_alive", "allocate", "_freed", "drain"):
    setattr(LockedDevice, _name, _guarded(_name))


class GatedStore:
    """A store whose copies begin when the test says so."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.writing, self.reading = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, slot: Any, source: Tensor) -> None:
        self.writing.set()
        assert self.may_write.wait(PATIENCE_SECONDS)
        self._store.write(slot, source)

    def read(self, slot: Any, target: Tensor) -> None:
        self.reading.set()
        assert self.may_read.wait(PATIENCE_SECONDS)
        self._store.read(slot, target)

    def open(self) -> None:
        self.may_write.set()
        self.may_read.set()


class Rig:
    """A staged lane with all that it stands on."""

    def __init__(self, directory: Path, *, seed: int = 0, bound: int | None = None) -> None:
        self.device = LockedDevice(seed)
        self.disk = DiskStore(directory)
        self.store: Any = GatedStore(self.disk)
        self.staging = HostStore(pin=False)
        self.threads = ThreadLane(timeout_seconds=PATIENCE_SECONDS)
        self.lane = StagedLane(
            AcceleratorLane(self.device), self.threads, self.staging, window=None if bound is None else Window(bound)
        )

    def made(self, value: int, num_bytes: int = 640) -> Tensor:
        """Return a device tensor that a kernel will fill."""
        tensor = self.device.allocate(num_bytes)
        self.device.kernel("make", [], [tensor], lambda reads, writes: writes[0].fill(value))
        return tensor

    def sent(self, value: int, num_bytes: int = 640) -> tuple[Any, Any]:
        slot = self.store.take(num_bytes)
        return slot, self.lane.out(self.made(value, num_bytes), self.store, slot)

    def fetched(self, slot: Any) -> list[int]:
        """Fetch a slot, and return what a kernel finds there: each value once."""
        target = self.device.allocate(slot.num_bytes)
        self.lane.back(self.store, slot, target).wait()
        return self.found(target)

    def found(self, target: Tensor) -> list[int]:
        seen: list[int] = []
        self.device.kernel("use", [target], [], lambda reads, writes: seen.extend(np.unique(reads[0]).tolist()))
        assert self.device.synchronise(self.device.record(self.device.compute), 1.0)
        return seen


@contextmanager
def rig(directory: Path, **options: Any) -> Iterator[Rig]:
    """Make a rig, and demand that nothing is left of it."""
    threads_before, files_before = threading.active_count(), folders(directory)
    one = Rig(directory, **options)
    try:
        yield one
        one.store.open()
        one.lane.settle()
        assert one.staging.used_bytes == 0, "host memory between the device and the disk is given back"
    finally:
        one.store.open()
        one.lane.close()
        one.disk.close()
    one.lane.close()
    assert one.staging.held_bytes == 0
    assert threading.active_count() == threads_before
    assert folders(directory) == files_before


@pytest.mark.parametrize("seed", range(5))
def test_what_went_to_disk_comes_back_to_the_byte(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with rig(tmp_path, seed=seed) as one:
        one.store.open()
        for _ in range(3):
            sizes = [draw.choice([64, 640, 4096, 10_000]) for _ in range(20)]
            slots = [one.sent(value, size)[0] for value, size in enumerate(sizes)]
            order = draw.sample(range(20), 20)
            ahead = {}
            for value in order[:8]:  # some are fetched ahead
                target = one.device.allocate(sizes[value])
                ahead[value] = target, one.lane.back(one.store, slots[value], target)
            for value in order[:-3]:  # and some never
                if value in ahead:
                    target, copy = ahead.pop(value)
                    copy.wait()
                    assert one.found(target) == [value]
                    del target, copy
                else:
                    assert one.fetched(slots[value]) == [value]
            for slot in slots:
                one.lane.give(one.store, slot)
            one.lane.settle()
            assert one.disk.used_bytes == 0
            assert one.staging.used_bytes == 0


def test_the_program_goes_on_while_the_disk_writes(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        (slot, copy), address = one.sent(7), one.device._end
        copy.release()
        assert not copy.done()
        assert one.device.live_bytes == 0, "the tensor is gone from the device, and not yet on the disk"
        again = one.made(8)
        assert one.device._end == address, "its memory is in use again"
        one.store.may_write.set()
        copy.wait()
        assert copy.done()
        one.store.may_read.set()
        assert one.fetched(slot) == [7]
        assert one.found(again) == [8]


def test_host_memory_on_the_way_to_a_slow_disk_is_bounded(tmp_path: Path) -> None:
    with rig(tmp_path, bound=1500) as one:
        for value in range(2):
            one.sent(value)[1].release()
        assert one.staging.used_bytes == 1280
        third = threading.Thread(target=one.sent, args=(2,))
        third.start()
        time.sleep(0.05)
        assert third.is_alive(), "it waits for the oldest write"
        assert one.staging.used_bytes == 1280
        one.store.may_write.set()
        third.join(PATIENCE_SECONDS)
        assert not third.is_alive()
        slot, copy = one.sent(3, 4000)  # what is larger than the bound goes alone
        copy.wait()
        one.store.may_read.set()
        assert one.fetched(slot) == [3]


def test_a_fetch_that_is_given_up_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.store.may_write.set()
        slots = [one.sent(value)[0] for value in range(2)]
        one.lane.settle()
        begun = [one.lane.back(one.store, slot, one.device.allocate(640)) for slot in slots]
        assert one.store.reading.wait(PATIENCE_SECONDS)
        begun.clear()  # one is being read, one is queued
        assert one.staging.used_bytes == 2 * 640, "the disk may still write there"
        one.store.may_read.set()
        one.lane.settle()
        assert one.staging.used_bytes == 0
        assert one.fetched(slots[1]) == [1]


def test_a_fetch_that_only_the_garbage_collector_finds_is_given_up_too(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.store.may_write.set()
        slot, _ = one.sent(1)
        loop: list[Any] = [one.lane.back(one.store, slot, one.device.allocate(640))]
        loop.append(loop)
        assert one.store.reading.wait(PATIENCE_SECONDS)
        del loop
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join(PATIENCE_SECONDS)
        assert not collector.is_alive()


# ---------------------------------------------------------------------- faults


def test_a_write_that_fails_is_told_to_who_waits_to_the_next_send_and_to_the_fetch(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.store.open()
        slot, copy = one.sent(1)
        copy.wait()
        other = one.store.take(640)
        shutil.rmtree(one.disk.path.parent)
        failed = one.lane.out(one.made(2), one.store, other)
        with pytest.raises(OffloadError, match=r"a copy of 640 bytes to the store failed: .* was removed while in use"):
            failed.wait()
        assert failed.done()
        with pytest.raises(OffloadError, match=r"an earlier copy failed: .* was removed while in use"):
            one.lane.out(one.made(3), one.store, other)
        back = one.lane.back(one.store, other, one.device.allocate(640))
        with pytest.raises(OffloadError, match="was removed while in use"):
            back.wait()
        assert back.done(), "it has ended, though not well"
        del back
        assert one.fetched(slot) == [1], "what was written before is still there"


def test_bytes_that_changed_on_the_disk_never_reach_the_device(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.store.open()
        slot, copy = one.sent(1)
        copy.wait()
        with one.disk.path.open("r+b") as file:
            file.seek(slot.offset + 100)
            file.write(b"\x02")
        target = one.device.allocate(640)
        back = one.lane.back(one.store, slot, target)
        num_copies = one.device._num_launched
        for _ in range(2):
            with pytest.raises(OffloadError, match=r"a copy of 640 bytes from the store failed: .*checksum"):
                back.wait()
        assert one.device._num_launched == num_copies, "no copy to the device was begun"
        del back


@pytest.mark.parametrize("direction", ["write", "read"])
def test_host_memory_stays_taken_until_a_disk_that_hangs_has_let_go_of_it(tmp_path: Path, direction: str) -> None:
    with rig(tmp_path) as one:
        if direction == "read":
            one.store.may_write.set()
            slot, copy = one.sent(1)
            copy.wait()
            one.threads._timeout_seconds = 0.2  # from here on: a write that ends may take its time
            copy = one.lane.back(one.store, slot, one.device.allocate(640))
        else:
            one.threads._timeout_seconds = 0.2
            _, copy = one.sent(1)
        with pytest.raises(OffloadError, match=r"a copy of 640 bytes .* the store did not finish within"):
            copy.wait()
        assert not copy.done()
        del copy
        assert one.staging.used_bytes == 640, "a write or read may still be under way"
        one.threads._timeout_seconds = PATIENCE_SECONDS
        one.store.open()
        assert eventually(lambda: not one.staging.used_bytes)
        one.lane.settle()
        assert one.staging.used_bytes == 0


def test_host_memory_stays_taken_until_a_device_that_hangs_has_let_go_of_it(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.store.open()
        never = Event({}, 0.0)
        one.device.wait(one.device.compute, never)
        slot, copy = one.sent(1)
        with pytest.raises(OffloadError, match="a copy of 640 bytes to host memory did not finish"):
            copy.wait()
        assert one.staging.used_bytes == 640, "the device may still write there"
        never.done = True
        one.lane.settle()
        assert one.staging.used_bytes == 0
        with pytest.raises(OffloadError, match="did not finish"):
            one.fetched(slot)


def test_a_lane_that_is_closed_gives_up_what_is_queued_and_leaves_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        copies = [one.sent(value)[1] for value in range(3)]
        assert one.store.writing.wait(PATIENCE_SECONDS)
        opener = threading.Timer(0.1, one.store.open)
        opener.start()
        one.lane.close()
        opener.join()
        copies[0].wait()  # it was under way
        for copy in copies[1:]:
            with pytest.raises(OffloadError, match="closed before the copy started"):
                copy.wait()
        with pytest.raises(OffloadError, match="closed"):
            one.lane.back(one.store, one.store.take(64), one.device.allocate(64))
        with pytest.raises(OffloadError, match="closed"):
            one.sent(1)
        assert one.staging.used_bytes == 0


@pytest.mark.parametrize("part", ["source", "device", "threads"])
def test_a_copy_that_cannot_begin_keeps_no_host_memory(tmp_path: Path, part: str) -> None:
    with rig(tmp_path) as one:
        slot, source = one.store.take(640), one.made(1)
        if part == "source":
            source = source[::2]
        elif part == "device":
            one.lane._device.close()
        else:
            one.threads.close()
        with pytest.raises(OffloadError):
            one.lane.out(source, one.store, slot)
        one.lane._device.settle()
        assert one.staging.used_bytes == 0
        if part == "threads":
            with pytest.raises(OffloadError):
                one.lane.back(one.store, slot, source)
            assert one.staging.used_bytes == 0


def test_values_of_other_types_and_shapes_go_as_their_bytes(tmp_path: Path) -> None:
    with rig(tmp_path) as one:
        one.store.open()
        memory = one.device.allocate(256)
        matrix = memory.view(torch.float32).view(8, 8)
        values = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        matrix.copy_(values)
        slot = one.store.take(256)
        one.lane.out(matrix, one.store, slot).wait()
        target = one.device.allocate(256).view(torch.float32).view(8, 8)
        one.lane.back(one.store, slot, target).wait()
        assert one.found(target.view(torch.uint8)) and torch.equal(target, values)
