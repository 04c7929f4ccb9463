"""From a budget to a plan: profile, solve, write down, check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from actmem.allocator import AllocatorSettings
from actmem.collector import uncollected
from actmem.decisions import Decision
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import FitRecord, Plan
from actmem.planner.budget_allowance import Allowance, allowance
from actmem.planner.card_fit import allowed_text, check_allocator, fit_card
from actmem.planner.compiled_fit import check_compiled, compilation, fit_ladder, make_ladder
from actmem.planner.enough_ranks import enough_ranks
from actmem.planner.named_modes import named_keeps, named_steps
from actmem.planner.solver import TIME_LIMIT, Keeps, Link, Solution, solve
from actmem.planner.split_choice import AUTO, check_asked, split_or_whole
from actmem.planner.written_plan import write_plan
from actmem.profiles import Profile
from actmem.profiling import OptimizerLike, called_as, check_step, for_card, profiles
from actmem.settings import STORES, Compiled, Offload, Split
from actmem.simulation import (
    Simulated,
    cost_seconds,
    decisions,
    dtypes_of,
    follow,
    groups_of,
    is_accelerator,
    lowering,
    on_card,
    outside_torch,
    peak_words,
    resolved,
    simulate,
    step_seconds,
)
from actmem.splitting import split_for_now
from actmem.structure import check_module, find_blocks
from actmem.units import size

__all__ = ["fit", "fit_profile", "fit_profiles", "refusal"]


def fit(
    model: nn.Module | Profile,
    example: dict[str, Any] | tuple[Any, ...] | None = None,
    *,
    budget: str | int | float,
    step: Callable[[], object] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    device: Device | str | None = None,
    offload: str | Offload | None = None,
    optimizer: OptimizerLike = "adamw",
    optimizer_dtype: torch.dtype | None = None,
    microbatches: int = 1,
    shard: int = 1,
    examples: Sequence[dict[str, Any] | tuple[Any, ...]] = (),
    headroom: float | None = None,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: str = "balanced",
    fake: bool = True,
    time_limit: float = TIME_LIMIT,
    compiled: bool | Compiled | None = None,
    allocator: str | AllocatorSettings = "",
    split: Split | None = None,
    allow: Sequence[str] = (),
) -> Plan:
    """Find the plan that trains fastest within a memory budget, and say how far from the best possible it may be.

    The budget counts every tensor that is alive in a step, as `measure` does: parameters, gradients, optimizer state,
    activations and temporaries. On a card it is a bound on what the process takes of it: on the bytes that torch's
    caching allocator reserves, which are simulated, and on what lies outside torch. The model is not changed:
    `apply(model, plan)` does that.

    Args:
        model: the model, in training mode; it may be on the meta device. Or a profile, such as of `profile_rank`: then
            `budget`, `device`, `offload`, `headroom`, `allocator` and `time_limit` are all that is left to say.
        example: a batch: a dict for `model(**example)`, or a tuple for `model(*example)`.
        budget: such as "20GiB", a number of bytes, or a fraction of the device's memory, such as 0.9.
        step: in place of an example, a function that runs one whole training step of your own loop, as for `profile`.
            `loss`, `optimizer`, `optimizer_dtype`, `microbatches`, `shard` and `examples` cannot be combined with it.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        device: whose speed to plan for, and whose memory a fraction is of: such as "h100-80gb". Default: this machine.
        offload: "host" or "disk", or an `Offload`, if values may be offloaded. None keeps them.
        optimizer: the optimizer to count: "adamw", "adamw_fused", "adam", "sgd", an optimizer of the model, a function
            of a list of parameters that makes one, or None for none.
        optimizer_dtype: the dtype of the state of a named one, if it is not that of the parameters.
        microbatches: how many batches gradients are accumulated over.
        shard: over how many ranks FSDP2 divides parameters, gradients and optimizer state.
        examples: several batches; the plan holds for each of them.
        headroom: the part of the budget to leave free. Default: 0.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks to take, as for `apply`.
        routing: what to assume about routers: "balanced" or "worst".
        fake: profile on tensors without bytes. Otherwise a real step is run, twice, and where no other device is named
            the plan uses its measured times.
        time_limit: an emergency brake: seconds after which the solver is stopped. The best plan found by then is
            returned, and says so. Otherwise the same inputs give the same plan, however long it takes.
        compiled: whether the plan is for compiled blocks. None: if they are compiled now. True: if they are, as they
            are, and else each block by inductor; an `actmem.Compiled` says otherwise. The model is compiled under
            several plans for this, on fake tensors, or with `fake=False` for real. `step`, `examples`, `offload`,
            `shard` and `allocator` cannot be combined with it.
        allocator: on a card, what PYTORCH_CUDA_ALLOC_CONF will be when the plan is applied, such as
            "expandable_segments:True", or an `actmem.allocator.AllocatorSettings`. Default: torch's defaults, whatever
            the variable is now.
        split: what the plan computes in pieces of tokens, such as `Split(loss=16)`: it is planned with.
        allow: what the plan may use that changes the order of sums: "split" lets it compute logits and loss in chunks
            of tokens, where the budget needs that or fewer values are then recomputed.

    Returns:
        The plan. `plan.predicted` has its peak, its step time and the proven bound.

    Raises:
        BudgetError: no plan fits. The message has the smallest peak that is possible, and what would help.
        ModeError: an argument is not permitted.

    >>> import actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    >>> plan = actmem.fit(model, (torch.randn(512, 64),), loss=torch.sum, budget="2GiB", device="h100-80gb")
    >>> plan.predicted.reserved_bytes + plan.predicted.outside_bytes <= 2 * 2**30
    True
    >>> sgd, batch = torch.optim.SGD(model.parameters()), torch.randn(512, 64)
    >>> def train():
    ...     sgd.zero_grad()
    ...     for half in batch.chunk(2):
    ...         model(half).sum().backward()
    ...     sgd.step()
    >>> plan = actmem.fit(model, step=train, budget="2GiB", device="h100-80gb")
    >>> plan.predicted.is_step
    True
    >>> print(*plan.predicted.calls[0])
    input float32 [256, 64]
    """
    if isinstance(model, Profile):
        if (
            any(given is not None for given in (example, step, loss, blocks, scope, compiled, split))
            or examples
            or allow
        ):
            raise ModeError(
                "a profile already says what the step does: example, examples, step, loss, blocks, scope, compiled, "
                "split and allow cannot be combined with it. Omit them, or pass the model itself."
            )
        known = resolved(device, dtypes_of(model))
        allowed = allowance(budget, known, headroom)
        return fit_profiles([model], allowed, known, offload=offload, time_limit=time_limit, allocator=allocator)
    check_module(model)
    batches = [*examples] if example is None else [example, *examples]
    if step is not None and examples:
        check_step(step, "examples")
    if step is None and not batches:
        raise ModeError(
            "there is no example to plan for. Give a batch, actmem.fit(model, batch, budget=...), or a function that "
            "runs one training step, actmem.fit(model, step=train, budget=...)."
        )
    for batch in batches:
        if not isinstance(batch, (dict, tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"an example is a {type(batch).__name__}. Expected a dict for model(**example), or a tuple for "
                "model(*example): write (batch,)."
            )
    if not time_limit > 0:
        raise ModeError(f"time_limit = {time_limit!r} is not permitted. Expected a number of seconds above 0.")
    known = resolved(device, {str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    allowed = allowance(budget, known, headroom)  # a wrong budget is refused before the model is profiled
    check_allocator(allocator, known)
    what = "batch" if step is None else "step=step"
    found_blocks = find_blocks(model, blocks, scope)
    how = compilation(model, found_blocks, compiled)
    if how is not None:
        check_compiled(allocator, step=step, examples=examples, offload=offload, shard=shard)
        model = cast("nn.Module", getattr(model, "_orig_mod", model))
        found_blocks = find_blocks(model, blocks, scope)
    check_asked(split, allow, is_compiled=how is not None)

    def profiled(split: Split | None) -> list[Profile]:
        called = f"actmem.fit(model, {what}, budget=..., fake=False)"
        with called_as(called), for_card(known.has_caching_allocator), split_for_now(model, split, found_blocks):
            return profiles(
                model,
                batches,
                step=step,
                loss=loss,
                fake=fake or how is not None,
                blocks=blocks,
                scope=scope,
                routing=routing,
                optimizer=optimizer,
                optimizer_dtype=optimizer_dtype,
                microbatches=microbatches,
                shard=shard,
            )

    found = profiled(split)
    if how is not None:
        ladder = make_ladder(model, found_blocks, batches[0], loss, how, found[0], known, fake=fake)
        return fit_ladder(ladder, allowed.budget_bytes, known, how, headroom=allowed.headroom, fake=fake)
    more: dict[str, Any] = {"offload": offload, "time_limit": time_limit, "allocator": allocator}
    planned = partial(fit_profiles, allowed=allowed, known=known, **more)
    if "split" in allow:
        return split_or_whole(planned, found, lambda: profiled(AUTO))
    return replace(planned(found), split=split)


def fit_profiles(
    profiles: Sequence[Profile],
    allowed: Allowance,
    known: Device,
    *,
    offload: str | Offload | None = None,
    time_limit: float = TIME_LIMIT,
    allocator: str | AllocatorSettings = "",
) -> Plan:
    """Find the plan for existing profiles, as `fit_profile` does, and describe its peak in words."""
    settings = check_allocator(allocator, known)
    options: dict[str, Any] = {"offload": offload, "headroom": allowed.headroom, "time_limit": time_limit}
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

        plan = fit_card(within, profiles, allowed.budget_bytes, known, settings)
    else:
        plan = fit_profile(profiles, allowed.budget_bytes, known, **options)
    predicted = plan.predicted
    assert predicted is not None
    chief = next(p for p in profiles if p.shapes == predicted.shapes)
    words = peak_words(chief, plan, accelerator=is_accelerator(known))
    return replace(plan, predicted=replace(predicted, peak_words=words))


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
) -> Plan:
    """Find the plan for existing profiles: the one with the highest plain peak decides.

    Args:
        profiles: one for each batch that the plan is to hold for.
        budget_bytes: the most bytes that may be alive.
        known: whose speed to take, by its roofline; for this machine, what a real profile measured.
        offload: where values may be sent.
        headroom: what was taken off the budget, to be recorded.
        beyond_bytes: how much more the budget is, for what is not a tensor; a refusal names it.
        time_limit: seconds after which the solver is stopped.
        named: returns what `named_keeps` does, perhaps from an earlier budget.
    """
    chief = profiles[0]
    if len(profiles) > 1:
        chief = max(profiles, key=lambda p: simulate(p, _everything(p), exact=True).peak_bytes)
    seconds = cost_seconds(chief, known)
    whole = step_seconds(chief, seconds)
    least_bytes = 2 * _largest_value_bytes(chief)
    where = _offload(offload, known, max(2**21, budget_bytes // 32, least_bytes))
    link = None if where is None else _link(where, known, least_bytes)

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
    # On a CPU the Python numbers that autograd holds are in the same memory: at most so many bytes.
    limit_bytes = budget_bytes - (0 if is_accelerator(known) else max(p.numbers_bytes for p in profiles))
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
            text = refusal(
                chief,
                solution,
                by_names,
                budget_bytes,
                offloaded=where is not None,
                headroom=headroom,
                beyond_bytes=beyond_bytes,
                known=known,
            )
            raise BudgetError(text)
        plan, found = write_plan(chief, solution.keeps, target_bytes, f"fit(budget={budget_bytes})", where)
        if found.peak_bytes <= limit_bytes:
            break
        # The solver treats layers as independent. Copies that one makes for another come on top: leave room for them.
        target_bytes -= found.peak_bytes - limit_bytes
    _check_peaks(plan, [p for p in profiles if p is not chief], chief, limit_bytes)
    return replace(plan, predicted=_predicted(chief, solution, found, budget_bytes, known, whole, headroom))


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


def _offload(offload: str | Offload | None, known: Device, in_flight_bytes: int) -> Offload | None:
    """Return where values go. What two blocks send depends on the plan, so a plan for a budget has a fixed number."""
    if offload is None:
        return None
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


def _largest_value_bytes(p: Profile) -> int:
    kinds = {layer.kind: layer for layer in p.layers}.values()
    return max((v.num_bytes for layer in kinds for v in layer.values if v.call >= 0), default=0)


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
    layer = found.peak_layer
    where = f" in {p.layers[layer].path or 'the model itself'}" if layer >= 0 else ""
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
        peak_at=f"{found.peak_op}{where}",
        headroom=headroom,
        microbatches=p.microbatches,
        shard=p.shard,
        routing=p.routing,
        experts="" if p.expert_loads is None else str(p.expert_loads),
        modules=p.modules,
        time_limit_hit=s.time_limit_hit,
    )


def _check_peaks(plan: Plan, others: Sequence[Profile], chief: Profile, budget_bytes: int) -> None:
    """Make sure that the other batches fit too."""
    for p in others:
        peak = follow(p, plan).peak_bytes
        if peak > budget_bytes:
            raise BudgetError(
                f"the plan that fits {', '.join(map(str, chief.shapes))} takes {peak} bytes for "
                f"{', '.join(map(str, p.shapes))}, more than the {budget_bytes} allowed. "
                "Plan for each by itself: actmem.fit(model, batch, budget=...)."
            )


def refusal(
    p: Profile,
    s: Solution,
    named: Sequence[tuple[Plan, Simulated]],
    budget_bytes: int,
    *,
    offloaded: bool,
    headroom: float,
    beyond_bytes: int,
    known: Device,
) -> str:
    """Write the message for a budget that cannot be met."""
    accelerator = is_accelerator(known)
    keeps, exact, simulated = s.keeps, True, simulate(p, s.keeps, exact=True, timeline=True)
    for plan, found in named:
        if found.peak_bytes < simulated.peak_bytes:
            keeps, exact, simulated = decisions(p, plan), False, found
    peak = simulated.peak_bytes + (0 if accelerator else p.numbers_bytes)
    layer = simulated.peak_layer
    where = f"in {p.layers[layer].path or 'the model itself'}" if layer >= 0 else "outside the blocks"
    rest = peak - p.base_bytes + (p.starting_gradients_bytes if p.is_step else 0)
    parts = [f"parameters {size(p.parameters_bytes // p.shard)}"]
    if p.buffers_bytes:
        parts.append(f"buffers {size(p.buffers_bytes)}")
    parts += [
        f"optimizer state {size(p.optimizer_bytes // p.shard)} ({p.optimizer})",
        f"gradients, activations and temporaries {size(rest)}",
        f"of which all gradients {size(p.gradients_bytes // p.shard)}",
    ]
    less = f" (after {headroom:.0%} that stay free)" if headroom else ""
    first = (
        f"no plan fits {size(budget_bytes)}{less}. The smallest peak is {size(peak)}, at {simulated.peak_op} {where}: "
    )
    lines = [first + f"{', '.join(parts)}."]
    if exact and s.least_peak_bytes is not None:
        lines[0] += f" No plan of these blocks can be below {size(s.least_peak_bytes)}."
    if s.time_limit_hit:
        lines.append("The search was stopped by time_limit: a longer one may find a smaller peak.")
    helps = lowering(p, keeps, simulated, exact=exact, offloaded=offloaded, accelerator=accelerator, shards=())
    lines += [f"What would help: {text}" for text in helps]
    lines += enough_ranks(p, keeps, budget_bytes, known, exact=exact)
    enough = math.ceil((peak + beyond_bytes) / (1 - headroom) / 2**20) * 2**20
    lines.append(f"Or allow it: {allowed_text(enough)}.")
    if beyond_bytes:
        outside = size(outside_torch(known, groups_of(p)))
        lines.append(
            f"Of the budget of {size(budget_bytes + beyond_bytes)} on {known.name}, {size(beyond_bytes)} are not for "
            f"tensors: {outside} lie outside torch, the rest is for cuBLAS's workspaces and for what the caching "
            "allocator adds."
        )
    return "\n".join(lines)
