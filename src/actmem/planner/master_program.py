"""The whole step as a program: how many layers of each family follow which decisions.

NOTE [ The master program ]
A *column* is an effect: decisions for a layer, worked out. A *row* is a moment of the step at which the bytes of all
layers must fit. Layers that are at the same point of their family's events at all rows are alike, so the program counts
them instead of naming them: its size depends on the number of rows, not of layers. Rows are added where a solution
breaks the budget; columns are added where the prices of the rows make them pay (NOTE [ The block program ]).

For any prices of the rows, take for each layer the decisions that cost least at these prices, and subtract from their
sum what the whole budget costs at every row, less what the program itself uses there. No plan that fits replays in less
time (Lagrange). That is the bound. Rows that are missing, and shared storages that are left out, only lower it.

The bound of a blend is off by about one layer's worth of work. Where there are few layers that is a lot. One program
with the decisions of every layer has no such gap. But it does not know that layers are alike, so it must be small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actmem.decisions import Decision
from actmem.log_entries import StorageDied
from actmem.planner.block_program import BlockProgram, Priced, price
from actmem.planner.highs import Program
from actmem.planner.problem import BlockProblem, block_problem
from actmem.planner.work import Work
from actmem.simulation import NEVER, Effect, Link, Timeline, Traffic

__all__ = ["Joined", "Mix", "Moment", "Step", "join"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SMALL = 250
"""Beyond this many columns and rows, an integer program must fit: to find the best mix that does not takes long, and
nothing is done with it."""
_LARGE, _OF_A_PART = 1_000, 40
"""An integer program with more columns and rows than the first, and than its allowance over the second, is not tried:
HiGHS is limited in nodes, and the first of them alone takes many times the allowance."""


@dataclass(frozen=True)
class Moment:
    """A row: after an event, or within an unpack that replays."""

    event: int
    within: bool


@dataclass(frozen=True)
class Group:
    """Layers that are alike at all rows."""

    family: int
    layers: tuple[int, ...]
    places: tuple[tuple[int, bool], ...]
    """For each row, the layer's own event before it, and whether the row lies within that event."""


@dataclass(frozen=True)
class Mix:
    """A solution: for each group, how many of its layers follow which column."""

    counts: list[list[tuple[int, float]]]
    """For each group, (number of the column in the family's pool, how many)."""
    over_bytes: float
    """How far it is above the budget."""
    prices: list[float]
    """The price of a byte at each row."""
    seconds: float
    bound: float = -float("inf")
    """For integer solutions: lower bound on the seconds, or the peak, of any mix of these columns."""
    copies: Sequence[float] = ()
    """The price of a byte that is sent, and of one that is fetched, where there is a link."""


