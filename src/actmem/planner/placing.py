"""Columns for the layers of a chain, one after the other.

NOTE [ Placing ]
In a chain of blocks the layers before one wait while it runs forward, and wait again while it runs backward. So all
that matters of them is the sum of what they hold. A dynamic program goes through the layers and remembers, for each
such sum, the least replay time. A layer's column fits if that sum and the column's own highest moment are within the
budget. What is found is judged by `Timeline.peak`; for steps that are no chain it is only a guess.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actmem.planner.master import Step
from actmem.planner.timeline import NEVER, Effect

__all__ = ["Placing"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUM_LABELS = 256


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
        """For each number of layers that wait, the most bytes of the program while no layer runs."""
        free = np.flatnonzero(~busy)
        np.maximum.at(self._between, counts[free], total[free])

    def place(self, budget_bytes: int, *, sent_byte: float = 0.0) -> list[Effect] | None:
        """Choose a column for each layer, with the least replay time that fits; None if nothing does.

        Args:
            budget_bytes: the most bytes at any time.
            sent_byte: seconds for each byte that is sent away. The last layer sends none: it is needed at once.
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
        """Return the columns worth a try, their seconds, what they hold while waiting, and their highest moment."""
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
    """Return the labels that no other betters, and of many alike ones the best."""
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
