"""What is sent comes back, or is dropped with what held it; nothing else is possible. Real stores, real threads."""

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actmem import OffloadError, VersionError
from actmem.offloading import Offloader, Ticket
from actmem.offloading.disk import DiskStore
from actmem.offloading.host import HostStore
from actmem.offloading.lanes import Copy
from actmem.offloading.stores import Slot, Store
from actmem.offloading.threads import ThreadLane
from actmem.offloading.window import Window
from tests.patience import PATIENCE_SECONDS, eventually

STORES = ("host", "disk")


class Gate:
    """Let writes of a host store through only while it is open, so that a test can look in between."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.on_write: Callable[[], None] = lambda: None

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self.on_write()
        assert self._event.wait(PATIENCE_SECONDS), "the test never opened the gate"


class GatedStore(HostStore):
    def __init__(self, gate: Gate, limit_bytes: int | None = None) -> None:
        super().__init__(pin=False, limit_bytes=limit_bytes)
        self._gate = gate

    def write(self, slot: Slot, source: Tensor) -> None:
        self._gate.wait()
        super().write(slot, source)


class WatchedLane(ThreadLane):
    """A lane that notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(timeout_seconds=PATIENCE_SECONDS)
        self._under_way: list[tuple[Copy, int]] = []
        self.out_counts: list[int] = []
        """At each copy out: how many were under way, this one included."""
        self.out_bytes: list[int] = []
        """At each copy out: how many bytes were under way, this one included."""
        self.backs: list[Slot] = []
        """The slots that were asked for, in that order."""

    def out(self, source: Tensor, store: Store, slot: Slot) -> Any:
        copy = super().out(source, store, slot)
        self._under_way = [(c, n) for c, n in self._under_way if not c.done()] + [(copy, slot.num_bytes)]
        self.out_counts.append(len(self._under_way))
        self.out_bytes.append(sum(n for _, n in self._under_way))
        return copy

    def back(self, store: Store, slot: Slot, target: Tensor) -> Any:
        self.backs.append(slot)
        return super().back(store, slot, target)


@contextmanager
def offloading(
    store: Store | str,
    lane: ThreadLane | None = None,
    *,
    in_flight_bytes: int | None = 2**20,
    max_in_flight: int | None = None,
    **rest: Any,
) -> Iterator[Offloader]:
    if isinstance(store, str):
        store = HostStore(pin=False) if store == "host" else DiskStore()
    lane = lane or ThreadLane(timeout_seconds=PATIENCE_SECONDS)
    try:
        yield Offloader(store, lane, window=Window(in_flight_bytes, max_in_flight), **rest)
    finally:
        lane.close()
        store.close()