class Step:
    """The step of a profile, with the columns and rows found so far."""

    def __init__(
        self, timeline: Timeline, work: Work, *, link: Link | None = None, traffic: Traffic | None = None
    ) -> None:
        self.timeline, self.work, self._link, self._traffic = timeline, work, link, traffic
        sizes = timeline.profile.storages
        self.problems: list[BlockProblem] = [block_problem(f, sizes) for f in timeline.families]
        self.pools: list[list[Effect]] = [[] for _ in timeline.families]
        self._known: list[set[tuple[str, ...]]] = [set() for _ in timeline.families]
        self.rows: list[Moment] = []
        self.groups: list[Group] = []
        self._prices: dict[tuple[int, tuple[tuple[int, float], ...], float, float | None], Priced] = {}
        self._safe = _safe_unpacks(timeline)
        starts = [int(timeline.places[nth][f.first_unpack]) for f in timeline.families for nth in f.layers if f.is_used]
        self._begins = np.array(sorted(starts), dtype=np.int64)
        self._link_unit = 1.0
        self.apart = False
        """Whether every layer is a group of its own."""
        self.tight: dict[Moment, int] = {}
        """Bytes that a row must keep free, for integer solutions."""
        self.barred: list[list[int]] = []
        """Integer solutions that turned out not to fit: for each layer, the number of its column."""
        self.regroup()

    def add(self, family: int, keep: Sequence[Decision]) -> Effect | None:
        """Add a column to the pool of a family; return it if it is new."""
        key = tuple(keep)
        if key in self._known[family]:
            return None
        self._known[family].add(key)
        effect = self.timeline.effect(family, key)
        if self._link is not None and effect.sent_bytes > self._link.in_flight_bytes:
            return None
        self.pools[family].append(effect)
        return effect

    def add_rows(self, moments: Sequence[Moment]) -> bool:
        """Add rows. Return whether any is new."""
        new = [m for m in moments if m not in self.rows]
        self.rows.extend(new)
        if new:
            self.regroup()
        return bool(new)

    def regroup(self) -> None:
        """Find out which layers are alike at all rows."""
        found: dict[tuple[int, tuple[tuple[int, bool], ...], int], list[int]] = {}
        events = np.array([m.event for m in self.rows], dtype=np.int64)
        for nth, places in enumerate(self.timeline.places):
            at = np.searchsorted(places, events, side="right") - 1
            own = [m.within and k >= 0 and int(places[k]) == m.event for k, m in zip(at, self.rows, strict=True)]
            key = self.timeline.family_of[nth], tuple(zip((int(k) for k in at), own, strict=True)), nth * self.apart
            found.setdefault(key, []).append(nth)
        self.groups = [Group(family, tuple(layers), places) for (family, places, _), layers in found.items()]

    def base_bytes(self, moment: Moment) -> int:
        """Return the bytes of a row without any layer's decisions."""
        line = self.timeline
        live = line.asked if moment.within else line.live
        return int(live[moment.event] + line.floor[moment.event])

    def is_sure(self, moment: Moment) -> bool:
        """Return whether a row may be used for a bound. See `_safe_unpacks`."""
        return not moment.within or bool(self._safe[moment.event])

    def _added_bytes(self, group: Group, bases: Ints) -> Ints:
        """Return what a layer of a group adds to each row, under each column of its family.

        Args:
            group: the layers.
            bases: the bytes of each row without any layer's decisions.
        """
        pool = self.pools[group.family]
        if not pool:
            return np.zeros((len(self.rows), 0), dtype=np.int64)
        places = np.array([k for k, _ in group.places], dtype=np.int64)
        added: Ints = np.array([effect.level for effect in pool])[:, places].T
        within = np.flatnonzero([within for _, within in group.places])
        if within.size:
            crests = np.array([effect.crest for effect in pool])[:, places[within]].T
            safe = np.array([self._safe[self.rows[n].event] for n in within], dtype=bool)
            unseen = np.where(safe[:, None], added[within], -4 * bases[within][:, None])
            added[within] = np.where(crests > NEVER, crests, unseen)
        return added

    # ---------------------------------------------------------------- solving

    def solve(
        self,
        budget_bytes: float | None,
        *,
        whole: bool = False,
        over_price: float = 0.0,
        near: float = 0.0,
        allowance: int = 0,
    ) -> Mix:
        """Mix the columns of the pools.

        Args:
            budget_bytes: what all rows must keep to; None to look for the smallest peak instead of the least time.
            whole: whether a layer follows one column, or may follow a blend.
            over_price: seconds for each byte above the budget.
            near: accept this many seconds, or bytes, above the minimum.
            allowance: for integer solutions, about how many simplex iterations it may take. Where that is too little
                even to begin, nothing is found.
        """
        num_parts = sum(len(self.pools[group.family]) + 1 for group in self.groups) + len(self.rows)
        if whole and num_parts > max(_LARGE, allowance // _OF_A_PART):
            return Mix([], float("inf"), [], float("inf"))
        program = Program()
        unit = max(1.0, max((self.base_bytes(m) for m in self.rows), default=1) / 1e4)
        worst = max((e.seconds for pool in self.pools for e in pool), default=0.0)
        scale = 1e3 / max(worst, 1e-12)
        columns: list[list[int]] = []
        for group in self.groups:
            pool = self.pools[group.family]
            costs = [0.0 if budget_bytes is None else e.seconds * scale for e in pool]
            columns.append([program.column(c, upper=float(len(group.layers)), whole=whole) for c in costs])
        must_fit = whole and budget_bytes is not None and num_parts > _SMALL
        over = program.column(
            1.0 if budget_bytes is None else over_price * scale * unit, upper=0.0 if must_fit else float("inf")
        )
        for g, group in enumerate(self.groups):
            program.row(dict.fromkeys(columns[g], 1.0), lower=len(group.layers), upper=len(group.layers))
        stalls = self._add_link(program, columns, scale) if budget_bytes is not None else 0
        bases: Ints = np.array([self.base_bytes(m) for m in self.rows], dtype=np.int64)
        added = [self._added_bytes(group, bases) for group in self.groups]
        for n, moment in enumerate(self.rows):
            amounts = np.concatenate([each[n] for each in added])
            terms = np.flatnonzero(amounts)  # the columns are numbered in the order of the groups
            free = self.tight.get(moment, 0) if whole else 0
            program.row_of(
                [over, *terms.tolist()],
                [-1.0, *(amounts[terms] / unit).tolist()],
                upper=((budget_bytes or 0.0) - int(bases[n]) - free) / unit,
            )
        if whole and self.apart:
            first = {group.layers[0]: g for g, group in enumerate(self.groups)}
            for barred in self.barred:
                program.row({columns[first[nth]][i]: 1.0 for nth, i in enumerate(barred)}, upper=len(barred) - 1.0)
        near *= 1 / unit if budget_bytes is None else scale
        found = program.solve(self.work, near=near, allowance=allowance)
        if not found.values:
            return Mix([], float("inf"), [], float("inf"))
        values = found.values
        counts = [[(i, values[c]) for i, c in enumerate(cs) if values[c] > 1e-7] for cs in columns]
        if whole:
            counts = [[(i, float(round(x))) for i, x in pairs if round(x)] for pairs in counts]
        seconds = sum(
            self.pools[g.family][i].seconds * x for g, pairs in zip(self.groups, counts, strict=True) for i, x in pairs
        )
        duals = found.duals[len(self.groups) + stalls :]
        per_byte = unit if budget_bytes is None else scale * unit
        prices = [max(0.0, -d) / per_byte for d in duals]
        if budget_bytes is None:
            prices = [p * unit for p in prices]
        bound = found.bound * unit if budget_bytes is None else found.bound / scale
        copies = [
            max(0.0, -d) / scale / self._link_unit for d in found.duals[len(self.groups) : len(self.groups) + stalls]
        ]
        return Mix(counts, values[over] * unit, prices, seconds, bound, copies)

    def _add_link(self, program: Program, columns: list[list[int]], scale: float) -> int:
        """Add a row for each direction of the link, and the time spent waiting for it. Return how many rows."""
        if self._link is None or self._traffic is None:
            return 0
        unit = max(1.0, self._link.out_bytes_per_second, self._link.in_bytes_per_second) * self._traffic.forward_seconds
        for out in (True, False):
            rate = self._link.out_bytes_per_second if out else self._link.in_bytes_per_second
            wait = program.column(scale)
            terms = {wait: -rate / unit}
            for g, group in enumerate(self.groups):
                for c, e in zip(columns[g], self.pools[group.family], strict=True):
                    terms[c] = (e.sent_bytes - (0.0 if out else rate * e.seconds)) / unit
            program.row(terms, upper=self._passes(out) / unit)
        self._link_unit = unit
        return 2

    def _passes(self, out: bool) -> float:
        """Return the bytes that cross the link while the step computes."""
        assert self._link is not None
        assert self._traffic is not None
        if out:
            return self._link.out_bytes_per_second * self._traffic.forward_seconds + self._link.in_flight_bytes
        return self._link.in_bytes_per_second * self._traffic.backward_seconds + self._link.in_flight_bytes

    def bound(self, mix: Mix, budget_bytes: int | None) -> tuple[float, int]:
        """Price new columns at the prices of a mix. Return a bound on every plan, and how many columns were new.

        With a budget the bound is on the seconds; without one it is on the peak in bytes.
        """
        prices = [p if self.is_sure(m) else 0.0 for p, m in zip(mix.prices, self.rows, strict=True)]
        second, sent_byte = (1.0, None) if budget_bytes is not None else (0.0, None if self._link is None else 0.0)
        total = sum(p * (self.base_bytes(m) - (budget_bytes or 0)) for p, m in zip(prices, self.rows, strict=True))
        if self._link is not None and mix.copies:
            out, back = mix.copies
            back = min(back, 1.0 / self._link.in_bytes_per_second)
            second, sent_byte = 1.0 - self._link.in_bytes_per_second * back, out + back
            total -= out * self._passes(out=True) + back * self._passes(out=False)
        num_new = 0
        for group in self.groups:
            found = self._price(group, prices, second, sent_byte)
            total += found.bound * len(group.layers)
            num_new += self.add(group.family, found.keep) is not None
        return total, num_new

    def _price(self, group: Group, prices: Sequence[float], second: float, sent_byte: float | None) -> Priced:
        found: dict[int, float] = {}
        for (k, _), p in zip(group.places, prices, strict=True):
            if p > 0 and k >= 0:
                found[k] = found.get(k, 0.0) + p
        key = group.family, tuple(sorted(found.items())), second, sent_byte
        if key not in self._prices:
            problem = self.problems[group.family]
            self._prices[key] = price(
                problem,
                key[1],
                work=self.work,
                second=second,
                sent_byte=sent_byte,
                sent_limit_bytes=0 if self._link is None else self._link.in_flight_bytes,
            )
        return self._prices[key]

    # ---------------------------------------------------------------- where it does not fit

    def crowded(self, mix: Mix, limit_bytes: float, *, most: int = 3) -> list[Moment]:
        """Return moments at which a mix is above a limit, the worst first, at most one per layer."""
        line = self.timeline
        num = len(line.live)
        change: Floats = np.zeros(num + 1)
        bursts: list[tuple[npt.NDArray[np.int64], Floats]] = []
        for group, pairs in zip(self.groups, mix.counts, strict=True):
            if not pairs:
                continue
            share = len(group.layers)
            pool = self.pools[group.family]
            level = sum(pool[i].level[:-1] * (x / share) for i, x in pairs)
            crests = sum(
                np.where(pool[i].crest > NEVER, pool[i].crest, pool[i].level[:-1]) * (x / share) for i, x in pairs
            )
            seen = np.any([pool[i].crest > NEVER for i, _ in pairs], axis=0)
            steps: Floats = np.diff(np.asarray(level), prepend=0.0)
            above: Floats = np.asarray(crests - np.concatenate(([0.0], np.asarray(level)[:-1])))[seen]
            for nth in group.layers:
                change[line.places[nth]] += steps
                bursts.append((line.places[nth][seen], above))
        extra = np.cumsum(change[:-1]) + line.floor
        after: Floats = line.live + extra
        before = np.concatenate(([0.0], extra[:-1]))
        within: Floats = np.full(num, float(NEVER))
        for at, above in bursts:
            within[at] = line.asked[at] + before[at] + above
        return self.worst(after, within, limit_bytes, most)

    def worst(
        self, after: npt.NDArray[np.generic], within: npt.NDArray[np.generic], limit_bytes: float, most: int
    ) -> list[Moment]:
        """Return the worst moments above a limit, at most one for each layer's backward."""
        found: list[Moment] = []
        taken: set[int] = set()
        merged = np.maximum(after, within)
        over = np.flatnonzero(merged > limit_bytes + 0.5)
        for event in sorted((int(j) for j in over), key=lambda j: -float(merged[j])):
            layer = self._layer_at(event)
            if layer in taken:
                continue
            taken.add(layer)
            found.append(Moment(event, bool(within[event] > after[event])))
            if len(found) == most:
                break
        return found

    def _layer_at(self, event: int) -> int:
        return int(np.searchsorted(self._begins, event, side="right"))


def _safe_unpacks(line: Timeline) -> npt.NDArray[np.bool_]:
    """Find the unpacks whose following bytes bound the peak even if nothing is replayed in them.

    True where an operator follows before anything is freed, and with no fewer bytes alive.
    """
    falls = np.zeros(len(line.live), dtype=bool)
    for family in line.families:
        own = [k for k, e in enumerate(family.events) if e.kind is not StorageDied]
        for nth in family.layers:
            falls[line.places[nth][own]] = True
    safe = np.zeros(len(line.live), dtype=bool)
    unpacks = np.flatnonzero(line.asked > NEVER)
    safe[unpacks] = line.live[unpacks] >= line.asked[unpacks]
    silent = unpacks[line.live[unpacks] == NEVER]
    stops = np.flatnonzero(falls | (line.live > NEVER))
    at = np.searchsorted(stops, silent, side="right")
    silent, ends = silent[at < len(stops)], stops[at[at < len(stops)]]
    safe[silent] = ~falls[ends] & (line.live[ends] >= line.asked[silent])
    return safe


@dataclass(frozen=True)
class Joined:
    """The outcome of `join`."""

    keeps: list[tuple[Decision, ...]]
    """For each layer, its decisions; empty if nothing was found."""
    bound: float
    """Lower bound on the seconds, or the peak, of every plan that keeps to the rows."""


def join(step: Step, budget_bytes: int | None, *, below: float | None, near: float, allowance: int) -> Joined:
    """Find decisions for all layers that keep to the rows found so far.

    Args:
        step: the step, and its rows.
        budget_bytes: what the rows must keep to; None to look for the smallest peak instead of the least time.
        below: look only for plans with fewer replay seconds, or a smaller peak, than this.
        near: accept this many seconds, or bytes, above the minimum.
        allowance: about how many simplex iterations it may take.
    """
    line = step.timeline
    problems = [step.problems[f] for f in line.family_of]
    total = sum(u.seconds for problem in problems for u in problem.units)
    unit = max(1.0, max((step.base_bytes(m) for m in step.rows), default=1) / 1e4)
    scale = 1.0 / unit if budget_bytes is None else 1000.0 / (total or 1.0)
    program = Program()
    blocks = [BlockProgram(program, p, second=0.0 if budget_bytes is None else scale) for p in problems]
    peak = program.column(1.0) if budget_bytes is None else None
    limit = budget_bytes or 0
    for n, moment in enumerate(step.rows):
        if not step.is_sure(moment):
            continue
        terms: dict[int, float] = {}
        used = step.base_bytes(moment) + step.tight.get(moment, 0)
        for group in step.groups:
            for nth in group.layers:
                found, constant = blocks[nth].bytes_after(group.places[n][0])
                used += constant
                terms.update((column, amount / unit) for column, amount in found.items())
        if peak is not None:
            terms[peak] = -1.0
        program.row(terms, upper=(limit - used) / unit)
    if below is not None and peak is not None:
        program.row({peak: 1.0}, upper=below * scale)
    elif below is not None:
        spent = {c: cost for block in blocks for c, cost in block.spent().items() if cost}
        program.row(spent, upper=below * scale)
    found = program.solve(step.work, near=near * scale, allowance=allowance)
    if found.infeasible:
        return Joined([], below if below is not None else float("inf"))
    keeps = [block.keep(found.values) for block in blocks] if found.values else []
    return Joined(keeps, found.bound / scale)
