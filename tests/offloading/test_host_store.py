from __future__ import annotations

import gc
import os
import random
import threading

import pytest
import torch

from actmem.errors import ActmemError, OffloadError
from actmem.offloading import host
from actmem.offloading.host import HostStore, class_bytes
from actmem.torchcompat import FakeTensor
from tests.patience import PATIENCE_SECONDS

MIB = 2**20


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def store():
    made = HostStore(pin=False)
    yield made
    made.close()


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 3 * MIB + 5])
def test_bytes_come_back_as_they_went(store, num_bytes):
    slot, sent = store.take(num_bytes), some_bytes(num_bytes)
    store.write(slot, sent)
    assert torch.equal(slot.tensor, sent)
    back = torch.zeros(num_bytes, dtype=torch.uint8)
    store.read(slot, back)
    assert torch.equal(back, sent)


def test_the_tensor_of_a_slot_is_the_place_itself(store):
    slot, back = store.take(100), torch.zeros(100, dtype=torch.uint8)
    slot.tensor.copy_(some_bytes(100))
    store.read(slot, back)
    assert torch.equal(back, some_bytes(100))


def test_slots_do_not_share_memory(store):
    slots = [store.take(5000) for _ in range(20)]
    for i, slot in enumerate(slots):
        store.write(slot, torch.full((5000,), i, dtype=torch.uint8))
    assert all((slot.tensor == i).all() for i, slot in enumerate(slots))


def test_used_is_what_was_asked_and_held_is_what_is_occupied(store):
    slots = [store.take(5000), store.take(4097)]
    assert (store.used_bytes, store.held_bytes) == (9097, 5120 + 4608)
    store.give(slots[0])
    assert (store.used_bytes, store.held_bytes) == (4097, 5120 + 4608)


def test_a_block_is_used_again_by_the_next_slot_of_its_size(store):
    first = store.take(MIB)
    address = first.tensor.data_ptr()
    store.give(first)
    assert store.take(MIB - 100).tensor.data_ptr() == address
    assert store.held_bytes == MIB


@pytest.mark.parametrize("power_of_two", [False, True])
def test_at_most_an_eighth_of_a_block_is_unused_or_half_where_pinned(power_of_two):
    for num_bytes in [*range(4096, 70_000, 37), 10**9 + 1, 2**40 + 1]:
        room = class_bytes(num_bytes, power_of_two=power_of_two)
        assert num_bytes <= room < num_bytes * (2 if power_of_two else 1.125) + 4096 / 8
        assert class_bytes(room, power_of_two=power_of_two) == room


def test_a_thousand_takes_of_varying_size_do_not_grow_the_pool(store):
    rng = random.Random(0)
    most = 0
    for _ in range(100):
        slots = [store.take(rng.randint(1, 2 * MIB)) for _ in range(10)]
        most = max(most, sum(class_bytes(slot.num_bytes) for slot in slots))
        for slot in slots:
            store.give(slot)
        assert store.held_bytes <= 1.25 * most
    assert store.used_bytes == 0
    assert store.held_bytes > 0


def test_the_same_step_again_makes_no_new_block(store, monkeypatch):
    sizes = [random.Random(0).randint(1, MIB) for _ in range(30)]
    for _ in range(2):
        for slot in [store.take(n) for n in sizes]:
            store.give(slot)

    def refuse():
        raise AssertionError("the pool grew")

    monkeypatch.setattr(host, "available_bytes", refuse)
    for slot in [store.take(n) for n in sizes]:
        store.give(slot)


def test_the_limit_holds_and_idle_blocks_make_way_for_others():
    store = HostStore(pin=False, limit_bytes=4 * MIB)
    store.give(store.take(3 * MIB))
    kept = store.take(2 * MIB)  # the idle block of 3 MiB goes
    assert store.held_bytes == 2 * MIB
    with pytest.raises(
        OffloadError, match=r"no room for 3\.0 MiB .*limit_bytes = 4\.0 MiB.*Use limit_bytes >= 5242880"
    ):
        store.take(3 * MIB)
    assert kept.num_bytes == store.used_bytes
    store.take(2 * MIB)
    assert store.held_bytes == 4 * MIB


