"""The plan with the smallest peak, whatever time it takes: for budgets that nothing seems to fit."""

from __future__ import annotations

from actmem.decisions import Decision
from actmem.planner.master_program import join
from actmem.planner.search import Search
from actmem.simulation import Effect

__all__ = ["find_smallest"]

_FINE = 1e-4
"""The smallest peak is found to within this fraction."""
_FAIR = 4e-3
"""Where it takes much work, the blend stops at this fraction."""
_MUCH = 4_000
"""Simplex iterations that are much work."""
_OF_THE_MIX = 4_000
_OF_A_COMPLETE_MIX = 100_000
_OF_THE_JOIN = 10_000


def find_smallest(search: Search) -> tuple[list[Effect], int]:
    """Find the plan with the smallest peak. Return it, and a lower bound on the peak of any plan."""
    line, step = search.line, search.step
    if not search.profile.layers:
        return [], line.base_peak_bytes
    floor = line.floor_peak_bytes
    best = search.everywhere(Decision.RECOMPUTE)
    if search.peak(best) <= floor:
        return best, floor
    search.seed(())
    step.tight.clear()
    step.barred.clear()
    least = max(float(floor), _blend(search))
    best, least = _mix(search, best, least)
    best = _place(search, best, least)
    best, least = _join(search, best, least)
    step.tight.clear()
    step.barred.clear()
    return best, min(search.peak(best), max(floor, _up(least)))


def _blend(search: Search) -> float:
    """Add rows and columns until nothing helps any more. Return a lower bound on the peak of any plan."""
    step, least = search.step, float(search.line.floor_peak_bytes)
    for _ in range(500):
        mix = step.solve(None)
        if not mix.counts:
            break
        if step.add_rows(step.crowded(mix, mix.over_bytes)):
            continue
        bound, num_new = step.bound(mix, None)
        least = max(least, bound)
        fair = _FINE if search.work.done < _MUCH else _FAIR
        if not num_new or mix.over_bytes - least <= fair * least or search.work.stopped:
            break
    return least


def _mix(search: Search, best: list[Effect], least: float) -> tuple[list[Effect], float]:
    """Give the layers whole columns."""
    step, work = search.step, search.work
    until = work.done + (_OF_A_COMPLETE_MIX if search.complete else _OF_THE_MIX)
    while (allowance := until - work.done) > 0 and not work.stopped:
        near = 0.0 if search.complete else _FINE * least
        mix = step.solve(None, whole=True, near=near, allowance=allowance)
        if not mix.counts:
            break
        found = search.placed(mix)
        best = min(best, found, key=search.peak)
        if search.complete and not step.tight:
            least = max(least, mix.bound)
        if search.peak(found) <= mix.over_bytes + 0.5 or not search.cut(found, mix.over_bytes):
            break
    step.tight.clear()
    return best, least


def _place(search: Search, best: list[Effect], least: float) -> list[Effect]:
    """Narrow the budget down between what is known to be reachable and what is not."""
    low, high = least, search.peak(best)
    for _ in range(12):
        if search.complete or high - low <= _FINE * high:
            break
        middle = int((low + high) / 2)
        found = search.placing.place(middle)
        if found is not None and search.peak(found) < high:
            best, high = found, search.peak(found)
        else:
            low = middle
    return best


def _join(search: Search, best: list[Effect], least: float) -> tuple[list[Effect], float]:
    """Put all layers into one program."""
    step, work = search.step, search.work
    until = work.done + _OF_THE_JOIN
    while (allowance := until - work.done) > 0 and not work.stopped:
        below = search.peak(best) - _FINE * abs(search.peak(best))
        if not search.is_small or least >= below:
            break
        joined = join(step, None, below=below, near=0.0, allowance=allowance)
        if not step.tight:
            least = max(least, joined.bound)
        if not joined.keeps:
            break
        found = search.effects(joined.keeps)
        best = min(best, found, key=search.peak)
        if not search.cut(found, joined.bound):
            break
    return best, least


def _up(value: float) -> int:
    """Round a bound up to whole bytes, allowing for what a solver's tolerance may have added."""
    return int(-(-(value - 1e-7 * abs(value) - 0.01) // 1))
