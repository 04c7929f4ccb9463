"""The search for the best decisions: a blend of columns for the bound, then a column for each layer.

NOTE [ The search ]
1. Blend: rows and columns are added to the master program until nothing helps any more. That gives the bound, and
   good columns.
2. Settle: a column for each layer, by the master program in integers, whose cost does not grow with the number of
   equal layers; where that is not near the bound, along the chain (NOTE [ Placing ]).
3. Improve: columns that differ in one unit from those in use are added, and the layers are placed again.
4. Chain: blocks of few units are also tried with all their decisions, which closes what is left near the smallest
   peak (NOTE [ The chain bound ]).
5. Join: few layers are also put into one program, whose bound is tighter.
Each is a function over one state (`Search`), and ends where the plan is near enough to the bound, or after a fixed
amount of work (NOTE [ Work, not seconds ]). Finally, single layers are given cheaper columns where that still fits.
Where there are only a few sets of decisions at all, each is a column from the start, and the result is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.decisions import Decision
from actmem.planner.master_program import join
from actmem.planner.placement import Chain
from actmem.planner.search import Search
from actmem.planner.smallest import find_smallest
from actmem.simulation import Effect

__all__ = ["NEAR", "best_within"]

NEAR = 5e-4
"""A plan is good enough at this fraction of a step's time above the bound."""
_FAIR = 4e-3
"""A plan that is not as good as this is worth more work."""
_MUCH = 4_000
"""After this many simplex iterations, a plan is good enough at `_FAIR`."""
_PATIENCE = 4_000
"""Simplex iterations for the blend, once there is a bound, and for a mix."""
_HASTE = 500
"""Simplex iterations for a first mix."""
_OF_A_COMPLETE_MIX = 100_000
"""Simplex iterations for a mix of all columns there are, which is then the optimum."""
_OF_THE_JOIN = 2_000
"""Simplex iterations for the program of all layers."""
_NUM_EXCHANGES, _NUM_EXCHANGES_WITH_LINK = 100, 400
"""How many cheaper columns are tried at the end."""


def best_within(search: Search, budget_bytes: int, candidates: Sequence[Sequence[Sequence[Decision]]]) -> list[Effect]:
    """Find the fastest plan within a budget; if there seems to be none, the plan with the smallest peak."""
    search.budget_bytes = budget_bytes
    everything = search.everywhere(Decision.SAVE)
    if search.peak(everything) <= budget_bytes:
        return everything
    search.seed(candidates)
    if search.traffic is not None:
        _seed_alone(search, candidates)
    may_fit = _blend(search, budget_bytes)
    if search.traffic is not None:
        may_fit = _blend(search, budget_bytes - search.in_flight_bytes)
    if may_fit:
        _settle(search)
    if search.best is None:
        found, search.least_peak_bytes = _smallest(search)
        if search.peak(found) > budget_bytes:
            return found
        search.add(found)
        search.add_neighbours(found)
        search.offer(found)
        _settle(search)
    _improve(search)
    _chain(search)
    _join(search)
    _exchange(search)
    return search.best or everything


def _seed_alone(search: Search, candidates: Sequence[Sequence[Sequence[Decision]]]) -> None:
    """Begin with the best plan that offloads nothing: a link never makes a plan slower."""
    alone = Search(search.profile, search.seconds, step_seconds=search.step_seconds, work=search.work.apart())
    kept = [c for c in candidates if not any(Decision.OFFLOAD in keep for keep in c)]
    here = search.effects([e.keep for e in best_within(alone, search.budget_bytes, kept)])
    search.add(here)
    search.add_neighbours(here)
    if search.peak(here) <= search.budget_bytes:
        search.offer(here)


def _smallest(search: Search) -> tuple[list[Effect], int]:
    """Find the smallest peak in a search of its own: so the answer does not depend on the budget."""
    costs = [0.0] * len(search.seconds)
    fresh = Search(search.profile, costs, step_seconds=0.0, work=search.work.apart(), link=search.link)
    found, least = find_smallest(fresh)
    return search.effects([e.keep for e in found]), least


def _blend(search: Search, limit: int) -> bool:
    """Find the best blend of columns within a limit, which gives the bound. Return whether one was found."""
    line, step, work = search.line, search.step, search.work
    if limit < line.floor_peak_bytes:
        return False
    worst = [max((e.seconds for e in pool), default=0.0) for pool in step.pools]
    over_price = 1e4 * (sum(worst[f] for f in line.family_of) or 1.0) / max(1, search.budget_bytes)
    all_again = 1.001 * sum(sum(line.families[f].seconds) for f in line.family_of)
    until = work.done + _PATIENCE
    for _ in range(500):
        mix = step.solve(limit, over_price=over_price)
        if not mix.counts:
            return False
        slow = work.done > until and search.bound_seconds > 0
        rows = step.crowded(mix, limit + mix.over_bytes)
        if not slow and step.add_rows(rows):
            continue
        bound, num_new = step.bound(mix, search.budget_bytes)
        search.bound_seconds = max(search.bound_seconds, bound)
        search.sent_byte = sum(mix.copies)
        if search.traffic is None and bound > all_again:
            return False
        close = mix.over_bytes <= 0.5 and mix.seconds - bound <= 0.1 * NEAR * search.step_seconds
        if not num_new or slow or (close and search.traffic is None) or work.stopped:
            return mix.over_bytes <= 0.5
    return False