def test_more_than_free_memory_raises_before_it_is_taken(store, monkeypatch):
    monkeypatch.setattr(host, "_mem_available", lambda: 300 * MIB)
    monkeypatch.setattr(host, "_cgroup_available", lambda: None)
    store.take(40 * MIB)
    held = store.held_bytes
    with pytest.raises(OffloadError, match=r"no room for 50\.0 MiB in host memory: 300\.0 MiB are free"):
        store.take(50 * MIB)
    assert store.held_bytes == held


def test_a_smaller_limit_of_the_container_counts(store, monkeypatch):
    monkeypatch.setattr(host, "_cgroup_available", lambda: MIB)
    with pytest.raises(OffloadError, match=r"1\.0 MiB are free"):
        store.take(10 * MIB)


def test_free_memory_is_read_from_this_machine():
    free = host.available_bytes()
    assert free is None or 0 < free < 2**50


def test_memory_that_the_system_refuses_is_an_offload_error(store, monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: None)  # as where it cannot be known
    with pytest.raises(OffloadError, match="no memory for"):
        store.take(2**60)


@pytest.mark.parametrize("limit_bytes", [0, -5])
def test_a_limit_is_positive(limit_bytes):
    with pytest.raises(OffloadError, match=f"limit_bytes = {limit_bytes}"):
        HostStore(pin=False, limit_bytes=limit_bytes)


def test_giving_twice_raises_and_frees_once(store):
    slot = store.take(100)
    store.give(slot)
    with pytest.raises(OffloadError, match="given back before"):
        store.give(slot)
    first, second = store.take(100), store.take(100)
    assert first.tensor.data_ptr() != second.tensor.data_ptr()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(99, dtype=torch.uint8), torch.zeros(100), torch.zeros(10, 10, dtype=torch.uint8)]
)
def test_only_plain_bytes_of_the_right_length_are_moved(store, wrong):
    slot = store.take(100)
    for move in (store.write, store.read):
        with pytest.raises(OffloadError, match="for a slot of 100 bytes"):
            move(slot, wrong)


def test_close_frees_all_may_be_called_twice_and_ends_the_use(store):
    slot = store.take(MIB)
    store.close()
    store.close()
    assert (store.used_bytes, store.held_bytes) == (0, 0)
    store.give(slot)  # finalizers come late
    with pytest.raises(OffloadError, match="is closed"):
        store.take(1)
    with pytest.raises(OffloadError, match="is closed"):
        store.read(slot, some_bytes(MIB))


def test_a_finalizer_may_give_a_slot_back_inside_take(store, monkeypatch):
    slot = store.take(100)

    class Holder:
        def __del__(self):
            store.give(slot)

    holder = Holder()
    holder.itself = holder
    del holder
    monkeypatch.setattr(host, "available_bytes", lambda: gc.collect() and None)  # runs while `take` holds its lock
    done = threading.Event()
    threading.Thread(target=lambda: (store.take(MIB), done.set()), daemon=True).start()
    assert done.wait(PATIENCE_SECONDS)
    assert store.used_bytes == MIB


def test_many_threads_take_and_give_without_losing_a_byte(store):
    failed: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(200):
                n = rng.randint(1, 50_000)
                slot, mine = store.take(n), torch.full((n,), number, dtype=torch.uint8)
                store.write(slot, mine)
                assert (slot.tensor == number).all()
                store.give(slot)
        except BaseException as error:  # noqa: BLE001 - shown below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert failed == []
    assert store.used_bytes == 0


def test_blocks_made_under_inference_mode_or_fake_tensors_are_plain_memory(store):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.inference_mode():
        slot = store.take(100)
    assert not slot.tensor.is_inference()
    with FakeTensorMode():
        other = store.take(5000)
    assert not isinstance(other.tensor, FakeTensor)
    slot.tensor.add_(1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is something to pin for")
def test_without_an_accelerator_nothing_is_pinned_and_the_store_says_so():
    assert not HostStore(pin=True).is_pinned


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # Python 3.12 and later
def test_a_forked_child_is_told_that_the_store_is_not_its_own(store):
    slot = store.take(100)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.give(slot)
            store.close()
            store.take(1)
        except ActmemError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.give(slot)
