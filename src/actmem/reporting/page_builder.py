"""Build the data of a page from a profile and a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from actmem.devices import Device
from actmem.errors import ModeError, PlanError
from actmem.measuring import Measurement
from actmem.plan import Plan
from actmem.planner import Frontier
from actmem.profiles import Profile
from actmem.reporting.block_view import Labels, curve, groups, kinds
from actmem.reporting.page_data import MeasuredRow, ModeView, PageData, PlanView
from actmem.reporting.page_frontier import foretold, solved
from actmem.settings import Offload
from actmem.simulation import (
    Ground,
    Moments,
    Prediction,
    Simulated,
    cost_seconds,
    dtypes_of,
    on_card,
    peak_words,
    plan_of,
    prediction,
    resolved,
    step_seconds,
    walk,
    with_stepping,
)
from actmem.units import size

__all__ = ["build"]


def build(
    profile: Profile,
    plan: Plan,
    device: Device | str | None = None,
    *,
    name: str,
    num_plans: int = 24,
    asked_bytes: int | None = None,
    offload: str | Offload | None = None,
    measured: Measurement | None = None,
    frontier: Frontier | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PageData:
    """Gather the contents of a page: the plan, the plans at other budgets, the named modes and the blocks.

    Args:
        profile: the profile of the step that the plan was made for.
        plan: the plan to show first, as returned by `fit`.
        device: the device to predict times for. Default: this machine.
        name: the model's name, for the title.
        num_plans: how many different plans to search for. A small model may have fewer.
        asked_bytes: the budget before headroom was subtracted. Default: computed from the plan.
        offload: where the other plans may offload to, as for `fit`.
        measured: the result of `measure` under `plan`, if it was run.
        frontier: the result of `actmem.frontier` for this profile and device, if it was solved already; its plans
            need not be solved again.
        progress: called with the number of plans solved and the total.

    Raises:
        PlanError: the plan was not made by `fit`, or not for this profile.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> batch = (torch.randn(64, 8),)
    >>> plan = actmem.fit(model, batch, loss=torch.sum, budget="2GiB", device="h100-80gb")
    >>> found = actmem.profile(model, batch, loss=torch.sum)
    >>> data = build(found, plan, "h100-80gb", name="three layers", num_plans=3)
    >>> [view.peak_bytes <= view.budget_bytes for view in data.plans if view.asked]
    [True]
    """
    if type(num_plans) is not int or num_plans < 2:
        raise ModeError(f"num_plans = {num_plans!r} is not permitted. Expected an int of 2 or more, such as 24.")
    known = resolved(device, dtypes_of(profile))
    asked = plan_of(profile, plan)
    profile = on_card(with_stepping(profile, asked), known)
    seconds = cost_seconds(profile, known)
    if asked.predicted is None:
        raise PlanError(
            "the plan has no prediction, so it has no budget to show. Expected a plan that actmem.fit(...) returned."
        )
    ground = Ground(profile)
    first = walk(ground, asked)
    if first[1].peak_bytes != asked.predicted.peak_bytes:
        raise PlanError(
            f"the plan predicts a peak of {size(asked.predicted.peak_bytes)}, but its peak on this profile is "
            f"{size(first[1].peak_bytes)}: they were made for different batches or optimizers. Make the profile with "
            "the arguments of fit: actmem.profile(model, batch, optimizer=...)."
        )
    found = solved(profile, asked, known, num_plans=num_plans, offload=offload, curve=frontier, progress=progress)
    labels = Labels(profile)
    views = [
        _view(profile, p, first if p is asked else walk(ground, p), labels, seconds, asked=p is asked)
        for p in found.plans
    ]
    return PageData(
        name=name,
        device=known.key,
        device_name=known.name,
        device_bytes=known.memory_bytes,
        asked_bytes=asked_bytes or math.ceil(asked.predicted.budget_bytes / (1 - asked.predicted.headroom)),
        shapes=[str(shape) for shape in profile.shapes],
        optimizer=profile.optimizer,
        microbatches=profile.microbatches,
        shard=profile.shard,
        routing=profile.routing,
        offload=offload.to if isinstance(offload, Offload) else offload or "",
        num_layers=len(profile.layers),
        step_seconds=step_seconds(profile, seconds),
        constant_bytes={c: num_bytes for c, num_bytes in first[0].constant_bytes.items() if num_bytes},
        num_wanted=num_plans,
        exhausted=found.exhausted,
        plans=views,
        modes=[
            ModeView(
                name=mode.name,
                peak_bytes=mode.peak_bytes,
                step_time_ratio=mode.step_time_ratio,
                replayed_flops=mode.replayed_flops,
            )
            for mode in found.modes
        ],
        kinds=kinds(profile, seconds),
        labels=labels.rows,
        measured=None if measured is None else _compared(first[0], prediction(profile, first[1], seconds), measured),
    )


def _view(
    profile: Profile,
    plan: Plan,
    walked: tuple[Moments, Simulated],
    labels: Labels,
    seconds: list[float],
    *,
    asked: bool,
) -> PlanView:
    moments, simulated = walked
    told, found = foretold(plan), prediction(profile, simulated, seconds)
    assert max(moments.totals) == found.peak_bytes == told.peak_bytes, "the curve does not reach the predicted peak"
    return PlanView(
        asked=asked,
        budget_bytes=told.budget_bytes,
        headroom=told.headroom,
        peak_bytes=told.peak_bytes,
        peak_at=told.peak_at,
        peak_words=list(peak_words(profile, plan, walked)),
        step_time_ratio=told.step_time_ratio,
        bound=told.bound,
        gap=told.gap,
        replayed_flops=found.replayed_flops,
        num_replayed=found.num_replayed,
        replay_seconds=found.replay_seconds,
        saved_bytes=found.saved_bytes,
        sent_bytes=found.sent_bytes,
        curve=curve(moments, labels, seconds),
        groups=groups(profile, simulated, seconds),
        plan_json=plan.to_json(),
    )


def _compared(moments: Moments, told: Prediction, measured: Measurement) -> list[MeasuredRow]:
    """Pair each predicted figure with the measured one."""
    constant, found = moments.constant_bytes, measured.by_category
    rows: Sequence[tuple[str, str, int, int]] = (
        ("Peak", "bytes", told.peak_bytes, measured.tensor_bytes),
        ("Saved for backward", "bytes", told.saved_bytes, measured.saved_bytes),
        ("Parameters", "bytes", constant["parameters"], found["parameters"]),
        ("Buffers", "bytes", constant["buffers"], found["buffers"]),
        ("Optimizer state", "bytes", constant["optimizer"], found["optimizer_state"]),
        ("Replayed FLOPs", "flops", told.replayed_flops, measured.replayed_flops),
    )
    return [
        MeasuredRow.model_validate({"name": name, "unit": unit, "predicted": predicted, "measured": seen})
        for name, unit, predicted, seen in rows
        if predicted or seen
    ]
