"""From a budget to a plan: profile, solve, write down, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from actmem.amounts import parse_budget
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.modes import Full, Selective, every_second
from actmem.plan import Plan, Predicted
from actmem.planner.choosing import is_accelerator, resolved
from actmem.planner.costing import cost_seconds, step_seconds
from actmem.planner.deciding import decisions
from actmem.planner.following import follow
from actmem.planner.peaks import peak_words
from actmem.planner.refusing import refusal
from actmem.planner.simulating import Simulated, simulate
from actmem.planner.solve import Keeps, Link, Solution, really_kept, solve
from actmem.planner.writing import ANY, loosened, write_rules
from actmem.profiles import Profile
from actmem.profiling.complaints import called_as
from actmem.profiling.stepping import profiles
from actmem.settings import Offload
from actmem.structure import check_module

__all__ = ["explained", "fit", "fit_profile", "named_keeps"]


def fit(
    model: nn.Module,
    example: dict[str, Any] | tuple[Any, ...] | None = None,
    *,
    budget: str | int | float,
    loss: Callable[[Any], Tensor] | None = None,
    device: Device | str | None = None,
    offload: str | Offload | None = None,
    optimizer: str | None = "adamw",
    optimizer_dtype: torch.dtype | None = None,
    microbatches: int = 1,
    shard: int = 1,
    examples: Sequence[dict[str, Any] | tuple[Any, ...]] = (),
    headroom: float | None = None,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: str = "balanced",
    fake: bool = True,
    time_limit: float = 20.0,
) -> Plan:
    """Find the plan that trains fastest within a memory budget, and say how far from the best possible it may be.

    The budget counts every tensor that is alive in a step, as `measure` does: parameters, gradients, optimizer state,
    activations and temporaries. The model is not changed: `apply(model, plan)` does that.

    Args:
        model: the model, in training mode; it may be on the meta device.
        example: a batch: a dict for `model(**example)`, or a tuple for `model(*example)`.
        budget: such as "20GiB", a number of bytes, or a fraction of the device's memory, such as 0.9.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        device: whose speed to plan for, and whose memory a fraction is of: such as "h100-80gb". Left out: this machine.
        offload: "host" or "disk", or an `Offload`, if values may be sent away. None keeps them.
        optimizer: the optimizer to count: "adamw", "adam", "sgd", or None for none.
        optimizer_dtype: the dtype of its state, if it is not that of the parameters.
        microbatches: how many batches gradients are accumulated over.
        shard: over how many ranks FSDP2 divides parameters, gradients and optimizer state.
        examples: several batches; the plan holds for each of them.
        headroom: the part of the budget to leave to the allocator. Left out: 0.05 on an accelerator, else 0.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks are meant, as for `apply`.
        routing: what to assume of routers: "balanced" or "worst".
        fake: profile on tensors without bytes. Otherwise one real step is run.
        time_limit: seconds for the solver. The best plan found by then is returned, with its gap.

    Returns:
        The plan. `plan.predicted` has its peak, its step time and the proven bound.

    Raises:
        BudgetError: no plan fits. The message has the smallest peak that would, and what would help.
        ModeError: an argument is not permitted.

    >>> import actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    >>> plan = actmem.fit(model, (torch.randn(512, 64),), loss=torch.sum, budget="1MiB", device="h100-80gb")
    >>> plan.predicted.peak_bytes <= 2**20
    True
    """
    check_module(model)
    batches = [*examples] if example is None else [example, *examples]
    if not batches:
        raise ModeError("there is no example to plan for. Give a batch: actmem.fit(model, batch, budget=...).")
    for batch in batches:
        if not isinstance(batch, (dict, tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"an example is a {type(batch).__name__}. Expected a dict for model(**example), or a tuple for "
                "model(*example): write (batch,)."
            )
    if not time_limit > 0:
        raise ModeError(f"time_limit = {time_limit!r} is not permitted. Expected a number of seconds above 0.")
    known = resolved(device, {str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if headroom is None:
        headroom = 0.05 if is_accelerator(known) else 0.0
    if not 0 <= headroom < 1:
        raise ModeError(f"headroom = {headroom!r} is not permitted. Expected a number from 0 to below 1, such as 0.05.")
    budget_bytes = int(parse_budget(budget, device_bytes=known.memory_bytes) * (1 - headroom))
    with called_as("actmem.fit(model, batch, budget=..., fake=False)"):
        found = profiles(
            model,
            batches,
            loss=loss,
            fake=fake,
            blocks=blocks,
            scope=scope,
            routing=routing,
            optimizer=optimizer,
            optimizer_dtype=optimizer_dtype,
            microbatches=microbatches,
            shard=shard,
        )
    plan = fit_profile(found, budget_bytes, known, offload=offload, headroom=headroom, time_limit=time_limit)
    return explained(plan, found, known)


def explained(plan: Plan, made_for: Sequence[Profile], known: Device) -> Plan:
    """Add the peak in words to a plan that was made for one of these profiles."""
    predicted = plan.predicted
    assert predicted is not None
    chief = next(p for p in made_for if p.shapes == predicted.shapes)
    words = peak_words(chief, plan, accelerator=is_accelerator(known))
    return replace(plan, predicted=replace(predicted, peak_words=words))


def fit_profile(
    profiles: Sequence[Profile],
    budget_bytes: int,
    known: Device,
    *,
    offload: str | Offload | None = None,
    headroom: float = 0.0,
    time_limit: float = 20.0,
    named: Sequence[Keeps] | None = None,
) -> Plan:
    """Find the plan for profiles that were made already: the one with the highest plain peak decides.

    Args:
        profiles: one for each batch that the plan is to hold for.
        budget_bytes: the most bytes that may be alive.
        known: whose roofline to take for times.
        offload: where values may be sent.
        headroom: what was taken off the budget, to be written down.
        time_limit: seconds for the solver.
        named: what `named_keeps` returned for the profile, if several budgets are tried on it.
    """
    chief = profiles[0]
    if len(profiles) > 1:
        chief = max(profiles, key=lambda p: simulate(p, _everything(p), exact=True).peak_bytes)
    seconds = cost_seconds(chief, known)
    whole = step_seconds(chief, seconds)
    where = _offload(offload, known, budget_bytes)
    link = None if where is None else _link(where, known, chief)

    def best(candidates: Sequence[Keeps]) -> Solution:
        return solve(
            chief,
            seconds,
            budget_bytes,
            step_seconds=whole,
            offload=link,
            candidates=candidates,
            time_limit=time_limit,
        )

    few = len(chief.layers) <= _FEW_LAYERS
    solution = best((named or named_keeps(chief)) if few else ())
    if not few and (not solution.feasible or solution.gap > _NEAR):
        named = named or named_keeps(chief)
        if not solution.feasible or any(_is_faster(chief, keeps, seconds, budget_bytes, solution) for keeps in named):
            solution = best(named)
    if not solution.feasible:
        text = refusal(
            chief,
            solution,
            budget_bytes,
            offloaded=where is not None,
            headroom=headroom,
            accelerator=is_accelerator(known),
        )
        raise BudgetError(text)
    plan, found = _written(chief, _one_for_each_block(chief, solution.keeps), budget_bytes, where)
    _check_peaks(plan, [p for p in profiles if p is not chief], chief, budget_bytes)
    return replace(plan, predicted=_predicted(chief, solution, found, budget_bytes, known, whole, headroom))


def _written(chief: Profile, keeps: Keeps, budget_bytes: int, where: Offload | None) -> tuple[Plan, Simulated]:
    """Write decisions as rules, few if that changes nothing; return the plan and the step that follows it."""
    simulated = simulate(chief, keeps, exact=True)
    for wanted in (loosened(chief, keeps, simulated.replayed, simulated.held), keeps):
        plan = Plan(
            write_rules(chief, wanted),
            chief.blocks,
            chief.fingerprint,
            f"fit(budget={budget_bytes})",
            where if any("offload" in keep for keep in wanted) else None,
            exact=True,
        )
        said = decisions(chief, plan)
        _check_rules(chief, wanted, said)
        found = follow(chief, plan, keeps=said)
        # What nothing depends on may matter after all where operators write on each other's results.
        if found.peak_bytes <= budget_bytes and found.replayed == simulated.replayed:
            return plan, found
    raise AssertionError("the rules do not do what was planned. Please report this, with the model and the budget.")


def _is_faster(p: Profile, keeps: Keeps, seconds: Sequence[float], budget_bytes: int, solution: Solution) -> bool:
    """Tell whether decisions fit the budget and take less time than a solution."""
    found = simulate(p, keeps, exact=True)
    again = sum(seconds[p.layers[n].calls[c].cost] for n, calls in enumerate(found.replayed) for c in calls)
    return found.peak_bytes <= budget_bytes and again < solution.replay_seconds + solution.stall_seconds


_FEW_LAYERS = 48
"""Up to so many layers the named modes are looked at first; with more, only where the solver leaves a gap."""
_NEAR = 5e-4


def _everything(p: Profile) -> Keeps:
    return [["save"] * len(layer.calls) for layer in p.layers]


def named_keeps(p: Profile) -> list[Keeps]:
    """Return what the named modes hold: the plan is to be no worse than any of them."""
    modes = (
        Full(),
        Selective(save=["attention"]),
        Selective(save=["attention", every_second("matmul|convolution")]),
        Selective(save=["attention", "matmul", "grouped_matmul"]),
    )
    found: list[Keeps] = []
    for mode in modes:
        plan = Plan(mode.rules(), p.blocks, p.fingerprint, repr(mode))
        found.append(really_kept(p, decisions(p, plan), follow(p, plan).held))
    return found


def _offload(offload: str | Offload | None, known: Device, budget_bytes: int) -> Offload | None:
    if offload is None or isinstance(offload, Offload):
        return offload
    if offload not in ("host", "disk"):
        raise ModeError(f"offload = {offload!r} is not known. Permitted: 'host', 'disk', an Offload, or None.")
    if offload == "host" and not is_accelerator(known):
        raise ModeError(
            "offload = 'host' does nothing on a CPU: its tensors are in host memory already. Write offload='disk'."
        )
    return Offload(to=offload, min_bytes=0, in_flight_bytes=max(2**20, budget_bytes // 64))


def _link(offload: Offload, known: Device, p: Profile) -> Link:
    """Return the link, with what copies take on the device: the bound for each direction, or the largest value."""
    rate = known.offload_rate(offload.to)
    kinds = {layer.kind: layer for layer in p.layers}.values()
    largest = max((v.num_bytes for layer in kinds for v in layer.values if v.call >= 0), default=0)
    return Link(rate, rate, 2 * max(offload.in_flight_bytes, largest))


def _one_for_each_block(p: Profile, keeps: Keeps) -> Keeps:
    """Give a block that is called more than once in a step the same decisions each time: the fewest that it saves."""
    found: dict[str, list[str]] = {}
    for layer, keep in zip(p.layers, keeps, strict=True):
        known = found.get(layer.path)
        same = known is not None and len(known) == len(keep)
        found[layer.path] = [a and b for a, b in zip(known or (), keep, strict=True)] if same else list(keep)
    if len(found) == len(p.layers):
        return keeps
    return [found[layer.path] for layer in p.layers]


def _predicted(
    p: Profile,
    s: Solution,
    found: Simulated,
    budget_bytes: int,
    known: Device,
    whole: float,
    headroom: float,
) -> Predicted:
    layer = found.peak_layer
    where = f" in {p.layers[layer].path or 'the model itself'}" if layer >= 0 else ""
    extra = s.replay_seconds + s.stall_seconds
    return Predicted(
        peak_bytes=found.peak_bytes,
        budget_bytes=budget_bytes,
        step_time_ratio=1 + extra / whole if whole else 1.0,
        replayed_flops=s.replayed_flops,
        bound=1 + s.bound_seconds / whole if whole else 1.0,
        gap=s.gap,
        device=known.name,
        optimizer=p.optimizer,
        shapes=p.shapes,
        peak_at=f"{found.peak_op}{where}",
        headroom=headroom,
        microbatches=p.microbatches,
        shard=p.shard,
        routing=p.routing,
        modules=p.modules,
    )


def _check_rules(chief: Profile, keeps: Keeps, said: Keeps) -> None:
    """Make sure that the rules say what was decided."""
    for layer, wanted, rules_say in zip(chief.layers, keeps, said, strict=True):
        differ = [c for c, call in enumerate(layer.calls) if call.makes and wanted[c] not in (rules_say[c], ANY)]
        if differ and not all(layer.values[v].why for c in differ for v in layer.calls[c].makes):
            raise AssertionError(f"the rules of {layer.path} do not say what was planned. Please report this.")


def _check_peaks(plan: Plan, others: Sequence[Profile], chief: Profile, budget_bytes: int) -> None:
    """Make sure that the other batches fit too."""
    for p in others:
        peak = follow(p, plan).peak_bytes
        if peak > budget_bytes:
            raise BudgetError(
                f"the plan that fits {', '.join(chief.shapes)} takes {peak} bytes for {', '.join(p.shapes)}, more than "
                f"the {budget_bytes} allowed. Plan for each by itself: actmem.fit(model, batch, budget=...)."
            )
