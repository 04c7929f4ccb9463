"""The plans that are tried for compiled blocks, from the least memory to the least time.

NOTE [ The ladder ]
Every different decision for a block is another graph, and a graph takes seconds to compile. So few are compiled: the
*levels*. A level says what is saved in each kind of block: nothing, everything, what the search for eager blocks found
best at several budgets, and the products in the order of what a byte of them saves in time. Each level is run once, in
all blocks.

Where blocks are compiled one by one, a plan may mix two levels without another graph: so many blocks at one end of the
model have the one, all others the other. What the step then takes is put together from the sections of the two runs
(NOTE [ The compiled step ]). That is exact but for tensors that several blocks share, such as a mask, which count until
the last block that may hold them. So it only selects: the plans that nothing beats are run, all of them.

The ladder is what is left of these when every plan that another one beats in both memory and time is gone: each of its
peaks was seen. It does not depend on the budget, so less budget never means a higher peak. Where the whole model is one
graph, only the levels themselves are tried.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actmem.decisions import Decision
from actmem.devices import Device
from actmem.plan import Plan
from actmem.planner.named_modes import named_keeps
from actmem.planner.rules_writer import write_rules
from actmem.planner.solver import Keeps, smallest_peak, solve
from actmem.profiles import Cost, Profile
from actmem.profiling import CompiledRun, CompiledStep
from actmem.simulation import cost_seconds, simulate, step_seconds

__all__ = ["Ladder", "Rung", "climb"]

Level = dict[int, tuple[Decision, ...]]
"""Kind of a layer -> the decision for each of its calls."""

_NUM_BUDGETS = 5
"""Budgets at which the search for eager blocks is asked."""
_MOST_LEVELS = 6
"""Levels that are compiled."""
_MOST_MIXED = 12
"""Mixed plans that are run."""


@dataclass(frozen=True)
class Rung:
    """One plan."""

    levels: tuple[int, ...]
    """The level of each block."""
    peak_bytes: int
    """Without the optimizer."""
    seconds: float
    """What the operators of all compiled graphs take, by the device's roofline."""
    flops: int
    peak_op: str
    peak_layer: int


@dataclass(frozen=True)
class Ladder:
    """The plans to choose from, the fastest first. Each takes less memory than all before it."""

    profile: Profile
    levels: tuple[Level, ...]
    rungs: tuple[Rung, ...]
    plain: Rung
    """Nothing is asked of the partitioner."""
    least_seconds: float
    """What all operators of the graphs take if each runs once."""
    unknown_workspaces: tuple[str, ...] = ()
    """Whose workspaces no peak includes: names of operators, or "kernels" for all."""

    def plan(self, rung: Rung, mode: str) -> Plan:
        """Write a plan."""
        return _written(self.profile, _keeps(self.profile, _by_path(self.levels, self.profile.blocks, rung)), mode)


def climb(step: CompiledStep, profile: Profile, known: Device, *, whole: bool) -> Ladder:
    """Find the ladder of a model. `profile` is that of its eager step, and `step` its compiled one."""
    levels = _levels(profile, known)
    runs = [
        step.run(_written(profile, _keeps(profile, dict.fromkeys(profile.blocks, level)), "one level"))
        for level in levels
    ]
    blocks = profile.blocks
    rungs: list[Rung] = []
    for number, run in enumerate(runs):
        rungs.append(_rung(run, (number,) * len(blocks), known))
    plain = rungs[-1]
    if not whole and _fit_together(runs):
        mixed = _undominated([*rungs, *_mixed(runs, blocks, known)])
        wanted = [rung for rung in mixed if len(set(rung.levels)) > 1]
        for rung in _spread(wanted, _MOST_MIXED):
            run = step.run(_written(profile, _keeps(profile, _by_path(levels, blocks, rung)), "a mix of levels"))
            rungs.append(_rung(run, rung.levels, known))
    joint = sum(runs[-1].joint.values(), Counter[Cost]())
    return Ladder(profile, tuple(levels), tuple(_undominated(rungs)), plain, _seconds(joint, known))


def _undominated(rungs: Sequence[Rung]) -> list[Rung]:
    """Leave out what another one beats in memory and time. The fastest comes first."""
    best: list[Rung] = []
    for rung in sorted(rungs, key=lambda r: (r.seconds, r.peak_bytes, r.levels)):
        if not best or rung.peak_bytes < best[-1].peak_bytes:
            best.append(rung)
    return best


def _spread(rungs: Sequence[Rung], most: int) -> list[Rung]:
    """Return at most so many, spread evenly."""
    if len(rungs) <= most:
        return list(rungs)
    return [rungs[round(n * (len(rungs) - 1) / (most - 1))] for n in range(most)]


def _by_path(levels: Sequence[Level], blocks: Sequence[str], rung: Rung) -> dict[str, Level]:
    return {path: levels[level] for path, level in zip(blocks, rung.levels, strict=True)}


