"""The accelerator lane on the virtual accelerator: ours under thousands of schedules, and every known defect planted.

The defects are those that public offloaders had to fix, and each edge that the lane draws, left out.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from actmem.errors import OffloadError
from actmem.offloading.accelerator import AcceleratorLane
from benchmarks import offload_simulated
from tests.offloading.programs import ArenaStore, MakeLane, MakeTickets, Parcel, Program, Ticket, Tickets
from tests.offloading.virtual import Event, Stream, VirtualDevice


def search(num_programs: int, make_lane: MakeLane = AcceleratorLane, first_seed: int = 0) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_programs):
        program = Program(seed, make_lane)
        outcome = program.run()
        assert not outcome.findings, f"seed {seed}: {outcome.findings[0]}"
        counts.update(
            operations=outcome.num_operations,
            sent=outcome.num_sent,
            observed=outcome.num_observed,
            unordered=program.device.num_overtaken,
        )
    return counts


def test_random_programs_under_random_schedules_are_free_of_races_leaks_and_wrong_bytes() -> None:
    counts = search(500)
    assert counts["sent"] > 1000 and counts["observed"] > 1000
    assert counts["unordered"] > 1000, "streams ran in the order in which they were given work: no schedule was tried"


@pytest.mark.slow
def test_thousands_of_random_schedules_are_free_of_races_leaks_and_wrong_bytes() -> None:
    assert search(5000, first_seed=10_000)["observed"] > 10_000


def test_without_streams_the_same_programs_are_free_of_races_too() -> None:
    assert search(100, functools.partial(AcceleratorLane, use_streams=False))["observed"] > 200


# ---------------------------------------------------------------------- the defects


class Behind:
    """A device as the lane sees it, with something left out."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class CapturedStream(Behind):
    """The compute stream is asked for once."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._captured = device.current_stream()

    def current_stream(self) -> Stream:
        return self._captured


class NoWaitOfCompute(Behind):
    """The stream that computes does not wait for what was copied back."""

    def wait(self, stream: Stream, event: Event) -> None:
        if stream is not self._device.compute:
            self._device.wait(stream, event)


class NoKeepAlive(Behind):
    """The allocator is not told which stream used a tensor last."""

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        pass


class NoEdgeFromCompute(AcceleratorLane[Stream, Event]):
    """One direction does not wait for the stream that computes."""

    outward = True

    def _ordered_stream(self, slot: Any, *, outward: bool) -> Stream:
        if outward != self.outward:
            return super()._ordered_stream(slot, outward=outward)
        assert self._streams is not None
        last = self._last.get(id(slot), (None, None))[1 if outward else 0]
        stream = self._streams[0 if outward else 1]
        if last is not None:
            self._device.wait(stream, last.event)
        return stream


class NoEdgeFromComputeBack(NoEdgeFromCompute):
    outward = False


class NoEdgeBetweenDirections(AcceleratorLane[Stream, Event]):
    """A copy back does not wait for the copy out of its slot."""

    def _ordered_stream(self, slot: Any, *, outward: bool) -> Stream:
        last, self._last = self._last, {}
        try:
            return super()._ordered_stream(slot, outward=outward)
        finally:
            self._last = last


class SourceNotHeld(AcceleratorLane[Stream, Event]):
    """The tensor may die while its copy is under way."""

    outward = True

    def _copy(self, device_bytes: Tensor, host_bytes: Tensor, slot: Any, *, outward: bool) -> Any:
        copy = super()._copy(device_bytes, host_bytes, slot, outward=outward)
        if outward == self.outward:
            copy._tensor = None
        return copy


class TargetNotHeld(SourceNotHeld):
    outward = False


class SlotGivenAtOnce(AcceleratorLane[Stream, Event]):
    """A slot goes back to its store while a copy may be under way."""

    def give(self, store: Any, slot: Any) -> None:
        store.give(slot)


class CloneOnCopyStream(Tickets):
    """What has an offset or other strides comes back as a clone that the copy stream makes, and nobody waits for."""

    def fetch(self, ticket: Ticket) -> Tensor:
        fetched = super().fetch(ticket)
        if ticket.parcel is None or (ticket.offset == 0 and fetched.is_contiguous()):
            return fetched
        clone = self.device.allocate(fetched.numel()).view(fetched.shape)
        stream = self.lane._streams[1]
        self.device.wait(stream, self.device.record(self.device.compute))
        self.device.keep_alive(fetched, stream)
        self.device.keep_alive(clone, stream)
        self.device.launch(stream, "clone", [fetched], [clone], _assign)
        return clone


class ClonedBeforeCopy(Tickets):
    """What has an offset or other strides is cloned on the copy stream, which does not wait for its kernel."""

    def post(self, tensor: Tensor) -> Parcel:
        stream = self.lane._streams[0]
        staging = self.device.allocate(tensor.numel()).view(tensor.shape)
        self.device.keep_alive(staging, stream)
        self.device.launch(stream, "clone", [tensor], [staging], _assign)
        return super().post(tensor)


def _assign(reads: list[Any], writes: list[Any]) -> None:
    writes[0][...] = reads[0]


class OneCopyOneShape(Tickets):
    """Views of one storage share a host copy, and come back in the shape of the first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first: dict[int, tuple[Parcel, Ticket]] = {}

    def send(self, tensor: Tensor) -> Ticket:
        ticket = super().send(tensor)
        if ticket.parcel is not None:
            _, first = self._first.setdefault(id(ticket.parcel), (ticket.parcel, ticket))
            ticket.shape, ticket.stride, ticket.offset = first.shape, first.stride, first.offset
        return ticket

    def end_step(self) -> None:
        super().end_step()
        self._first.clear()


