"""Write the stages of a pipeline as one offline page, side by side: peak by category, plan, microbatches in flight."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from actmem.devices import Device
from actmem.layout import Layout
from actmem.parallelism import StageProfile
from actmem.plan import Plan
from actmem.reporting.page_writer import rendered, write_text
from actmem.simulation import NAMES, Ground, in_flight, predict, walk
from actmem.units import size

__all__ = ["JobPage", "job_page", "write_job_page"]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageView(_Data):
    """One place of the pipeline, as the page shows it."""

    place: int
    rank: int
    """The rank that was profiled."""
    stages: str
    """The stages of the pipeline that its ranks run."""
    num_blocks: int
    peak_bytes: int
    peak: str
    parts: list[int]
    """What the peak consists of, by the page's categories. The sum is `peak_bytes`."""
    step_time_ratio: float
    in_flight: int
    """The most microbatches that wait for their backward pass."""
    waiting_for_weights: int
    experts: str
    plan: str


class JobPage(_Data):
    """The contents of the page. It computes no figures of its own."""

    name: str
    layout: str
    world: int
    device: str
    budget_bytes: int
    budget: str
    categories: list[str]
    stages: list[StageView]


def write_job_page(
    path: str | os.PathLike[str],
    name: str,
    layout: Layout,
    stages: Sequence[StageProfile],
    plans: Sequence[Plan],
    device: Device,
    budget_bytes: int,
) -> None:
    """Write the stages of a job as one self-contained `.html` file, overwriting an existing file.

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
        ModeError: if the file cannot be written.
    """
    data = job_page(name, layout, stages, plans, device, budget_bytes)
    write_text(path, rendered("job.html.jinja", data, ("formats.js", "job.js")))


def job_page(
    name: str,
    layout: Layout,
    stages: Sequence[StageProfile],
    plans: Sequence[Plan],
    device: Device,
    budget_bytes: int,
) -> JobPage:
    """Return what the page of a job shows.

    Args:
        name: what to call the job.
        layout: how it is spread over ranks.
        stages: what the ranks of each place do.
        plans: the plan of each.
        device: whose speed is meant.
        budget_bytes: what each rank may use.
    """
    return JobPage(
        name=name,
        layout=repr(layout),
        world=layout.world,
        device=device.name,
        budget_bytes=budget_bytes,
        budget=size(budget_bytes),
        categories=list(NAMES.values()),
        stages=[_view(stage, plan, layout, device) for stage, plan in zip(stages, plans, strict=True)],
    )


def _view(stage: StageProfile, plan: Plan, layout: Layout, device: Device) -> StageView:
    profile = stage.profile
    moments, _ = walk(Ground(profile), plan)
    parts = moments.constant_bytes | {c: series[moments.peak] for c, series in moments.by_category.items()}
    told = predict(profile, plan, device)
    waiting, for_weights = in_flight(profile.actions)
    return StageView(
        place=stage.pp,
        rank=stage.rank,
        stages=", ".join(map(str, layout.stages_of(stage.pp))),
        num_blocks=len(profile.blocks),
        peak_bytes=told.live_bytes,
        peak=size(told.live_bytes),
        parts=[parts[c] for c in NAMES],
        step_time_ratio=told.step_time_ratio,
        in_flight=waiting,
        waiting_for_weights=for_weights,
        experts="" if profile.expert_loads is None else str(profile.expert_loads),
        plan=str(plan),
    )
