"""What a plan takes of a card: the caching allocator's bytes, CUDA's kernels, and what lies outside torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import actmem
from actmem.errors import BudgetError
from actmem.log_entries import LiveEntry
from actmem.profiles import Profile
from actmem.profiling import card_autocast
from actmem.simulation import card_memory, on_card, plan_of
from actmem.simulation.card_usage import step_changes
from benchmarks.recorded_steps import STEPS, predicted
from tests.zoo import ZOO

H100 = actmem.device("h100-80gb")
SHARED = Path(__file__).parents[2].parent / "shared"
MODELS = ("llama", "gpt2_dropout", "moe_topk", "t5")


def profiled(name: str, **options: Any) -> Profile:
    case = ZOO[name]
    model = case.build()
    return actmem.profile(model, case.batch(model), loss=case.loss, blocks=case.blocks, **options)


class Attending(nn.Module):
    def __init__(self, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SelfAttending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).view(*x.shape[:2], 4, 48).transpose(1, 2).chunk(3, -1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x


def attending(dtype: torch.dtype = torch.bfloat16) -> Profile:
    model = nn.Sequential(*(SelfAttending() for _ in range(2))).to(dtype)
    return actmem.profile(model, (torch.randn(2, 16, 64, dtype=dtype),), loss=torch.sum)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_profile_allocates_and_frees_adds_up_to_the_bytes_that_are_alive(name: str) -> None:
    found = profiled(name, optimizer=None)
    alive = {number: size for number, size, role in found.stock if role != "batch"}
    live = sum(alive.values())
    assert live == found.base_bytes
    changes, at = list(found.memory), 0
    for position, entry in enumerate(found.log):
        while at < len(changes) and changes[at][0] <= position:
            _, storage, size = changes[at]
            at += 1
            if size:
                assert storage not in alive
                alive[storage] = size
            live += size or -alive.pop(storage)
        if isinstance(entry, LiveEntry):
            assert live == entry.live_bytes


@pytest.mark.parametrize("mode", [actmem.SaveEverything(), actmem.Full(), actmem.Selective(save=["matmul"])])
def test_torch_reserves_no_less_than_it_allocates_and_allocates_no_less_than_is_alive(mode: Any) -> None:
    found = actmem.predict(profiled("llama"), mode, H100)
    assert found.reserved_bytes is not None and H100.blas_workspace_bytes is not None
    assert found.live_bytes + 2 * H100.blas_workspace_bytes <= found.peak_bytes <= found.reserved_bytes
    assert found.reserved_bytes % (2 * 2**20) == 0
    assert found.outside_bytes == H100.outside_bytes


def test_nothing_changes_where_no_caching_allocator_serves_the_device() -> None:
    profile = profiled("llama")
    assert on_card(profile, actmem.Device(key="x", name="x", memory_bytes=1, flops_per_second={})) is profile
    here = actmem.predict(profile, actmem.Full())
    assert (here.reserved_bytes, here.outside_bytes, here.peak_bytes) == (None, 0, here.live_bytes)


def test_a_budget_on_a_card_covers_what_torch_reserves_and_what_lies_outside_torch() -> None:
    model, batch = Attending(256), (torch.randn(64, 512, 256),)
    plain = actmem.predict(actmem.profile(model, batch, loss=torch.sum), actmem.SaveEverything(), H100)
    assert plain.reserved_bytes is not None
    needed = plain.reserved_bytes + plain.outside_bytes
    whole = actmem.fit(model, batch, loss=torch.sum, budget=needed, device=H100).predicted
    assert whole is not None and whole.replayed_flops == 0
    less = actmem.fit(model, batch, loss=torch.sum, budget=needed - 200 * 2**20, device=H100).predicted
    assert less is not None and less.reserved_bytes is not None and less.replayed_flops > 0
    assert less.reserved_bytes + less.outside_bytes <= needed - 200 * 2**20
    assert (whole.headroom, less.headroom) == (0.0, 0.0)
    with pytest.raises(BudgetError, match=r"leaves nothing for tensors on NVIDIA H100 SXM 80 GB: 1.20 GiB lie outside"):
        actmem.fit(model, batch, loss=torch.sum, budget="1GiB", device=H100)
    with pytest.raises(BudgetError, match="lie outside torch, the rest is for cuBLAS's workspaces"):
        actmem.fit(model, batch, loss=torch.sum, budget="1330MiB", device=H100)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_a_plan_for_a_card_names_the_cards_attention(dtype: torch.dtype, kernel: str) -> None:
    profile = attending(dtype)
    assert any("for_cpu" in cost.op for cost in profile.costs)
    found = on_card(profile, H100)
    names = {cost.op for cost in found.costs} | {call.op for layer in found.layers for call in layer.calls}
    assert not any("for_cpu" in name for name in names)
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in names
    assert on_card(found, H100) == found  # a second time changes nothing
    more = {size for _, _, size in found.memory} - {size for _, _, size in profile.memory}
    assert len(found.memory) > len(profile.memory) and (more or dtype is torch.float32)


def test_an_optimizer_on_a_card_takes_a_tensor_more_for_each_parameter_unless_it_is_fused() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    profiles = [
        actmem.profile(model, (torch.randn(1, 64),), loss=torch.sum, optimizer=o) for o in ("adamw", "adamw_fused")
    ]
    one, fused = (actmem.predict(p, actmem.SaveEverything(), H100) for p in profiles)
    assert one.timeline[-1] - fused.timeline[-1] == profiles[0].parameters_bytes
    assert one.peak_op == "optimizer step" != fused.peak_op


def test_what_is_not_known_of_a_cards_kernels_is_named_in_the_plan() -> None:
    case = ZOO["gpt2_dropout"]
    model = case.build()
    plan = actmem.fit(model, case.batch(model), loss=case.loss, budget="2GiB", device=H100)
    assert plan.predicted is not None and any("embedding" in text for text in plan.predicted.assumptions)
    assert "not known: " in str(plan) and "outside torch" in str(plan)


class Dropping(nn.Module):
    """Three layers with dropout, and dropout around them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64, dtype=dtype), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_on_a_card_saves_one_byte_for_each_element(dtype: torch.dtype) -> None:
    found = actmem.profile(Dropping(dtype), (torch.randn(32, 64, dtype=dtype),), loss=torch.sum, optimizer=None)
    there = on_card(found, H100)
    assert on_card(there, H100) == there  # a second time changes nothing
    assert "aten.bernoulli_.float" not in {cost.op for layer in there.layers for cost in layer.calls}
    less = 32 * 64 * (dtype.itemsize - 1)
    here, card = (simulate_plain(each) for each in (found, there))
    assert here.saved_bytes - card.saved_bytes == 4 * less  # the first one needs no backward
    assert here.peak_bytes > card.peak_bytes
    changes, _ = step_changes(there, plan_of(there, actmem.SaveEverything()))
    assert max_alive(changes) + there.base_bytes == card.peak_bytes


