"""One plan for each stage of a parallel job, for the same budget on every rank, and how long the whole step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from actmem.allocator import AllocatorSettings
from actmem.collector import uncollected
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.job_plan import JobPlan, JobRecord, RankPlan
from actmem.plan import Plan
from actmem.planner.budget_allowance import Allowance, allowance
from actmem.planner.profile_fit import fit_profiles, with_rules_of
from actmem.planner.solver import TIME_LIMIT
from actmem.profiles import Place, Profile, with_collectives
from actmem.profiling import profile_rank
from actmem.settings import Offload
from actmem.simulation import (
    Stretch,
    cost_seconds,
    dtypes_of,
    ends_of,
    follow,
    in_flight,
    least_seconds,
    link_seconds,
    may_communicate,
    on_card,
    resolved,
    step_seconds,
    stretches,
)

__all__ = ["fit_job", "job_seconds"]

Build = Callable[[], tuple[nn.Module, Callable[[], object]]]


@uncollected()
def fit_job(
    job: Build | Sequence[Profile],
    *,
    budget: str | int | float,
    world: int | None = None,
    ranks: Sequence[int] | None = None,
    device: Device | str | None = None,
    offload: str | Offload | None = None,
    headroom: float | None = None,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: str = "balanced",
    time_limit: float = TIME_LIMIT,
    allocator: str | AllocatorSettings = "",
) -> JobPlan:
    """Find the plans that train a parallel job fastest within a memory budget for each of its ranks.

    The stages of a pipeline have plans of their own: the first of them often hold more microbatches than the last, and
    those with room to spare recompute less. Ranks that run the same stages have the same plan, as ranks that
    communicate inside the blocks must; without a pipeline there is one plan for all ranks. Where the speed of the link
    is known, a plan may communicate again what it does not hold (`Plan.collectives`). The time of the step is that
    of the schedule as torch runs it: what each rank does, and what it waits for.

    Args:
        job: a function that makes one rank of the job, as for `profile_rank`; or the profiles of its ranks.
        budget: what each rank may use, as for `fit`.
        world: how many ranks the job has. Not with profiles, which know it.
        ranks: the ranks to profile. Default: the first and the last, and those of their pipelines: with mesh
            dimensions that are divided unevenly, all others take no more than these.
        device: whose speed to plan for, as for `fit`. Default: this machine.
        offload: where values may be offloaded to, as for `fit`.
        headroom: the part of the budget to leave free. Default: 0.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks to use, as for `apply`.
        routing: what to assume of routers: "balanced" or "worst".
        time_limit: an emergency brake for the search of each plan, in seconds.
        allocator: settings of the caching allocator on a card, as for `fit`.

    Returns:
        The plans. On each rank, `apply(model, job.for_rank(rank))` applies its own to the model that `job` returned.

    Raises:
        BudgetError: a rank has no plan that fits. The message says which, and what would help.
        ModeError: an argument is not permitted.

    >>> import torch, actmem
    >>> from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    >>> def build():
    ...     rank, hidden = torch.distributed.get_rank(), torch.empty(64, 32, device="meta", requires_grad=True)
    ...     layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)])
    ...     stage = PipelineStage(layers, rank, 2, torch.device("cpu"), input_args=(hidden,), output_args=(hidden,))
    ...     schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    ...     batch = torch.randn(256, 32)
    ...     return layers, lambda: schedule.step(*[batch] * (rank == 0), target=batch if rank else None)
    >>> found = actmem.fit_job(build, world=2, budget="1MiB", device=actmem.device("h100-80gb").tensors_only())
    >>> [part.microbatches_in_flight for part in found.parts]
    [2, 1]
    """
    if callable(job):
        profiles = _profiled(job, world, ranks, blocks=blocks, scope=scope, routing=routing)
    else:
        if any(given is not None for given in (world, ranks, blocks, scope)):
            raise ModeError("profiles already say which ranks they are of: leave out world, ranks, blocks and scope.")
        profiles = list(job)
    _check(profiles)
    known = resolved(device, frozenset[str]().union(*map(dtypes_of, profiles)))
    allowed = allowance(budget, known, headroom)
    # Ranks that communicate with each other inside the blocks have one plan, so that it may say to do so again.
    profiles = [with_collectives(on_card(p, known), again=may_communicate(p, known)) for p in profiles]
    groups: dict[tuple[int, ...], list[Profile]] = {}
    for p in profiles:
        groups.setdefault(p.stages, []).append(p)
    plans = {
        stages: _fitted(group, allowed, known, offload=offload, time_limit=time_limit, allocator=allocator)
        for stages, group in sorted(groups.items())
    }
    timed = _Timed(profiles, [plans[p.stages] for p in profiles], known)
    for alike in _alike(plans, groups, known):
        other = _Timed(profiles, [alike[p.stages] for p in profiles], known)
        if other.step_seconds < timed.step_seconds:
            plans, timed = alike, other
    parts = tuple(
        RankPlan(
            ranks=tuple(sorted(_place(p).rank for p in groups[stages])),
            stages=stages,
            plan=plan,
            busy=max(timed.busy[_place(p).rank] for p in groups[stages]),
            microbatches_in_flight=in_flight(groups[stages][0].actions)[0],
            waiting_for_weights=in_flight(groups[stages][0].actions)[1],
        )
        for stages, plan in plans.items()
    )
    predicted = JobRecord(
        step_seconds=timed.step_seconds,
        plain_seconds=timed.plain_seconds,
        bound_seconds=timed.bound_seconds,
        budget_bytes=allowed.budget_bytes,
        device=known.name,
    )
    return JobPlan(parts, _place(profiles[0]).world, predicted)


def job_seconds(profiles: Sequence[Profile], plans: Sequence[Plan], device: Device | str | None = None) -> float:
    """Return how long a step of a job takes, with a plan for each of its ranks. See NOTE [ The clock of a job ]."""
    known = resolved(device, frozenset[str]().union(*map(dtypes_of, profiles)))
    return _Timed([on_card(p, known) for p in profiles], plans, known).step_seconds


class _Timed:
    """How long a step takes under plans, with everything saved, and at least."""

    def __init__(self, profiles: Sequence[Profile], plans: Sequence[Plan], known: Device) -> None:
        sides = {
            _place(p).rank: _sides(p, plan, cost_seconds(p, known)) for p, plan in zip(profiles, plans, strict=True)
        }
        ends: dict[int, float] = {}
        self.plain_seconds = self.bound_seconds = 0.0
        for pipeline in _pipelines(profiles):
            mine = [sides[rank] for rank in pipeline]
            reach = 1 + abs(pipeline[1] - pipeline[0]) if len(pipeline) > 1 else 1

            def sent(num_bytes: int, reach: int = reach) -> float:
                return link_seconds(num_bytes, reach, known)

            planned, plain = ([getattr(side, name) for side in mine] for name in ("planned", "plain"))
            ends |= dict(zip(pipeline, (done[-1] for done in ends_of(planned, sent)), strict=True))
            least = [side.more_seconds for side in mine]
            evenly = [side.evenly for side in mine]
            self.plain_seconds = max(self.plain_seconds, *(done[-1] for done in ends_of(plain, sent)))
            self.bound_seconds = max(self.bound_seconds, least_seconds(plain, least, sent, evenly=evenly))
        self.step_seconds = max(ends.values())
        self.bound_seconds = min(self.bound_seconds, self.step_seconds)
        self.busy = {
            rank: sum(s.seconds for s in side.planned) / self.step_seconds if self.step_seconds else 1.0
            for rank, side in sides.items()
        }


@dataclass(frozen=True)
class _Sides:
    """The step of a rank under its plan, with everything saved, and what any plan adds to that at least."""

    planned: list[Stretch]
    plain: list[Stretch]
    more_seconds: float
    evenly: bool


def _sides(p: Profile, plan: Plan, seconds: list[float]) -> _Sides:
    found, whole = follow(p, plan, timeline=True, on_top=True), step_seconds(p, seconds)
    replayed = sum(seconds[p.layers[n].calls[c].cost] for n, calls in enumerate(found.replayed) for c in calls)
    record = plan.predicted
    waits = 0.0 if record is None or not found.sent_bytes else (record.step_time_ratio - 1) * whole - replayed
    kinds: dict[str, set[int]] = {}
    for layer in p.layers:
        kinds.setdefault(layer.path, set()).add(layer.kind)
    return _Sides(
        planned=stretches(p, seconds, found, waiting_seconds=max(0.0, waits)),
        plain=stretches(p, seconds),
        # A plan for several ranks was found for the neediest of them, and so was its bound.
        more_seconds=(record.bound - 1) * whole
        if record is not None and record.peak_bytes == found.peak_bytes
        else 0.0,
        evenly=len(p.stages) < 2
        and not any(action.kind == "input" for action in p.actions)
        and all(len(found) == 1 for found in kinds.values()),
    )


def _fitted(group: Sequence[Profile], allowed: Allowance, known: Device, **settings: Any) -> Plan:
    """Find the plan for ranks that run the same stages. Those that do exactly the same count once."""
    distinct: list[Profile] = []
    for p in group:
        alone = replace(p, place=None)
        if alone not in distinct:
            distinct.append(alone)
    try:
        return fit_profiles(distinct, allowed, known, **settings)
    except BudgetError as error:
        first = group[0]
        where = f"rank {_place(first).rank}"
        if first.stages:
            where += f", with stage {' and '.join(map(str, first.stages))} of the pipeline"
        raise BudgetError(f"on {where}, {error}") from error


def _alike(
    plans: dict[tuple[int, ...], Plan], groups: dict[tuple[int, ...], list[Profile]], known: Device
) -> Iterator[dict[tuple[int, ...], Plan]]:
    """Yield the plans under which all ranks follow the rules of one of them, where these fit all.

    A rank's plan is the fastest for the rank. Where it has several stages, others may still wait for the one that
    recomputes more, and less so if every rank recomputes in the same places. On a card fragmentation would have to be
    judged again: those plans are not tried.
    """
    if known.has_caching_allocator or all(len(stages) < 2 for stages in plans):
        return
    for plan in plans.values():
        if plan.offload is None:
            alike = {stages: with_rules_of(plan, own, groups[stages], known) for stages, own in plans.items()}
            found = {stages: each for stages, each in alike.items() if each is not None}
            if len(found) == len(plans):
                yield found


def _profiled(
    build: Build,
    world: int | None,
    ranks: Sequence[int] | None,
    *,
    blocks: str | Sequence[str] | None,
    scope: Sequence[str] | None,
    routing: str,
) -> list[Profile]:
    if world is None:
        raise ModeError("a job that is built needs its number of ranks: actmem.fit_job(build, world=8, budget=...).")
    found: dict[int, Profile] = {}
    waiting = list(dict.fromkeys((0, world - 1) if ranks is None else ranks))
    if not waiting:
        raise ModeError("ranks = [] is not permitted. Expected at least one rank, or None for those that matter.")
    while waiting:
        rank = waiting.pop(0)
        if rank not in found:
            found[rank] = profile_rank(build, world=world, rank=rank, blocks=blocks, scope=scope, routing=routing)
            waiting += _place(found[rank]).pipeline
    return [found[rank] for rank in sorted(found)]


def _check(profiles: Sequence[Profile]) -> None:
    """Refuse profiles that are not all ranks of whole pipelines."""
    if not profiles or any(p.place is None for p in profiles):
        raise ModeError(
            "a job is planned from profiles of its ranks, and "
            f"{'there is none' if not profiles else 'one of these is of no rank'}. Make them with "
            "actmem.profile_rank(build, world=..., rank=...)."
        )
    places = [_place(p) for p in profiles]
    if len({place.world for place in places}) > 1 or len({place.rank for place in places}) < len(places):
        raise ModeError(
            "these profiles are not of different ranks of one job: two are of the same rank, or of two jobs."
        )
    known = {place.rank for place in places}
    for place in places:
        missing = sorted(set(place.pipeline) - known)
        if missing:
            raise ModeError(
                f"rank {place.rank} is in a pipeline with the ranks {missing}, of which there is no profile. How long "
                "a step takes depends on all of them: add theirs."
            )


def _pipelines(profiles: Sequence[Profile]) -> list[tuple[int, ...]]:
    """Return the ranks of each pipeline. A rank without one is by itself."""
    return list(dict.fromkeys(_place(p).pipeline or (_place(p).rank,) for p in profiles))


def _place(p: Profile) -> Place:
    assert p.place is not None
    return p.place
