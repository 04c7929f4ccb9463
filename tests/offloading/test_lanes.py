"""The thread lane: order, errors, bounded waits, and nothing left behind."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.lanes import Copy, Lane, as_bytes
from actmem.offloading.stores import Slot
from actmem.offloading.threads import ThreadLane
from tests.children import child, ended, run
from tests.offloading.virtual import VirtualDevice
from tests.patience import PATIENCE_SECONDS, eventually


class MemoryStore:
    """Slots in a dictionary. `before` runs on the worker thread, ahead of each write or read."""

    def __init__(self) -> None:
        self.data: dict[int, Tensor] = {}
        self.taken: set[int] = set()
        self.given: list[Slot] = []
        self.before: Callable[[str, Slot], None] = lambda what, slot: None
        self.used_bytes = self.held_bytes = 0

    def take(self, num_bytes: int) -> Slot:
        slot = Slot(num_bytes)
        self.taken.add(id(slot))
        return slot

    def give(self, slot: Slot) -> None:
        if id(slot) not in self.taken:
            raise OffloadError("given twice")
        self.taken.remove(id(slot))
        self.data.pop(id(slot), None)
        self.given.append(slot)

    def write(self, slot: Slot, source: Tensor) -> None:
        self.before("write", slot)
        assert source.dtype == torch.uint8 and source.dim() == 1 and source.numel() == slot.num_bytes
        self.data[id(slot)] = source.clone()

    def read(self, slot: Slot, target: Tensor) -> None:
        self.before("read", slot)
        target.copy_(self.data[id(slot)])

    def close(self) -> None:
        pass


_OLDER: set[threading.Thread] = set()
"""Threads from before the test, which other tests may have left to end."""


@pytest.fixture(autouse=True)
def _older_threads() -> None:
    _OLDER.clear()
    _OLDER.update(threading.enumerate())


def lane_threads() -> list[str]:
    """Name the threads of lanes that the test has started."""
    return [t.name for t in threading.enumerate() if t not in _OLDER and t.name.startswith("actmem-")]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def lane() -> Iterator[ThreadLane]:
    lane = ThreadLane(timeout_seconds=PATIENCE_SECONDS)
    yield lane
    lane.close()
    assert not lane_threads()


class Gate:
    """Hold the worker back until the test opens."""

    def __init__(self, store: MemoryStore, what: str = "write") -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self._what = what
        store.before = self._pass

    def _pass(self, what: str, slot: Slot) -> None:
        if what == self._what:
            self.reached.set()
            assert self.open.wait(PATIENCE_SECONDS)


def test_both_lanes_keep_the_same_protocol() -> None:
    device = VirtualDevice()
    thread_lane = ThreadLane()
    for lane in (thread_lane, AcceleratorLane(device)):
        checked: Lane = lane
        assert callable(checked.out) and callable(checked.settle)
        checked.close()
        checked.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1000,)])
def test_bytes_come_back_as_they_were_for_every_kind_of_tensor(
    lane: ThreadLane, store: MemoryStore, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = torch.testing.make_tensor(shape, dtype=dtype, device="cpu")
    expected = source.clone()
    slot = store.take(source.nbytes)
    lane.out(source, store, slot)
    del source
    target = torch.empty(shape, dtype=dtype)
    lane.back(store, slot, target).wait()
    assert torch.equal(target, expected)
    lane.give(store, slot)
    lane.settle()
    assert not store.taken


def test_the_caller_goes_on_while_a_copy_is_under_way(lane: ThreadLane, store: MemoryStore) -> None:
    gate = Gate(store)
    source = torch.arange(8, dtype=torch.uint8)
    copy = lane.out(source, store, store.take(8))
    assert gate.reached.wait(PATIENCE_SECONDS)
    assert not copy.done()
    gate.open.set()
    copy.wait()
    assert copy.done()


def test_a_source_lives_until_its_copy_is_done_and_no_longer(lane: ThreadLane, store: MemoryStore) -> None:
    gate = Gate(store)
    source = torch.ones(8)
    storage = weakref.ref(source.untyped_storage())
    copy = lane.out(source, store, store.take(32))
    del source
    gc.collect()
    assert storage() is not None
    gate.open.set()
    copy.wait()
    assert eventually(lambda: storage() is None)


def test_a_read_waits_for_the_write_of_its_slot_and_for_no_other(lane: ThreadLane, store: MemoryStore) -> None:
    first = store.take(4)
    lane.out(torch.full((4,), 7, dtype=torch.uint8), store, first).wait()
    gate = Gate(store)
    second = store.take(4)
    write = lane.out(torch.full((4,), 9, dtype=torch.uint8), store, second)
    target = torch.zeros(4, dtype=torch.uint8)
    lane.back(store, first, target).wait()  # does not queue behind the write that is held back
    assert target.tolist() == [7] * 4 and not write.done()
    read = lane.back(store, second, target)
    assert not read.done()
    gate.open.set()
    read.wait()
    assert target.tolist() == [9] * 4


def test_a_slot_is_given_back_once_no_copy_touches_it(lane: ThreadLane, store: MemoryStore) -> None:
    gate = Gate(store)
    slot = store.take(4)
    copy = lane.out(torch.zeros(4, dtype=torch.uint8), store, slot)
    lane.give(store, slot)
    assert store.given == []
    gate.open.set()
    copy.wait()
    lane.settle()
    assert store.given == [slot] and not store.taken


def test_a_failed_write_is_raised_by_its_own_wait_by_a_read_of_it_and_by_the_next_out(
    lane: ThreadLane, store: MemoryStore
) -> None:
    def fail(what: str, slot: Slot) -> None:
        raise OSError(28, "No space left on device")

    store.before = fail
    slot = store.take(4)
    copy = lane.out(torch.zeros(4, dtype=torch.uint8), store, slot)
    with pytest.raises(OffloadError, match=r"a copy of 4 bytes to the store failed: .*No space left on device"):
        copy.wait()
    store.before = lambda what, slot: None
    with pytest.raises(OffloadError, match=r"an earlier copy failed: .*No space left on device"):
        lane.out(torch.zeros(4, dtype=torch.uint8), store, store.take(4))
    lane.settle()  # the lane need not have the write before its eyes any more
    read = lane.back(store, slot, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(OffloadError, match=r"from the store failed: .*No space left on device"):
        read.wait()
    lane.out(torch.ones(4, dtype=torch.uint8), store, slot)  # it was said; a write that works makes the slot good
    target = torch.zeros(4, dtype=torch.uint8)
    lane.back(store, slot, target).wait()
    assert target.tolist() == [1] * 4
    lane.give(store, slot)
    lane.settle()
    assert store.given == [slot]


def test_a_read_that_failed_does_not_spoil_the_next_one(lane: ThreadLane, store: MemoryStore) -> None:
    slot = store.take(4)
    lane.out(torch.full((4,), 3, dtype=torch.uint8), store, slot).wait()
    gate = threading.Event()

    def fail_once(what: str, slot: Slot) -> None:
        assert gate.wait(PATIENCE_SECONDS)
        store.before = lambda what, slot: None
        raise OSError(5, "Input/output error")

    store.before = fail_once
    target = torch.zeros(4, dtype=torch.uint8)
    first = lane.back(store, slot, target)
    second = lane.back(store, slot, target)
    gate.set()
    with pytest.raises(OffloadError, match="Input/output error"):
        first.wait()
    second.wait()
    assert target.tolist() == [3] * 4


def test_a_failed_copy_keeps_no_tensor_alive(lane: ThreadLane, store: MemoryStore) -> None:
    def fail(what: str, slot: Slot) -> None:
        raise OSError(5, "Input/output error")

    store.before = fail
    source = torch.ones(8)
    storage = weakref.ref(source.untyped_storage())
    copy = lane.out(source, store, store.take(32))
    del source
    with pytest.raises(OffloadError, match="Input/output error"):
        copy.wait()
    assert eventually(lambda: storage() is None)


def test_a_wait_ends_with_an_error_when_the_store_hangs(store: MemoryStore) -> None:
    lane = ThreadLane(timeout_seconds=0.05)
    gate = Gate(store)
    copy = lane.out(torch.zeros(4, dtype=torch.uint8), store, store.take(4))
    with pytest.raises(OffloadError, match=r"a copy of 4 bytes to the store did not finish within 0\.05 s"):
        copy.wait()
    with pytest.raises(OffloadError, match="did not finish within"):
        lane.settle()
    with pytest.raises(OffloadError, match="threads actmem-write-0 did not finish"):
        lane.close()
    gate.open.set()
    assert eventually(lambda: not lane_threads())


def test_close_gives_up_what_is_queued_and_whoever_waits_for_it_is_told(store: MemoryStore) -> None:
    lane = ThreadLane(timeout_seconds=PATIENCE_SECONDS)
    gate = Gate(store)
    slots = [store.take(4) for _ in range(3)]
    copies: list[Copy] = [lane.out(torch.zeros(4, dtype=torch.uint8), store, slot) for slot in slots]
    copies.append(lane.back(store, slots[2], torch.zeros(4, dtype=torch.uint8)))
    assert gate.reached.wait(PATIENCE_SECONDS)
    for slot in slots:
        lane.give(store, slot)
    closing = threading.Thread(target=lane.close)
    closing.start()
    assert eventually(lambda: lane._closed)
    gate.open.set()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive() and not lane_threads()
    copies[0].wait()
    for copy in copies[1:]:
        with pytest.raises(OffloadError, match="closed before the copy started"):
            copy.wait()
    assert len(store.given) == 3
    with pytest.raises(OffloadError, match="this lane is closed"):
        lane.out(torch.zeros(4, dtype=torch.uint8), store, store.take(4))


def test_no_thread_is_left_after_a_lane_that_nobody_closed() -> None:
    lane = ThreadLane()
    store = MemoryStore()
    lane.out(torch.zeros(4, dtype=torch.uint8), store, store.take(4)).wait()
    assert len(lane_threads()) == 2
    del lane
    assert eventually(lambda: not lane_threads())


def test_no_thread_is_left_after_an_exception() -> None:
    def step() -> None:
        lane = ThreadLane()
        store = MemoryStore()
        try:
            lane.out(torch.zeros(4, dtype=torch.uint8), store, store.take(4))
            raise KeyError("in the middle of a step")
        finally:
            lane.close()

    with pytest.raises(KeyError):
        step()
    assert not lane_threads()


def test_a_finalizer_may_give_a_slot_back_while_its_thread_is_inside_the_lane(
    lane: ThreadLane, store: MemoryStore
) -> None:
    slots = [store.take(4) for _ in range(2)]
    take = store.give

    def give(slot: Slot) -> None:  # the store itself sets off a finalizer that comes back to the lane
        take(slot)
        if slot is slots[0]:
            lane.give(store, slots[1])

    store.give = give  # type: ignore[method-assign]
    lane.give(store, slots[0])
    lane.settle()
    assert store.given == slots


def test_many_threads_may_share_a_lane(lane: ThreadLane, store: MemoryStore) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for i in range(50):
            value = (number * 50 + i) % 256
            slot = store.take(16)
            lane.out(torch.full((16,), value, dtype=torch.uint8), store, slot)
            target = torch.zeros(16, dtype=torch.uint8)
            lane.back(store, slot, target).wait()
            lane.give(store, slot)
            if target.tolist() != [value] * 16:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    lane.settle()
    assert not wrong and not store.taken and len(store.given) == 200


def test_a_tensor_of_another_size_stride_or_device_is_refused(lane: ThreadLane, store: MemoryStore) -> None:
    slot = store.take(16)
    with pytest.raises(OffloadError, match="tensor of 12 bytes, slot of 16 bytes"):
        lane.out(torch.zeros(3), store, slot)
    with pytest.raises(OffloadError, match=r"shape \(2, 2\) and strides \(1, 2\)"):
        lane.out(torch.zeros(2, 2).t(), store, slot)
    with pytest.raises(OffloadError, match=r"tensor\.device = meta"):
        lane.out(torch.zeros(4, device="meta"), store, slot)
    with pytest.raises(OffloadError, match="num_writers = 0"):
        ThreadLane(num_writers=0)


def test_bytes_are_a_view_without_history() -> None:
    tensor = torch.ones(3, 2, requires_grad=True)
    data = as_bytes(tensor, Slot(24))
    assert data.data_ptr() == tensor.data_ptr() and not data.requires_grad
    with pytest.raises(OffloadError, match="contiguous tensors only"):
        as_bytes(torch.ones(3, dtype=torch.complex64).conj(), Slot(24))


# A fork copies a process whose other threads are gone: do it in a process that has nothing else to lose.
FORK = """
import os, sys, torch
from actmem.errors import OffloadError
from actmem.offloading.threads import ThreadLane
from tests.offloading.test_lanes import PATIENCE_SECONDS, MemoryStore, Gate

