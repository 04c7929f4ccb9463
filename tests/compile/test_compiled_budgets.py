"""Budgets of compiled blocks: the plan is for the graphs that run, and they keep it.

Measured bytes are the allocator's own, from the events of torch's profiler, which sees inside inductor's graphs too.
"""

import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

import actmem
from actmem import Budget, BudgetError, Compiled, ModeError, Plan, UnsupportedError
from actmem.devices import THIS_MACHINE
from actmem.planner import compilation, fit_ladder, make_ladder
from actmem.structure import find_blocks
from benchmarks.compile import MARK, allocated
from tests.compile.compiling import Stack, built, compiled, gradients
from tests.flat_device import FLAT
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds

BATCH = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),)
MODELS = ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_sliding", "vit"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stack() -> Stack:
    return Stack(Wide, num_blocks=4)


def step_of(call: Any, batch: Any, loss: Any) -> Any:
    def step() -> None:
        out = call(**batch) if isinstance(batch, dict) else call(*batch)
        value = out.loss if loss is None else loss(out)
        with record_function(MARK):
            pass
        value.backward()

    return step


def peak_of(model: nn.Module, call: Any, batch: Any = BATCH, loss: Any = torch.sum) -> int:
    """Train three steps; return the peak of the last, by the allocator's count, on top of parameters and buffers."""
    step = step_of(call, batch, loss)
    for _ in range(2):
        model.zero_grad()
        step()
    model.zero_grad()
    state = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(state.values()) + allocated(step)[0]


KNOWN = FLAT
HERE = replace(FLAT, key=THIS_MACHINE)
"""The same speed, and the memory of this machine, where numbers of Python take some too."""


@functools.cache
def ladder_of(backend: str, what: str = "blocks") -> tuple[Any, Any]:
    """Return what `fit` chooses from, for the stack, and how it is compiled: the same for every budget."""
    model = stack()
    profile = actmem.profile(model, BATCH, loss=torch.sum, optimizer=None)
    blocks = find_blocks(model)
    how = compilation(model, blocks, Compiled(what, backend=backend))
    assert how is not None
    return make_ladder(model, blocks, BATCH, torch.sum, how, profile, KNOWN, fake=True), how


def planned(budget: int, backend: str = "aot_eager", what: str = "blocks") -> Plan:
    ladder, how = ladder_of(backend, what)
    return fit_ladder(ladder, budget, KNOWN, how)


