"""FlexAttention inside an applied block: it stays compiled, trains to the bit, and never runs again."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, Report, SaveEverything, Selective, Targets, every_second
from actmem.modes import Mode
from tests.compile.blocks import (
    LENGTH,
    MLPS,
    NUM_BLOCKS,
    Block,
    Counting,
    assert_same_bits,
    build,
    fresh_compiler,
    step,
)
from tests.compile.flex import accelerator, flex, frozen, trainable_on_cpu

MODES: dict[str, Mode] = {
    "full": Full(),
    "selective": Selective(save=["attention", every_second("matmul")]),
    "norm": Targets(["norm"]),
    "everything": SaveEverything(),
}
OPERATOR = "higher_order.flex_attention"

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, and that of FlexAttention without it


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def trained(model: nn.Module, mode: Mode, plain: dict[str, Tensor]) -> Report:
    with actmem.apply(model, mode) as applied:
        for _ in range(3):
            assert_same_bits(plain, step(model))
        report = applied.report()
    assert (report.num_replayed > 0) != isinstance(mode, SaveEverything)
    return report


@pytest.mark.parametrize(
    ("backend", "mlp"),
    [
        ("aot_eager", "dense"),
        ("aot_eager", "moe"),
        ("inductor", "dense"),
        pytest.param("inductor", "moe", marks=pytest.mark.slow),
    ],
)
def test_flex_attention_that_needs_no_gradient_stays_compiled_on_a_cpu(backend: str, mlp: str) -> None:
    counting = Counting(backend)
    model = build(frozen(torch.compile(flex(LENGTH), backend=counting.backend, fullgraph=True)), mlp)
    plain = step(model)
    assert counting.runs == {"inference": NUM_BLOCKS}
    for mode in MODES.values():
        counting.runs.clear()
        trained(model, mode, plain)
        assert counting.runs == {"inference": 3 * NUM_BLOCKS}
    assert counting.graphs == {"inference": 1}


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("mode", MODES)
def test_flex_attention_that_is_not_compiled_trains_and_is_one_operator_that_never_runs_again(
    mode: str, mlp: str
) -> None:
    with trainable_on_cpu():
        model = build(flex(LENGTH), mlp)
        report = trained(model, MODES[mode], step(model))
    rows = [row for kind in report.kinds for row in kind.rows if row.op == OPERATOR]
    assert rows and not any(row.replayed for row in rows)
    assert {row.decision for row in rows} <= {"save", "never"}


@pytest.mark.parametrize("mlp", MLPS)
def test_compiled_flex_attention_trains_and_stays_compiled(mlp: str) -> None:
    counting = Counting("aot_eager")
    once = {"forward": NUM_BLOCKS, "backward": NUM_BLOCKS}
    with trainable_on_cpu():
        model = build(torch.compile(flex(LENGTH), backend=counting.backend, fullgraph=True), mlp)
        plain = step(model)
        assert counting.runs == once
        for mode in MODES.values():
            counting.runs.clear()
            report = trained(model, mode, plain)
            assert counting.runs == {kind: 3 * runs for kind, runs in once.items()}
            assert not any(row.replayed for kind in report.kinds for row in kind.rows if row.op == OPERATOR)
    assert counting.graphs == {"forward": 1, "backward": 1}


@pytest.mark.gpu
@pytest.mark.skipif(accelerator() is None, reason="FlexAttention has no compiled backward pass on a CPU")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mlp", MLPS)
def test_flex_attention_compiled_by_inductor_trains_and_stays_compiled_on_an_accelerator(mlp: str, mode: str) -> None:
    device = accelerator()
    assert device is not None
    length, width, heads = 256, 128, 2
    counting = Counting("inductor")
    compiled = torch.compile(flex(length, device), backend=counting.backend, fullgraph=True)

    def wide() -> nn.Module:
        torch.manual_seed(1)
        blocks = [Block(compiled, MLPS[mlp], width=width, heads=heads) for _ in range(NUM_BLOCKS)]
        return nn.Sequential(*blocks).to(device)

    x = torch.randn(2, length, width, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        (model(x) * torch.linspace(-1, 1, x.numel(), device=device).view_as(x)).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model = wide()
    plain = gradients(model)
    assert counting.runs["forward"] == counting.runs["backward"] == NUM_BLOCKS
    with actmem.apply(model, MODES[mode]):
        for _ in range(3):
            counting.runs.clear()
            assert_same_bits(plain, gradients(model))
            assert counting.runs == {"forward": NUM_BLOCKS, "backward": NUM_BLOCKS}


def _warnings_of_uncompiled(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, actmem.apply(model, Full()):
        warnings.simplefilter("always")
        step(model)
        step(model)
    return [text for w in caught if "FlexAttention runs without compilation" in (text := str(w.message))]


def test_flex_attention_without_compilation_is_warned_of_once_by_name() -> None:
    with trainable_on_cpu():
        (text,) = _warnings_of_uncompiled(build(flex(LENGTH), "dense"))
        assert "in layers.0:" in text and "torch.compile(flex_attention)" in text


def test_flex_attention_that_is_compiled_is_not_warned_of() -> None:
    model = build(frozen(torch.compile(flex(LENGTH), fullgraph=True)), "dense")
    assert not _warnings_of_uncompiled(model)


def test_flex_attention_that_loses_its_compilation_with_its_block_is_warned_of() -> None:
    with trainable_on_cpu():
        model = build(flex(LENGTH), "moe")  # which breaks the graph, and only the block is compiled
        for block in model.modules():
            if isinstance(block, Block):
                block.compile(backend="aot_eager")
        (text,) = _warnings_of_uncompiled(model)
        assert "since torch.compile could not take in the whole block" in text
