"""Many different plans for one profile: the frontier, and more budgets where it leaves wide gaps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from actmem.devices import Device
from actmem.errors import BudgetError
from actmem.plan import Plan, Predicted
from actmem.planner.fitting import fit_profile, named_keeps
from actmem.planner.frontier import Point, frontier
from actmem.profiles import Profile
from actmem.settings import Offload

__all__ = ["Solved", "foretold", "solved"]

_PATIENCE = 3
"""How many budgets are tried for each plan that is looked for."""


@dataclass(frozen=True)
class Solved:
    """The outcome of `solved`."""

    plans: tuple[Plan, ...]
    """From the smallest peak on."""
    modes: tuple[Point, ...]
    """The named modes."""
    exhausted: bool
    """Whether no other budget gives another plan."""


def foretold(plan: Plan) -> Predicted:
    """Return what the planner expects of a plan that it made."""
    assert plan.predicted is not None
    return plan.predicted


def solved(
    profile: Profile,
    asked: Plan,
    device: Device,
    *,
    num_plans: int,
    offload: str | Offload | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Solved:
    """Solve for many budgets until there are enough different plans, or no budget gives another.

    The plan that was asked for is among them, and none that another beats in both bytes and time.
    """
    spread = num_plans if offload is None else 2  # the frontier sends nothing away

    def tell(done: int) -> None:
        if progress is not None:
            progress(min(done, num_plans), num_plans)

    curve = frontier(profile, device, num_points=spread, progress=lambda done, _: tell(min(done, num_plans - 1)))
    plans = {foretold(point.plan).peak_bytes: point.plan for point in curve.points}
    plans[foretold(asked).peak_bytes] = asked
    tried: set[int] = set()
    named = named_keeps(profile)
    exhausted = False

    def attempt(budget: int) -> None:
        tried.add(budget)
        with contextlib.suppress(BudgetError):
            plan = fit_profile([profile], budget, device, offload=offload, named=named)
            known = plans.get(foretold(plan).peak_bytes)
            if known is None or (known is not asked and _ratio(plan) < _ratio(known)):
                plans[foretold(plan).peak_bytes] = plan

    for mode in curve.modes:  # no named mode is to lie below the line
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
    """Return the plans that no other beats, from the smallest peak on. The one that was asked for always stays."""
    found: list[Plan] = []
    for peak in sorted(plans):
        plan = plans[peak]
        if plan is asked or not found or _ratio(plan) < min(_ratio(other) for other in found):
            found.append(plan)
    return found


def _open_budget(peaks: list[int], tried: set[int]) -> int | None:
    """Return a budget that may still give another plan, in the widest range between two peaks; None if there is none.

    A budget gives the same plan as all budgets from that plan's peak up to itself. So the middle of a range is tried
    first, and if that gave nothing new, the last byte of the range: that settles all of it.
    """
    widest, budget = 1, None
    for low, high in itertools.pairwise(peaks):
        within = [b for b in tried if low <= b < high]
        start = max(within, default=low)
        if high - start > widest:
            widest, budget = high - start, high - 1 if within else (low + high) // 2
    return budget