def peak_under(plan: Plan, how: str, backend: str) -> int:
    torch._dynamo.reset()
    model = stack()
    with actmem.apply(model, plan):
        return peak_of(model, compiled(model, how, backend))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_keep_the_budget_and_the_prediction_is_what_is_measured(backend: str) -> None:
    ladder, _ = ladder_of(backend)
    measured: list[int] = []
    most, least = ladder.rungs[0].peak_bytes, ladder.rungs[-1].peak_bytes
    for budget in (most, (most + least) // 2, least):
        plan = planned(budget, backend)
        assert plan.predicted is not None and plan.predicted.compiled == f"each block, by {backend}"
        measured.append(peak_under(plan, "block.compile", backend))
        assert measured[-1] == plan.predicted.peak_bytes <= budget
        assert 0 <= plan.predicted.gap == plan.predicted.step_time_ratio - plan.predicted.bound
    assert measured == sorted(measured, reverse=True) and measured[-1] < 0.9 * measured[0]
    with pytest.raises(BudgetError, match=f"no plan fits .* where each block is compiled by {backend}"):
        planned(least - 1, backend)


def test_a_model_that_is_one_graph_keeps_the_budget() -> None:
    ladder, _ = ladder_of("aot_eager", "model")
    plan = planned(ladder.rungs[0].peak_bytes - 1, what="model")
    assert plan.predicted is not None and plan.predicted.compiled == "the whole model, by aot_eager"
    assert peak_under(plan, "model", "aot_eager") == plan.predicted.peak_bytes < ladder.rungs[0].peak_bytes


def test_less_budget_never_means_less_time_and_no_rung_is_beaten_by_another() -> None:
    rungs = ladder_of("aot_eager")[0].rungs
    assert [r.peak_bytes for r in rungs] == sorted({r.peak_bytes for r in rungs}, reverse=True)
    assert [r.seconds for r in rungs] == sorted(r.seconds for r in rungs)
    assert any(len(set(r.levels)) > 1 for r in rungs), "blocks of one model may be planned differently"


def test_how_a_model_is_compiled_is_seen_and_gradients_are_those_of_compiled_plain_training() -> None:
    def train(budget: int | None) -> tuple[dict[str, Tensor], Any]:
        torch._dynamo.reset()
        model = stack()
        call = compiled(model, "block.compile", "aot_eager")
        applied = None
        if budget is not None:
            mode = Budget(budget, device=FLAT, optimizer=None)
            applied = actmem.apply(model, mode, example=BATCH, loss=torch.sum)
        call(*BATCH).sum().backward()
        return gradients(model), applied

    plain, _ = train(None)
    found, applied = train(330_000)
    assert applied.plan.predicted.compiled == "each block, by aot_eager"
    assert [graph for graph in applied.report().compiled if graph.num_asked.get("recompute")]
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_a_plan_for_compiled_blocks_does_not_run_in_eager_and_one_for_eager_blocks_not_in_graphs() -> None:
    model = stack()
    with actmem.apply(model, planned(2**30)), pytest.raises(UnsupportedError, match="runs in eager"):
        model(*BATCH)
    with actmem.apply(model, actmem.fit(model, BATCH, loss=torch.sum, budget=310_000, optimizer=None, device=FLAT)):
        compiled(model, "block.compile")
        with pytest.raises(UnsupportedError, match="compiled=True"):
            model(*BATCH)


def test_a_batch_of_other_sizes_is_refused() -> None:
    model = stack()
    with actmem.apply(model, planned(2**30)):
        compiled(model, "block.compile")
        with pytest.raises(BudgetError, match="another graph"):
            model(torch.randn(32, 32))


def test_a_plan_for_compiled_blocks_says_so_and_survives_a_file() -> None:
    plan = planned(ladder_of("aot_eager")[0].rungs[-1].peak_bytes + 1000)
    assert Plan.from_json(plan.to_json()) == plan
    assert "compiled: each block, by aot_eager; the bound is for plans that its partitioner can carry out" in str(plan)


class Attending(nn.Module):
    """The kernel of its attention takes more for itself than all tensors of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 1, 8).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape_as(x)


def test_what_a_kernel_takes_for_itself_is_part_of_what_is_predicted_on_fakes() -> None:
    model, batch = Stack(Attending), (torch.ones(256, 8),)
    how = Compiled(backend="aot_eager")
    plan = actmem.fit(model, batch, loss=torch.sum, budget="1MiB", device=FLAT, compiled=how, optimizer=None)
    assert plan.predicted is not None and not plan.predicted.assumptions
    assert "flash_attention_for_cpu_backward" in plan.predicted.peak_at
    with actmem.apply(model, plan):
        assert peak_of(model, compiled(model, "block.compile", "aot_eager"), batch) == plan.predicted.peak_bytes


class Routed(nn.Module):
    """One grouped product: each row goes through the expert that its gate prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        order = chosen.argsort()
        ends = torch.zeros(4, dtype=torch.int32).scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        rows, weights = x[order].bfloat16(), self.experts.bfloat16()
        made = torch._grouped_mm(rows, weights, offs=ends.cumsum(0, dtype=torch.int32))
        return x.index_add(0, order, made.float())


def test_with_routers_a_plan_on_fakes_holds_however_rows_are_routed() -> None:
    model, batch = Stack(Routed), (torch.randn(256, 32, generator=torch.Generator().manual_seed(0)),)
    how = Compiled(backend="aot_eager")
    plan = actmem.fit(model, batch, loss=torch.sum, budget="1MiB", device=FLAT, compiled=how, optimizer=None)
    assert plan.predicted is not None and plan.predicted.routing == "any" and "routing any" in str(plan)
    call = compiled(model, "block.compile", "aot_eager")
    with actmem.apply(model, plan):
        for preference in (0.0, 100.0):  # rows choose, and all choose one
            for layer in model.layers:
                nn.init.constant_(layer.gate.bias[:1], preference)
            measured = peak_of(model, call, batch)
            assert measured <= plan.predicted.peak_bytes <= 1.10 * measured


class Breaking(Wide):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_block_that_breaks_the_graph_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the graph breaks inside Breaking"):
        actmem.fit(
            Stack(Breaking),
            BATCH,
            loss=torch.sum,
            budget="1MiB",
            device=FLAT,
            compiled=Compiled(backend="aot_eager"),
        )


def test_blocks_that_are_not_compiled_alike_are_refused() -> None:
    model = stack()
    model.layers[0].compile(backend="aot_eager")
    with pytest.raises(ModeError, match="1 of 4 blocks are compiled"):
        actmem.fit(model, BATCH, loss=torch.sum, budget="1MiB", device=FLAT)


def test_a_block_inside_what_torch_compile_returns_is_refused_with_the_line_that_helps() -> None:
    model = stack()
    compiled(model, "torch.compile(block)", "aot_eager")
    with pytest.raises(ModeError, match=r"Compile it in place, block.compile\(\)"):
        actmem.fit(model, BATCH, loss=torch.sum, budget="1MiB", device=FLAT)


@pytest.mark.slow
def test_a_plan_holds_for_blocks_that_torch_compile_replaces_and_for_a_model_that_it_returns() -> None:
    least = ladder_of("aot_eager")[0].rungs[-1].peak_bytes
    assert peak_under(planned(least), "torch.compile(block)", "aot_eager") == least
    ladder, _ = ladder_of("aot_eager", "model")
    model = stack()
    call = torch.compile(model, backend="aot_eager")
    mode = Budget(int(ladder.rungs[-1].peak_bytes / 0.95) + 100, device=FLAT, optimizer=None)
    with actmem.apply(call, mode, example=BATCH, loss=torch.sum) as applied:
        assert applied.plan.predicted is not None
        assert peak_of(model, call) == applied.plan.predicted.peak_bytes == ladder.rungs[-1].peak_bytes


def test_planning_leaves_no_trace_in_a_compiled_model() -> None:
    model = Stack(Wide)
    call = compiled(model, "block.compile", "aot_eager")
    call(*BATCH).sum().backward()
    model.zero_grad()
    own = [(type(layer), layer._compiled_call_impl) for layer in model.layers]
    state = torch.get_rng_state()
    for fake in (True, False):
        actmem.fit(model, BATCH, loss=torch.sum, budget="1MiB", device=FLAT, fake=fake)
    assert [(type(layer), layer._compiled_call_impl) for layer in model.layers] == own
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    with torch._dynamo.config.patch(error_on_recompile=True):
        call(*BATCH).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("fake", [True, False], ids=["fakes", "real"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_six_models_keep_five_budgets_by_the_allocators_own_count(name: str, backend: str, fake: bool) -> None:
    case = ZOO[name]
    model, batch = built(case)
    profile = actmem.profile(model, batch, loss=case.loss, blocks=case.blocks, optimizer=None)
    blocks = find_blocks(model, case.blocks)
    how = compilation(model, blocks, Compiled(backend=backend))
    assert how is not None
    ladder = make_ladder(model, blocks, batch, case.loss, how, profile, HERE, fake=fake)
    numbers_bytes = profile.numbers_bytes if fake else 0
    least, most = (rung.peak_bytes + numbers_bytes for rung in (ladder.rungs[-1], ladder.rungs[0]))
    measured: list[int] = []
    for nth in range(5):
        budget = least + (most - least) * nth // 4
        plan = fit_ladder(ladder, budget, HERE, how, fake=fake)
        assert plan.predicted is not None
        torch._dynamo.reset()
        model, batch = built(case)
        with actmem.apply(model, plan):
            measured.append(peak_of(model, compiled(model, "block.compile", backend, case.blocks), batch, case.loss))
        assert measured[-1] <= budget
        assert measured[-1] <= plan.predicted.peak_bytes <= 1.10 * measured[-1]
    assert measured == sorted(measured), "less budget never means a higher peak"
    with pytest.raises(BudgetError, match="The smallest peak is"):
        fit_ladder(ladder, least - 1, HERE, how, fake=fake)
