"""Whether a plan computes logits and loss in chunks: where it is asked to, or where it may and it pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from actmem.errors import BudgetError, ModeError
from actmem.modes import check_allowed
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.settings import Split, check_split

__all__ = ["AUTO", "check_asked", "split_or_whole"]

AUTO = Split(loss="auto")
"""What a planner that may split does."""


def check_asked(split: Split | None, allow: Sequence[str], *, is_compiled: bool) -> None:
    """Refuse what cannot be asked of a planner.

    Raises:
        ModeError: a value that is not permitted, or two that exclude each other.
    """
    check_allowed(allow)
    if split is not None:
        check_split(split)
    if split is not None and "split" in allow:
        raise ModeError(
            "split and allow=['split'] cannot be combined: the one says it, the other lets the planner choose."
        )
    if is_compiled and (split is not None or allow):
        raise ModeError(
            "split and allow cannot be planned for compiled blocks yet: a head inside a compiled graph is not split. "
            "Omit them, or plan with compiled=False."
        )


def split_or_whole(
    planned: Callable[[Sequence[Profile]], Plan], whole: Sequence[Profile], split: Callable[[], Sequence[Profile]]
) -> Plan:
    """Return the plan that recomputes less: that for the whole loss, or that for the loss in chunks.

    Args:
        planned: how a plan is made of profiles.
        whole: profiles of the step with whole logits.
        split: makes those of the step with logits in chunks.

    Raises:
        BudgetError: neither fits.
    """
    try:
        plan = planned(whole)
    except BudgetError as error:
        try:
            return replace(planned(split()), split=AUTO)
        except ModeError:  # there is no head to split
            raise error from None
    assert plan.predicted is not None
    if plan.predicted.step_time_ratio <= 1.0:
        return plan
    try:
        other = replace(planned(split()), split=AUTO)
    except (ModeError, BudgetError):
        return plan
    assert other.predicted is not None
    return other if other.predicted.step_time_ratio < plan.predicted.step_time_ratio else plan
