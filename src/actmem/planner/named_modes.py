"""What the named modes do with a step: the plan for a budget must be no worse than any of them."""

from __future__ import annotations

from actmem.modes import Full, Selective, every_second
from actmem.plan import Plan
from actmem.planner.solver import Keeps, really_kept
from actmem.profiles import Profile
from actmem.simulation import Simulated, decisions, follow

__all__ = ["named_keeps", "named_steps"]

_MODES = (
    Full(),
    Selective(save=["attention"]),
    Selective(save=["attention", every_second("matmul|convolution")]),
    Selective(save=["attention", "matmul", "grouped_matmul"]),
)


def named_steps(p: Profile) -> list[tuple[Plan, Simulated]]:
    """Return the plans of the named modes, and the step under each.

    They leave the smaller side to the tape, so their peak may lie below that of every exact plan.
    """
    collectives = "recompute" if p.decides_collectives else "save"
    plans = [Plan(m.rules(), p.blocks, p.fingerprint, repr(m), collectives=collectives) for m in _MODES]
    return [(plan, follow(p, plan, timeline=True)) for plan in plans]


def named_keeps(p: Profile) -> list[Keeps]:
    """Return what the named modes hold, as decisions of an exact plan."""
    return [really_kept(p, decisions(p, plan), found.held) for plan, found in named_steps(p)]
