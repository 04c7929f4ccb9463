"""What one process predicts of a rank is what that rank measures in a real job, on gloo."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import actmem
from actmem.distributedcompat import forget_meshes
from tests.distributed import layouts
from tests.distributed.ranks import bits, step_bytes
from tests.flat_device import FLAT
from tests.patience import PATIENCE_SECONDS

Make = Callable[[], layouts.Job]

MODES: dict[str, Any] = {
    "plain": actmem.SaveEverything(),
    "full": actmem.Full(),
    "selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
}
_TOLERANCE = 64


def builds(make: Make) -> Callable[[], tuple[nn.Module, Callable[[], object]]]:
    def build() -> tuple[nn.Module, Callable[[], object]]:
        job = make()
        return job.model, job.step

    return build


def gloo_worker(rank: int, world: int, cases: Sequence[tuple[str, str]], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, mode in cases:
        store = dist.FileStore(f"{folder}/{name}.{mode}.store", world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_SECONDS)
        )
        job: layouts.Job = getattr(layouts, name)()
        if mode != "plain":
            actmem.apply(job.model, MODES[mode] if mode in MODES else actmem.FromPlan(f"{folder}/{rank}.json"))
        digest = hashlib.sha256()
        hook = job.optimizer.register_step_pre_hook(lambda *_, job=job, digest=digest: add_gradients(job, digest))
        job.step()
        job.step()
        hook.remove()
        found = {"bytes": step_bytes(job.step, job.model, job.optimizer), "gradients": digest.hexdigest()}
        Path(folder, f"{name}.{mode}.{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()
        forget_meshes()


def add_gradients(job: layouts.Job, digest: Any) -> None:
    """Add the bits of this rank's gradients to a digest."""
    for name, parameter in job.model.named_parameters():
        digest.update(name.encode())
        if parameter.grad is not None:
            digest.update(bits(parameter.grad).encode())


def compare(
    makes: Sequence[Make], world: int, modes: Sequence[str], folder: Path, routing: Callable[[str], Any] | None = None
) -> None:
    """Run every job under every mode on real ranks, and compare each of them with its prediction.

    Args:
        makes: the jobs.
        world: how many ranks they have.
        modes: names of `MODES`; the first is compared with the others.
        folder: for files.
        routing: the name of a job -> what to assume of routers.
    """
    names = [make.__name__ for make in makes]
    cases = [(name, mode) for name in names for mode in modes]
    torch.multiprocessing.spawn(gloo_worker, args=(world, cases, str(folder)), nprocs=world)
    wrong: list[str] = []
    for make, name in zip(makes, names, strict=True):
        for rank in range(world):
            options = {} if routing is None else {"routing": routing(name)}
            found = actmem.profile_rank(builds(make), world=world, rank=rank, **options)
            plain = json.loads((folder / f"{name}.{modes[0]}.{rank}.json").read_text())
            for mode in modes:
                real = json.loads((folder / f"{name}.{mode}.{rank}.json").read_text())
                predicted = actmem.predict(found, MODES[mode], FLAT).tensor_bytes
                if abs(predicted - real["bytes"]) > _TOLERANCE:
                    wrong.append(f"{name}, rank {rank}, {mode}: predicted {predicted}, measured {real['bytes']}")
                if real["gradients"] != plain["gradients"]:
                    wrong.append(f"{name}, rank {rank}, {mode}: trained otherwise than plain")
    assert not wrong, "\n".join(wrong)


QUICK = (layouts.fsdp, layouts.sequences, layouts.ring, layouts.pipeline_interleaved_zero_bubble)