def _settle(search: Search) -> None:
    """Find a column for each layer by an integer mix, whose cost does not grow with the number of equal layers.

    Where that is not good enough, place them along the chain.
    """
    if search.complete:
        _place_mix(search, _OF_A_COMPLETE_MIX)
        return
    if search.traffic is not None:
        if not _place_along(search):
            _place_mix(search, _PATIENCE)
        return
    _place_mix(search, _HASTE)
    if not search.is_within(NEAR) and not _place_along(search) and not search.is_within(_FAIR):
        _place_mix(search, _PATIENCE)


def _place_along(search: Search) -> bool:
    """Place the columns along the chain. Return whether that fits."""
    limit, fits, prices = search.budget_bytes - search.in_flight_bytes, False, [0.0]
    if search.traffic is not None:
        most = max(e.seconds / max(1, int(e.level.max())) for pool in search.step.pools for e in pool)
        prices = [search.sent_byte, *(most * 10.0 ** (-n / 2) for n in range(7))]
    for price in prices:
        found = search.placing.place(limit, sent_byte=price)
        if found is not None and search.fits(found):
            search.offer(found)
            fits = True
    return fits


def _place_mix(search: Search, allowance: int) -> None:
    """Place the columns by an integer mix."""
    step, work, limit = search.step, search.work, search.budget_bytes - search.in_flight_bytes
    price = 1e5 * max(1e-9, sum(max(e.seconds for e in pool) for pool in step.pools)) / max(1, search.budget_bytes)
    near = 0.0 if search.complete else NEAR * search.step_seconds
    step.tight.clear()
    until = work.done + allowance
    while (allowance := until - work.done) > 0 and not work.stopped:
        mix = step.solve(limit, whole=True, over_price=price, near=near, allowance=allowance)
        if not mix.counts or mix.over_bytes > 0.5:
            return
        if search.complete and not step.tight:
            search.bound_seconds = max(search.bound_seconds, mix.bound * (1 - 1e-9))
        found = search.placed(mix)
        if search.fits(found):
            search.offer(found)
            return
        if not search.cut(found, search.budget_bytes):
            return


def _improve(search: Search) -> None:
    """Add neighbours of what is in use, and place the layers again."""
    for _ in range(4):
        if search.complete or _is_good(search) or search.best is None or search.work.stopped:
            return
        before = search.cost(search.best)
        search.add_neighbours(search.best)
        _place_along(search)
        if search.cost(search.best) >= before:
            return


def _chain(search: Search) -> None:
    """Bound the layers as a chain, and place the columns behind the bound."""
    if search.complete or search.traffic is not None or search.best is None or _is_good(search):
        return
    chain = Chain(search.step, search.budget_bytes)
    if chain.is_small and not search.work.stopped:
        search.bound_seconds = max(search.bound_seconds, chain.bound())
        _place_along(search)
        _improve(search)


def _join(search: Search) -> None:
    """Put all layers into one program, which closes what the blend leaves open."""
    step, work, near = search.step, search.work, NEAR * search.step_seconds
    if not search.is_small or search.is_within(_FAIR):
        return
    step.tight.clear()
    until = work.done + _OF_THE_JOIN
    while (allowance := until - work.done) > 0 and not search.is_within(_FAIR) and not work.stopped:
        below = None if search.best is None else search.cost(search.best) - near
        joined = join(step, search.budget_bytes, below=below, near=near, allowance=allowance)
        if not step.tight:
            search.bound_seconds = max(search.bound_seconds, joined.bound)
        if not joined.keeps:
            return
        found = search.effects(joined.keeps)
        search.add(found)
        if search.peak(found) <= search.budget_bytes:
            search.offer(found)
        elif not search.cut(found, search.budget_bytes):
            return


def _exchange(search: Search) -> None:
    """Give single layers cheaper columns as long as the step still fits."""
    best, step = search.best, search.step
    if best is None or search.complete or _is_good(search):
        return
    moves = sorted(
        (effect.seconds - best[nth].seconds, nth, i)
        for f, family in enumerate(search.line.families)
        for i, effect in enumerate(step.pools[f])
        for nth in family.layers
        if effect.seconds < best[nth].seconds - 1e-12
    )
    for _, nth, i in moves[: _NUM_EXCHANGES if search.traffic is None else _NUM_EXCHANGES_WITH_LINK]:
        if search.work.stopped:
            return
        effect = step.pools[search.line.family_of[nth]][i]
        if effect.seconds < best[nth].seconds:
            changed = [*best[:nth], effect, *best[nth + 1 :]]
            if search.cost(changed) < search.cost(best) and search.fits(changed):
                search.best = best = changed


def _is_good(search: Search) -> bool:
    """Return whether the best plan is good enough to stop; after much work, a looser limit applies."""
    return search.is_within(NEAR if search.work.done < _MUCH else _FAIR)
