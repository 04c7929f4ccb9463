"""The search for the best decisions: a blend of columns for the bound, then a column for each layer.

NOTE [ The search ]
1. Blend: rows and columns are added to the master program until nothing helps any more. That gives the bound, and
   good columns.
2. Place: a column for each layer, by the master program in whole numbers, whose cost does not grow with the number of
   equal layers; where that is not near the bound, along the chain (NOTE [ Placing ]).
3. Improve: columns that differ in one unit from those in use are added, and the layers are placed again.
4. Chain: blocks of few units are also tried with all their decisions, which closes what is left near the smallest
   peak (NOTE [ The chain bound ]).
5. Join: few layers are also put into one program, whose bound is closer.
Where there are only a few sets of decisions at all, each is a column from the start, and the result is the optimum.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from actmem.planner.joint import join
from actmem.planner.links import Link, Traffic
from actmem.planner.master import Mix, Step
from actmem.planner.placing import Chain, Placing
from actmem.planner.timeline import Effect, Timeline
from actmem.profiles import Profile

__all__ = ["Search"]

_FEW = 512
"""Up to so many sets of decisions, all are tried."""
_SMALL = 200
"""Up to so many units, all layers are also put into one program."""
_NEAR = 5e-4
"""A plan is good enough at this fraction of a step's time above the bound."""
_FAIR = 4e-3
"""A plan that is not as good as this is worth more time."""
_FINE = 1e-4
"""The smallest peak is found to this fraction."""
_PATIENCE = 1.0
"""Seconds that the blend, and the program of all layers, may take once there is something to return."""

_HASTE = 0.05
"""Seconds that a first try may take."""