def test_a_rank_takes_what_was_predicted_of_it(tmp_path: Path) -> None:
    compare(QUICK, 2, ("plain", "full"), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch's advice about views, on real ranks too
@pytest.mark.parametrize(
    ("makes", "world"),
    [(layouts.TWO, 2), (layouts.PIPELINES, 2), (layouts.FOUR, 4), (layouts.EIGHT, 8)],
    ids=["two", "pipelines", "four", "eight"],
)
def test_every_layout_takes_what_was_predicted_of_it(makes: Sequence[Make], world: int, tmp_path: Path) -> None:
    compare(makes, world, tuple(MODES), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("make", [layouts.fsdp, layouts.sequences, layouts.experts, layouts.pipeline_1f1b])
def test_a_budget_is_kept_on_every_rank(make: Make, tmp_path: Path) -> None:
    name, budgets = make.__name__, []
    for rank in range(2):
        found = actmem.profile_rank(builds(make), world=2, rank=rank)
        least, most = (actmem.predict(found, MODES[mode], FLAT).tensor_bytes for mode in ("full", "plain"))
        budgets.append((least + most) // 2)
        actmem.fit(found, budget=budgets[-1], device=FLAT).save(tmp_path / f"{rank}.json")
    cases = [(name, "plain"), (name, "fitted")]
    torch.multiprocessing.spawn(gloo_worker, args=(2, cases, str(tmp_path)), nprocs=2)
    for rank, budget in enumerate(budgets):
        plain, fitted = (
            json.loads((tmp_path / f"{name}.{mode}.{rank}.json").read_text()) for mode in ("plain", "fitted")
        )
        assert fitted["bytes"] <= budget < plain["bytes"]
        assert fitted["gradients"] == plain["gradients"]


def test_a_profile_is_planned_for_as_it_is() -> None:
    found = actmem.profile_rank(builds(layouts.fsdp), world=2)
    full = actmem.predict(found, actmem.Full(), FLAT).tensor_bytes
    plan = actmem.fit(found, budget=full + 100_000, device=FLAT)
    assert plan.predicted is not None
    assert full <= plan.predicted.peak_bytes <= full + 100_000
    with pytest.raises(actmem.ModeError, match="a profile already says"):
        actmem.fit(found, (torch.zeros(1),), budget="1GiB", device=FLAT)


# -------------------------------------------------------------------- what profile_rank leaves, and refuses


def test_profiles_of_several_ranks_and_sizes_follow_each_other_in_one_process() -> None:
    found = [actmem.profile_rank(builds(layouts.fsdp), world=2, rank=rank).base_bytes for rank in (0, 1, 0)]
    assert found[0] == found[2]
    assert not dist.is_initialized()


def test_the_size_of_the_job_does_not_change_what_its_largest_dimension_repeats() -> None:
    def build(world: int) -> Any:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shard"))
        job = layouts.trained(layouts.shard(layouts.decoder(), mesh))
        return job.model, job.step

    small, large = (actmem.profile_rank(lambda w=world: build(w), world=world) for world in (4, 4096))
    assert actmem.predict(small, actmem.Full(), FLAT) == actmem.predict(large, actmem.Full(), FLAT)


def test_a_process_that_belongs_to_a_group_is_refused() -> None:
    def build() -> Any:
        return actmem.profile_rank(builds(layouts.fsdp), world=2)

    with pytest.raises(actmem.ModeError, match="already rank 1 of a group of 8"):
        actmem.profile_rank(build, world=8, rank=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world": 0}, "world = 0"),
        ({"world": 2, "rank": 2}, "from 0 to 1"),
        ({"world": 2, "routing": "even"}, "routing = 'even'"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(actmem.ModeError, match=message):
        actmem.profile_rank(builds(layouts.fsdp), **arguments)


def test_a_build_that_returns_no_step_is_refused() -> None:
    with pytest.raises(actmem.ModeError, match=r"not \(model, step\)"):
        actmem.profile_rank(layouts.decoder, world=2)  # type: ignore[arg-type]


def test_a_pipeline_that_would_ask_its_neighbours_is_refused() -> None:
    def build() -> Any:
        stage = layouts.PipelineStage(layouts.Stage(layouts.decoder(), 0, 2), 0, 2, torch.device("cpu"))
        schedule = layouts.ScheduleGPipe(stage, 2, loss_fn=layouts.loss_of)
        return stage.submod, lambda: schedule.step(torch.zeros(2, 32, dtype=torch.int64))

    with pytest.raises(actmem.UnsupportedError, match="input_args="):
        actmem.profile_rank(build, world=2)