def _mixed(runs: Sequence[CompiledRun], blocks: Sequence[str], known: Device) -> Iterator[Rung]:
    """Put together every step in which the blocks at one end of the model have one level, and all others another."""
    outside = [
        replace(
            section,
            top_bytes=max(run.sections[n].top_bytes for run in runs),
            net_bytes=max(run.sections[n].net_bytes for run in runs),
        )
        for n, section in enumerate(runs[0].sections)
    ]
    for first, last in itertools.permutations(range(len(runs)), 2):
        for n in range(1, len(blocks)):
            levels = (first,) * n + (last,) * (len(blocks) - n)
            of_path = {path: runs[level] for path, level in zip(blocks, levels, strict=True)}
            sections = [
                section if section.layer < 0 else of_path[runs[0].paths[section.layer]].sections[at]
                for at, section in enumerate(outside)
            ]
            costs = {path: of_path[path].costs[path] for path in blocks}
            yield _rung(replace(runs[0], sections=tuple(sections), costs=costs), levels, known)


def _fit_together(runs: Sequence[CompiledRun]) -> bool:
    """Return whether runs consist of the same sections."""
    return len({(run.start_bytes, run.paths, tuple(s.layer for s in run.sections)) for run in runs}) == 1


def _rung(run: CompiledRun, levels: tuple[int, ...], known: Device) -> Rung:
    costs = sum(run.costs.values(), Counter[Cost]())
    peak_bytes, op, layer = run.peak
    flops = sum(cost.flops * times for cost, times in costs.items())
    return Rung(levels, peak_bytes, _seconds(costs, known), flops, op, layer)


def _seconds(costs: Counter[Cost], known: Device) -> float:
    return sum(
        times * known.seconds(cost.flops, cost.moved_bytes, cost.dtype)
        for cost, times in costs.items()
        if cost.flops or cost.moved_bytes
    )


# ---------------------------------------------------------------- levels


def _levels(p: Profile, known: Device) -> list[Level]:
    """Return the levels, from the fewest bytes to plain training."""
    kinds = {layer.kind: layer for layer in p.layers}
    nothing: Level = {kind: (Decision.RECOMPUTE,) * len(layer.calls) for kind, layer in kinds.items()}
    everything: Level = {kind: (Decision.SAVE,) * len(layer.calls) for kind, layer in kinds.items()}
    seconds = cost_seconds(p, known)
    between = [*_by_worth(p, seconds), *_by_search(p, seconds)]
    tried: list[tuple[int, float, Level]] = []
    for level in [nothing, *between]:
        if level == everything:
            continue
        found = simulate(p, _keeps(p, dict.fromkeys(p.blocks, level)), exact=True)
        again = sum(seconds[p.layers[n].calls[c].cost] for n, calls in enumerate(found.replayed) for c in calls)
        tried.append((found.saved_bytes, again, level))
    best: list[Level] = []
    least = float("inf")
    for _, again, level in sorted(tried, key=lambda t: (t[0], t[1])):
        if again < least and level not in best:
            least = again
            best.append(level)
    if len(best) >= _MOST_LEVELS:
        step = (len(best) - 1) / (_MOST_LEVELS - 2)
        best = [best[round(step * n)] for n in range(_MOST_LEVELS - 1)]
    return [*best, everything]


def _by_worth(p: Profile, seconds: Sequence[float]) -> Iterator[Level]:
    """Save the results of products and kernels, one after the other: first those that save most time for a byte."""
    kinds = {layer.kind: layer for layer in p.layers}
    worth: dict[tuple[int, int], float] = {}
    for kind, layer in kinds.items():
        for c, call in enumerate(layer.calls):
            size = sum(layer.values[v].num_bytes for v in call.makes)
            if p.costs[call.cost].flops and size:
                worth[kind, c] = seconds[call.cost] / size
    for least in sorted(set(worth.values()), reverse=True):
        yield {
            kind: tuple(
                Decision.SAVE if worth.get((kind, c), -1.0) >= least else Decision.RECOMPUTE
                for c in range(len(layer.calls))
            )
            for kind, layer in kinds.items()
        }


def _by_search(p: Profile, seconds: list[float]) -> Iterator[Level]:
    """Ask the search for eager blocks. It may decide differently for equal layers: the most common comes first."""
    least = smallest_peak(p)[0]
    most = simulate(p, [[Decision.SAVE] * len(layer.calls) for layer in p.layers], exact=True).peak_bytes
    whole, named = step_seconds(p, seconds), named_keeps(p)
    for nth in range(_NUM_BUDGETS):
        budget = least + (most - least) * nth // (_NUM_BUDGETS - 1)
        solution = solve(p, seconds, budget, step_seconds=whole, candidates=named)
        found: dict[int, Counter[tuple[Decision, ...]]] = {}
        for layer, keep in zip(p.layers, solution.keeps, strict=True):
            found.setdefault(layer.kind, Counter())[tuple(keep)] += 1
        ranked = {kind: [keep for keep, _ in counted.most_common()] for kind, counted in found.items()}
        for n in range(max(map(len, ranked.values()))):
            yield {kind: keeps[min(n, len(keeps) - 1)] for kind, keeps in ranked.items()}


def _keeps(p: Profile, at: dict[str, Level]) -> Keeps:
    """Return the decisions for every call, from the level of each block."""
    return [list(at[layer.path][layer.kind]) for layer in p.layers]


def _written(p: Profile, keeps: Keeps, mode: str) -> Plan:
    return Plan(write_rules(p, keeps), p.blocks, p.fingerprint, mode, exact=True)
