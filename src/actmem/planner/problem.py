"""What there is to decide in one block: which values are needed when, what each takes, what each costs to recompute.

NOTE [ Units ]
A unit is a call, together with calls before it that are never worth keeping by themselves. A call joins the only unit
that reads it where that unit's result is at most as large and lives as long: keeping the result of the unit instead
takes no more bytes at any moment and saves more work. So the last four calls of a rotary embedding are one unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actmem.decisions import Decision
from actmem.log_entries import Dropped, Packed, StorageDied, Unpacked
from actmem.simulation import LayerFamily

__all__ = ["BlockProblem", "Item", "Unit", "block_problem"]


@dataclass(frozen=True)
class Unit:
    """Calls that are replayed together."""

    calls: tuple[int, ...]
    """The last one is kept if the unit is."""
    seconds: float
    reads: tuple[int, ...]
    """Items that a replay needs."""
    makes: tuple[int, ...]
    """Items that it makes."""


@dataclass(frozen=True)
class Item:
    """One value that backward or a replay needs."""

    value: int
    unit: int
    """Which unit makes it; -1 if it can only be held."""
    num_bytes: int
    """What a copy takes."""
    death: int
    """The event from which it takes bytes if it was kept: until then the program holds it anyway."""
    counted: frozenset[int] | None
    """The events after which it counts when kept; None for all."""
    first_unpack: int
    """The first event that asks for it; -1 if only replays need it."""
    last_drop: int
    """The event that ends the last handle; -1 if there is none."""
    readers: tuple[int, ...]
    """Units that read it."""

    def kept_bytes(self, event: int) -> int:
        """Return what it takes after an event, if it is kept and still needed."""
        counts = event >= self.death and (self.counted is None or event in self.counted)
        return self.num_bytes if counts else 0


@dataclass(frozen=True)
class BlockProblem:
    """What there is to decide in the layers of one family."""

    num_calls: int
    units: tuple[Unit, ...]
    items: tuple[Item, ...]
    first_unpack: int
    """The event that begins the backward of the block."""

    def keep(self, recomputed: frozenset[int], sent: frozenset[int] = frozenset()) -> tuple[Decision, ...]:
        """Return the decision for each call: units that are neither recomputed nor offloaded are saved."""
        found = [Decision.RECOMPUTE] * self.num_calls
        for u, unit in enumerate(self.units):
            if u not in recomputed:
                found[unit.calls[-1]] = Decision.OFFLOAD if u in sent else Decision.SAVE
        return tuple(found)


def block_problem(family: LayerFamily, sizes: Mapping[int, int]) -> BlockProblem:
    """Read the problem of one family of layers off its events. `sizes` are the bytes of the profile's storages."""
    return _Reader(family, sizes).read()


class _Reader:
    def __init__(self, family: LayerFamily, sizes: Mapping[int, int]) -> None:
        self._family, self._sizes = family, sizes
        self._values = family.layer.values
        self._unpack: dict[int, int] = {}
        self._drop: dict[int, int] = {}
        self._packed: set[int] = set()
        self._death: dict[int, int] = {}
        handles = family.layer.handles
        for k, (kind, about) in enumerate(family.events):
            if kind is StorageDied:
                self._death[self._values[about].storage] = k
            elif kind is Packed:
                self._packed.add(handles[about])
            elif kind is Unpacked:
                self._unpack.setdefault(handles[about], k)
            elif kind is Dropped:
                self._drop[handles[about]] = k

    def read(self) -> BlockProblem:
        reads, makes, needed = self._needed()
        groups = self._join(reads, makes)
        units: list[Unit] = []
        unit_of: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        inner = {v for calls in groups.values() for c in calls[:-1] for v in makes[c]}
        number = {v: i for i, v in enumerate(sorted(needed - inner))}
        for last, calls in sorted(groups.items()):
            found = dict.fromkeys(number[r] for c in calls for r in reads[c] if r in number)
            for r in found:
                readers.setdefault(r, []).append(len(units))
            for v in makes[last]:
                unit_of[v] = len(units)
            seconds = sum(self._family.seconds[c] for c in calls)
            units.append(Unit(tuple(calls), seconds, tuple(found), tuple(number[v] for v in makes[last])))
        owned = dict(self._family.owned)
        storages = {self._values[v].storage: v for v in self._family.outside}
        items: list[Item] = []
        for v, i in number.items():
            value = self._values[v]
            apart = storages.get(value.storage)
            items.append(
                Item(
                    value=v,
                    unit=unit_of.get(v, -1),
                    num_bytes=value.num_bytes if value.kind == "made" else self._sizes.get(value.storage, 0),
                    death=self._dies(v),
                    counted=None if apart is None else owned.get(apart, frozenset()),
                    first_unpack=self._unpack.get(v, -1),
                    last_drop=self._drop.get(v, len(self._family.events)) if v in self._packed else -1,
                    readers=tuple(readers.get(i, ())),
                )
            )
        return BlockProblem(len(self._family.layer.calls), tuple(units), tuple(items), self._family.first_unpack)

    def _needed(self) -> tuple[dict[int, tuple[int, ...]], dict[int, list[int]], set[int]]:
        """Find the values that backward can need, and the calls that can recompute them."""
        reads: dict[int, tuple[int, ...]] = {}
        makes: dict[int, list[int]] = {}
        needed: set[int] = set()
        stack = list(self._unpack)
        while stack:
            v = stack.pop()
            if v in needed:
                continue
            needed.add(v)
            value = self._values[v]
            if value.kind != "made" or value.why is not None:
                continue
            makes.setdefault(value.call, []).append(v)
            if value.call not in reads:
                made = self._family.layer.calls[value.call].makes
                found = dict.fromkeys(r for u in made if self._values[u].why is None for r in self._values[u].reads)
                reads[value.call] = tuple(found)
                stack.extend(found)
        return reads, makes, needed

    def _join(self, reads: dict[int, tuple[int, ...]], makes: dict[int, list[int]]) -> dict[int, list[int]]:
        """Join calls into units. See NOTE [ Units ]."""
        into = {c: c for c in reads}

        def root(c: int) -> int:
            while into[c] != c:
                c = into[c]
            return c

        apart = {self._values[v].storage for v in self._family.outside}
        by: dict[int, list[int]] = {}
        for c, found in reads.items():
            for r in found:
                by.setdefault(r, []).append(c)
        for c in sorted(reads, reverse=True):
            made = makes[c]
            if any(v in self._packed or self._values[v].storage in apart for v in made):
                continue
            targets = {root(r) for v in made for r in by.get(v, ())}
            if len(targets) != 1:
                continue
            (target,) = targets
            smaller = self._total(makes[target]) <= self._total(made)
            if smaller and max(map(self._dies, made)) <= min(map(self._dies, makes[target])):
                into[c] = target
        groups: dict[int, list[int]] = {}
        for c in sorted(reads):
            groups.setdefault(root(c), []).append(c)
        return groups

    def _total(self, values: list[int]) -> int:
        return sum(self._values[v].num_bytes for v in values)

    def _dies(self, v: int) -> int:
        return self._death.get(self._values[v].storage, len(self._family.events))
