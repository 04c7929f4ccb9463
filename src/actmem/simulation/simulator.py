"""What a step takes under a plan: peak bytes and where, replayed work, bytes offloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actmem.decisions import Decision, Reason
from actmem.profiles import COPY, Entry, Profile
from actmem.simulation.flight import InFlight
from actmem.simulation.room import Room
from actmem.simulation.tape_emulator import Emulated, Fate

__all__ = ["Simulated", "replayed_cost", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """The outcome of `simulate`."""

    peak_bytes: int
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
    fates: tuple[tuple[Fate | None, ...], ...] = ()
    """For each layer, what became of its values by the end of its forward."""
    forced: tuple[Mapping[int, Reason] | None, ...] = ()
    """For each layer, the calls of its smallest cut that were held."""


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
    """
    walk = _Walk(profile, in_flight, timeline=timeline)
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
    for at, entry in enumerate(profile.log):
        walk.take(at, entry)
    return Simulated(
        peak_bytes=walk.peak,
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
        fates=tuple(walk.fates),
        forced=tuple(forced or ()),
    )


def replayed_cost(profile: Profile, layer: int, call: int) -> int:
    """Return the cost of a call that runs again; of a copy, if the call is -1."""
    if call >= 0:
        return profile.layers[layer].calls[call].cost
    return next((n for n, cost in enumerate(profile.costs) if cost.op == COPY), 0)


class _Walk:
    """A step in progress."""

    def __init__(self, profile: Profile, in_flight: InFlight | None, *, timeline: bool) -> None:
        self.room = Room(dict(profile.storages))
        self.flight = None if in_flight is None else in_flight.begin(self.room)
        self.layers: list[Emulated] = []
        self.held: list[tuple[int, ...]] = [()] * len(profile.layers)
        self.away: list[tuple[int, ...]] = [()] * len(profile.layers)
        self.whys: list[tuple[Reason | None, ...]] = [()] * len(profile.layers)
        self.fates: list[tuple[Fate | None, ...]] = [()] * len(profile.layers)
        self.peak, self.peak_op, self.peak_layer = -1, "", -1
        self.saved = self.sent = 0
        self.sent_by_layer = [0] * len(profile.layers)
        self.points: list[tuple[int, int]] = []
        self._profile, self._timeline = profile, timeline
        self._live = self._at = 0
        self._layer = -1
        self._kept = profile.base_bytes
        """What is not an activation: parameters, buffers, optimizer state, and the gradients that are there."""

    def take(self, at: int, entry: Entry) -> None:
        """Advance by one entry."""
        self._at = at
        verb: str = entry[0]
        if verb == "op":
            self._live = entry[2]
            self._sample(0, entry[1])
        elif verb == "call":
            self.layers[int(entry[1])].call(entry[2])
            self._live = entry[4]
            self._sample(0, entry[3])
        elif verb == "die":
            self.room.die(entry[1])
        elif verb == "pack":
            self.layers[int(entry[1])].pack(entry[2])
        elif verb == "unpack":
            self._layer, self._live = int(entry[1]), entry[3]
            self.layers[self._layer].unpack(entry[2], self._replayed)
        elif verb == "drop":
            self.layers[int(entry[1])].drop(entry[2])
        elif verb == "loose":
            self.layers[int(entry[1])].loosen(entry[2])
        elif verb == "done":
            self.layers[int(entry[1])].done(entry[2])
        elif verb == "gone":
            self.layers[int(entry[1])].lose(entry[2])
        elif verb == "enter":
            self._layer = int(entry[1])
        elif verb == "leave":
            self._leave(int(entry[1]))
        elif verb == "phase":
            self._layer = -1
            if entry[1] == "backward":
                self.saved = max(self.saved, entry[2] + self.room.extra_bytes - self._kept)
        elif verb == "gradients":
            self._kept = self._profile.base_bytes - self._profile.starting_gradients_bytes + entry[1]

    def _leave(self, layer: int) -> None:
        done = self.layers[layer]
        done.leave()
        self.sent += done.sent_bytes
        if self.flight is not None:
            self.sent_by_layer[layer] = self.flight.end_block()
        self.held[layer] = tuple(v for v, is_held in enumerate(done.held) if is_held)
        self.away[layer] = tuple(v for v, is_away in enumerate(done.away) if is_away)
        self.whys[layer] = tuple(done.why)
        self.fates[layer] = tuple(done.fates)
        self._layer = -1

    def _replayed(self, call: int, born_bytes: int) -> None:
        self._sample(born_bytes, replayed_cost(self._profile, self._layer, call))

    def _sample(self, born_bytes: int, cost: int) -> None:
        """Count what is alive now. Prefetched values count with as many bytes as they may take."""
        total = self._live + self.room.extra_bytes + born_bytes
        if self.flight is not None:
            total += self.flight.ahead_bytes
        if self._timeline:
            self.points.append((self._at, total))
        if total > self.peak:
            self.peak, self.peak_layer = total, self._layer
            self.peak_op = self._profile.costs[cost].op
