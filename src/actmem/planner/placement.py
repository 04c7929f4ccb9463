"""Columns for the layers of a chain, one after the other.

NOTE [ Placing ]
In a chain of blocks the layers before one wait while it runs forward, and wait again while it runs backward. So all
that matters about them is the sum of what they hold. A dynamic program goes through the layers and remembers, for each
such sum, the least replay time. A layer's column fits if that sum and the column's own highest moment are within the
budget. What is found is judged by `Timeline.peak`; for steps that are not a chain it is only a guess.

NOTE [ The chain bound ]
A blend lets a layer follow half of one column and half of another, so that its own highest moment fits on average only.
Close to the smallest peak that makes the bound too low. There the same dynamic program is also run for the bound: over
all decisions of a block, not only over the columns found so far, where a block has few enough (`tabulate`). A layer's
decisions must fit, by themselves, on top of what the layers before it hold. That sum is in cells, rounded down.
Only moments at which all layers before one certainly wait are used. Leaving out others only lowers the bound. In a step
of several microbatches some layers are done before others begin, so that they never wait together: nothing limits what
those hold in sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actmem.planner.block_program import tabulate
from actmem.planner.master_program import Moment, Step
from actmem.simulation import NEVER, Effect

__all__ = ["Chain", "Placing"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUM_LABELS = 256
_NUM_CELLS = 4096
_UNLIMITED = 2**62
_FEW_UNITS = 21
"""Up to this many units, all decisions of a block are enumerated."""


class Placing:
    """The layers of a step in the order in which they run."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._stacks: dict[int, tuple[list[Effect], Ints, Ints]] = {}
        line = step.timeline
        num = len(line.live)
        total = line.live + line.floor
        asked = np.where(line.asked > NEVER, line.asked + line.floor, NEVER)
        self._order = sorted(range(len(line.places)), key=lambda nth: int(line.places[nth][0]))
        self._after: list[Ints] = []
        self._within: list[Ints] = []
        busy = np.zeros(num, dtype=bool)
        waiting = np.zeros(num + 1, dtype=np.int64)
        for nth, places in enumerate(line.places):
            family = line.families[line.family_of[nth]]
            own = np.maximum.reduceat(total, places)
            own[-1] = NEVER
            own[family.leave : family.first_unpack] = NEVER
            self._after.append(own)
            self._within.append(asked[places])
            busy[int(places[0]) : int(places[family.leave]) + 1] = True
            waiting[int(places[family.leave]) + 1] += 1
            if family.first_unpack < len(places):
                busy[int(places[family.first_unpack]) : int(places[-1])] = True
                waiting[int(places[family.first_unpack])] -= 1
        counts = np.cumsum(waiting[:-1])
        self._between = np.full(len(line.places) + 1, NEVER, dtype=np.int64)
        """For each number of waiting layers, the most bytes of the program while no layer runs."""
        free = np.flatnonzero(~busy)
        np.maximum.at(self._between, counts[free], total[free])

    def place(self, budget_bytes: int, *, sent_byte: float = 0.0) -> list[Effect] | None:
        """Choose a column for each layer, with the least replay time that fits; None if nothing does.

        Args:
            budget_bytes: the most bytes at any time.
            sent_byte: seconds for each byte that is offloaded. The last layer sends none: it is needed at once.
        """
        held, spent = np.zeros(1, dtype=np.int64), np.zeros(1)
        trail: list[tuple[Ints, list[Effect], Ints]] = []
        if self._between[0] > budget_bytes:
            return None
        for n, nth in enumerate(self._order):
            effects, seconds, holds, tops = self._choices(nth, sent_byte, is_last=n == len(self._order) - 1)
            heaps = held[:, None] + holds[None, :]
            fits = (held[:, None] + tops[None, :] <= budget_bytes) & (heaps + self._between[n + 1] <= budget_bytes)
            froms, whats = np.nonzero(fits)
            if not froms.size:
                return None
            new_held, new_spent = heaps[froms, whats], spent[froms] + seconds[whats]
            kept = _front(new_held, new_spent)
            trail.append((froms[kept], effects, whats[kept]))
            held, spent = new_held[kept], new_spent[kept]
        found: dict[int, Effect] = {}
        at = int(np.argmin(spent))
        for nth, (froms, effects, whats) in zip(reversed(self._order), reversed(trail), strict=True):
            found[nth] = effects[int(whats[at])]
            at = int(froms[at])
        return [found[nth] for nth in range(len(found))]

    def _choices(self, nth: int, sent_byte: float, *, is_last: bool) -> tuple[list[Effect], Floats, Ints, Ints]:
        """Return the columns worth trying, their seconds, what they hold while waiting, and their highest moment."""
        line = self._step.timeline
        family = line.families[line.family_of[nth]]
        pool = [e for e in self._step.pools[line.family_of[nth]] if not (is_last and e.sent_bytes)]
        levels, crests = self._stacked(line.family_of[nth], pool)
        seconds = np.array([e.seconds + sent_byte * e.sent_bytes for e in pool])
        holds = levels[:, family.first_unpack - 1]
        bursts = np.where(crests > NEVER, crests + self._within[nth], NEVER)
        tops = np.maximum((levels + self._after[nth]).max(axis=1), bursts.max(axis=1))
        order = np.lexsort((tops, holds, seconds))
        seconds, holds, tops = seconds[order], holds[order], tops[order]
        better = (holds[:, None] <= holds[None, :]) & (tops[:, None] <= tops[None, :])
        kept = np.flatnonzero(~np.triu(better, 1).any(axis=0))
        return [pool[int(i)] for i in order[kept]], seconds[kept], holds[kept], tops[kept]

    def _stacked(self, family: int, pool: list[Effect]) -> tuple[Ints, Ints]:
        """Return the levels and crests of a family's columns, side by side."""
        known = self._stacks.get(family)
        if known is None or known[0] != pool:
            known = pool, np.array([e.level[:-1] for e in pool]), np.array([e.crest for e in pool])
            self._stacks[family] = known
        return known[1], known[2]


