"""A compiled attention in a model that is itself compiled: it stays compiled, whatever becomes of the block around it.

dense block   traces whole. Dynamo takes the attention into the block's graph; the plan goes to the partitioner.
MoE block     breaks the graph. Where the plan recomputes something, the tape takes the block, and records the pieces
              that Dynamo can compile; under a plan that names modules, no piece is larger than such a module, and the
              attention is one.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, SaveEverything, Selective, Targets, every_second
from actmem.modes import Mode
from tests.compile.blocks import (
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
HOW = ["model", "blocks"]
ONCE = {"forward": NUM_BLOCKS, "backward": NUM_BLOCKS}
NUM_STEPS = 2

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def compiled(model: nn.Module, how: str, counting: Counting) -> Any:
    """Compile the model, or each of its blocks; return what to call."""
    if how == "model":
        return torch.compile(model, backend=counting.backend)
    for block in model.layers:
        block.compile(backend=counting.backend)
    return model


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


class Cell:
    """What plain training does in one cell: in eager around the compiled attention, and with all compiled."""

    def __init__(self, backend: str, mlp: str, how: str) -> None:
        self.backend, self.mlp, self.how = backend, mlp, how
        model = build(torch.compile(attention, backend=Counting(backend).backend), mlp)
        self.eager = step(model)
        torch._dynamo.reset()
        counting = Counting(backend)
        self.compiled = step(model, compiled(model, how, counting))
        self.runs = dict(counting.runs)
        """Runs of compiled graphs in one step."""

    def check(self, mode: Mode, *, apply_first: bool) -> None:
        torch._dynamo.reset()
        inner, outer = Counting(self.backend), Counting(self.backend)
        model = build(torch.compile(attention, backend=inner.backend), self.mlp)
        call = model if apply_first else compiled(model, self.how, outer)
        with actmem.apply(model, mode) as applied:
            call = compiled(model, self.how, outer) if apply_first else call
            found = [step(model, call) for _ in range(NUM_STEPS)]
            report = applied.report()
        taped = self.mlp == "moe" and not isinstance(mode, SaveEverything)
        by_module = isinstance(mode, Targets) and taped
        for n in range(NUM_STEPS):
            if taped and not by_module:
                assert_same_bits(self.compiled, found[n])
            elif self.backend == "aot_eager":
                assert_same_bits(self.eager, found[n])
            else:
                assert distance(self.eager, found[n]) <= distance(self.eager, self.compiled)
        runs = outer.runs
        if by_module:
            assert runs["backward"] >= NUM_STEPS * NUM_BLOCKS, "the pieces run compiled"
            assert self.backend == "inductor" or runs["forward"] == runs["backward"]
        else:
            once = {kind: NUM_STEPS * runs for kind, runs in self.runs.items()}
            if taped and self.backend == "inductor":  # the pieces that are replayed run twice
                assert once["forward"] <= runs.pop("forward") <= 2 * once.pop("forward")
            assert runs == once, "every compiled graph runs once, as in plain training"
        assert not inner.runs
        if taped:
            assert report.num_replayed > 0 and report.held_bytes < report.plain_bytes
            assert not report.compiled and sum(kind.num_blocks for kind in report.kinds) == NUM_BLOCKS
        elif not isinstance(mode, SaveEverything):
            assert report.compiled and not report.kinds and not report.unobserved and report.num_replayed == 0
            assert sum(graph.num_asked.get("recompute", 0) for graph in report.compiled) > 0


@pytest.mark.parametrize("how", ["model", pytest.param("blocks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mlp", MLPS)
def test_a_compiled_attention_in_a_compiled_model_stays_compiled(mlp: str, how: str) -> None:
    cell = Cell("aot_eager", mlp, how)
    assert distance(cell.eager, cell.compiled) == 0
    for turn, mode in enumerate(MODES.values()):
        cell.check(mode, apply_first=bool(turn % 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "apply_first"),
    [("aot_eager", True), ("aot_eager", False), ("inductor", True)],
    ids=["aot_eager, apply first", "aot_eager, compile first", "inductor"],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mlp", MLPS)
def test_in_every_cell_in_either_order(mlp: str, how: str, mode: str, backend: str, apply_first: bool) -> None:
    Cell(backend, mlp, how).check(MODES[mode], apply_first=apply_first)
