"""A plan for each stage of a pipeline that was built from a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from actmem.devices import Device
from actmem.parallelism import StageProfile
from actmem.plan import Plan
from actmem.planner.budget_allowance import Allowance
from actmem.planner.profile_fit import fit_profiles
from actmem.settings import Offload

__all__ = ["StagePlan", "fit_stages"]


class StagePlan(NamedTuple):
    """The plan of a stage."""

    plan: Plan
    made_for: int
    """The place that it was made for."""


def fit_stages(
    stages: Sequence[StageProfile],
    allowed: Allowance,
    device: Device,
    *,
    offload: str | Offload | None = None,
    allocator: str = "",
) -> list[StagePlan]:
    """Find the plan of each stage. A stage in the middle has that of the one before it, which has more in flight.

    The plan of the stage with the most microbatches in flight fits all those after it that have the same blocks, and
    the slowest of them decides how long a step takes.

    Raises:
        BudgetError: a stage has no plan that fits.
    """
    found: list[StagePlan] = []
    made: dict[object, StagePlan] = {}
    for stage in stages:
        key = stage.profile.fingerprint, stage.profile.blocks, stage.pp == 0, stage.pp == len(stages) - 1
        if key not in made:
            plan = fit_profiles([stage.profile], allowed, device, offload=offload, allocator=allocator)
            made[key] = StagePlan(plan, stage.pp)
        found.append(made[key])
    return found