class GivenWithTheFirstView(Tickets):
    """Views of one storage share a host copy, and the first that is dropped takes it away."""

    def drop(self, ticket: Ticket) -> None:
        parcel, ticket.parcel, ticket.kept = ticket.parcel, None, None
        if parcel is not None:
            parcel.coming = None
            self.lane.give(self.store, parcel.slot)


class NeverGiven(Tickets):
    """Host memory grows: no slot goes back."""

    def drop(self, ticket: Ticket) -> None:
        ticket.parcel = ticket.kept = None


class GivenByFetch(Tickets):
    """A slot goes back after its fetch only, and a value whose backward never runs keeps it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fetched: list[Ticket] = []

    def fetch(self, ticket: Ticket) -> Tensor:
        self._fetched.append(ticket)
        return super().fetch(ticket)

    def drop(self, ticket: Ticket) -> None:
        if any(ticket is one for one in self._fetched):
            super().drop(ticket)

    def end_step(self) -> None:
        super().end_step()
        self._fetched.clear()


class IdentityByPointer(Tickets):
    """A storage is known by its address, which the allocator hands out again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._by_pointer: dict[int, Parcel] = {}

    def known(self, tensor: Tensor) -> Parcel | None:
        parcel = self._by_pointer.get(tensor.untyped_storage().data_ptr())
        return None if parcel is None or parcel.num_views == 0 else parcel

    def post(self, tensor: Tensor) -> Parcel:
        parcel = super().post(tensor)
        self._by_pointer[tensor.untyped_storage().data_ptr()] = parcel
        return parcel


class EverythingToTheDevice(Tickets):
    """What was in host memory comes back in device memory."""

    def fetch(self, ticket: Ticket) -> Tensor:
        return super().fetch(ticket) if ticket.parcel is not None else self.device.allocate(64)


class WriteWithoutRelease(Tickets):
    """A program writes in place on what is still being copied out, as an adapter that adds to a saved product does."""

    def about_to_write(self, tensor: Tensor) -> None:
        pass


class NoVersion(Tickets):
    """A value that was written on since is taken for the one that was sent."""

    def send(self, tensor: Tensor) -> Ticket:
        known = self.known(tensor) if self.device.owns(tensor) else None
        if known is not None:
            known.version = tensor._version
        return super().send(tensor)


class NotFetched(Tickets):
    """What comes back is memory that was allocated and not filled."""

    def prefetch(self, ticket: Ticket) -> None:
        parcel = ticket.parcel
        if parcel is not None and parcel.coming is None:
            parcel.coming = self.device.allocate(parcel.slot.num_bytes), parcel.out


@dataclass(frozen=True)
class Defect:
    kinds: frozenset[str]
    """What must be found, each in some program."""
    make_lane: MakeLane = AcceleratorLane
    make_tickets: MakeTickets = Tickets


