"""Memory against time: the best plan at many budgets, with the named modes for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.modes import Full, Mode, SaveEverything, Selective, every_second
from actmem.plan import Plan
from actmem.planner.named_modes import named_keeps
from actmem.planner.profile_fit import fit_profile
from actmem.planner.solver import smallest_peak
from actmem.profiles import Profile
from actmem.settings import Offload
from actmem.simulation import cost_seconds, dtypes_of, follow, on_card, plan_of, prediction, resolved

__all__ = ["Frontier", "Point", "frontier"]

NAMED: dict[str, Mode] = {
    "save everything": SaveEverything(),
    "full": Full(),
    "full, every second block": Full(every=2),
    "save attention": Selective(save=["attention"]),
    "save attention, every second product": Selective(save=["attention", every_second("matmul|convolution")]),
    "save attention and products": Selective(save=["attention", "matmul|grouped_matmul|convolution"]),
}
"""The modes that are compared with the frontier."""


@dataclass(frozen=True)
class Point:
    """One plan or mode."""

    name: str
    peak_bytes: int
    step_time_ratio: float
    replayed_flops: int
    plan: Plan


@dataclass(frozen=True)
class Frontier:
    """The outcome of `frontier`."""

    points: tuple[Point, ...]
    """The best plans, from the smallest peak to saving everything."""
    modes: tuple[Point, ...]
    """The named modes."""

    def __str__(self) -> str:
        lines = [f"{'peak':>12}  {'step time':>9}  {'replayed':>12}"]
        lines += [
            f"{point.peak_bytes / 2**20:>8,.1f} MiB  {point.step_time_ratio:>8.4f}x  "
            f"{point.replayed_flops / 1e9:>6,.1f} GFLOP  {point.name}"
            for point in (*self.points, *self.modes)
        ]
        return "\n".join(lines)


def frontier(
    profile: Profile,
    device: Device | str | None = None,
    *,
    num_points: int = 24,
    offload: str | Offload | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Frontier:
    """Find the best plan at many budgets, from the smallest that any plan can meet up to saving everything.

    Args:
        profile: what the step does.
        device: whose speed to take. Default: this machine.
        num_points: how many plans.
        offload: "host" or "disk", or an `Offload`, if the plans may offload values.
        progress: called with how many are done, and of how many.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> found = actmem.profile(model, (torch.randn(64, 8),), loss=torch.sum)
    >>> curve = actmem.frontier(found, "h100-80gb", num_points=3)
    >>> curve.points[-1].step_time_ratio
    1.0
    """
    if type(num_points) is not int or num_points < 2:
        raise ModeError(f"num_points = {num_points!r} is not permitted. Expected an int of 2 or more.")
    known = resolved(device, dtypes_of(profile))
    profile = on_card(profile, known)
    seconds = cost_seconds(profile, known)
    modes: list[Point] = []
    for name, mode in NAMED.items():
        plan = plan_of(profile, mode)
        found = prediction(profile, follow(profile, plan), seconds)
        modes.append(Point(name, found.peak_bytes, found.step_time_ratio, found.replayed_flops, plan))
    most, least = modes[0].peak_bytes, smallest_peak(profile)[0]
    points: dict[int, Point] = {}
    named = named_keeps(profile)
    for nth in range(num_points):
        budget = least + (most - least) * nth // (num_points - 1)
        try:
            plan = fit_profile([profile], budget, known, named=lambda _: named, offload=offload)
        except BudgetError:  # the smallest peak is found, not proven: a hair may be missing
            continue
        assert plan.predicted is not None
        p = plan.predicted
        best = points.get(p.peak_bytes)
        if best is None or p.step_time_ratio < best.step_time_ratio:
            points[p.peak_bytes] = Point("fitted", p.peak_bytes, p.step_time_ratio, p.replayed_flops, plan)
        if progress is not None:
            progress(nth + 1, num_points)
    return Frontier(tuple(points[peak] for peak in sorted(points)), tuple(modes))
