"""The bytes of a step as sums: what each layer adds at each moment, whatever the other layers do.

NOTE [ Moments ]
`simulate` walks the whole log for one plan. A search asks for thousands of plans, most of which differ in one layer. So
the log is cut at its *events*, the entries where what a tape holds may change: a call, a pack, a leave, an unpack, a
drop, the death of a storage. Between two events only the largest number of bytes alive matters. What one layer adds
after each of its own events depends on its own decisions alone (`Effect`), and the total is their sum. Layers whose own
events come in the same order are one *family*: an effect is worked out once and used for all of them.

Storages that several layers may hold, such as rotary tables, are counted separately, once, while any of them is held.
So are those that a layer did not make and holds whatever is decided. A block's output is mostly not shared: the block
that made it no longer needs it, so it belongs to the next one alone, which reads it. `Timeline.peak` is exact: the same
number as `simulate` finds.

For a bound those unions are not sums. There a shared storage counts while a layer holds it whatever is decided
(`floor`), and beyond that only for the layer that made it. That is never too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from actmem.decisions import Decision
from actmem.log_entries import CallRan, Dropped, LayerEntry, Left, OpRan, Packed, StorageDied, Unpacked
from actmem.profiles import Layer, Profile
from actmem.simulation.room import Room
from actmem.simulation.simulator import ON_TAPE
from actmem.simulation.tape_emulator import Emulated

__all__ = ["Effect", "Event", "LayerFamily", "Timeline"]

Ints = npt.NDArray[np.int64]
NEVER = -(2**62)
"""Fewer bytes than any moment has: nothing was sampled there."""
_OF_A_LAYER = frozenset({*ON_TAPE, Unpacked, Left})
"""The entries of the log that are events of one layer."""


class Uncovered:
    """From here on no other layer is sure to hold a value that this one made."""


class Event(NamedTuple):
    """What happens to a layer."""

    kind: type[LayerEntry | Left | StorageDied | Uncovered]
    """The class of an entry of the log, or `Uncovered`."""
    about: int
    """A call, a handle or a value of the layer."""


@dataclass(frozen=True)
class LayerFamily:
    """Layers that do the same things in the same order."""

    layers: tuple[int, ...]
    """Indices of the layers."""
    layer: Layer
    """The first of them."""
    events: tuple[Event, ...]
    """What happens to such a layer."""
    seconds: tuple[float, ...]
    """What each call takes."""
    outside: frozenset[int]
    """Values whose storage is counted separately."""
    owned: tuple[tuple[int, frozenset[int]], ...]
    """Of these, what the layer made: the value, and after which events nobody else is sure to hold it."""
    leave: int
    """The event that ends the forward."""
    first_unpack: int
    """The event that begins the backward."""

    @property
    def is_used(self) -> bool:
        """Whether backward asks for anything."""
        return self.first_unpack < len(self.events)


@dataclass(frozen=True, eq=False)
class Effect:
    """What one layer does under one set of decisions."""

    keep: tuple[Decision, ...]
    seconds: float
    flops: int
    replayed: tuple[int, ...]
    held: tuple[int, ...]
    sent_bytes: int
    delta: Ints
    """Change of its own bytes at each of its events."""
    burst: Ints
    """Most bytes above those before the event, while calls are replayed in it."""
    late: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Samples after an outside storage was released in the same event: the event, bytes above, the values released."""
    holds: tuple[tuple[int, int, int], ...]
    """Outside storages: the event, the value, 1 or -1."""
    level: Ints
    """For the bound: bytes after each event, and 0 at the end for what has not begun."""
    crest: Ints
    """For the bound: bytes within each unpack that replays."""