lane, store = ThreadLane(timeout_seconds=PATIENCE_SECONDS), MemoryStore()
gate = Gate(store)
slot = store.take(4)
copy = lane.out(torch.ones(4, dtype=torch.uint8), store, slot)
assert gate.reached.wait(PATIENCE_SECONDS)
child = os.fork()
if child == 0:
    told = 0
    for use in (lambda: lane.out(torch.ones(4, dtype=torch.uint8), store, slot), copy.wait, lane.settle):
        try:
            use()
        except OffloadError as error:
            told += "which was forked from it" in str(error)
    lane.give(store, slot)
    lane.close()
    del lane
    os._exit(0 if told == 3 and not store.given else 1)
_, status = os.waitpid(child, 0)
gate.open.set()
copy.wait()
lane.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""

INTERRUPT = """
import sys, threading, torch
from actmem.offloading.threads import ThreadLane
from tests.offloading.test_lanes import PATIENCE_SECONDS, MemoryStore, Gate

lane, store = ThreadLane(timeout_seconds=PATIENCE_SECONDS), MemoryStore()
gate = Gate(store)
copies = [lane.out(torch.ones(4, dtype=torch.uint8), store, store.take(4)) for _ in range(3)]
assert gate.reached.wait(PATIENCE_SECONDS)
try:
    print("ready", flush=True)
    copies[0].wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    gate.open.set()
    lane.close()
    print([t.name for t in threading.enumerate() if t.name.startswith("actmem")], flush=True)
"""

ENDS_OPEN = """
import torch
from actmem.offloading.threads import ThreadLane
from tests.offloading.test_lanes import MemoryStore

lane, store = ThreadLane(), MemoryStore()
for _ in range(200):
    lane.out(torch.ones(100_000), store, store.take(400_000))
print("end", flush=True)
"""


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    done = run("-c", FORK)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_in_the_middle_of_a_wait_ends_cleanly() -> None:
    with child("-c", INTERRUPT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        output, errors = ended(process)
        assert output == "interrupted\n[]\n", errors
        assert process.returncode == 0


def test_a_process_that_ends_with_copies_under_way_ends() -> None:
    done = run("-c", ENDS_OPEN)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)
