"""A plan for each stage of a job: kept on every rank, and no slower than one plan for all stages."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem.distributedcompat import forget_meshes
from actmem.planner import job_seconds
from tests.distributed import layouts
from tests.distributed.ranks import bits, step_bytes
from tests.distributed.test_rank_profiles import Make, builds
from tests.flat_device import FLAT
from tests.patience import PATIENCE_SECONDS


def profiles_of(make: Make, world: int) -> list[actmem.Profile]:
    return [actmem.profile_rank(builds(make), world=world, rank=rank) for rank in range(world)]


def bytes_of(profiles: Sequence[actmem.Profile], mode: actmem.Full | actmem.SaveEverything) -> list[int]:
    return [actmem.predict(p, mode, FLAT).tensor_bytes for p in profiles]


def middle(profiles: Sequence[actmem.Profile]) -> int:
    """Return a budget halfway between what the neediest rank takes at least and what it takes plain."""
    return (max(bytes_of(profiles, actmem.Full())) + max(bytes_of(profiles, actmem.SaveEverything()))) // 2


def one_plan_for_all(profiles: Sequence[actmem.Profile], budget: int) -> list[actmem.Plan]:
    """Return the plan of the neediest rank, for every rank."""
    plain = bytes_of(profiles, actmem.SaveEverything())
    plan = actmem.fit(profiles[plain.index(max(plain))], budget=budget, device=FLAT)
    plans = [replace(plan, blocks=p.blocks, fingerprint=p.fingerprint, predicted=None) for p in profiles]
    assert all(actmem.predict(p, q, FLAT).peak_bytes <= budget for p, q in zip(profiles, plans, strict=True))
    return plans


class Block(nn.Module):
    """A small block, where only the schedule matters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def small_1f1b() -> layouts.Job:
    """A stage of two small blocks, for as many microbatches as there are stages."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    hidden = torch.empty(64, 32, device="meta", requires_grad=True)
    layers = nn.Sequential(Block(), Block())
    stage = layouts.PipelineStage(
        layers, rank, num_stages, torch.device("cpu"), input_args=(hidden,), output_args=(hidden,)
    )
    schedule = layouts.Schedule1F1B(stage, num_stages, loss_fn=F.mse_loss)
    batch = torch.randn(64 * num_stages, 32)
    given, target = (batch,) if rank == 0 else (), batch if rank == num_stages - 1 else None
    return layouts.Job(layers, torch.optim.SGD(layers.parameters()), lambda: schedule.step(*given, target=target))


def test_stages_with_room_to_spare_recompute_less_and_the_step_is_shorter() -> None:
    found = profiles_of(small_1f1b, 4)
    budget = middle(found)
    job = actmem.fit_job(found, budget=budget, device=FLAT)
    assert job.predicted is not None
    assert [part.stages for part in job.parts] == [(0,), (1,), (2,), (3,)]
    assert [part.microbatches_in_flight for part in job.parts] == [4, 3, 2, 1]
    records = [part.plan.predicted for part in job.parts if part.plan.predicted is not None]
    times = [record.step_time_ratio for record in records]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.0 == times[-1]
    assert all(record.bound <= record.step_time_ratio for record in records)
    alike = job_seconds(found, one_plan_for_all(found, budget), FLAT)
    assert job.predicted.plain_seconds <= job.predicted.bound_seconds <= job.predicted.step_seconds < alike


@pytest.mark.slow
@pytest.mark.parametrize("make", layouts.PIPELINES)
def test_no_schedule_is_slower_with_a_plan_for_each_stage(make: Make) -> None:
    found = profiles_of(make, 2)
    budget = middle(found)
    job = actmem.fit_job(found, budget=budget, device=FLAT)
    assert job.predicted is not None
    assert job.predicted.step_seconds <= job_seconds(found, one_plan_for_all(found, budget), FLAT)
    assert job.predicted.plain_seconds <= job.predicted.bound_seconds <= job.predicted.step_seconds


def _worker(rank: int, world: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for mode in ("plain", "fitted"):
        store = dist.FileStore(f"{folder}/{mode}.store", world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_SECONDS)
        )
        made: layouts.Job = getattr(layouts, name)()
        if mode == "fitted":
            actmem.apply(made.model, actmem.JobPlan.load(f"{folder}/job.json").for_rank(rank))
        made.step()
        made.step()
        found = {
            "bytes": step_bytes(made.step, made.model, made.optimizer),
            "parameters": [bits(p) for p in made.model.parameters()],
        }
        Path(folder, f"{mode}.{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()
        forget_meshes()


def assert_kept(make: Make, world: int, folder: Path) -> None:
    """Plan a job, run it on real ranks, and compare each with the budget, the prediction and plain training."""
    profiles = profiles_of(make, world)
    budget = middle(profiles)
    job = actmem.fit_job(profiles, budget=budget, device=FLAT)
    job.save(folder / "job.json")
    assert actmem.JobPlan.load(folder / "job.json") == job
    torch.multiprocessing.spawn(_worker, args=(world, make.__name__, str(folder)), nprocs=world)
    plain, fitted = (
        [json.loads((folder / f"{mode}.{rank}.json").read_text()) for rank in range(world)]
        for mode in ("plain", "fitted")
    )
    assert max(found["bytes"] for found in plain) > budget
    for rank in range(world):
        predicted = job.for_rank(rank).predicted
        assert predicted is not None
        assert fitted[rank]["bytes"] <= predicted.peak_bytes <= budget
        assert fitted[rank]["parameters"] == plain[rank]["parameters"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch's advice about views, on real ranks too
@pytest.mark.parametrize(
    ("make", "world"),
    [
        (layouts.fsdp, 2),
        (layouts.sequences, 2),
        (layouts.pipeline_1f1b, 2),
        (layouts.pipeline_interleaved_zero_bubble, 2),
        (layouts.pipeline_dual_in_a_v, 2),
        (layouts.fsdp_and_tensors, 4),
        (layouts.pipeline_1f1b, 4),
        (layouts.pipeline_of_shards, 4),
    ],
)
def test_every_rank_of_a_planned_job_keeps_the_budget_and_trains_as_plain(
    make: Make, world: int, tmp_path: Path
) -> None:
    assert_kept(make, world, tmp_path)


# -------------------------------------------------------------------- doors and refusals


@pytest.mark.slow
def test_a_job_is_planned_from_its_first_and_last_rank_and_their_pipelines() -> None:
    job = actmem.fit_job(builds(layouts.pipeline_of_shards), world=4, budget="1GiB", device=FLAT)
    assert [(part.ranks, part.stages) for part in job.parts] == [((0, 1), (0,)), ((2, 3), (1,))]
    assert job.for_rank(3) == job.for_stage(1)
    whole = actmem.fit_job(builds(layouts.fsdp), world=2, budget="1GiB", device=FLAT, ranks=[0])
    assert whole.for_rank(1) == whole.parts[0].plan
    with pytest.raises(actmem.PlanError, match="has no pipeline"):
        whole.for_stage(0)


def test_what_is_not_a_job_is_refused_and_a_rank_that_cannot_keep_the_budget_is_named() -> None:
    found = profiles_of(small_1f1b, 2)
    with pytest.raises(actmem.BudgetError, match=r"on rank 0, with stage 0 of the pipeline, no plan fits"):
        actmem.fit_job(found, budget="100KiB", device=FLAT)
    with pytest.raises(actmem.ModeError, match=r"rank 0 is in a pipeline with the ranks \[1\]"):
        actmem.fit_job(found[:1], budget="1GiB", device=FLAT)
    with pytest.raises(actmem.ModeError, match="two are of the same rank"):
        actmem.fit_job([*found, found[0]], budget="1GiB", device=FLAT)
    with pytest.raises(actmem.ModeError, match="leave out world"):
        actmem.fit_job(found, world=2, budget="1GiB", device=FLAT)
    with pytest.raises(actmem.ModeError, match="one of these is of no rank"):
        actmem.fit_job([replace(found[0], place=None)], budget="1GiB", device=FLAT)
    assert actmem.Profile.from_json(found[0].to_json()) == found[0]
