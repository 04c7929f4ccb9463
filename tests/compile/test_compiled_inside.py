"""A compiled function inside a block that is not compiled stays compiled, and runs as often as the report says."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem import Full, Report, SaveEverything, Selective, Targets, every_second
from actmem.modes import Mode
from tests.compile.blocks import (
    BACKENDS,
    MLPS,
    NUM_BLOCKS,
    Counting,
    assert_same_bits,
    attention,
    build,
    fresh_compiler,
    step,
)

MODES: dict[str, Mode] = {
    "full": Full(),
    "selective": Selective(save=["attention", every_second("matmul")]),
    "norm": Targets(["norm"]),
    "everything": SaveEverything(),
}
ONCE = {"forward": NUM_BLOCKS, "backward": NUM_BLOCKS}
"""The runs of compiled graphs in one step of plain training."""
REGION = "higher_order.inductor_compiled_code"
NUM_STEPS = 3  # a first call is observed, the second may know a smaller cut, the third is as all others

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def trained(model: nn.Module, mode: Mode, counting: Counting, plain: dict[str, Any]) -> Report:
    """Train under a mode; every step is plain training to the bit, and runs each graph once, and once more if replayed.

    Those of aot_eager are never replayed as a whole: their operators are.
    """
    with actmem.apply(model, mode) as applied:
        for _ in range(NUM_STEPS):
            counting.runs.clear()
            assert_same_bits(plain, step(model))
            runs = counting.runs.copy()
        report = applied.report()
    again = sum(kind.num_blocks for kind in report.kinds if any(r.op == REGION and r.replayed for r in kind.rows))
    assert runs == ONCE | {"forward": NUM_BLOCKS + again}, mode
    if isinstance(mode, SaveEverything):
        assert report.num_replayed == 0
    else:
        assert report.num_replayed > 0 and report.held_bytes < report.plain_bytes
    return report


def replayed(report: Report, module: str) -> set[str]:
    return {row.op for kind in report.kinds for row in kind.rows if row.module == module and row.replayed}


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_attention_stays_compiled_and_is_replayed_as_a_whole(backend: str, mlp: str) -> None:
    counting = Counting(backend)
    model = build(torch.compile(attention, backend=counting.backend, fullgraph=True), mlp)
    plain = step(model)
    assert counting.runs == ONCE
    for mode in MODES.values():
        report = trained(model, mode, counting, plain)
        if backend == "inductor" and isinstance(mode, Full):
            assert REGION in replayed(report, "attention")
    assert counting.graphs == {"forward": 1, "backward": 1}, "no mode has it compiled anew"


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_may_meet_the_compiler_for_the_first_time_under_a_plan(backend: str) -> None:
    plain_count, counting = Counting(backend), Counting(backend)
    plain = step(build(torch.compile(attention, backend=plain_count.backend), "dense"))
    torch._dynamo.reset()
    model = build(torch.compile(attention, backend=counting.backend), "dense")
    trained(model, Full(), counting, plain)
    assert counting.graphs == plain_count.graphs == {"forward": 1, "backward": 1}


HOW: dict[str, Callable[[nn.Module, Counting], None]] = {
    "in place": lambda block, counting: block.attention.compile(backend=counting.backend),
    "wrapped": lambda block, counting: setattr(
        block, "attention", torch.compile(block.attention, backend=counting.backend)
    ),
}


@pytest.mark.parametrize("how", HOW)
def test_a_compiled_attention_module_stays_compiled(how: str) -> None:
    counting = Counting("aot_eager")
    model = build(attention, "moe")
    for block in model.layers:
        HOW[how](block, counting)
    plain = step(model)
    assert counting.runs == ONCE
    for mode in MODES.values():
        trained(model, mode, counting, plain)
    assert counting.graphs == {"forward": 1, "backward": 1}, "no mode has it compiled anew"


@pytest.mark.parametrize("mlp", MLPS)
def test_a_region_that_torch_shows_as_one_operator_is_no_other(mlp: str) -> None:
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
        counting = Counting("inductor")
        model = build(torch.compile(attention, backend=counting.backend, fullgraph=True), mlp)
        plain = step(model)
        assert counting.runs == ONCE
        for mode in (*MODES.values(), Selective(save=["compiled"])):
            report = trained(model, mode, counting, plain)
            rows = [row for kind in report.kinds for row in kind.rows if row.op == REGION]
            assert rows, "the region is seen"
            assert {row.module for row in rows} == {"attention"}
            again = any(row.replayed for row in rows)
            assert again or not isinstance(mode, Full)
            assert not (again and mode in (SaveEverything(), Selective(save=["compiled"])))


def test_gradients_of_lengths_that_are_compiled_anew_are_those_of_plain_training() -> None:
    counting = Counting("aot_eager")
    model = build(torch.compile(attention, backend=counting.backend), "dense")
    lengths = [8, 5, 8, 11, 5]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        for length in lengths:
            model(torch.ones(2, length, 16).cumsum(1).sin()).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    compiled = counting.graphs.copy()
    assert compiled["forward"] > 1, "a second length has its own graph"
    counting.runs.clear()
    with actmem.apply(model, Full()):
        managed = gradients()
    assert all(map(torch.equal, plain, managed))
    assert counting.runs == {kind: len(lengths) * runs for kind, runs in ONCE.items()}
    assert counting.graphs == compiled, "no graph is compiled for the sake of a replay"


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_count_shows_it_where_a_compiled_function_does_not_run_compiled() -> None:
    """The counter can tell: under a dispatch mode that is not the tape, torch runs the function's own code."""
    counting = Counting("aot_eager")
    model = build(torch.compile(attention, backend=counting.backend), "dense")
    with Plain():
        step(model)
    assert not counting.runs
