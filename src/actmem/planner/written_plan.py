"""From decisions to a plan: as few rules as say the same, checked by following them."""

from __future__ import annotations

from collections.abc import Sequence

from actmem.decisions import Decision
from actmem.plan import Plan
from actmem.planner.rules_writer import ANY, loosened, write_rules
from actmem.planner.solver import Followed, Keeps
from actmem.profiles import Profile
from actmem.settings import Offload
from actmem.simulation import Simulated, follow, ruling, simulate

__all__ = ["CannotSayError", "write_plan"]


class CannotSayError(AssertionError):
    """No rules say what was decided: a defect, but for decisions that are only tried.

    Rules are for blocks. They cannot decide differently about two calls of one, or about operators that run in its
    second call alone.
    """


def write_plan(
    profile: Profile,
    keeps: Keeps,
    target_bytes: int,
    mode: str,
    where: Offload | None,
    followed: Followed | None = None,
) -> tuple[Plan, Simulated]:
    """Write decisions as rules, few if that changes nothing; return the plan and the step that follows it.

    Args:
        profile: the profile.
        keeps: the decisions.
        target_bytes: what the plan is to fit.
        mode: what the plan says of its origin.
        where: where values may be offloaded to.
        followed: what the decisions lead to, if that is known.

    Raises:
        CannotSayError: rules cannot say it.
    """
    if followed is None:
        simulated = simulate(profile, keeps, exact=True)
        followed = Followed(simulated.replayed, simulated.held)
    written: list[tuple[Plan, Simulated]] = []
    for wanted in (loosened(profile, keeps, followed.replayed, followed.held), keeps):
        plan = Plan(
            write_rules(profile, wanted),
            profile.blocks,
            profile.fingerprint,
            mode,
            where if any(Decision.OFFLOAD in keep for keep in wanted) else None,
            exact=True,
            collectives="recompute" if profile.decides_collectives else "save",
        )
        said = ruling(profile, plan)
        if not _is_said(profile, wanted, said.keeps):
            continue
        found = follow(profile, plan, said=said)
        written.append((plan, found))
        # What nothing depends on may matter after all where operators write to each other's results.
        if found.peak_bytes <= target_bytes and found.replayed == followed.replayed:
            break
    if not written:
        raise CannotSayError(
            "the rules do not say what was planned. Please report this, with the model and the budget."
        )
    return written[-1]


def _is_said(profile: Profile, keeps: Sequence[Sequence[Decision | None]], said: Keeps) -> bool:
    """Return whether the rules say what was decided, where that makes a difference."""
    for layer, wanted, rules_say in zip(profile.layers, keeps, said, strict=True):
        differ = [c for c, call in enumerate(layer.calls) if call.makes and wanted[c] not in (rules_say[c], ANY)]
        if differ and not all(layer.values[v].why is not None for c in differ for v in layer.calls[c].makes):
            return False
    return True