class _Ledger(Room):
    """Count the bytes of one layer, and note what it does with storages that are counted separately."""

    def __init__(self, sizes: dict[int, int], outside: dict[int, int]) -> None:
        super().__init__(sizes)
        self._outside = outside
        self.now = 0
        self.holds: list[tuple[int, int, int]] = []

    def hold(self, storage: int) -> None:
        super().hold(storage)
        if storage in self._outside:
            self.holds.append((self.now, self._outside[storage], 1))

    def release(self, storage: int) -> None:
        super().release(storage)
        if storage in self._outside:
            self.holds.append((self.now, self._outside[storage], -1))


class Timeline:
    """The moments of a profile, and what layers add to them. See NOTE [ Moments ]."""

    def __init__(self, profile: Profile, seconds: Sequence[float], *, exact: bool = True) -> None:
        """Cut the log of a profile at its events.

        Args:
            profile: what the step does.
            seconds: what each of the profile's costs takes.
            exact: whether decisions are followed to the letter; see `Emulated`.
        """
        self.profile, self._seconds, self._exact = profile, seconds, exact
        self._sizes = {s: n for s, n in profile.storages.items() if n}
        self._first_value = [_first_values(layer) for layer in profile.layers]
        kinds = {layer.kind: layer for layer in profile.layers}
        reachable = {kind: _reachable(layer) for kind, layer in kinds.items()}
        self._useful = [{layer.values[v].storage for v in reachable[layer.kind]} for layer in profile.layers]
        self._effects: dict[tuple[int, tuple[Decision, ...]], Effect] = {}
        self._cut()
        self._find_outside()
        self._find_makers()
        self._find_families()

    # ---------------------------------------------------------------- the log

    def _cut(self) -> None:
        having: dict[int, list[int]] = {}
        for nth, firsts in enumerate(self._first_value):
            for storage in firsts:
                if storage in self._sizes and storage in self._useful[nth]:
                    having.setdefault(storage, []).append(nth)
        self._having = having
        owned: list[list[int]] = [[] for _ in self.profile.layers]
        events: list[list[Event]] = [[] for _ in self.profile.layers]
        tops: list[int] = []
        asked: list[int] = []
        entries: list[int] = []
        known: dict[tuple[Any, int], Event] = {}  # one object for equal events of all layers
        self._death: dict[int, int] = {}
        top = -1
        log = cast("Sequence[Any]", self.profile.log)
        for at, entry in enumerate(log):  # a large model has a hundred thousand entries
            kind: Any = type(entry)  # pyright: ignore[reportUnknownVariableType]
            if kind is OpRan:
                its = entry.live_bytes + entry.workspace_bytes
                if its > top:  # `max` is a call
                    top = its
                continue
            if kind is StorageDied:
                layers = having.get(entry.storage)
                if layers is None:
                    continue
                self._death[entry.storage] = len(entries)
                for nth in layers:
                    owned[nth].append(len(entries))
                    key = StorageDied, self._first_value[nth][entry.storage]
                    if key not in known:
                        known[key] = Event(*key)
                    events[nth].append(known[key])
            elif kind in _OF_A_LAYER:
                layer: int = entry.layer
                owned[layer].append(len(entries))
                key = kind, 0 if kind is Left else entry.index
                events[layer].append(known.get(key) or known.setdefault(key, Event(*key)))
            else:
                continue
            tops.append(top)
            entries.append(at)
            asked.append(entry.live_bytes if kind is Unpacked else NEVER)
            top = entry.live_bytes + entry.workspace_bytes if kind is CallRan else NEVER
        self.base_peak_bytes, *live = [*tops, top]
        """The peak before the first event."""
        self.live: Ints = np.array(live, dtype=np.int64)
        """For each event, the most bytes that the program keeps alive until the next one."""
        self.asked: Ints = np.array(asked, dtype=np.int64)
        """For each unpack, the bytes that the program keeps alive in it."""
        self.entries = entries
        self.places = [np.array(o, dtype=np.int64) for o in owned]
        """For each layer, where its own events are."""
        self._events = events

    def _find_outside(self) -> None:
        """Find the storages that are counted separately, and when each is held whatever is decided."""
        self._sure: dict[int, list[tuple[int, int]]] = {}
        outside = {s for s, layers in self._having.items() if len(layers) > 1}
        for nth, layer in enumerate(self.profile.layers):
            opened: dict[int, int] = {}
            closed: dict[int, int] = {}
            values = {
                handle: layer.values[v] for handle, v in enumerate(layer.handles) if layer.values[v].kind != "made"
            }
            sure = {h: v.storage for h, v in values.items() if v.storage in self._sizes and v.overwritten < 0}
            for k, (kind, handle) in enumerate(self._events[nth]):
                if kind is Packed and handle in sure:
                    opened[handle] = int(self.places[nth][k])
                elif kind is Dropped and handle in sure:
                    closed[handle] = int(self.places[nth][k])
            for handle, begin in opened.items():
                outside.add(sure[handle])
                interval = begin, closed.get(handle, len(self.live))
                self._sure.setdefault(sure[handle], []).append(interval)
        self._outside = outside
        change = np.zeros(len(self.live) + 1, dtype=np.int64)
        for storage in outside:
            death = self._death.get(storage)
            for begin, end in _union(self._sure.get(storage, [])):
                if death is not None and end > max(begin, death):
                    change[max(begin, death)] += self._sizes[storage]
                    change[end] -= self._sizes[storage]
        self.floor: Ints = np.cumsum(change[:-1])
        """For each event, bytes of shared storages that are held whatever is decided."""
        self.floor_peak_bytes = max(self.base_peak_bytes, int((self.live + self.floor).max(initial=-1)))
        """Lower bound on the peak of any decisions."""

    def _find_makers(self) -> None:
        """Find who made the separately counted storages: what matters is when nobody else is sure to hold them."""
        self._maker: dict[int, int] = {}
        made = [{value.storage for value in layer.values if value.kind == "made"} for layer in self.profile.layers]
        ends: dict[int, list[tuple[int, int]]] = {}
        for storage in self._outside:
            for nth in self._having[storage]:
                if storage in made[nth]:
                    self._maker[storage] = nth
                    for _, end in _union(self._sure.get(storage, [])):
                        ends.setdefault(nth, []).append((end, self._first_value[nth][storage]))
                    break
        for nth, found in ends.items():
            events = [(int(place), event) for place, event in zip(self.places[nth], self._events[nth], strict=True)]
            events += [
                (end, Event(Uncovered, v)) for end, v in found if end < len(self.live) and end not in self.places[nth]
            ]
            events.sort(key=lambda placed: placed[0])
            self.places[nth] = np.array([place for place, _ in events], dtype=np.int64)
            self._events[nth] = [event for _, event in events]

    def _find_families(self) -> None:
        found: dict[Any, list[int]] = {}
        facts: dict[Any, Any] = {}
        for nth, layer in enumerate(self.profile.layers):
            events = self._events[nth]
            outside = frozenset(self._first_value[nth][s] for s in self._useful[nth] if s in self._outside)
            owned = tuple(
                (v, self._uncovered(nth, v)) for v in sorted(outside) if self._maker.get(layer.values[v].storage) == nth
            )
            seconds = tuple(self._seconds[c.cost] for c in layer.calls)
            key = layer.kind, tuple(events), outside, owned, seconds
            found.setdefault(key, []).append(nth)
            facts[key] = events, outside, owned, seconds
        self.families: list[LayerFamily] = []
        self.family_of = [0] * len(self.profile.layers)
        for key, layers in found.items():
            events, outside, owned, seconds = facts[key]
            kinds = [event.kind for event in events]
            for nth in layers:
                self.family_of[nth] = len(self.families)
            self.families.append(
                LayerFamily(
                    layers=tuple(layers),
                    layer=self.profile.layers[layers[0]],
                    events=tuple(events),
                    seconds=seconds,
                    outside=outside,
                    owned=owned,
                    leave=kinds.index(Left),
                    first_unpack=kinds.index(Unpacked) if Unpacked in kinds else len(kinds),
                )
            )

    def _uncovered(self, nth: int, v: int) -> frozenset[int]:
        sure = _union(self._sure.get(self.profile.layers[nth].values[v].storage, []))
        places = [*(int(j) for j in self.places[nth]), len(self.live)]
        return frozenset(
            k for k in range(len(places) - 1) if not any(b < places[k + 1] and e > places[k] for b, e in sure)
        )

    # ---------------------------------------------------------------- effects

    def effect(self, family: int, keep: Sequence[Decision]) -> Effect:
        """Work out what a layer of a family does under given decisions."""
        key = family, tuple(keep)
        if key not in self._effects:
            self._effects[key] = self._emulate(self.families[family], key[1])
        return self._effects[key]

    def _emulate(self, family: LayerFamily, keep: tuple[Decision, ...]) -> Effect:
        layer = family.layer
        apart = {layer.values[v].storage: v for v in family.outside}
        inside = {v.storage for v in layer.values if v.storage in self._sizes and v.storage not in apart}
        ledger = _Ledger({s: self._sizes[s] for s in inside}, apart)
        tape = Emulated(layer, keep, ledger, exact=self._exact)
        n = len(family.events)
        delta, burst = np.zeros(n, dtype=np.int64), np.full(n, NEVER, dtype=np.int64)
        level, crest = np.zeros(n + 1, dtype=np.int64), np.full(n, NEVER, dtype=np.int64)
        late: list[tuple[int, int, tuple[int, ...]]] = []
        credit = _Credit(family, self._sizes, ledger)
        costs = self.profile.costs
        before = 0
        held: tuple[int, ...] = ()
        seen = [0]

        def sample(call: int) -> None:
            workspace = 0 if call < 0 else costs[layer.calls[call].cost].workspace_bytes
            above = ledger.extra_bytes + workspace - before
            gone = tuple(v for _, v, way in ledger.holds[seen[0] :] if way < 0)
            if gone:
                late.append((ledger.now, above, gone))
            else:
                burst[ledger.now] = max(burst[ledger.now], above)
            crest[ledger.now] = max(crest[ledger.now], ledger.extra_bytes + workspace + credit.bytes(ledger.now))

        for k, (kind, about) in enumerate(family.events):
            ledger.now, before, seen[0] = k, ledger.extra_bytes, len(ledger.holds)
            if kind in ON_TAPE:
                ON_TAPE[kind](tape, about)
            elif kind is StorageDied:
                ledger.die(layer.values[about].storage)
            elif kind is Left:
                tape.leave()
                held = tuple(v for v, is_held in enumerate(tape.held) if is_held)
            elif kind is Unpacked:
                tape.unpack(about, sample)
            delta[k] = ledger.extra_bytes - before
            level[k] = ledger.extra_bytes + credit.bytes(k)
        return Effect(
            keep=keep,
            seconds=sum(family.seconds[c] for c in tape.replayed),
            flops=sum(costs[layer.calls[c].cost].flops for c in tape.replayed),
            replayed=tuple(tape.replayed),
            held=held,
            sent_bytes=tape.sent_bytes,
            delta=delta,
            burst=burst,
            late=tuple(late),
            holds=tuple(ledger.holds),
            level=level,
            crest=crest,
        )

    # ---------------------------------------------------------------- totals

    def totals(self, effects: Sequence[Effect], *, in_flight_bytes: int = 0) -> tuple[Ints, Ints]:
        """Return the most bytes after each event and within each unpack, for one effect per layer."""
        change = np.zeros(len(self.live) + 1, dtype=np.int64)
        holds: dict[int, list[tuple[int, int]]] = {}
        for nth, effect in enumerate(effects):
            places = self.places[nth]
            change[places] += effect.delta
            values = self.profile.layers[nth].values
            for k, v, way in effect.holds:
                holds.setdefault(values[v].storage, []).append((int(places[k]), way))
        for storage, found in holds.items():
            death = self._death.get(storage)
            if death is None:
                continue
            for begin, end in _held(found, len(self.live)):
                if end > max(begin, death):
                    change[max(begin, death)] += self._sizes.get(storage, 0)
                    change[end] -= self._sizes.get(storage, 0)
        extra = np.cumsum(change[:-1])
        if in_flight_bytes:
            extra = extra + self._in_flight(effects, in_flight_bytes)
        before = np.concatenate(([0], extra[:-1]))
        within = np.full(len(self.live), NEVER, dtype=np.int64)
        for nth, effect in enumerate(effects):
            places = self.places[nth]
            found = effect.burst > NEVER
            at = places[found]
            within[at] = np.maximum(within[at], self.asked[at] + before[at] + effect.burst[found])
            for k, above, gone in effect.late:
                at = int(places[k])
                freed = sum(self._freed(nth, v, at, holds) for v in set(gone))
                within[at] = max(int(within[at]), int(self.asked[at] + before[at]) + above - freed)
        return self.live + extra, within

    def _in_flight(self, effects: Sequence[Effect], in_flight_bytes: int) -> Ints:
        sent = np.zeros(len(self.live), dtype=np.int64)
        for nth, effect in enumerate(effects):
            family = self.families[self.family_of[nth]]
            sent[int(self.places[nth][family.leave])] += effect.sent_bytes
        return np.minimum(np.cumsum(sent), in_flight_bytes)

    def _freed(self, nth: int, v: int, at: int, holds: dict[int, list[tuple[int, int]]]) -> int:
        storage = self.profile.layers[nth].values[v].storage
        death = self._death.get(storage)
        if death is None or death >= at:
            return 0
        left = sum(way for j, way in holds[storage] if j <= at)
        return 0 if left else self._sizes.get(storage, 0)

    def peak(self, effects: Sequence[Effect], *, in_flight_bytes: int = 0) -> int:
        """Return the peak of a step, exactly as `simulate` does."""
        after, within = self.totals(effects, in_flight_bytes=in_flight_bytes)
        return max(self.base_peak_bytes, int(after.max(initial=-1)), int(within.max(initial=-1)))


