"""From the profile of a step to a plan: solve, write down, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from actmem.allocator import AllocatorSettings
from actmem.collector import uncollected
from actmem.decisions import Decision
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import FitRecord, Plan
from actmem.planner.budget_allowance import Allowance
from actmem.planner.budget_refusal import Words, refusal
from actmem.planner.card_fit import check_allocator, fit_card
from actmem.planner.named_modes import named_keeps, named_steps
from actmem.planner.solver import TIME_LIMIT, Followed, Keeps, Link, Solution, solve
from actmem.planner.written_plan import write_plan
from actmem.profiles import Profile
from actmem.settings import STORES, Offload
from actmem.simulation import (
    Simulated,
    cost_seconds,
    decisions,
    follow,
    is_accelerator,
    on_card,
    peak_words,
    simulate,
    step_seconds,
)

__all__ = ["fit_profile", "fit_profiles", "offload_settings", "with_rules_of"]


def fit_profiles(
    profiles: Sequence[Profile],
    allowed: Allowance,
    known: Device,
    *,
    offload: str | Offload | None = None,
    time_limit: float = TIME_LIMIT,
    allocator: str | AllocatorSettings = "",
    words: Words = "all",
    used: Sequence[str] = (),
) -> Plan:
    """Find the plan for existing profiles, as `fit_profile` does, and describe its peak in words.

    Args:
        profiles: one for each batch that the plan is to hold for.
        allowed: the budget.
        known: the device.
        offload: where values may be sent.
        time_limit: seconds after which the solver is stopped.
        allocator: the settings of a card's caching allocator.
        words: what to say of the peak, or of a refusal.
        used: the measures that the plan uses, or may use.
    """
    settings = check_allocator(allocator, known)
    options: dict[str, Any] = {
        "offload": offload,
        "headroom": allowed.headroom,
        "time_limit": time_limit,
        "words": words,
    }
    if known.has_caching_allocator:
        profiles = [on_card(p, known) for p in profiles]
        found = profiles
        kept: dict[int, list[Keeps]] = {}

        def named(p: Profile) -> list[Keeps]:
            """Follow the named modes once for all targets."""
            return kept[id(p)] if id(p) in kept else kept.setdefault(id(p), named_keeps(p))

        def within(target_bytes: int) -> Plan:
            beyond_bytes = allowed.budget_bytes - target_bytes
            return fit_profile(found, target_bytes, known, beyond_bytes=beyond_bytes, named=named, **options)

        plan = fit_card(within, profiles, allowed.budget_bytes, known, settings, words=words != "none")
    else:
        plan = fit_profile(profiles, allowed.budget_bytes, known, **options)
    predicted = plan.predicted
    assert predicted is not None
    if words == "none":
        return plan
    chief = next(p for p in profiles if p.shapes == predicted.shapes)
    said = peak_words(chief, plan, accelerator=is_accelerator(known), used=used)
    return replace(plan, predicted=replace(predicted, peak_words=said))


@uncollected()
def fit_profile(
    profiles: Sequence[Profile],
    budget_bytes: int,
    known: Device,
    *,
    offload: str | Offload | None = None,
    headroom: float = 0.0,
    beyond_bytes: int = 0,
    time_limit: float = TIME_LIMIT,
    named: Callable[[Profile], Sequence[Keeps]] = named_keeps,
    words: Words = "all",
) -> Plan:
    """Find the plan for existing profiles: that of the one with the highest plain peak, if it holds for all.

    If it does not, the one that it breaks the budget for decides; and if its plan does not hold for all either, the
    fastest named mode that does is taken.

    Args:
        profiles: one for each batch that the plan is to hold for.
        budget_bytes: the most bytes that may be alive.
        known: whose speed to take, by its roofline; for this machine, what a real profile measured.
        offload: where values may be sent.
        headroom: what was taken off the budget, to be recorded.
        beyond_bytes: how much more the budget is, for what is not a tensor; a refusal names it.
        time_limit: seconds after which the solver is stopped.
        named: returns what `named_keeps` does, perhaps from an earlier budget.
        words: what a refusal says.
    """
    # On a CPU the Python numbers that autograd holds are in the same memory: at most so many bytes.
    limit_bytes = budget_bytes - (0 if is_accelerator(known) else max(p.numbers_bytes for p in profiles))
    chief, decided = profiles[0], list[Profile]()
    if len(profiles) > 1:
        chief = max(profiles, key=lambda p: simulate(p, _everything(p), exact=True).peak_bytes)
    while True:
        plan = _fit_one(
            chief, budget_bytes, limit_bytes, known, offload, headroom, beyond_bytes, time_limit, named, words
        )
        peaks = [(follow(p, plan), p) for p in profiles if p is not chief]
        highest, worst = max(peaks, key=lambda each: each[0].peak_bytes, default=(None, chief))
        if highest is None or highest.peak_bytes <= limit_bytes:
            return _recorded(plan, chief, worst, highest, profiles)
        decided.append(chief)
        if any(worst is p for p in decided):
            by_name = _for_all(profiles, budget_bytes, limit_bytes, known, headroom)
            if by_name is None:
                raise _unfit(chief, worst, highest.peak_bytes, limit_bytes)
            return by_name
        chief = worst


def _fit_one(
    chief: Profile,
    budget_bytes: int,
    limit_bytes: int,
    known: Device,
    offload: str | Offload | None,
    headroom: float,
    beyond_bytes: int,
    time_limit: float,
    named: Callable[[Profile], Sequence[Keeps]],
    words: Words,
) -> Plan:
    """Find the plan for one profile."""
    seconds = cost_seconds(chief, known)
    whole = step_seconds(chief, seconds)
    where = offload_settings(chief, offload, known, budget_bytes)
    link = None if where is None else _link(where, known, _least_in_flight_bytes(chief))

    def best(target_bytes: int, candidates: Sequence[Keeps]) -> Solution:
        return solve(
            chief,
            seconds,
            target_bytes,
            step_seconds=whole,
            offload=link,
            candidates=candidates,
            time_limit=time_limit,
        )

    few = len(chief.layers) <= _FEW_LAYERS
    target_bytes = limit_bytes
    while True:
        solution = best(target_bytes, named(chief) if few else ())
        if not few and (not solution.feasible or solution.gap > _NEAR):
            modes = named(chief)
            if not solution.feasible or any(_is_faster(chief, k, seconds, target_bytes, solution) for k in modes):
                again = best(target_bytes, modes)
                solution = replace(again, time_limit_hit=again.time_limit_hit or solution.time_limit_hit)
        solution = _same_each_time(chief, solution, seconds, whole, target_bytes)
        if not solution.feasible:
            by_names = named_steps(chief)
            by_name = _by_name(chief, by_names, seconds, whole, limit_bytes, budget_bytes)
            if by_name is not None:
                plan, found, solution = by_name
                break
            raise refusal(
                chief,
                solution,
                by_names,
                budget_bytes,
                offloaded=where is not None,
                headroom=headroom,
                beyond_bytes=beyond_bytes,
                known=known,
                words=words,
            )
        mode = f"fit(budget={budget_bytes})"
        plan, found = write_plan(chief, solution.keeps, target_bytes, mode, where, solution.followed)
        if found.peak_bytes <= limit_bytes:
            break
        # The solver treats layers as independent. Copies that one makes for another come on top: leave room for them.
        target_bytes -= found.peak_bytes - limit_bytes
    return replace(plan, predicted=_predicted(chief, solution, found, budget_bytes, known, whole, headroom))


def with_rules_of(other: Plan, plan: Plan, profiles: Sequence[Profile], known: Device) -> Plan | None:
    """Return a plan with the rules of another one, if these fit the same budget; None if they do not.

    Args:
        other: the plan whose rules to take. It offloads nothing.
        plan: the plan to change.
        profiles: what the plan is for.
        known: the device, without a caching allocator.
    """
    record = plan.predicted
    assert record is not None
    moved = replace(plan, rules=other.rules, exact=other.exact, collectives=other.collectives)
    found, worst = max(((follow(p, moved), p) for p in profiles), key=lambda each: each[0].peak_bytes)
    if found.peak_bytes > record.budget_bytes - (0 if is_accelerator(known) else worst.numbers_bytes):
        return None
    seconds = cost_seconds(worst, known)
    whole, replayed = step_seconds(worst, seconds), _replayed(worst, found)
    ratio = 1 + sum(seconds[cost] for cost in replayed) / whole if whole else 1.0
    told = replace(
        record,
        peak_bytes=found.peak_bytes,
        step_time_ratio=ratio,
        replayed_flops=sum(worst.costs[cost].flops for cost in replayed),
        gap=max(0.0, ratio - record.bound),
        peak_at=_peak_at(worst, found),
        peak_words=peak_words(worst, moved, accelerator=is_accelerator(known)),
    )
    return replace(moved, predicted=told)


def _by_name(
    chief: Profile,
    named: Sequence[tuple[Plan, Simulated]],
    seconds: Sequence[float],
    whole: float,
    limit_bytes: int,
    budget_bytes: int,
) -> tuple[Plan, Simulated, Solution] | None:
    """Return the fastest named mode that fits, for a budget below the peak of every exact plan. Nothing bounds it."""
    fitting: list[tuple[float, Plan, Simulated]] = []
    for plan, found in named:
        if found.peak_bytes <= limit_bytes:
            fitting.append((sum(seconds[cost] for cost in _replayed(chief, found)), plan, found))
    if not fitting:
        return None
    replayed, plan, found = min(fitting, key=lambda tried: tried[0])
    solution = Solution(
        feasible=True,
        keeps=decisions(chief, plan),
        peak_bytes=found.peak_bytes,
        replay_seconds=replayed,
        stall_seconds=0.0,
        replayed_flops=sum(chief.costs[cost].flops for cost in _replayed(chief, found)),
        sent_bytes=0,
        bound_seconds=0.0,
        gap=replayed / whole if whole else 0.0,
        solver_seconds=0.0,
    )
    return replace(plan, mode=f"fit(budget={budget_bytes})"), found, solution


def _for_all(
    profiles: Sequence[Profile], budget_bytes: int, limit_bytes: int, known: Device, headroom: float
) -> Plan | None:
    """Return the fastest named mode that fits for each of several profiles."""
    fitting: list[Plan] = []
    for plan, _ in named_steps(profiles[0]):
        steps = [(follow(p, plan), p) for p in profiles]
        found, worst = max(steps, key=lambda each: each[0].peak_bytes)
        seconds = cost_seconds(worst, known)
        whole = step_seconds(worst, seconds)
        by_name = _by_name(worst, [(plan, found)], seconds, whole, limit_bytes, budget_bytes)
        if by_name is not None:
            record = _predicted(worst, by_name[2], found, budget_bytes, known, whole, headroom)
            fitting.append(_recorded(replace(by_name[0], predicted=record), worst, worst, None, profiles))
    return min(fitting, key=lambda plan: plan.predicted.step_time_ratio if plan.predicted else 1.0, default=None)


def _is_faster(p: Profile, keeps: Keeps, seconds: Sequence[float], budget_bytes: int, solution: Solution) -> bool:
    """Return whether decisions fit the budget and take less time than a solution."""
    found = simulate(p, keeps, exact=True)
    again = sum(seconds[cost] for cost in _replayed(p, found))
    return found.peak_bytes <= budget_bytes and again < solution.replay_seconds + solution.stall_seconds


def _replayed(p: Profile, found: Simulated) -> list[int]:
    """Return the costs of the calls that are run again."""
    return [p.layers[n].calls[c].cost for n, calls in enumerate(found.replayed) for c in calls]


_FEW_LAYERS = 48
"""Up to this many layers the named modes are tried first; with more, only where the solver leaves a gap."""
_NEAR = 5e-4
_MOST_TRIED = 4
"""Of how many calls of a block the decisions are tried for all of them."""


def _everything(p: Profile) -> Keeps:
    return [[Decision.SAVE] * len(layer.calls) for layer in p.layers]


def offload_settings(chief: Profile, offload: str | Offload | None, known: Device, budget_bytes: int) -> Offload | None:
    """Return where values go. What two blocks send depends on the plan, so a plan for a budget has a fixed number."""
    if offload is None:
        return None
    in_flight_bytes = max(2**21, budget_bytes // 32, _least_in_flight_bytes(chief))
    if isinstance(offload, Offload):
        return offload if offload.in_flight_bytes is not None else replace(offload, in_flight_bytes=in_flight_bytes)
    if offload not in STORES:
        raise ModeError(f"offload = {offload!r} is not known. Permitted: 'host', 'disk', an Offload, or None.")
    if not STORES[offload].frees_host_memory and not is_accelerator(known):
        raise ModeError(
            "offload = 'host' does nothing on a CPU: its tensors are in host memory already. Write offload='disk'."
        )
    return Offload(to=offload, min_bytes=0, in_flight_bytes=in_flight_bytes)


def _link(offload: Offload, known: Device, least_bytes: int) -> Link:
    """Return the link, with what may be in flight on the device."""
    rate = known.offload_rate(offload.to)
    assert offload.in_flight_bytes is not None
    return Link(rate, rate, max(offload.in_flight_bytes, least_bytes))


def _least_in_flight_bytes(p: Profile) -> int:
    """Return what two values at least may take in flight."""
    kinds = {layer.kind: layer for layer in p.layers}.values()
    return 2 * max((v.num_bytes for layer in kinds for v in layer.values if v.call >= 0), default=0)


def _same_each_time(
    p: Profile, solution: Solution, seconds: Sequence[float], whole: float, budget_bytes: int
) -> Solution:
    """Give a block that is called more than once in a step the same decisions each time, as rules do.

    The candidates are what the solution decides for each of the calls, or for some of them if there are many, and what
    it saves in all of them. The fastest that fits is taken. A block that does not run the same operators each time is
    saved or recomputed as a whole. The bound stays: it holds for plans that may decide differently each time, and so
    for these.
    """
    groups: dict[str, list[int]] = {}
    for n, layer in enumerate(p.layers):
        groups.setdefault(layer.path, []).append(n)
    most = max((len(group) for group in groups.values()), default=1)
    if not solution.feasible or most == 1:
        return solution
    best: Solution | None = None
    known: set[str] = set()
    for nth in (-1, *sorted({n * (most - 1) // (_MOST_TRIED - 1) for n in range(_MOST_TRIED)})):
        keeps: Keeps = [[]] * len(p.layers)
        for group in groups.values():
            each = [solution.keeps[n] for n in group]
            if len({tuple(call.op for call in p.layers[n].calls) for n in group}) > 1:
                kept = nth >= 0 and all(Decision.RECOMPUTE not in keep for keep in each)
                whole_block = Decision.SAVE if kept else Decision.RECOMPUTE
                each = [[whole_block] * len(keep) for keep in each]
            elif nth < 0:
                together = zip(*each, strict=True)
                each = [[k[0] if Decision.RECOMPUTE not in k else Decision.RECOMPUTE for k in together]] * len(group)
            else:
                each = [each[min(nth, len(each) - 1)]] * len(group)
            for n, keep in zip(group, each, strict=True):
                keeps[n] = list(keep)
        if (text := repr(keeps)) in known:
            continue
        known.add(text)
        found = simulate(p, keeps, exact=True)
        replayed = sum(seconds[cost] for cost in _replayed(p, found))
        tried = replace(
            solution,
            feasible=found.peak_bytes <= budget_bytes,
            keeps=keeps,
            peak_bytes=found.peak_bytes,
            replay_seconds=replayed,
            replayed_flops=sum(p.costs[cost].flops for cost in _replayed(p, found)),
            sent_bytes=found.sent_bytes,
            gap=(replayed + solution.stall_seconds - solution.bound_seconds) / whole if whole else 0.0,
            followed=Followed(found.replayed, found.held),
            least_peak_bytes=None,
        )
        if best is None or _rank(tried) < _rank(best):
            best = tried
    assert best is not None
    return best


def _rank(s: Solution) -> tuple[bool, float]:
    return not s.feasible, s.replay_seconds if s.feasible else float(s.peak_bytes)


def _predicted(
    p: Profile,
    s: Solution,
    found: Simulated,
    budget_bytes: int,
    known: Device,
    whole: float,
    headroom: float,
) -> FitRecord:
    extra = s.replay_seconds + s.stall_seconds
    return FitRecord(
        peak_bytes=found.peak_bytes,
        budget_bytes=budget_bytes,
        step_time_ratio=1 + extra / whole if whole else 1.0,
        replayed_flops=s.replayed_flops,
        bound=1 + s.bound_seconds / whole if whole else 1.0,
        gap=s.gap,
        device=known.name,
        optimizer=p.optimizer,
        shapes=p.shapes,
        calls=p.calls,
        is_step=p.is_step,
        peak_at=_peak_at(p, found),
        headroom=headroom,
        microbatches=p.microbatches,
        shard=p.shard,
        routing=p.routing,
        experts="" if p.expert_loads is None else str(p.expert_loads),
        modules=p.modules,
        time_limit_hit=s.time_limit_hit,
    )


def _recorded(
    plan: Plan, chief: Profile, worst: Profile, highest: Simulated | None, profiles: Sequence[Profile]
) -> Plan:
    """Record the example that takes the most under a plan as the one that it is for, and the others."""
    record = plan.predicted
    assert record is not None
    if highest is not None and highest.peak_bytes > record.peak_bytes:
        peak_at = _peak_at(worst, highest)
        chief, record = worst, replace(record, peak_bytes=highest.peak_bytes, peak_at=peak_at, shapes=worst.shapes)
    return replace(plan, predicted=replace(record, examples=tuple(p.shapes for p in profiles if p is not chief)))


def _peak_at(p: Profile, found: Simulated) -> str:
    layer = found.peak_layer
    where = f" in {p.layers[layer].path or 'the model itself'}" if layer >= 0 else ""
    return f"{found.peak_op}{where}"


def _unfit(chief: Profile, other: Profile, peak_bytes: int, limit_bytes: int) -> BudgetError:
    """Return the error for examples of which each has a plan that fits, but none for all was found."""
    return BudgetError(
        f"the plan that fits {', '.join(map(str, chief.shapes))} takes {peak_bytes} bytes for "
        f"{', '.join(map(str, other.shapes))}, more than the {limit_bytes} allowed, and neither a plan for the latter "
        "nor a named mode fits all examples. Plan for each by itself: actmem.fit(model, batch, budget=...)."
    )
