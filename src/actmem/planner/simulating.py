"""What a step takes under a plan: peak bytes and where, replayed work, bytes sent away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actmem.planner.emulating import Emulated, Room
from actmem.profiles import Entry, Profile

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """The outcome of `simulate`."""

    peak_bytes: int
    peak_op: str
    peak_layer: int
    """Index of the layer that the peak lies in; -1 if it lies outside."""
    saved_bytes: int
    """What is alive when backward begins, beyond what was alive at the start."""
    replayed: tuple[tuple[int, ...], ...]
    """For each layer, the calls that were run again."""
    held: tuple[tuple[int, ...], ...]
    """For each layer, the values that were held when its forward was over."""
    away: tuple[tuple[int, ...], ...]
    """For each layer, those of them that were sent away."""
    whys: tuple[tuple[str | None, ...], ...]
    """For each layer, why each of its values cannot be replayed, if it cannot."""
    sent_bytes: int
    timeline: tuple[tuple[int, int], ...]
    """(position in the log, bytes alive), where it was asked for."""


def simulate(
    profile: Profile,
    keeps: Sequence[Sequence[str]],
    *,
    exact: bool = False,
    inputs_sent: Sequence[bool] | None = None,
    min_offload_bytes: int = 0,
    in_flight_bytes: int = 0,
    forced: Sequence[Mapping[int, str] | None] | None = None,
    timeline: bool = False,
) -> Simulated:
    """Walk through the log of a profile with the decisions of every layer.

    Args:
        profile: what the step does.
        keeps: for each layer, "save", "offload" or "" for each of its calls.
        exact: see `Emulated`.
        inputs_sent: for each layer, whether what it is given is sent away.
        min_offload_bytes: smaller values stay.
        in_flight_bytes: how many bytes the copies under way may take, which are counted as if they did.
        forced: for each layer, the calls of its smallest cut.
        timeline: whether to return the bytes after each operator.
    """
    walk = _Walk(profile, in_flight_bytes, timeline=timeline)
    for i, (layer, keep) in enumerate(zip(profile.layers, keeps, strict=True)):
        cut = None if forced is None else forced[i]
        walk.layers.append(
            Emulated(
                layer,
                keep,
                walk.room,
                exact=exact,
                sends_inputs=inputs_sent is not None and inputs_sent[i],
                min_offload_bytes=min_offload_bytes,
                forced=None if cut is None else dict(cut),
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
        timeline=tuple(walk.points),
    )


class _Walk:
    """A step under way."""

    def __init__(self, profile: Profile, in_flight_bytes: int, *, timeline: bool) -> None:
        self.room = Room(dict(profile.storages))
        self.layers: list[Emulated] = []
        self.held: list[tuple[int, ...]] = [()] * len(profile.layers)
        self.away: list[tuple[int, ...]] = [()] * len(profile.layers)
        self.whys: list[tuple[str | None, ...]] = [()] * len(profile.layers)
        self.peak, self.peak_op, self.peak_layer = -1, "", -1
        self.saved = self.sent = 0
        self.points: list[tuple[int, int]] = []
        self._profile, self._in_flight_bytes, self._timeline = profile, in_flight_bytes, timeline
        self._live = self._at = 0
        self._layer = -1

    def take(self, at: int, entry: Entry) -> None:
        """Go on by one entry."""
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
        elif verb == "enter":
            self._layer = int(entry[1])
        elif verb == "leave":
            self._leave(int(entry[1]))
        elif verb == "phase":
            self._layer = -1
            if entry[1] == "backward":
                self.saved = entry[2] + self.room.extra_bytes - self._profile.base_bytes

    def _leave(self, layer: int) -> None:
        done = self.layers[layer]
        done.leave()
        self.sent += done.sent_bytes
        self.held[layer] = tuple(v for v, is_held in enumerate(done.held) if is_held)
        self.away[layer] = tuple(v for v, is_away in enumerate(done.away) if is_away)
        self.whys[layer] = tuple(done.why)
        self._layer = -1

    def _replayed(self, call: int, born_bytes: int) -> None:
        self._sample(born_bytes, self._profile.layers[self._layer].calls[call].cost)

    def _sample(self, born_bytes: int, cost: int) -> None:
        """Count what is alive now. Copies under way count as many bytes as they may take."""
        total = self._live + self.room.extra_bytes + born_bytes
        if self.sent:
            total += min(self._in_flight_bytes, self.sent)
        if self._timeline:
            self.points.append((self._at, total))
        if total > self.peak:
            self.peak, self.peak_layer = total, self._layer
            self.peak_op = self._profile.costs[cost].op
