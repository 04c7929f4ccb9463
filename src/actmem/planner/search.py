"""What a search knows so far: the columns and rows found, the best plan, the bound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from actmem.decisions import Decision
from actmem.planner.master_program import Mix, Step
from actmem.planner.placement import Placing
from actmem.planner.work import Work
from actmem.profiles import Profile
from actmem.simulation import Effect, Link, Timeline, Traffic

__all__ = ["Search"]

_SAVE, _RECOMPUTE, _OFFLOAD = Decision.SAVE, Decision.RECOMPUTE, Decision.OFFLOAD

_FEW = 512
"""Up to this many sets of decisions, all are tried."""
_SMALL = 200
"""Up to this many units, all layers are also put into one program."""
_MANY = 1_000
"""With this many columns, no neighbours are added: each takes an emulation, and each pair of them a comparison."""


class Search:
    """The state of a search for decisions of one profile. `phases` and `smallest` advance it."""

    def __init__(
        self,
        profile: Profile,
        seconds: Sequence[float],
        *,
        step_seconds: float,
        work: Work,
        link: Link | None = None,
    ) -> None:
        self.profile, self.seconds, self.step_seconds, self.link, self.work = profile, seconds, step_seconds, link, work
        self.line = Timeline(profile, seconds)
        self.traffic = None if link is None else Traffic(profile, seconds, self.line, link)
        self.in_flight_bytes = 0 if link is None else link.in_flight_bytes
        self.step = Step(self.line, work, link=link, traffic=self.traffic)
        self.placing = Placing(self.step)
        self.budget_bytes = 0
        self.best: list[Effect] | None = None
        """The fastest plan found that fits."""
        self.bound_seconds = 0.0
        """Lower bound on the seconds of any plan that fits."""
        self.least_peak_bytes: int | None = None
        """Lower bound on the peak of any plan; known where nothing was found that fits."""
        self.complete = False
        """Whether every set of decisions is a column."""
        self.sent_byte = 0.0
        """What the last blend paid for a byte that is offloaded."""

    # ---------------------------------------------------------------- plans

    def peak(self, effects: Sequence[Effect]) -> int:
        """Return the peak of a plan."""
        return self.line.peak(effects, in_flight_bytes=self.in_flight_bytes)

    def cost(self, effects: Sequence[Effect]) -> float:
        """Return the seconds of replays and of waiting."""
        waits = 0.0 if self.traffic is None else self.traffic.stall_seconds(effects)
        return sum(e.seconds for e in effects) + waits

    def fits(self, found: list[Effect]) -> bool:
        """Return whether a plan is within the budget, and does not offload what is needed at once."""
        if self.traffic is not None and found[self.traffic.out_order[-1]].sent_bytes:
            return False
        if any(e.sent_bytes > self.in_flight_bytes for e in found):
            return False
        return self.peak(found) <= self.budget_bytes

    def offer(self, found: list[Effect]) -> None:
        """Take a plan that fits if it is faster than the best so far."""
        if self.best is None or self.cost(found) < self.cost(self.best) - 1e-15:
            self.best = found

    def is_within(self, fraction: float) -> bool:
        """Return whether the best plan is within a fraction of a step's time of the bound."""
        if self.best is None:
            return False
        return self.cost(self.best) - self.bound_seconds <= fraction * self.step_seconds

    @property
    def is_small(self) -> bool:
        """Whether all layers may be put into one program."""
        num_units = sum(len(self.step.problems[f].units) for f in self.line.family_of)
        return not self.complete and self.traffic is None and num_units <= _SMALL

    # ---------------------------------------------------------------- effects

    def everywhere(self, decision: Decision) -> list[Effect]:
        """Return the plan with the same decision everywhere."""
        layers = self.profile.layers
        return self.effects([[decision] * len(layer.calls) for layer in layers])

    def effects(self, keeps: Sequence[Sequence[Decision]]) -> list[Effect]:
        """Return what each layer does under its decisions."""
        return [self.line.effect(self.line.family_of[nth], keep) for nth, keep in enumerate(keeps)]

    def placed(self, mix: Mix) -> list[Effect]:
        """Give each layer of a group its column: those that hold least come first."""
        line, step = self.line, self.step
        found: dict[int, Effect] = {}
        for group, pairs in zip(step.groups, mix.counts, strict=True):
            pool = step.pools[group.family]
            held = max(0, line.families[group.family].first_unpack - 1)
            chosen = sorted((int(pool[i].level[held]), i) for i, x in pairs for _ in range(int(x)))
            for nth, (_, i) in zip(group.layers, chosen, strict=True):
                found[nth] = pool[i]
        return [found[nth] for nth in range(len(found))]

    # ---------------------------------------------------------------- columns and rows

    def seed(self, candidates: Sequence[Sequence[Sequence[Decision]]]) -> None:
        """Begin with a few columns, or with all of them where there are few."""
        step = self.step
        deciding = [[self._may_decide(f, c) for c in range(p.num_calls)] for f, p in enumerate(step.problems)]
        few = sum(2 ** sum(d) for d in deciding) <= _FEW and len(self.profile.layers) <= 4
        self.complete = few and self.traffic is None
        for f, problem in enumerate(step.problems):
            if self.complete:
                for keep in itertools.product(*[(_SAVE, _RECOMPUTE) if d else (_RECOMPUTE,) for d in deciding[f]]):
                    step.add(f, keep)
            else:
                step.add(f, [_SAVE] * problem.num_calls)
                step.add(f, [_RECOMPUTE] * problem.num_calls)
        if self.complete:
            step.apart = True
            step.regroup()
        for keeps in candidates:
            if self.traffic is None and any(_OFFLOAD in keep for keep in keeps):
                continue
            found = self.effects(keeps)
            self.add(found)
            if self.peak(found) <= self.budget_bytes:
                self.offer(found)

    def _may_decide(self, family: int, call: int) -> bool:
        layer = self.line.families[family].layer
        return any(layer.values[v].why is None for v in layer.calls[call].makes)

    def add(self, effects: Sequence[Effect]) -> None:
        """Add the columns of a plan."""
        for nth, effect in enumerate(effects):
            self.step.add(self.line.family_of[nth], effect.keep)

    def add_neighbours(self, effects: Sequence[Effect]) -> None:
        """Add columns that differ in one unit from those of a plan."""
        step = self.step
        others = (_SAVE, _RECOMPUTE) if self.traffic is None else (_SAVE, _RECOMPUTE, _OFFLOAD)
        used = dict.fromkeys((self.line.family_of[nth], e.keep) for nth, e in enumerate(effects))
        for f, kept in used:
            for unit in step.problems[f].units[:100]:
                for other in others:
                    if sum(map(len, step.pools)) >= _MANY:
                        return
                    keep = list(kept)
                    keep[unit.calls[-1]] = other
                    step.add(f, keep)

    def cut(self, found: list[Effect], limit_bytes: float) -> bool:
        """Add rows where a plan does not fit, or forbid it. Return whether anything changed."""
        step, line = self.step, self.line
        after, within = line.totals(found, in_flight_bytes=self.in_flight_bytes)
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