def _behind(kind: type[Behind]) -> MakeLane:
    return lambda device: AcceleratorLane(kind(device))


DEFECTS = {
    "the compute stream captured once": Defect(
        frozenset({"copy before its kernel", "read before its copy"}), _behind(CapturedStream)
    ),
    "a copy out that does not wait for its kernel": Defect(
        frozenset({"copy before its kernel", "wrong bytes"}), NoEdgeFromCompute
    ),
    "a copy back into memory that is still read": Defect(
        frozenset({"reuse before its read", "overwrite", "wrong bytes"}), NoEdgeFromComputeBack
    ),
    "a kernel that does not wait for its copy back": Defect(
        frozenset({"read before its copy", "wrong bytes"}), _behind(NoWaitOfCompute)
    ),
    "a copy back that overtakes the copy out of its slot": Defect(
        frozenset({"host slot read in flight", "wrong bytes"}), NoEdgeBetweenDirections
    ),
    "a source freed before its copy is done": Defect(
        frozenset({"reuse before its read", "wrong bytes"}), SourceNotHeld
    ),
    "a target freed before its copy is done": Defect(frozenset({"overwrite"}), TargetNotHeld),
    "memory of another stream freed without a mark": Defect(frozenset({"reuse before its read"}), _behind(NoKeepAlive)),
    "a slot reused before its copy is done": Defect(
        frozenset({"slot given in flight", "host slot overwritten in flight"}), SlotGivenAtOnce
    ),
    "a clone on the copy stream that is read at once": Defect(
        frozenset({"read before its kernel", "wrong bytes"}), make_tickets=CloneOnCopyStream
    ),
    "a clone on the copy stream that is made at once": Defect(
        frozenset({"read before its kernel"}), make_tickets=ClonedBeforeCopy
    ),
    "views that share one copy and one shape": Defect(frozenset({"wrong bytes"}), make_tickets=OneCopyOneShape),
    "views that share one copy, given with the first": Defect(
        frozenset({"double free", "wrong bytes"}), make_tickets=GivenWithTheFirstView
    ),
    "host memory that grows": Defect(frozenset({"leak"}), make_tickets=NeverGiven),
    "a value whose backward never runs": Defect(frozenset({"leak"}), make_tickets=GivenByFetch),
    "a storage known by its address": Defect(frozenset({"wrong bytes"}), make_tickets=IdentityByPointer),
    "a storage known without its version": Defect(frozenset({"wrong bytes"}), make_tickets=NoVersion),
    "host tensors that come back on the device": Defect(frozenset({"wrong place"}), make_tickets=EverythingToTheDevice),
    "a write in place on what is being copied": Defect(
        frozenset({"reuse before its read", "wrong bytes"}), make_tickets=WriteWithoutRelease
    ),
    "a fetch that fetches nothing": Defect(frozenset({"read before its copy"}), make_tickets=NotFetched),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str) -> None:
    defect = DEFECTS[name]
    found: Counter[str] = Counter()
    for seed in range(400):
        program = Program(seed, defect.make_lane, defect.make_tickets)
        found.update(program.run().kinds)
        if defect.kinds <= set(found):
            return
    pytest.fail(f"not found: {set(defect.kinds) - set(found)}; found {dict(found)}")


# ---------------------------------------------------------------------- the simulator itself


def test_the_checker_finds_a_race_that_the_schedule_did_not_show() -> None:
    device = VirtualDevice(eager=1.0)  # all is done the moment it is enqueued
    tensor, other = device.allocate(64), device.new_stream()
    device.kernel("write", [], [tensor], lambda reads, writes: writes[0].fill(7))
    device.launch(other, "read", [tensor], [], lambda reads, writes: None)
    assert [f.kind for f in device.findings] == ["read before its kernel"]


def test_an_event_orders_two_streams_and_what_the_host_saw_done_orders_all() -> None:
    device = VirtualDevice(eager=0.0)
    tensor, other = device.allocate(64), device.new_stream()
    device.kernel("write", [], [tensor], lambda reads, writes: writes[0].fill(7))
    device.wait(other, device.record(device.compute))
    seen: list[int] = []
    device.launch(other, "read", [tensor], [], lambda reads, writes: seen.append(int(reads[0][0])))
    event = device.record(other)
    assert not device.done(event)
    assert device.synchronise(event, 1.0)
    device.host_touches("host write", [], [tensor])
    assert seen == [7] and not device.findings