class _Credit:
    """For the bound: bytes of outside storages that this layer made and nobody else is sure to hold."""

    def __init__(self, family: LayerFamily, sizes: dict[int, int], ledger: _Ledger) -> None:
        self._owned = [
            (v, family.layer.values[v].storage, sizes[family.layer.values[v].storage], k) for v, k in family.owned
        ]
        self._ledger = ledger

    def bytes(self, now: int) -> int:
        """Return the bytes that currently count."""
        total = 0
        for v, storage, size, uncovered in self._owned:
            if now in uncovered and self._ledger.is_dead(storage):
                total += size if sum(way for _, u, way in self._ledger.holds if u == v) else 0
        return total


def _first_values(layer: Layer) -> dict[int, int]:
    found: dict[int, int] = {}
    for v, value in enumerate(layer.values):
        found.setdefault(value.storage, v)
    return found


def _reachable(layer: Layer) -> frozenset[int]:
    """Return the values that a tape may hold: what autograd saves, and what a call reads or writes to."""
    found = set(layer.handles)
    for value in layer.values:
        found.update(value.reads)
        found.add(value.writes)
    return frozenset(found - {-1})


def _union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _held(changes: list[tuple[int, int]], last: int) -> list[tuple[int, int]]:
    """Return the stretches in which a storage is held."""
    found: list[tuple[int, int]] = []
    count, begin = 0, 0
    steps: dict[int, int] = {}
    for j, way in changes:
        steps[j] = steps.get(j, 0) + way
    for j in sorted(steps):
        after = count + steps[j]
        if after and not count:
            begin = j
        elif count and not after:
            found.append((begin, j))
        count = after
    if count:
        found.append((begin, last))
    return found
