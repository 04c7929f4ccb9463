"""What a step takes under a plan: peak bytes and where, replayed work, bytes offloaded.

This is the only walk through the log of a step that follows a plan. What a plan changes at a moment is which calls are
replayed, and the bytes on top of the program's own (`OnTop`): that is noted here, on request. All else is the same for
every plan, and `step_walk.py` adds it for the report page and the trace. For the search, `peak_moments.py` emulates the
tape of one layer apart from the log, and what an entry of the log means to a tape (`ON_TAPE`) is said here for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from actmem.decisions import Decision, Reason
from actmem.log_entries import (
    CallRan,
    Dropped,
    Entered,
    Entry,
    GivenGone,
    GradientsCounted,
    LayerEntry,
    Left,
    Loosened,
    OpRan,
    Packed,
    PhaseBegan,
    StorageDied,
    TensorGone,
    Unpacked,
)
from actmem.profiles import COPY, Profile
from actmem.simulation.flight import Flight, InFlight
from actmem.simulation.room import REPLAYED, SAVED, STATES, TRANSFERS, Listener, Room
from actmem.simulation.tape_emulator import Emulated, Fate

__all__ = ["ON_TAPE", "OnTop", "Simulated", "Watcher", "replayed_cost", "simulate"]

ON_TAPE: Mapping[type, Callable[[Emulated, int], None]] = {
    CallRan: Emulated.call,
    Packed: Emulated.pack,
    Dropped: Emulated.drop,
    Loosened: Emulated.loosen,
    GivenGone: Emulated.done,
    TensorGone: Emulated.lose,
}
"""What the tape of a layer does at an entry about its call, handle or tensor `index`. See also `Emulated.unpack`."""


class Watcher(Listener, Protocol):
    """Whoever is told of each allocation of a step, and of what goes on in between."""

    def allocated(self, storage: int, num_bytes: int) -> None:
        """Note that the program allocated a storage."""
        ...

    def passed(self, entry: Entry) -> None:
        """Note an entry of the log, after what it caused."""
        ...

    def replayed(self, cost: int) -> None:
        """Note that an operator ran again, after what it allocated."""
        ...


class OnTop(NamedTuple):
    """What a plan adds at one moment: bytes on top of those that the program itself keeps alive."""

    saved_bytes: int
    replayed_bytes: int
    transfers_bytes: int
    """Those on the way to or from elsewhere."""
    workspace_bytes: int
    """What the kernel that runs takes for itself."""
    call: int | None
    """The call that was replayed, -1 for a copy; None where an operator of the program itself ran."""


@dataclass(frozen=True)
class Simulated:
    """The outcome of `simulate`."""

    peak_bytes: int
    tensor_bytes: int
    """The peak without the workspaces of kernels and the states of generators."""
    peak_op: str
    peak_layer: int
    """Index of the layer in which the peak occurs; -1 if it is outside the layers."""
    saved_bytes: int
    """What is alive when backward begins, beyond what stays; the most, if there are several backward passes."""
    replayed: tuple[tuple[int, ...], ...]
    """For each layer, the calls that were run again."""
    held: tuple[tuple[int, ...], ...]
    """For each layer, the values that were held when its forward was over."""
    away: tuple[tuple[int, ...], ...]
    """For each layer, those of them that were offloaded."""
    whys: tuple[tuple[Reason | None, ...], ...]
    """For each layer, why each of its values cannot be replayed, if it cannot."""
    sent_bytes: int
    sent_by_layer: tuple[int, ...]
    """Where something is in flight: what each layer sends and no other has sent."""
    fetch_order: tuple[int, ...]
    """In which order the last backward pass fetched, where something is in flight. See `InFlight`."""
    timeline: tuple[tuple[int, int], ...]
    """(position in the log, bytes alive), if requested."""
    on_top: tuple[OnTop, ...] = ()
    """For each point of the timeline, what the plan adds there, if requested."""
    fates: tuple[tuple[Fate | None, ...], ...] = ()
    """For each layer, what became of its values by the end of its forward."""


def simulate(
    profile: Profile,
    keeps: Sequence[Sequence[Decision]],
    *,
    exact: bool = False,
    inputs_sent: Sequence[bool] | None = None,
    min_offload_bytes: int = 0,
    in_flight: InFlight | None = None,
    forced: Sequence[Mapping[int, Reason] | None] | None = None,
    plain: Sequence[bool] | None = None,
    timeline: bool = False,
    on_top: bool = False,
    watcher: Watcher | None = None,
) -> Simulated:
    """Walk through the log of a profile with the decisions of every layer.

    Args:
        profile: what the step does.
        keeps: for each layer, the decision for each of its calls.
        exact: see `Emulated`.
        inputs_sent: for each layer, whether its inputs are offloaded.
        min_offload_bytes: smaller values stay.
        in_flight: how many bytes and values may be in flight. None: nothing is, and all that is sent is gone at once.
        forced: for each layer, the calls of its smallest cut.
        plain: for each layer, whether the plan has nothing to say there.
        timeline: whether to return the bytes after each operator.
        on_top: whether to return what the plan adds to them, too.
        watcher: who is told of each allocation by itself.
    """
    walk = _Walk(profile, in_flight, timeline=timeline, on_top=on_top, watcher=watcher)
    for i, (layer, keep) in enumerate(zip(profile.layers, keeps, strict=True)):
        cut = None if forced is None else forced[i]
        walk.layers.append(
            Emulated(
                layer,
                keep,
                walk.room,
                exact=exact,
                plain=plain is not None and plain[i],
                sends_inputs=inputs_sent is not None and inputs_sent[i],
                min_offload_bytes=min_offload_bytes,
                forced=None if cut is None else dict(cut),
                flight=walk.flight,
            )
        )
    walk.run()
    walk.room.listener = None
    return Simulated(
        peak_bytes=walk.peak,
        tensor_bytes=walk.tensor_peak,
        peak_op=walk.peak_op,
        peak_layer=walk.peak_layer,
        saved_bytes=walk.saved,
        replayed=tuple(tuple(layer.replayed) for layer in walk.layers),
        held=tuple(walk.held),
        away=tuple(walk.away),
        whys=tuple(walk.whys),
        sent_bytes=walk.sent,
        sent_by_layer=tuple(walk.sent_by_layer),
        fetch_order=() if walk.flight is None else tuple(walk.flight.order),
        timeline=tuple(walk.points),
        on_top=tuple(walk.on_top),
        fates=tuple(walk.fates),
    )


def replayed_cost(profile: Profile, layer: int, call: int) -> int:
    """Return the cost of a call that runs again; of a copy, if the call is -1."""
    if call >= 0:
        return profile.layers[layer].calls[call].cost
    return next((n for n, cost in enumerate(profile.costs) if cost.op == COPY), 0)


class _Walk:
    """A step in progress."""

    def __init__(
        self,
        profile: Profile,
        in_flight: InFlight | None,
        *,
        timeline: bool,
        on_top: bool,
        watcher: Watcher | None,
    ) -> None:
        self.room = Room(dict(profile.storages))
        self.room.listener = self._watcher = watcher
        self.flight = None if in_flight is None else in_flight.begin(self.room)
        self.layers: list[Emulated] = []
        self.held: list[tuple[int, ...]] = [()] * len(profile.layers)
        self.away: list[tuple[int, ...]] = [()] * len(profile.layers)
        self.whys: list[tuple[Reason | None, ...]] = [()] * len(profile.layers)
        self.fates: list[tuple[Fate | None, ...]] = [()] * len(profile.layers)
        self.peak, self.peak_op, self.peak_layer = -1, "", -1
        self.tensor_peak = -1
        self.saved = self.sent = 0
        self.sent_by_layer = [0] * len(profile.layers)
        self.points: list[tuple[int, int]] = []
        self.on_top: list[OnTop] = []
        self._profile, self._timeline, self._on_top = profile, timeline, on_top
        self._live = self._at = 0
        self._layer = -1
        self._kept = profile.base_bytes
        """What is not an activation: parameters, buffers, optimizer state, and the gradients that are there."""

    def run(self) -> None:
        """Take all entries of the log, in order."""
        takers: dict[type[Entry], Callable[[Any], None]] = {
            OpRan: self._op,
            CallRan: self._call,
            Entered: self._enter,
            Left: self._leave,
            Packed: self._on_tape,
            Unpacked: self._unpack,
            Dropped: self._on_tape,
            Loosened: self._on_tape,
            GivenGone: self._on_tape,
            TensorGone: self._on_tape,
            StorageDied: self._die,
            PhaseBegan: self._phase,
            GradientsCounted: self._count_gradients,
        }
        if self._watcher is not None:
            self._run_watched(takers, self._watcher)
            return
        for at, entry in enumerate(self._profile.log):
            self._at = at
            takers[type(entry)](entry)

    def _run_watched(self, takers: Mapping[type[Entry], Callable[[Any], None]], watcher: Watcher) -> None:
        """Do the same, and tell a watcher what the program itself allocates and frees."""
        memory, log = self._profile.memory, self._profile.log
        died = {entry.storage for entry in log if isinstance(entry, StorageDied)}
        ends = {storage: nth for nth, (_, storage, _) in enumerate(memory) if storage in died}
        told = 0
        for at, entry in enumerate(log):
            self._at = at
            while told < len(memory) and memory[told][0] <= at:
                self._tell(memory[told], watcher, dies=ends.get(memory[told][1]) == told)
                told += 1
            takers[type(entry)](entry)
            watcher.passed(entry)
        for nth in range(told, len(memory)):
            self._tell(memory[nth], watcher, dies=ends.get(memory[nth][1]) == nth)

    def _tell(self, change: tuple[int, int, int], watcher: Watcher, *, dies: bool) -> None:
        _, storage, num_bytes = change
        if num_bytes:
            watcher.allocated(storage, num_bytes)
        elif not dies or not self.room.is_held(storage):
            # One that dies is freed when the last holder lets go of it. One that is emptied, as FSDP does it with its
            # parameters after a forward pass, is free at once, whoever holds it.
            watcher.freed(storage)

    def _op(self, entry: OpRan) -> None:
        self._live = entry.live_bytes
        self._sample(entry.cost, entry.workspace_bytes)

    def _call(self, entry: CallRan) -> None:
        self.layers[entry.layer].call(entry.index)
        self._live = entry.live_bytes
        self._sample(entry.cost, entry.workspace_bytes)

    def _on_tape(self, entry: LayerEntry) -> None:
        ON_TAPE[type(entry)](self.layers[entry.layer], entry.index)

    def _die(self, entry: StorageDied) -> None:
        self.room.die(entry.storage)

    def _unpack(self, entry: Unpacked) -> None:
        self._layer, self._live = entry.layer, entry.live_bytes
        self.layers[entry.layer].unpack(entry.index, self._replayed)

    def _enter(self, entry: Entered) -> None:
        self._layer = entry.layer

    def _leave(self, entry: Left) -> None:
        layer, done = entry.layer, self.layers[entry.layer]
        done.leave()
        self.sent += done.sent_bytes
        if self.flight is not None:
            self.sent_by_layer[layer] = self.flight.end_block()
        self.held[layer] = tuple(v for v, is_held in enumerate(done.held) if is_held)
        self.away[layer] = tuple(v for v, is_away in enumerate(done.away) if is_away)
        self.whys[layer] = tuple(done.why)
        self.fates[layer] = tuple(done.fates)
        self._layer = -1

    def _phase(self, entry: PhaseBegan) -> None:
        self._layer = -1
        if entry.name == "backward":
            held_bytes = self.room.extra_bytes - self.room.bytes_of[STATES]
            self.saved = max(self.saved, entry.live_bytes + held_bytes - self._kept)

    def _count_gradients(self, entry: GradientsCounted) -> None:
        self._kept = self._profile.base_bytes - self._profile.starting_gradients_bytes + entry.num_bytes

    def _replayed(self, call: int) -> None:
        cost = replayed_cost(self._profile, self._layer, call)
        if self._watcher is not None:
            self._watcher.replayed(cost)
        self._sample(cost, 0 if call < 0 else self._profile.costs[cost].workspace_bytes, call)

    def _sample(self, cost: int, workspace_bytes: int, call: int | None = None) -> None:
        """Count what is alive now. Prefetched values count with as many bytes as they may take."""
        total = self._live + self.room.extra_bytes + workspace_bytes
        if self.flight is not None:
            total += self.flight.ahead_bytes
        if self._timeline:
            self.points.append((self._at, total))
        if self._on_top:
            self._note_on_top(workspace_bytes, call)
        if total > self.peak:
            self.peak, self.peak_layer = total, self._layer
            self.peak_op = self._profile.costs[cost].op
        total -= workspace_bytes + self.room.bytes_of[STATES]
        if total > self.tensor_peak:
            self.tensor_peak = total

    def _note_on_top(self, workspace_bytes: int, call: int | None) -> None:
        kinds, flight = self.room.bytes_of, self.flight
        ahead = 0 if flight is None else flight.ahead_bytes
        sent = 0 if flight is None else self._still_there(flight)
        self.on_top.append(
            OnTop(
                saved_bytes=kinds[SAVED] + kinds[STATES] - sent,
                replayed_bytes=kinds[REPLAYED],
                transfers_bytes=kinds[TRANSFERS] + sent + ahead,
                workspace_bytes=workspace_bytes,
                call=call,
            )
        )

    def _still_there(self, flight: Flight) -> int:
        """Return the bytes that live only because they were sent and have not been pushed out of the window."""
        return sum(s.num_bytes for s in flight.in_memory if s.storage >= 0 and self.room.is_held_once(s.storage))