def _front(held: Ints, spent: Floats) -> npt.NDArray[np.intp]:
    """Return the Pareto-optimal labels, and of many similar ones the best."""
    order = np.lexsort((spent, held))
    least = np.minimum.accumulate(spent[order])
    better = np.concatenate(([True], spent[order][1:] < least[:-1] - 1e-15))
    front = order[better]
    if front.size <= _NUM_LABELS:
        return front
    low, high = float(held[front[0]]), float(held[front[-1]])
    bucket = ((held[front] - low) / max(1.0, high - low) * (_NUM_LABELS - 1)).astype(np.int64)
    last = np.append(bucket[1:] != bucket[:-1], True)  # within a bucket, the one that holds most takes least time
    last[0] = True
    return front[last]


@dataclass(frozen=True, eq=False)
class _Choices:
    """Pareto-optimal decisions of a block, for given moments of its own."""

    numbers: Ints
    seconds: Floats
    holds: Ints
    room: Ints
    """How much may be held before the layer, less what fits at its first moment."""


class Chain:
    """A bound on every plan of a chain, and the decisions that reach it. See NOTE [ The chain bound ]."""

    def __init__(self, step: Step, budget_bytes: int) -> None:
        self._step, self._budget = step, budget_bytes
        line = step.timeline
        used = [nth for nth, f in enumerate(line.family_of) if line.families[f].is_used]
        self._order = sorted(used, key=lambda nth: int(line.places[nth][0]))
        self._caps = [budget_bytes if together else _UNLIMITED for together in self._together()]
        """The most that the first layers may hold, for each number of them."""
        self._rooms: list[dict[int, int]] = [{} for _ in used]
        """For each layer, events of its own and what is left there for it and for the layers before it."""
        self._waiting: dict[tuple[int, int], bool] = {}
        for moment in step.rows:
            if step.is_sure(moment):
                self._read(moment.event, budget_bytes - step.base_bytes(moment))
        inside: dict[int, set[int]] = {}
        for n, nth in enumerate(self._order):
            inside.setdefault(line.family_of[nth], set()).update(self._rooms[n])
        for nth in self._order:
            for k in inside[line.family_of[nth]]:
                event = int(line.places[nth][k])
                if line.live[event] > NEVER:
                    self._read(event, budget_bytes - step.base_bytes(Moment(event, within=False)))

    def _together(self) -> list[bool]:
        """Return, for each number of layers, whether the first so many all wait at some moment."""
        line = self._step.timeline
        found = [True]
        last_left, first_asked = -1, len(line.live)
        for nth in self._order:
            family = line.families[line.family_of[nth]]
            last_left = max(last_left, int(line.places[nth][family.leave]))
            first_asked = min(first_asked, int(line.places[nth][family.first_unpack]))
            found.append(last_left < first_asked)
        return found

    @property
    def is_small(self) -> bool:
        """Return whether all decisions of its blocks can be enumerated."""
        families = {self._step.timeline.family_of[nth] for nth in self._order}
        return all(len(self._step.problems[f].units) <= _FEW_UNITS for f in families)

    def _read(self, event: int, room: int) -> None:
        """Note what a moment leaves for the first layers that wait, and for the one after them."""
        line = self._step.timeline
        for n, nth in enumerate(self._order):
            k = int(np.searchsorted(line.places[nth], event, side="right")) - 1
            if not self._waits(line.family_of[nth], k):
                self._caps[n] = min(self._caps[n], room)
                if k >= 0:
                    self._rooms[n][k] = min(self._rooms[n].get(k, room), room)
                return
        self._caps[-1] = min(self._caps[-1], room)

    def _waits(self, family: int, k: int) -> bool:
        """Return whether a layer holds, after one of its events, all that it holds while it waits."""
        if (family, k) not in self._waiting:
            problem = self._step.problems[family]
            last = problem.first_unpack - 1
            self._waiting[family, k] = 0 <= k <= last and all(
                i.kept_bytes(k) >= i.kept_bytes(last) for i in problem.items
            )
        return self._waiting[family, k]

    def bound(self) -> float:
        """Return a lower bound on the seconds of any plan within the budget. Add its decisions to the pools."""
        line = self._step.timeline
        choices, firsts = self._tabulated()
        most = sum(int(c.holds.max(initial=0)) for c in choices)
        cell = max(1, -(-min(max(self._caps), most) // _NUM_CELLS))
        size = _NUM_CELLS + 2
        after = np.where(np.arange(size) * cell <= self._caps[-1], 0.0, np.inf)
        picks: list[tuple[Ints, Ints]] = []
        for n in range(len(self._order) - 1, -1, -1):
            found = choices[n]
            least, pick = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
            steps = found.holds // cell
            ends = np.minimum((np.minimum(found.room + firsts[n], self._caps[n]) // cell) + 1, size - steps)
            for p in np.flatnonzero(ends > 0):
                total = after[steps[p] : steps[p] + ends[p]] + found.seconds[p]
                better = total < least[: ends[p]]
                least[: ends[p]][better] = total[better]
                pick[: ends[p]][better] = p
            picks.append((pick, steps))
            after = least
        at = 0
        for n, (pick, steps) in enumerate(reversed(picks if np.isfinite(after[0]) else [])):
            family = line.family_of[self._order[n]]
            p = int(pick[at])
            number = int(choices[n].numbers[p])
            problem = self._step.problems[family]
            again = frozenset(u for u in range(len(problem.units)) if number >> u & 1)
            self._step.add(family, problem.keep(again))
            at += int(steps[p])
        return float(after[0]) * (1 - 1e-9)

    def _tabulated(self) -> tuple[list[_Choices], list[int]]:
        """Return the choices of each layer, and what fits at its first moment."""
        line = self._step.timeline
        known: dict[tuple[int, tuple[tuple[int, int], ...]], _Choices] = {}
        tables = {
            f: tabulate(
                self._step.problems[f],
                [
                    self._step.problems[f].first_unpack - 1,
                    *(k for n, nth in enumerate(self._order) if line.family_of[nth] == f for k in self._rooms[n]),
                ],
            )
            for f in {line.family_of[nth] for nth in self._order}
        }
        choices: list[_Choices] = []
        firsts: list[int] = []
        for n, nth in enumerate(self._order):
            f = line.family_of[nth]
            rooms = sorted(self._rooms[n].items())
            first = rooms[0][1] if rooms else self._budget
            key = f, tuple((k, room - first) for k, room in rooms)
            if key not in known:
                table = tables[f]
                holds = table.bytes_after[self._step.problems[f].first_unpack - 1]
                room = np.zeros_like(holds)
                for m, (k, beside) in enumerate(key[1]):
                    here = beside - table.bytes_after[k]
                    room = np.minimum(room, here) if m else here
                kept = _best(table.seconds, holds, -room)
                known[key] = _Choices(table.numbers[kept], table.seconds[kept], holds[kept], room[kept])
            choices.append(known[key])
            firsts.append(first)
        return choices, firsts


def _best(seconds: Floats, holds: Ints, tops: Ints) -> Ints:
    """Return the numbers of those that are Pareto-optimal in seconds, bytes held, and bytes at their highest moment."""
    grid = np.full((257, 257), np.inf)
    h = 1 + (holds - holds.min()) * 255 // max(1, int(np.ptp(holds)))
    t = 1 + (tops - tops.min()) * 255 // max(1, int(np.ptp(tops)))
    np.minimum.at(grid, (h, t), seconds)
    grid = np.minimum.accumulate(np.minimum.accumulate(grid, axis=0), axis=1)
    near = np.flatnonzero(seconds < grid[h - 1, t - 1])
    order = near[np.lexsort((tops[near], holds[near], seconds[near]))]
    front_holds, front_tops = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    kept: list[int] = []
    for one in order:
        if not np.any((front_holds <= holds[one]) & (front_tops <= tops[one])):
            kept.append(int(one))
            front_holds, front_tops = np.append(front_holds, holds[one]), np.append(front_tops, tops[one])
    return np.array(kept, dtype=np.int64)