def test_a_freed_block_is_reused_at_once_on_its_stream_and_late_where_another_stream_used_it() -> None:
    device = VirtualDevice(eager=0.0)
    first = device.allocate(64)
    address = first.data_ptr()
    del first
    again = device.allocate(64)
    assert again.data_ptr() == address
    device.keep_alive(again, device.new_stream())
    del again
    other = device.allocate(64)
    assert other.data_ptr() != address
    device.drain()
    assert device.allocate(64).data_ptr() == address


def test_a_stream_that_waits_for_ever_is_an_error_within_the_time_of_the_lane() -> None:
    device = VirtualDevice(eager=0.0)
    lane, store = AcceleratorLane(device), ArenaStore(device)
    source = device.allocate(64)
    device.wait(device.compute, Event({}, 0.0))
    copy = lane.out(source, store, store.take(64))
    with pytest.raises(OffloadError, match="a copy of 64 bytes to host memory did not finish within 120 s"):
        copy.wait()
    with pytest.raises(OffloadError, match="did not finish"):
        lane.close()


def test_release_frees_a_source_in_the_order_of_the_host() -> None:
    device = VirtualDevice(eager=0.0)
    lane, store = AcceleratorLane(device), ArenaStore(device)
    for _ in range(8):
        source = device.allocate(64)
        device.kernel("make", [], [source], lambda reads, writes: None)
        copy = lane.out(source, store, store.take(64))
        del source
        copy.release()
        assert device.live_bytes == 0
    assert device.num_done == 0 and device.peak_bytes == 64
    device.drain()
    assert not device.findings


@pytest.mark.parametrize("marked", [True, False])
def test_memory_of_another_stream_is_reused_only_behind_its_copy(marked: bool) -> None:
    device = VirtualDevice(eager=0.0)
    lane = AcceleratorLane(device if marked else NoKeepAlive(device))
    store, first, second = ArenaStore(device), device.compute, device.new_stream()
    source = device.allocate(64)
    device.kernel("make", [], [source], _nothing)
    device.wait(second, device.record(first))
    device.compute = second  # another stream saves what the first one made, and does nothing else with it
    copy = lane.out(source, store, store.take(64))
    del source
    copy.release()
    device.compute = first
    again = device.allocate(64)
    device.kernel("make again", [], [again], _nothing)
    assert [f.kind for f in device.findings] == ([] if marked else ["reuse before its read"])


def _nothing(reads: list[Any], writes: list[Any]) -> None:
    pass


def test_simulated_step_time_is_within_two_percent_of_the_lower_bound() -> None:
    points = offload_simulated.curve()
    assert {p.link_gb_per_second for p in points} >= {8, 900} and len({p.block_bytes for p in points}) == 3
    assert max(p.over_bound for p in points) <= 1.02
    assert min(p.over_bound for p in points) >= 1.0, "faster than the bound: the bound is wrong"
    assert max(p.peak_tensors for p in points) <= 8, "of 256"


def test_the_simulation_sees_what_streams_are_good_for() -> None:
    point = offload_simulated.simulate(64, 64 << 20, num_blocks=8, use_streams=False)
    assert point.over_bound > 1.4
    assert offload_simulated.simulate(64, 64 << 20, num_blocks=8).over_bound < 1.02
    assert offload_simulated.simulate(64, 64 << 20, num_blocks=8, in_flight=1).over_bound > 1.1


def test_a_slot_of_another_kind_and_other_shapes_are_refused_by_name() -> None:
    device = VirtualDevice()
    lane, store = AcceleratorLane(device), ArenaStore(device)
    with pytest.raises(OffloadError, match=r"Take a slot with store\.take\(64\)"):
        lane.out(device.allocate(64), store, store.take(32))
    with pytest.raises(OffloadError, match="contiguous tensors only"):
        lane.out(device.allocate(64)[::2], store, store.take(32))
    slot: Any = type("DiskSlot", (), {"num_bytes": 64})()
    with pytest.raises(OffloadError, match="DiskSlot has no host memory"):
        lane.out(device.allocate(64), store, slot)
    lane.close()
    lane.close()
    with pytest.raises(OffloadError, match="closed"):
        lane.back(store, store.take(64), device.allocate(64))
