"""The plan with the least replay time that fits a budget, and how far from the proven optimum it may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actmem.decisions import Decision
from actmem.planner.search import Search
from actmem.planner.search_phases import best_within
from actmem.planner.smallest import find_smallest
from actmem.planner.work import Work
from actmem.profiles import Profile
from actmem.simulation import Link

__all__ = ["TIME_LIMIT", "Followed", "Keeps", "Link", "Solution", "really_kept", "smallest_peak", "solve"]

Keeps = list[list[Decision]]
"""For each layer, the decision for each of its calls. To be followed to the letter."""


class Followed(NamedTuple):
    """What decisions lead to, for each layer. As `simulate` finds it."""

    replayed: tuple[tuple[int, ...], ...]
    """The calls that are run again."""
    held: tuple[tuple[int, ...], ...]
    """The values that are held when the forward of the layer is over."""


@dataclass(frozen=True)
class Solution:
    """What `solve` found."""

    feasible: bool
    """Whether it fits the budget. If not, it is the plan with the smallest peak that was found."""
    keeps: Keeps
    peak_bytes: int
    """As `simulate` finds it."""
    replay_seconds: float
    stall_seconds: float
    """How long the step waits for values that were offloaded."""
    replayed_flops: int
    sent_bytes: int
    bound_seconds: float
    """Lower bound on the seconds for replays and waiting of any plan that fits."""
    gap: float
    """How much of a step's time a better plan could save at most, as a fraction."""
    solver_seconds: float
    followed: Followed | None = None
    """What is replayed and held; None if it is not known."""
    least_peak_bytes: int | None = None
    """If it does not fit: lower bound on the peak of any plan."""
    time_limit_hit: bool = False
    """Whether the time limit stopped the search before it was done."""


TIME_LIMIT = 600.0
"""Seconds after which a search is stopped, unless told otherwise. See NOTE [ Work, not seconds ]."""


def solve(
    profile: Profile,
    seconds: Sequence[float],
    budget_bytes: int,
    *,
    step_seconds: float,
    offload: Link | None = None,
    candidates: Sequence[Sequence[Sequence[Decision]]] = (),
    time_limit: float = TIME_LIMIT,
) -> Solution:
    """Find the decisions with the least replay time whose peak is within a budget.

    Args:
        profile: what the step does.
        seconds: what each of the profile's costs takes.
        budget_bytes: the most bytes that may be alive at any time.
        step_seconds: what the step takes with everything saved.
        offload: where values may be sent to; None if they may not.
        candidates: decisions that the result must be no worse than, where they fit. See `really_kept`.
        time_limit: an emergency brake, in seconds: the best plan found by then is returned, and says that it was
            stopped. Otherwise the result does not depend on how long it took.

    >>> solve(Profile(), [], 10, step_seconds=1.0).feasible
    True
    """
    work = Work(time_limit)
    search = Search(profile, seconds, step_seconds=step_seconds, work=work, link=offload)
    best = best_within(search, budget_bytes, candidates)
    keeps = [list(e.keep) for e in best]
    peak_bytes = search.peak(best)
    feasible = peak_bytes <= budget_bytes
    replayed = sum(e.seconds for e in best)
    stalled = search.cost(best) - replayed
    bound = min(replayed + stalled, max(0.0, search.bound_seconds)) if feasible else 0.0
    return Solution(
        feasible=feasible,
        keeps=keeps,
        peak_bytes=peak_bytes,
        replay_seconds=replayed,
        stall_seconds=stalled,
        replayed_flops=sum(e.flops for e in best),
        sent_bytes=sum(e.sent_bytes for e in best),
        bound_seconds=bound,
        gap=(replayed + stalled - bound) / step_seconds if feasible else 0.0,
        solver_seconds=work.seconds_spent,
        followed=Followed(tuple(e.replayed for e in best), tuple(e.held for e in best)),
        least_peak_bytes=None if feasible else search.least_peak_bytes,
        time_limit_hit=work.was_stopped,
    )


def smallest_peak(profile: Profile, *, time_limit: float = TIME_LIMIT) -> tuple[int, Keeps, int]:
    """Find the decisions with the smallest peak, whatever time they take.

    Returns:
        The peak, the decisions, and a lower bound on the peak of any decisions.

    >>> smallest_peak(Profile())
    (-1, [], -1)
    """
    search = Search(profile, [0.0] * len(profile.costs), step_seconds=0.0, work=Work(time_limit))
    best, least = find_smallest(search)
    return search.peak(best), [list(e.keep) for e in best], least


def really_kept(profile: Profile, keeps: Sequence[Sequence[Decision]], held: Sequence[Sequence[int]]) -> Keeps:
    """Turn what a plan held into decisions to be followed to the letter.

    A named mode leaves it to the tape to hold the smaller side of what cannot be replayed. `held` says what it did, as
    `simulate` returns it.

    >>> really_kept(Profile(), [], [])
    []
    """
    found: Keeps = []
    for layer, keep, values in zip(profile.layers, keeps, held, strict=True):
        calls = {layer.values[v].call for v in values if layer.values[v].call >= 0}
        kept = [Decision.SAVE if k is Decision.RECOMPUTE else k for k in keep]
        found.append([k if c in calls else Decision.RECOMPUTE for c, k in enumerate(kept)])
    return found