def numbers(num_bytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def balanced(offloader: Offloader) -> bool:
    ledger = offloader.ledger
    moved = (ledger.back_bytes, ledger.dropped_bytes, ledger.waiting_bytes, ledger.again_bytes)
    return ledger.out_bytes == sum(moved[:3]) and min(moved) >= 0


def open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    return sorted(str(f.readlink()) for f in folder.iterdir() if f.is_symlink() and f.exists())


# ---------------------------------------------------------------- the ledger


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("place", STORES)
def test_out_is_back_dropped_and_waiting_after_every_step_of_a_random_program(place: str, overlap: bool) -> None:
    """Random sends, fetches and deaths, in any order, some fetched twice: every byte is right and accounted for."""
    chance = random.Random(place)
    with offloading(place, in_flight_bytes=20_000, overlap=overlap) as offloader:
        held: list[tuple[Ticket, int, int]] = []
        for seed in range(300):
            what = chance.choice(["send", "send", "fetch", "fetch", "drop"])
            if what == "send" or not held:
                num_bytes = chance.choice([1, 511, 4096, 9000])
                held.append((offloader.send(numbers(num_bytes, seed)), num_bytes, seed))
            elif what == "fetch":
                ticket, num_bytes, from_seed = chance.choice(held)
                assert torch.equal(ticket.fetch(), numbers(num_bytes, from_seed))
                del ticket
            else:
                held.pop(chance.randrange(len(held)))
            assert balanced(offloader)
            if seed % 50 == 49:
                held.clear()
        held.clear()
        offloader.lane.settle()
        ledger = offloader.ledger
        assert balanced(offloader)
        assert ledger.waiting_bytes == 0 == offloader.store.used_bytes
        assert min(ledger.back_bytes, ledger.dropped_bytes, ledger.again_bytes) > 0


def test_a_storage_is_sent_once_however_many_views_show_it() -> None:
    with offloading("disk") as offloader:
        base = torch.randn(8, 16)
        first, again = offloader.send(base), offloader.send(base[2:, ::3].t())
        assert again is first
        assert offloader.ledger.out_bytes == base.nbytes
        base.add_(1)  # another version is another value
        offloader.lane.settle()
        assert offloader.send(base) is not first
        assert offloader.ledger.out_bytes == 2 * base.nbytes


def test_a_second_holder_shares_what_the_first_fetched_while_it_lives() -> None:
    with offloading("disk") as offloader:
        ticket = offloader.send(numbers(5000))
        offloader.lane.settle()
        first = ticket.fetch_shared()
        second = ticket.fetch_shared()
        assert first.data_ptr() == second.data_ptr()
        assert offloader.ledger.again_bytes == 0
        del first, second
        assert eventually(lambda: ticket._shared() is None), "the lane lets go of what it copied"
        assert torch.equal(ticket.fetch_shared(), numbers(5000))
        assert offloader.ledger.again_bytes == offloader.ledger.back_bytes == 5000


# ---------------------------------------------------------------- bounds on the way out


def test_never_more_bytes_are_on_their_way_out_than_in_flight_bytes() -> None:
    gate, lane = Gate(), WatchedLane()
    with offloading(GatedStore(gate), lane, in_flight_bytes=10_000) as offloader:
        held = [offloader.send(numbers(3000, seed)) for seed in range(3)]
        assert lane.out_bytes == [3000, 6000, 9000], "the gate is shut, so all are under way"
        threading.Timer(0.05, gate.open).start()
        held += [offloader.send(numbers(3000, seed)) for seed in range(3, 12)]
        assert max(lane.out_bytes) <= 10_000
        assert all(torch.equal(t.fetch(), numbers(3000, seed)) for seed, t in enumerate(held))


def test_a_value_larger_than_the_bound_goes_alone() -> None:
    lane = WatchedLane()
    with offloading("host", lane, in_flight_bytes=100) as offloader:
        held = [offloader.send(numbers(5000, seed)) for seed in range(4)]
        assert lane.out_counts == [1, 1, 1, 1]
        assert all(torch.equal(t.fetch(), numbers(5000, seed)) for seed, t in enumerate(held))


def test_never_more_values_are_on_their_way_out_than_max_in_flight() -> None:
    gate, lane = Gate(), WatchedLane()
    with offloading(GatedStore(gate), lane, max_in_flight=2) as offloader:
        held = [offloader.send(numbers(100, seed)) for seed in range(2)]
        assert lane.out_counts == [1, 2]
        threading.Timer(0.05, gate.open).start()
        held += [offloader.send(numbers(100, seed)) for seed in range(2, 10)]
        assert max(lane.out_counts) == 2


def test_without_overlap_each_value_is_away_when_send_returns() -> None:
    lane = WatchedLane()
    with offloading("disk", lane, overlap=False) as offloader:
        source = numbers(5000)
        alive = weakref.ref(source.untyped_storage())
        ticket = offloader.send(source)
        del source
        assert eventually(lambda: alive() is None)  # the thread that wrote it may need a moment to leave its frame
        other = offloader.send(numbers(5000, 1))
        assert lane.out_counts == [1, 1]
        assert torch.equal(other.fetch(), numbers(5000, 1))
        assert lane.backs == [other.slot], "nothing is fetched ahead"
        assert torch.equal(ticket.fetch(), numbers(5000))


# ---------------------------------------------------------------- before the copy is done


def test_what_is_fetched_before_its_copy_is_done_is_taken_back() -> None:
    gate, lane = Gate(), WatchedLane()
    with offloading(GatedStore(gate), lane) as offloader:
        source = numbers(4000)
        ticket = offloader.send(source)
        assert ticket.fetch().data_ptr() == source.data_ptr()
        assert lane.backs == []
        assert offloader.ledger.back_bytes == 4000
        gate.open()


@pytest.mark.parametrize("when", ["before the copy is done", "after it is done"])
def test_a_write_under_way_raises_when_the_value_is_fetched_and_names_the_repair(when: str) -> None:
    gate = Gate()
    with offloading(GatedStore(gate)) as offloader:
        source = torch.randn(1000)
        ticket = offloader.send(source)
        source.add_(1)
        if when == "after it is done":
            gate.open()
            offloader.lane.settle()
        with pytest.raises(VersionError, match=r"4000 bytes was modified in place .* Rule\('save', module=\.\.\.\)"):
            ticket.fetch()
        gate.open()


def test_a_write_after_the_copy_is_done_leaves_what_was_sent() -> None:
    with offloading("disk") as offloader:
        source = torch.randn(1000)
        expected, ticket = source.clone(), offloader.send(source)
        offloader.lane.settle()
        offloader.send(numbers(1))  # takes note that the copy is done
        source.add_(1)
        assert torch.equal(ticket.fetch().view(torch.float32), expected)


# ---------------------------------------------------------------- deaths


@pytest.mark.parametrize("place", STORES)
def test_a_ticket_that_nobody_holds_gives_its_slot_back_without_the_garbage_collector(place: str) -> None:
    gc.collect()
    gc.disable()
    try:
        with offloading(place) as offloader:
            for _ in range(30):
                held = [offloader.send(numbers(70_000, seed)) for seed in range(5)]
                held[0].fetch()
                del held
                offloader.lane.settle()
                assert offloader.store.used_bytes == 0
            assert offloader.ledger.back_bytes == 30 * 70_000
            assert offloader.ledger.dropped_bytes == 30 * 4 * 70_000
    finally:
        gc.enable()


def test_the_last_holder_may_go_in_a_thread_that_somebody_waits_for_under_the_lock() -> None:
    """A finalizer can run anywhere: here in the writer, while a send waits for that very write."""
    gate, held = Gate(), []
    with offloading(GatedStore(gate), in_flight_bytes=1000) as offloader:
        held.append(offloader.send(numbers(10)))
        gate.on_write = held.clear
        gate.open()
        kept = [offloader.send(numbers(1000, seed)) for seed in range(3)]
        assert held == []
        assert balanced(offloader)
        offloader.lane.settle()
        assert offloader.ledger.dropped_bytes == 10
        assert offloader.store.used_bytes == sum(t.num_bytes for t in kept)


def test_a_foreign_thread_that_drops_a_ticket_while_a_send_waits_goes_on_at_once() -> None:
    gate = Gate()
    with offloading(GatedStore(gate), in_flight_bytes=1000) as offloader:
        held = [offloader.send(numbers(1000))]
        sent: list[Ticket] = []
        waiting = threading.Thread(target=lambda: sent.append(offloader.send(numbers(1000, 1))))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive(), "the bound is reached, and the gate is shut"
        dropping = threading.Thread(target=held.clear)
        dropping.start()
        dropping.join(PATIENCE_SECONDS)
        assert not dropping.is_alive()
        gate.open()
        waiting.join(PATIENCE_SECONDS)
        assert not waiting.is_alive()
        offloader.lane.settle()
        assert offloader.ledger.dropped_bytes == 1000
        assert torch.equal(sent[0].fetch(), numbers(1000, 1))


# ---------------------------------------------------------------- fetching ahead


def sent_and_gone(offloader: Offloader, num_tickets: int, num_bytes: int) -> list[Ticket]:
    """Send values, and have none of them in memory any more."""
    held = [offloader.send(numbers(num_bytes, seed)) for seed in range(num_tickets)]
    for leaving in list(offloader.window):
        offloader.window.remove(leaving)
        offloader._push_out(leaving)
    return held


def test_the_order_of_the_step_before_is_the_order_in_which_values_are_fetched_ahead() -> None:
    order, lane = [3, 0, 5, 1, 4, 2], WatchedLane()
    with offloading("disk", lane, in_flight_bytes=2000) as offloader:
        held = sent_and_gone(offloader, 6, 1000)
        for index in order:
            held[index].fetch()
        del held
        held = sent_and_gone(offloader, 6, 1000)
        lane.backs.clear()
        for place, index in enumerate(order):
            assert torch.equal(held[index].fetch(), numbers(1000, index))
            expected = order[: place + 3]  # this one, and as many ahead as the bound permits
            assert lane.backs == [held[i].slot for i in expected], "each once, in order, two ahead"


def test_in_the_first_step_values_are_fetched_ahead_in_the_order_of_sending_backwards() -> None:
    lane = WatchedLane()
    with offloading("disk", lane, in_flight_bytes=2500) as offloader:
        held = sent_and_gone(offloader, 5, 1000)
        held[4].fetch()
        assert lane.backs == [held[i].slot for i in (4, 3, 2)]


def test_what_was_fetched_ahead_for_nothing_is_dropped_and_its_room_is_free_again() -> None:
    lane = WatchedLane()
    with offloading("host", lane, in_flight_bytes=3000) as offloader:
        for _ in range(5):
            held = sent_and_gone(offloader, 4, 1000)
            lane.backs.clear()
            held[3].fetch()
            assert len(lane.backs) == 4, "all the others were fetched ahead, in every round"
            del held
        offloader.lane.settle()
        assert (offloader.ledger.back_bytes, offloader.ledger.dropped_bytes) == (5 * 1000, 5 * 3000)
        assert offloader.store.used_bytes == 0


def test_two_microbatches_under_way_at_once_come_back_right_in_either_order() -> None:
    with offloading("disk", in_flight_bytes=3000) as offloader:
        for swapped in (False, True, False, True):
            first = [offloader.send(numbers(1000, seed)) for seed in range(4)]
            second = [offloader.send(numbers(1000, seed)) for seed in range(4, 8)]
            pairs = list(enumerate(first + second))
            for seed, ticket in pairs if swapped else reversed(pairs):
                assert torch.equal(ticket.fetch(), numbers(1000, seed))
            del first, second, pairs, ticket
        offloader.lane.settle()
        assert offloader.ledger.back_bytes == offloader.ledger.out_bytes
        assert offloader.store.used_bytes == 0


def test_bookkeeping_does_not_grow_although_a_graph_is_always_under_way() -> None:
    """One ticket overlaps the next step, for ever: the numbers are never all free at once."""
    with offloading("host") as offloader:
        last = None
        for step in range(200):
            held = [offloader.send(numbers(64, seed)) for seed in range(4)]
            for ticket in held:
                ticket.fetch()
            last = held[step % 4]
            offloader.lane.settle()
            if step == 20:
                before = _bookkeeping(offloader)
        del held, ticket
        assert last is not None
        assert _bookkeeping(offloader) <= before + 8


def _bookkeeping(offloader: Offloader) -> int:
    """Count the entries of everything that the offloader keeps."""
    return sum(len(v) for v in vars(offloader).values() if hasattr(v, "__len__"))


# ---------------------------------------------------------------- two threads


@pytest.mark.parametrize("place", STORES)
def test_threads_that_send_and_fetch_at_once_get_their_own_bytes(place: str) -> None:
    failed: list[Exception] = []
    with offloading(place, in_flight_bytes=8000) as offloader:

        def train(thread: int) -> None:
            try:
                for step in range(25):
                    seeds = [1000 * thread + 10 * step + i for i in range(5)]
                    held = [offloader.send(numbers(1500, seed)) for seed in seeds]
                    for seed, ticket in reversed(list(zip(seeds, held, strict=True))):
                        assert torch.equal(ticket.fetch(), numbers(1500, seed))
            except (AssertionError, RuntimeError) as error:
                failed.append(error)

        threads = [threading.Thread(target=train, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert failed == []
        offloader.lane.settle()
        assert balanced(offloader)
        assert offloader.ledger.back_bytes == offloader.ledger.out_bytes == 3 * 25 * 5 * 1500
        assert offloader.store.used_bytes == 0


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("place", STORES)
def test_no_room_raises_at_the_send_that_found_none_and_room_that_is_given_back_is_used(
    place: str, tmp_path: Path
) -> None:
    store = HostStore(pin=False, limit_bytes=40_960) if place == "host" else DiskStore(tmp_path, limit_bytes=40_960)
    with offloading(store) as offloader:
        held = [offloader.send(numbers(4096, seed)) for seed in range(10)]
        with pytest.raises(OffloadError, match=r"no room for 4\.0 KiB"):
            offloader.send(numbers(4096, 10))
        assert balanced(offloader)
        assert offloader.ledger.out_bytes == 40_960
        assert all(torch.equal(t.fetch(), numbers(4096, seed)) for seed, t in enumerate(held)), "the others are safe"
        held.clear()
        offloader.lane.settle()
        assert torch.equal(offloader.send(numbers(4096, 11)).fetch(), numbers(4096, 11))


def test_room_that_a_copy_under_way_still_takes_is_waited_for() -> None:
    gate = Gate()
    with offloading(GatedStore(gate, limit_bytes=8192)) as offloader:
        for seed in range(2):
            offloader.send(numbers(4096, seed))  # dropped at once, but its copy is under way
        threading.Timer(0.05, gate.open).start()
        assert torch.equal(offloader.send(numbers(4096, 2)).fetch(), numbers(4096, 2))
        assert offloader.ledger.dropped_bytes == 2 * 4096


class FailingStore(DiskStore):
    """A disk that fails after some writes."""

    num_good = 2

    def write(self, slot: Slot, source: Tensor) -> None:
        if self.num_good == 0:
            raise OSError(5, "Input/output error")
        self.num_good -= 1
        super().write(slot, source)


def test_a_write_that_failed_raises_at_the_next_send_and_when_its_value_is_fetched() -> None:
    with offloading(FailingStore()) as offloader:
        held = [offloader.send(numbers(1000, seed)) for seed in range(3)]
        offloader.lane.settle()
        with pytest.raises(OffloadError, match="Input/output error"):
            offloader.send(numbers(1000, 3))
        assert balanced(offloader)
        with pytest.raises(OffloadError, match="Input/output error"):
            held[2].fetch()
        assert torch.equal(held[0].fetch(), numbers(1000, 0)), "what was written before is safe"
        held.clear()
        assert balanced(offloader)


def test_a_byte_that_changed_on_disk_raises_when_its_value_is_fetched() -> None:
    store = DiskStore()
    with offloading(store) as offloader:
        held = sent_and_gone(offloader, 3, 4096)
        with store.path.open("r+b") as file:
            file.seek(4096 + 17)
            byte = file.read(1)
            file.seek(4096 + 17)
            file.write(bytes([byte[0] ^ 1]))
        assert torch.equal(held[0].fetch(), numbers(4096, 0))
        with pytest.raises(OffloadError, match="checksum"):
            held[1].fetch()


def test_a_directory_that_was_removed_raises_at_the_next_send(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with offloading(store) as offloader:
        held = sent_and_gone(offloader, 1, 1000)
        store.path.unlink()
        store.path.parent.rmdir()
        with pytest.raises(OffloadError, match="removed while in use"):
            offloader.send(numbers(1000, 1))
        assert torch.equal(held[0].fetch(), numbers(1000, 0))
        assert balanced(offloader)


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("place", STORES)
def test_close_waits_for_what_is_away_and_then_leaves_no_thread_file_or_descriptor(place: str, tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), open_files()
    store = HostStore(pin=False) if place == "host" else DiskStore(tmp_path)
    offloader = Offloader(store, ThreadLane(timeout_seconds=PATIENCE_SECONDS), window=Window(4000))
    held = [offloader.send(numbers(3000, seed)) for seed in range(4)]
    offloader.close()
    offloader.close()
    assert not threads.issuperset(threading.enumerate()), "something is away"
    assert all(torch.equal(t.fetch(), numbers(3000, seed)) for seed, t in enumerate(held))
    held.pop()
    assert not threads.issuperset(threading.enumerate())
    held.clear()
    assert threads.issuperset(threading.enumerate())
    assert open_files() == files
    assert list(tmp_path.iterdir()) == []
    assert store.held_bytes == 0
    with pytest.raises(OffloadError, match="closed"):
        offloader.send(numbers(10))


def test_close_with_nothing_away_ends_at_once_although_copies_were_queued(tmp_path: Path) -> None:
    threads = threading.active_count()
    offloader = Offloader(DiskStore(tmp_path), ThreadLane(timeout_seconds=PATIENCE_SECONDS), window=Window(2**20))
    for seed in range(20):
        offloader.send(numbers(30_000, seed))  # dropped at once
    offloader.close()
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []
    assert offloader.ledger.dropped_bytes == 20 * 30_000
