"""What every store promises, whatever it keeps bytes in, and every way to it: from a CPU, and staged from a device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from actmem import Offload
from actmem.errors import OffloadError
from actmem.offloading import Offloader, Ticket, make_offloader
from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.factory import MAKERS
from actmem.offloading.host import HostStore
from actmem.offloading.lanes import Copy
from actmem.offloading.staged import StagedLane
from actmem.offloading.stores import Slot, Store
from actmem.offloading.threads import ThreadLane
from actmem.offloading.window import Window
from actmem.settings import STORES, Place
from tests.offloading.disks import some_bytes
from tests.offloading.test_staged import LockedDevice
from tests.patience import PATIENCE_SECONDS

VALUE = 1024
"""Bytes of a value: whole cells of the simulated device."""
SIZES = (1, 63, 4095, 4096, 4097, 70_000, 3 * 2**20 + 5)


def settings(to: str, tmp_path: Path, **rest: Any) -> Offload:
    rest |= {"directory": str(tmp_path)} if STORES[to].has_files else {"copy_cpu": True}
    return Offload(**{"to": to, "min_bytes": 0, **rest})


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def make(**rest: Any) -> Store:
        made.append(MAKERS[request.param](settings(request.param, tmp_path, **rest), True))
        return made[-1]

    yield make
    for store in made:
        store.close()
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def test_every_store_of_the_table_can_be_made() -> None:
    assert tuple(STORES) == tuple(MAKERS) == get_args(Place)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_come_back_as_they_went(make_store: Callable[..., Store], num_bytes: int) -> None:
    store, source, target = make_store(), some_bytes(num_bytes), torch.zeros(num_bytes, dtype=torch.uint8)
    slot = store.take(num_bytes)
    store.write(slot, source)
    store.read(slot, target)
    assert torch.equal(target, source)


def test_slots_never_overlap_whatever_is_taken_and_given(make_store: Callable[..., Store]) -> None:
    store, chance = make_store(), random.Random(0)
    held: list[tuple[Slot, Tensor]] = []
    for seed in range(60):
        slot = store.take(chance.choice(SIZES[:-1]))
        held.append((slot, some_bytes(slot.num_bytes, seed)))
        store.write(*held[-1])
        if chance.random() < 0.4:
            store.give(held.pop(chance.randrange(len(held)))[0])
        assert store.used_bytes == sum(slot.num_bytes for slot, _ in held) <= store.held_bytes
    for slot, source in held:
        target = torch.zeros_like(source)
        store.read(slot, target)
        assert torch.equal(target, source)


def test_the_same_step_again_takes_no_more_room(make_store: Callable[..., Store]) -> None:
    store, held_bytes = make_store(), set[int]()
    for _ in range(5):
        slots = [store.take(num_bytes) for num_bytes in SIZES]
        held_bytes.add(store.held_bytes)
        for slot in slots:
            store.give(slot)
    assert len(held_bytes) == 1


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_slot_has_at_least_one_byte(make_store: Callable[..., Store], num_bytes: int) -> None:
    with pytest.raises(OffloadError, match=f"num_bytes = {num_bytes}"):
        make_store().take(num_bytes)


def test_more_than_the_limit_is_refused_and_what_was_given_back_can_be_taken(make_store: Callable[..., Store]) -> None:
    store = make_store(limit_bytes=2**20)
    slot = store.take(900_000)
    with pytest.raises(OffloadError, match="limit_bytes = "):
        store.take(900_000)
    store.give(slot)
    store.take(900_000)


def test_a_slot_is_given_back_once_to_its_own_store_and_not_used_afterwards(make_store: Callable[..., Store]) -> None:
    store, other, some = make_store(), make_store(), some_bytes(100)
    slot = store.take(100)
    with pytest.raises(OffloadError, match="from another store"):
        other.give(slot)
    store.give(slot)
    with pytest.raises(OffloadError, match="given back before"):
        store.give(slot)
    for move in (store.write, store.read):
        with pytest.raises(OffloadError, match="it was given back"):
            move(slot, some)


def test_only_plain_bytes_of_the_right_length_are_moved(make_store: Callable[..., Store]) -> None:
    store = make_store()
    slot = store.take(100)
    for wrong in (some_bytes(99), torch.zeros(25), some_bytes(200)[::2], some_bytes(100).view(10, 10)):
        with pytest.raises(OffloadError, match="expected contiguous uint8"):
            store.write(slot, wrong)


def test_a_closed_store_frees_all_takes_nothing_and_may_be_given_and_closed_again(
    make_store: Callable[..., Store],
) -> None:
    store, some = make_store(), some_bytes(100)
    slot = store.take(100)
    store.close()
    for use in (lambda: store.take(1), lambda: store.write(slot, some), lambda: store.read(slot, some)):
        with pytest.raises(OffloadError, match="is closed"):
            use()
    store.give(slot)
    store.close()
    assert store.used_bytes == store.held_bytes == 0


# ---------------------------------------------------------------- every way to a store


class Staged(Offloader):
    """From a simulated device through host memory to the disk."""

    def __init__(self, offload: Offload) -> None:
        self.device = LockedDevice()
        self.staging, window = HostStore(pin=False), Window[Any](offload.in_flight_bytes)
        threads = ThreadLane(timeout_seconds=PATIENCE_SECONDS)
        lane = StagedLane(AcceleratorLane(self.device), threads, self.staging, window=window)
        super().__init__(MAKERS["disk"](offload, False), lane, window=window)

    def _begin(self, ticket: Ticket) -> tuple[Tensor, Copy]:
        assert ticket.slot is not None
        target = self.device.allocate(ticket.num_bytes)
        return target, self.lane.back(self.store, ticket.slot, target)


@pytest.fixture(params=(*STORES, "staged"))
def make_way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Offloader]]:
    made: list[Offloader] = []

    def make(**rest: Any) -> Offloader:
        if request.param == "staged":
            made.append(Staged(settings("disk", tmp_path, **rest)))
        else:
            made.append(make_offloader(settings(request.param, tmp_path, **rest), torch.device("cpu")))
        return made[-1]

    yield make
    for way in made:
        way.close()
        assert way.store.used_bytes == 0
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def value(way: Offloader, number: int, num_bytes: int) -> Tensor:
    if not isinstance(way, Staged):
        return torch.full((num_bytes,), number, dtype=torch.uint8)
    made = way.device.allocate(num_bytes)
    way.device.kernel("make", [], [made], lambda reads, writes: writes[0].fill(number))
    return made


def numbers_in(way: Offloader, tensor: Tensor) -> list[int]:
    if isinstance(way, Staged):
        assert way.device.synchronise(way.device.record(way.device.compute), PATIENCE_SECONDS)
    return tensor.unique().tolist()


@pytest.mark.parametrize("in_flight_bytes", [1, 3 * VALUE, None])
def test_what_was_sent_comes_back_step_after_step(
    make_way: Callable[..., Offloader], in_flight_bytes: int | None
) -> None:
    way = make_way(in_flight_bytes=in_flight_bytes)
    for _ in range(3):
        tickets = [(way.send(value(way, number, VALUE)), number) for number in range(12)]
        while tickets:
            ticket, number = tickets.pop()
            assert numbers_in(way, ticket.fetch()) == [number]
            del ticket
    assert way.ledger.out_bytes == way.ledger.back_bytes == 36 * VALUE


@pytest.mark.parametrize("in_flight_bytes", [1, 3 * VALUE, None])
def test_never_more_is_in_flight_than_the_bound(
    make_way: Callable[..., Offloader], in_flight_bytes: int | None
) -> None:
    way = make_way(in_flight_bytes=in_flight_bytes)
    most = 0
    for _ in range(2):
        tickets: list[Ticket] = []
        for number in range(12):
            tickets.append(way.send(value(way, number, VALUE)))
            most = max(most, way.window.num_bytes + way.window.ahead_bytes)
        while tickets:
            tickets.pop().fetch()
            most = max(most, way.window.num_bytes + way.window.ahead_bytes)
    assert most == {1: 0, 3 * VALUE: 3 * VALUE, None: 2 * VALUE}[in_flight_bytes], (
        "outside a block, each value counts as one"
    )


def test_what_nobody_fetches_leaves_nothing(make_way: Callable[..., Offloader]) -> None:
    way = make_way(in_flight_bytes=2 * VALUE)
    for _ in range(3):
        tickets = [way.send(value(way, number, VALUE)) for number in range(6)]
        tickets[2].fetch()
        del tickets
        way.lane.settle()
        assert way.store.used_bytes == 0 == way.window.num_bytes
    assert (way.ledger.back_bytes, way.ledger.dropped_bytes) == (3 * VALUE, 15 * VALUE)


def test_a_copy_that_fails_is_raised_to_whoever_fetches_it(
    make_way: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(slot: Slot, source: Tensor) -> None:
        raise OSError(5, "no such luck")

    way = make_way(in_flight_bytes=VALUE)
    monkeypatch.setattr(way.store, "write", fails)
    ticket = way.send(value(way, 0, VALUE))
    with pytest.raises(OffloadError, match="no such luck"):
        way.send(value(way, 1, VALUE))
    with pytest.raises(OffloadError, match="no such luck"):
        ticket.fetch()