def simulate_plain(profile: Profile) -> Any:
    return step_changes(profile, plan_of(profile, actmem.SaveEverything()))[1]


def max_alive(changes: Sequence[object]) -> int:
    alive: dict[int, int] = {}
    live = most = 0
    for change in changes:
        if isinstance(change, tuple):
            number, size = cast("tuple[int, int]", change)
            live += size or -alive.pop(number)
            alive |= {number: size} if size else {}
            most = max(most, live)
    return most


def test_what_a_loop_inside_a_step_leaves_in_a_variable_is_freed_when_the_next_step_first_fills_it() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(3)))
    batch, kept = torch.randn(4096, 512), list[torch.Tensor]()
    optimizer = torch.optim.SGD(model.parameters())

    def train() -> None:
        for _ in range(3):
            kept[:] = [model(batch)]
            kept[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = actmem.profile(model, step=train)
    few, many = (card_memory(found, plan_of(found, actmem.Full()), H100, num_steps=n)[0] for n in (1, 3))
    assert many.allocated_bytes == few.allocated_bytes  # one result is alive, and never that of the last step too


def test_autocast_on_a_card_computes_in_float32_what_a_cpu_does_not() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with card_autocast():
        low = x @ x
        found = [low.exp(), low.sum(), low.softmax(-1), low.pow(2), low / 2, low.max(-1)[0]]
        low.softmax(-1).sum().backward()
    assert [t.dtype for t in found] == [torch.float32] * 4 + [torch.bfloat16] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).exp().dtype is torch.bfloat16  # and nothing of it stays


def test_what_a_sharded_plan_estimates_of_the_allocator_is_said() -> None:
    found = actmem.predict(profiled("llama", shard=4), actmem.Full(), H100)
    assert any("estimated" in text and "world=4" in text for text in found.assumptions)
    whole = actmem.predict(profiled("llama"), actmem.Full(), H100)
    assert not any("estimated" in text for text in whole.assumptions)


def test_steps_after_the_first_take_no_more_and_leave_nothing_behind() -> None:
    profile = on_card(profiled("llama"), H100)
    plan = plan_of(profile, actmem.Full())
    few, many = (card_memory(profile, plan, H100, num_steps=n)[0] for n in (3, 6))
    assert few.whole.final_allocated_bytes == many.whole.final_allocated_bytes
    assert many.reserved_bytes == few.reserved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_recorded_step_is_predicted_to_the_byte(nth: int) -> None:
    import json

    if not SHARED.exists():
        pytest.skip("there are no recordings next to the project")
    index = json.loads((SHARED / "recordings" / "index.json").read_text())
    seen = next(each for each in index if each["file"].startswith(STEPS[nth].file))["devices"][0]
    found = predicted(STEPS[nth])
    assert found.allocated_bytes == seen["peak_allocated"]
    assert found.reserved_bytes == pytest.approx(seen["peak_reserved"], rel=0.01)
