"""Find many different plans for one profile: the frontier, then more budgets where it leaves wide gaps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from actmem.devices import Device
from actmem.errors import BudgetError
from actmem.plan import FitRecord, Plan
from actmem.planner import Frontier, Point, fit_profile, frontier, named_keeps
from actmem.profiles import Profile
from actmem.settings import Offload

__all__ = ["Solved", "foretold", "solved"]

_PATIENCE = 3
"""How many budgets are tried for each plan wanted."""


@dataclass(frozen=True)
class Solved:
    """The result of `solved`."""

    plans: tuple[Plan, ...]
    """In order of increasing peak."""
    modes: tuple[Point, ...]
    """The named modes."""
    exhausted: bool
    """Whether no other budget yields another plan."""


def foretold(plan: Plan) -> FitRecord:
    """Return the planner's prediction for a plan that it made."""
    assert plan.predicted is not None
    return plan.predicted


def solved(
    profile: Profile,
    asked: Plan,
    device: Device,
    *,
    num_plans: int,
    offload: str | Offload | None = None,
    curve: Frontier | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Solved:
    """Solve for many budgets until there are enough different plans, or no budget yields another.

    The result contains the requested plan, and otherwise only plans that no other beats in both bytes and time. A
    frontier of the same profile and device that was solved before is the starting point.
    """
    spread = num_plans if offload is None else 2  # the frontier does not offload

    def tell(done: int) -> None:
        if progress is not None:
            progress(min(done, num_plans), num_plans)

    if curve is None:
        curve = frontier(profile, device, num_points=spread, progress=lambda done, _: tell(min(done, num_plans - 1)))
    start = curve.points if offload is None else (curve.points[0], curve.points[-1])
    plans = {foretold(point.plan).peak_bytes: point.plan for point in start}
    plans[foretold(asked).peak_bytes] = asked
    tried: set[int] = set()
    named = named_keeps(profile)
    exhausted = False

    def attempt(budget: int) -> None:
        tried.add(budget)
        with contextlib.suppress(BudgetError):
            plan = fit_profile([profile], budget, device, offload=offload, named=lambda _: named)
            known = plans.get(foretold(plan).peak_bytes)
            if known is None or (known is not asked and _ratio(plan) < _ratio(known)):
                plans[foretold(plan).peak_bytes] = plan

    for mode in curve.modes:  # no named mode may lie below the curve
        if not any(peak <= mode.peak_bytes and _ratio(p) <= mode.step_time_ratio for peak, p in plans.items()):
            attempt(mode.peak_bytes)
    while len(found := _undominated(plans, asked)) < num_plans and len(tried) < _PATIENCE * num_plans:
        budget = _open_budget(sorted(plans), tried)
        if budget is None:
            exhausted = True
            break
        attempt(budget)
        tell(min(len(found), num_plans - 1))
    tell(num_plans)
    return Solved(tuple(found), curve.modes, exhausted)


def _ratio(plan: Plan) -> float:
    return foretold(plan).step_time_ratio


def _undominated(plans: dict[int, Plan], asked: Plan) -> list[Plan]:
    """Return the Pareto-optimal plans in order of increasing peak. The requested plan always stays."""
    found: list[Plan] = []
    for peak in sorted(plans):
        plan = plans[peak]
        if plan is asked or not found or _ratio(plan) < min(_ratio(other) for other in found):
            found.append(plan)
    return found


def _open_budget(peaks: list[int], tried: set[int]) -> int | None:
    """Return a budget that may still yield a new plan, in the widest range between two peaks; None if there is none.

    A budget yields the same plan as every budget from that plan's peak up to itself. So the middle of a range is tried
    first and, if that yielded nothing new, the last byte of the range, which settles the whole range.
    """
    widest, budget = 1, None
    for low, high in itertools.pairwise(peaks):
        within = [b for b in tried if low <= b < high]
        start = max(within, default=low)
        if high - start > widest:
            widest, budget = high - start, high - 1 if within else (low + high) // 2
    return budget