class Search:
    """The search for decisions of one profile."""

    def __init__(
        self,
        profile: Profile,
        seconds: Sequence[float],
        *,
        step_seconds: float,
        time_limit: float,
        link: Link | None = None,
    ) -> None:
        self._began = time.perf_counter()
        self._deadline = self._began + time_limit
        self._profile, self._seconds, self._link = profile, seconds, link
        self._line = Timeline(profile, seconds)
        self._traffic = None if link is None else Traffic(profile, seconds, self._line, link)
        self._in_flight_bytes = 0 if link is None else link.in_flight_bytes
        self._step = Step(self._line, link=link, traffic=self._traffic)
        self._placing = Placing(self._step)
        self._step_seconds = step_seconds
        self._budget = 0
        self._best: list[Effect] | None = None
        self.bound_seconds = 0.0
        """No plan that fits takes less."""
        self.least_peak_bytes: int | None = None
        """No plan has a smaller peak; known where nothing was found that fits."""
        self._complete = False
        self._sent_byte = 0.0

    @property
    def spent_seconds(self) -> float:
        """How long the search took so far."""
        return time.perf_counter() - self._began

    def peak(self, effects: Sequence[Effect]) -> int:
        """Return the peak of a plan."""
        return self._line.peak(effects, in_flight_bytes=self._in_flight_bytes)

    def cost(self, effects: Sequence[Effect]) -> float:
        """Return the seconds of replays and of waiting."""
        waits = 0.0 if self._traffic is None else self._traffic.stall_seconds(effects)
        return sum(e.seconds for e in effects) + waits

    # ---------------------------------------------------------------- least time

    def best_within(self, budget_bytes: int, candidates: Sequence[Sequence[Sequence[str]]]) -> list[Effect]:
        """Find the plan of least time within a budget; if there seems to be none, that of the smallest peak."""
        self._budget = budget_bytes
        everything = [self._effect(nth, "save") for nth in range(len(self._profile.layers))]
        if self.peak(everything) <= budget_bytes:
            return everything
        self._seed(candidates)
        if self._traffic is not None:
            self._seed_alone(candidates)
        may_fit = self._blend(budget_bytes)
        if self._traffic is not None:
            may_fit = self._blend(budget_bytes - self._in_flight_bytes)
        if may_fit:
            self._settle()
        if self._best is None:
            found, self.least_peak_bytes = self._find_smallest()
            if self.peak(found) > budget_bytes:
                return found
            self._add(found)
            self._add_neighbours(found)
            self._offer(found)
            self._settle()
        self._improve()
        self._chain()
        self._join()
        self._exchange()
        return self._best or everything

    def _seed(self, candidates: Sequence[Sequence[Sequence[str]]]) -> None:
        """Begin with a few columns, or with all of them where there are few."""
        step = self._step
        deciding = [[self._may_decide(f, c) for c in range(p.num_calls)] for f, p in enumerate(step.problems)]
        few = sum(2 ** sum(d) for d in deciding) <= _FEW and len(self._profile.layers) <= 4
        self._complete = few and self._traffic is None
        for f, problem in enumerate(step.problems):
            if self._complete:
                for keep in itertools.product(*[("save", "") if d else ("",) for d in deciding[f]]):
                    step.add(f, keep)
            else:
                step.add(f, ["save"] * problem.num_calls)
                step.add(f, [""] * problem.num_calls)
        if self._complete:
            step.apart = True
            step.regroup()
        for keeps in candidates:
            if self._traffic is None and any("offload" in keep for keep in keeps):
                continue
            found = [self._line.effect(self._line.family_of[nth], keep) for nth, keep in enumerate(keeps)]
            self._add(found)
            if self.peak(found) <= self._budget:
                self._offer(found)

    def _seed_alone(self, candidates: Sequence[Sequence[Sequence[str]]]) -> None:
        """Begin with what is best without sending anything: a link never makes a plan slower."""
        alone = Search(self._profile, self._seconds, step_seconds=self._step_seconds, time_limit=0.3 * self._left())
        kept = [c for c in candidates if not any("offload" in keep for keep in c)]
        here = self._here(alone.best_within(self._budget, kept))
        self._add(here)
        self._add_neighbours(here)
        if self.peak(here) <= self._budget:
            self._offer(here)

    def _may_decide(self, family: int, call: int) -> bool:
        layer = self._line.families[family].layer
        return any(layer.values[v].why is None for v in layer.calls[call].makes)

    def _blend(self, limit: int) -> bool:
        """Find the best blend of columns within a limit, which gives the bound. Return whether one was found."""
        if limit < self._line.floor_peak_bytes:
            return False
        step = self._step
        worst = [max((e.seconds for e in pool), default=0.0) for pool in step.pools]
        over_price = 1e4 * (sum(worst[f] for f in self._line.family_of) or 1.0) / max(1, self._budget)
        all_again = 1.001 * sum(sum(self._line.families[f].seconds) for f in self._line.family_of)
        began = time.perf_counter()
        for _ in range(500):
            mix = step.solve(limit, over_price=over_price, time_limit=self._left())
            if not mix.counts:
                return False
            slow = time.perf_counter() - began > _PATIENCE and self.bound_seconds > 0
            rows = step.crowded(mix, limit + mix.over_bytes)
            if not slow and step.add_rows(rows):
                continue
            bound, num_new = step.bound(mix, self._budget, time_limit=self._left())
            self.bound_seconds = max(self.bound_seconds, bound)
            self._sent_byte = sum(mix.copies)
            if self._traffic is None and bound > all_again:
                return False
            close = mix.over_bytes <= 0.5 and mix.seconds - bound <= 0.1 * _NEAR * self._step_seconds
            if not num_new or slow or (close and self._traffic is None) or self._left() <= 0:
                return mix.over_bytes <= 0.5
        return False

    def _settle(self) -> None:
        """Find a column for each layer: by a mix in whole numbers, whose cost does not grow with equal layers.

        Where that is not good enough, along the chain.
        """
        if self._complete or self._traffic is not None:
            if self._complete or not self._place_along():
                self._place_mix()
            return
        self._place_mix(patience=_HASTE)
        if not self._is_within(_NEAR) and not self._place_along() and not self._is_within(_FAIR):
            self._place_mix()

    def _place_along(self) -> bool:
        limit, fits, prices = self._budget - self._in_flight_bytes, False, [0.0]
        if self._traffic is not None:
            most = max(e.seconds / max(1, int(e.level.max())) for pool in self._step.pools for e in pool)
            prices = [self._sent_byte, *(most * 10.0 ** (-n / 2) for n in range(7))]
        for price in prices:
            found = self._placing.place(limit, sent_byte=price)
            if found is not None and self._fits(found):
                self._offer(found)
                fits = True
        return fits

    def _place_mix(self, patience: float = _PATIENCE) -> None:
        step, limit = self._step, self._budget - self._in_flight_bytes
        price = 1e5 * max(1e-9, sum(max(e.seconds for e in pool) for pool in step.pools)) / max(1, self._budget)
        near = 0.0 if self._complete else _NEAR * self._step_seconds
        step.tight.clear()
        until = time.perf_counter() + (self._left() if self._complete else min(patience, self._left()))
        while (left := until - time.perf_counter()) > 0:
            mix = step.solve(limit, whole=True, over_price=price, near=near, time_limit=left)
            if not mix.counts or mix.over_bytes > 0.5:
                return
            if self._complete and not step.tight:
                self.bound_seconds = max(self.bound_seconds, mix.bound * (1 - 1e-9))
            found = self._place(mix)
            if self._fits(found):
                self._offer(found)
                return
            if not self._cut(found, self._budget):
                return

    def _improve(self) -> None:
        """Add neighbours of what is in use, and place the layers again."""
        for _ in range(4):
            if self._complete or self._is_within(self._target) or self._best is None or self._left() <= 0:
                return
            before = self.cost(self._best)
            self._add_neighbours(self._best)
            self._place_along()
            if self.cost(self._best) >= before:
                return

    def _add_neighbours(self, effects: Sequence[Effect]) -> None:
        step, others = self._step, ("save", "") if self._traffic is None else ("save", "", "offload")
        for f, effect in {(self._line.family_of[nth], e) for nth, e in enumerate(effects)}:
            for unit in step.problems[f].units[:100]:
                for other in others:
                    keep = list(effect.keep)
                    keep[unit.calls[-1]] = other
                    step.add(f, keep)

    def _chain(self) -> None:
        """Bound the layers as a chain, and place the columns that the bound stands for."""
        if self._complete or self._traffic is not None or self._best is None or self._is_within(self._target):
            return
        chain = Chain(self._step, self._budget)
        if chain.is_small and self._left() > 0:
            self.bound_seconds = max(self.bound_seconds, chain.bound())
            self._place_along()
            self._improve()

    def _join(self) -> None:
        """Put all layers into one program, which closes what the blend leaves open."""
        step, near = self._step, _NEAR * self._step_seconds
        if not self._is_small() or self._is_within(_FAIR):
            return
        step.tight.clear()
        until = time.perf_counter() + min(2 * _PATIENCE, self._left())
        while (left := until - time.perf_counter()) > 0 and not self._is_within(_FAIR):
            below = None if self._best is None else self.cost(self._best) - near
            joined = join(step, self._budget, below=below, near=near, time_limit=left)
            if not step.tight:
                self.bound_seconds = max(self.bound_seconds, joined.bound)
            if not joined.keeps:
                return
            found = [self._line.effect(self._line.family_of[nth], keep) for nth, keep in enumerate(joined.keeps)]
            self._add(found)
            if self.peak(found) <= self._budget:
                self._offer(found)
            elif not self._cut(found, self._budget):
                return

    def _exchange(self) -> None:
        """Give single layers cheaper columns as long as the step still fits."""
        best = self._best
        if best is None or self._complete or self._is_within(self._target):
            return
        until = time.perf_counter() + min(0.5 * _PATIENCE, self._left())
        moves = sorted(
            (effect.seconds - best[nth].seconds, nth, i)
            for f, family in enumerate(self._line.families)
            for i, effect in enumerate(self._step.pools[f])
            for nth in family.layers
            if effect.seconds < best[nth].seconds - 1e-12
        )
        for _, nth, i in moves[: 100 if self._traffic is None else 1000]:
            if time.perf_counter() > until:
                return
            effect = self._step.pools[self._line.family_of[nth]][i]
            if effect.seconds < best[nth].seconds:
                changed = [*best[:nth], effect, *best[nth + 1 :]]
                if self.cost(changed) < self.cost(best) and self._fits(changed):
                    self._best = best = changed

    # ---------------------------------------------------------------- least bytes

    def _find_smallest(self) -> tuple[list[Effect], int]:
        """Find the smallest peak in a search of its own: so the answer does not depend on the budget."""
        costs = [0.0] * len(self._seconds)
        fresh = Search(self._profile, costs, step_seconds=0.0, time_limit=max(1.0, self._left()), link=self._link)
        found, least = fresh.smallest()
        return self._here(found), least

    def smallest(self) -> tuple[list[Effect], int]:
        """Find the plan with the smallest peak. Return it, and bytes that no plan can be below."""
        line, step = self._line, self._step
        if not self._profile.layers:
            return [], line.base_peak_bytes
        floor = line.floor_peak_bytes
        best = [self._effect(nth, "") for nth in range(len(self._profile.layers))]
        if self.peak(best) <= floor:
            return best, floor
        self._seed(())
        step.tight.clear()
        step.barred.clear()
        least = float(floor)
        for _ in range(500):
            mix = step.solve(None, time_limit=max(1.0, self._left()))
            if not mix.counts:
                break
            if step.add_rows(step.crowded(mix, mix.over_bytes)):
                continue
            bound, num_new = step.bound(mix, None, time_limit=max(1.0, self._left()))
            least = max(least, bound)
            fair = _FINE if self.spent_seconds < _PATIENCE else _FAIR
            if not num_new or mix.over_bytes - least <= fair * least or self._left() <= 0:
                break
        best, least = self._mix_smallest(best, least)
        best = self._place_smallest(best, least)
        best, least = self._join_smallest(best, least)
        step.tight.clear()
        step.barred.clear()
        return best, min(self.peak(best), max(floor, _up(least)))

    def _mix_smallest(self, best: list[Effect], least: float) -> tuple[list[Effect], float]:
        step = self._step
        until = time.perf_counter() + (max(1.0, self._left()) if self._complete else _PATIENCE)
        while (left := until - time.perf_counter()) > 0:
            near = 0.0 if self._complete else _FINE * least
            mix = step.solve(None, whole=True, near=near, time_limit=left)
            if not mix.counts:
                break
            found = self._place(mix)
            best = min(best, found, key=self.peak)
            if self._complete and not step.tight:
                least = max(least, mix.bound)
            if self.peak(found) <= mix.over_bytes + 0.5 or not self._cut(found, mix.over_bytes):
                break
        step.tight.clear()
        return best, least

    def _place_smallest(self, best: list[Effect], least: float) -> list[Effect]:
        """Narrow the budget down between what is known to be reachable and what is not."""
        low, high = least, self.peak(best)
        for _ in range(12):
            if self._complete or high - low <= _FINE * high:
                break
            middle = int((low + high) / 2)
            found = self._placing.place(middle)
            if found is not None and self.peak(found) < high:
                best, high = found, self.peak(found)
            else:
                low = middle
        return best

    def _join_smallest(self, best: list[Effect], least: float) -> tuple[list[Effect], float]:
        step = self._step
        until = time.perf_counter() + 2 * _PATIENCE
        while (left := until - time.perf_counter()) > 0:
            below = self.peak(best) - _FINE * abs(self.peak(best))
            if not self._is_small() or least >= below:
                break
            joined = join(step, None, below=below, near=0.0, time_limit=left)
            if not step.tight:
                least = max(least, joined.bound)
            if not joined.keeps:
                break
            found = [self._line.effect(self._line.family_of[nth], keep) for nth, keep in enumerate(joined.keeps)]
            best = min(best, found, key=self.peak)
            if not self._cut(found, joined.bound):
                break
        return best, least

    # ---------------------------------------------------------------- parts

    def _cut(self, found: list[Effect], limit_bytes: float) -> bool:
        """Add rows where a solution does not fit, or forbid it. Return whether anything changed."""
        step, line = self._step, self._line
        after, within = line.totals(found, in_flight_bytes=self._in_flight_bytes)
        rows = step.worst(after, within, limit_bytes, 3)
        if step.add_rows(rows):
            return True
        if step.apart:
            step.barred.append([step.pools[line.family_of[nth]].index(e) for nth, e in enumerate(found)])
            return True
        for row in rows[:1]:
            excess = int(max(after[row.event], within[row.event]) - limit_bytes)
            step.tight[row] = step.tight.get(row, 0) + max(1, excess)
        return bool(rows)

    def _place(self, mix: Mix) -> list[Effect]:
        """Give each layer of a group its column: those that hold least come first."""
        line, step = self._line, self._step
        found: dict[int, Effect] = {}
        for group, pairs in zip(step.groups, mix.counts, strict=True):
            pool = step.pools[group.family]
            held = max(0, line.families[group.family].first_unpack - 1)
            chosen = sorted((int(pool[i].level[held]), i) for i, x in pairs for _ in range(int(x)))
            for nth, (_, i) in zip(group.layers, chosen, strict=True):
                found[nth] = pool[i]
        return [found[nth] for nth in range(len(found))]

    def _fits(self, found: list[Effect]) -> bool:
        """Tell whether a plan is within the budget, and does not send away what is needed at once."""
        if self._traffic is not None and found[self._traffic.out_order[-1]].sent_bytes:
            return False
        if any(e.sent_bytes > self._in_flight_bytes for e in found):
            return False
        return self.peak(found) <= self._budget

    def _here(self, effects: Sequence[Effect]) -> list[Effect]:
        """Return the effects of another search as those of this one."""
        return [self._line.effect(self._line.family_of[nth], e.keep) for nth, e in enumerate(effects)]

    def _effect(self, layer: int, decision: str) -> Effect:
        return self._line.effect(self._line.family_of[layer], [decision] * len(self._profile.layers[layer].calls))

    def _add(self, effects: Sequence[Effect]) -> None:
        for nth, effect in enumerate(effects):
            self._step.add(self._line.family_of[nth], effect.keep)

    def _offer(self, found: list[Effect]) -> None:
        if self._best is None or self.cost(found) < self.cost(self._best) - 1e-15:
            self._best = found

    def _is_within(self, fraction: float) -> bool:
        """Tell whether the best plan is within a fraction of a step's time of the bound."""
        if self._best is None:
            return False
        return self.cost(self._best) - self.bound_seconds <= fraction * self._step_seconds

    @property
    def _target(self) -> float:
        """How good a plan must be to stop: less so when much time was spent."""
        return _NEAR if self.spent_seconds < 0.5 * _PATIENCE else _FAIR

    def _is_small(self) -> bool:
        """Tell whether all layers may be put into one program."""
        num_units = sum(len(self._step.problems[f].units) for f in self._line.family_of)
        return not self._complete and self._traffic is None and num_units <= _SMALL

    def _left(self) -> float:
        return self._deadline - time.perf_counter()


def _up(value: float) -> int:
    """Round a bound on whole bytes up, but for what a solver's tolerance may have added."""
    return int(-(-(value - 1e-7 * abs(value) - 0.01) // 1))
