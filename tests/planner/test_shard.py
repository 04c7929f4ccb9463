"""A budget on one of several ranks: what FSDP2 takes there is not predicted too low."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import actmem
from actmem.errors import ModeError
from tests.distributed.ranks import NUM_RANKS, Outcomes, run
from tests.planner.steps import DEVICE, Training, peaks, rows, stack


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measured(plan: Any, num_rows: int) -> int:
    """Return the peak of a step on this rank."""
    model = stack(width=64)
    applied = actmem.apply(model, plan)
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    found = Training(model, rows(num_rows, 64), mean, optimizer=optimizer).measured()
    applied.remove()
    return found.peak_bytes


def a_rank_takes_no_more_than_predicted_and_not_much_less(rank: int) -> None:
    for num_rows in (64, 1024):
        profile = actmem.profile(stack(width=64), rows(num_rows, 64), loss=mean, shard=NUM_RANKS)
        for mode in (actmem.SaveEverything(), actmem.Full()):
            seen, said = measured(mode, num_rows), actmem.predict(profile, mode, DEVICE).peak_bytes
            assert seen <= said <= 1.35 * seen, f"{mode} {num_rows} rows: {said} predicted, {seen} measured"


def a_budget_is_kept_on_every_rank(rank: int) -> None:
    options: Any = {"loss": mean, "shard": NUM_RANKS}
    profile = actmem.profile(stack(width=64), rows(1024, 64), **options)
    budget = sum(peaks(profile)) // 2
    plan = actmem.fit(stack(width=64), rows(1024, 64), budget=budget, device=DEVICE, headroom=0, **options)
    assert plan.predicted is not None
    assert (plan.predicted.shard, plan.predicted.step_time_ratio > 1) == (NUM_RANKS, True)
    assert "sharded over 2 ranks" in str(plan)
    assert measured(plan, 1024) <= plan.predicted.peak_bytes <= budget


def a_model_that_is_sharded_already_is_refused(rank: int) -> None:
    model = shard(stack())
    with pytest.raises(ModeError, match=r"already sharded.*profile_rank\(build, world=N\)"):
        actmem.profile(model, rows(4), loss=mean)
    with pytest.raises(ModeError, match="already sharded"):
        actmem.apply(model, actmem.Budget("1GiB"), example=rows(4), loss=mean)


CASES = (
    a_rank_takes_no_more_than_predicted_and_not_much_less,
    a_budget_is_kept_on_every_rank,
    a_model_that_is_sharded_already_is_refused,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [c.__name__ for c in CASES])
def test_two_ranks(name: str, outcomes: Outcomes) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])


def test_each_rank_holds_its_part_of_what_lasts() -> None:
    alone, part = (actmem.profile(stack(), rows(64), loss=mean, shard=n) for n in (1, 4))
    assert (alone.shard, part.shard) == (1, 4)
    assert part.base_bytes == pytest.approx(alone.base_bytes / 4, abs=4)
    assert part.layers == alone.layers
