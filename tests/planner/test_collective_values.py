"""What sequence parallel gathers is a value like others: rules or the planner decide if it is communicated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collective
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import actmem
from actmem.devices import Fabric
from actmem.simulation import cost_seconds, follow
from tests.flat_device import FLAT
from tests.sequence_collectives import Gathered, Scattered

NUM_RANKS, LENGTH, WIDTH = 8, 16, 32
GATHER = "_c10d_functional.all_gather_into_tensor.default"
EXCHANGE = "_c10d_functional.all_to_all_single.default"


class Layer(nn.Module):
    def __init__(self, *, exchanges: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.exchanges = exchanges

    def forward(self, x: Tensor) -> Tensor:
        if self.exchanges:
            parts = [LENGTH // NUM_RANKS] * NUM_RANKS
            x = collective.all_to_all_single_autograd(x, parts, parts, dist.group.WORLD)
        return x + Scattered.apply(self.down(F.silu(self.up(Gathered.apply(self.norm(x))))))


def build(*, exchanges: bool = False) -> tuple[nn.Module, Callable[[], object]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(exchanges=exchanges) for _ in range(3)])
    x = torch.randn(LENGTH, WIDTH)

    def step() -> None:
        model(x).square().sum().backward()
        model.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def found() -> actmem.Profile:
    return actmem.profile_rank(build, world=NUM_RANKS)


@pytest.fixture
def group(found: actmem.Profile) -> Iterator[None]:  # which must be made before there is a group
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


MODES = [
    actmem.Full(),
    actmem.Rules([actmem.Rule("save", op="collective", layers="0"), actmem.Rule("recompute")]),
    actmem.Rules([actmem.Rule("recompute", op="collective"), actmem.Rule("save")]),
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mode", MODES, ids=["full", "one-held", "only-collectives"])
def test_a_rank_takes_what_was_predicted_whatever_is_communicated_again(found: actmem.Profile, mode: Any) -> None:
    measured: list[int] = []
    for collectives in ("save", "recompute"):
        model, step = build()
        applied = actmem.apply(model, mode, collectives=collectives)
        assert applied.plan.collectives == collectives
        for _ in range(3):
            step()
        measured.append(actmem.measure(step, model=model).tensor_bytes)
        assert actmem.predict(found, applied.plan, FLAT).tensor_bytes == measured[-1]
        assert actmem.predict(found, mode, FLAT, collectives=collectives).tensor_bytes == measured[-1]
    assert measured[1] < measured[0]


def replayed(profile: actmem.Profile, plan: actmem.Plan) -> list[str]:
    again = follow(profile, plan).replayed
    return [profile.layers[n].calls[c].op for n, calls in enumerate(again) for c in calls]


def joined(rate: float) -> actmem.Device:
    """A device whose link to its neighbours has this speed."""
    return replace(FLAT, fabric=Fabric("test", NUM_RANKS, rate, rate))


def planned(profile: actmem.Profile, budget: int, device: actmem.Device) -> actmem.Plan:
    return actmem.fit_job([profile], budget=budget, device=device).for_rank(0)


def test_a_fast_link_communicates_again_and_a_slow_one_holds(found: actmem.Profile) -> None:
    most, least = (actmem.predict(found, mode, FLAT).tensor_bytes for mode in (actmem.SaveEverything(), actmem.Full()))
    budget = (most + least) // 2
    fast, slow = (planned(found, budget, joined(rate)) for rate in (1e15, 1e3))
    assert fast.predicted is not None
    assert slow.predicted is not None
    assert GATHER in replayed(found, fast)
    assert GATHER not in replayed(found, slow)
    assert actmem.Plan.from_json(fast.to_json()) == fast
    assert max(fast.predicted.peak_bytes, slow.predicted.peak_bytes) <= budget
    assert planned(found, budget, replace(FLAT, fabric=None)).collectives == "save"
    assert actmem.fit(found, budget=budget, device=joined(1e15)).collectives == "save"  # of one rank alone


@pytest.mark.usefixtures("group")
def test_a_budget_that_only_communicating_again_can_meet_is_kept(found: actmem.Profile) -> None:
    held = actmem.predict(found, actmem.Full(), FLAT).tensor_bytes
    plan = planned(found, held - 4096, FLAT)
    assert plan.collectives == "recompute"
    model, step = build()
    actmem.apply(model, plan)
    for _ in range(3):
        step()
    assert plan.predicted is not None
    measured = actmem.measure(step, model=model).tensor_bytes
    assert measured == plan.predicted.peak_bytes <= held - 4096


def test_a_collective_takes_its_bytes_over_the_bandwidth_of_its_link(found: actmem.Profile) -> None:
    seconds = cost_seconds(found, joined(1e6))
    gathered = NUM_RANKS * LENGTH * WIDTH * 4
    number = next(n for n, cost in enumerate(found.costs) if cost.op == GATHER)
    assert found.costs[number].reach == NUM_RANKS
    assert seconds[number] == pytest.approx(gathered * (NUM_RANKS - 1) / NUM_RANKS / (1e6 * FLAT.attainable.link))


def test_an_exchange_never_runs_again() -> None:
    exchanged = actmem.profile_rank(lambda: build(exchanges=True), world=NUM_RANKS)
    plan = actmem.Plan(
        actmem.Full().rules(), exchanged.blocks, exchanged.fingerprint, "Full()", collectives="recompute"
    )
    again = replayed(exchanged, plan)
    assert GATHER in again
    assert EXCHANGE not in again
    assert any(call.op == EXCHANGE for layer in exchanged.layers for call in layer.calls)
