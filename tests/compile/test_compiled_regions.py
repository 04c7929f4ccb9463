"""A compiled function inside an eager block is one operator of the tape: replayed by calling its graph again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem import Full, Report, Rule, Rules, SaveEverything, Selective
from tests.compile.blocks import fresh_compiler

REGION = "higher_order.inductor_compiled_code"
WIDTH = 16
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


class Part(nn.Module):
    """A part of a block that is compiled by itself."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.body = body
        self.compile(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Block(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.rest = part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rest(self.part(x.sin())).tanh()


def feed_forward(part: Any, x: Tensor) -> Tensor:
    return part.down(F.gelu(part.up(x)))


def dropped(part: Any, x: Tensor) -> Tensor:
    return F.dropout(part.down(F.dropout(part.up(x), 0.3, part.training).relu()), 0.2, part.training)


def normed(part: Any, x: Tensor) -> Tensor:
    return part.norm(part.down(part.up(x).sigmoid()))


def counts(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        part.seen.mul_(0.9).add_(x.mean(0))
    return part.down(part.up(x + part.seen).tanh())


def routed(part: Any, x: Tensor) -> Tensor:
    top, where = part.up(x).topk(4, dim=-1)
    return part.down(torch.zeros(x.shape[0], 4 * WIDTH).scatter(1, where, top.exp()))


def writes_its_input(part: Any, x: Tensor) -> Tensor:
    x = x.mul_(2)
    return part.down(part.up(x).exp())


def returns_a_view(part: Any, x: Tensor) -> Tensor:
    return part.down(part.up(x).tanh()) + x.view(x.shape[0], 2, -1).flatten(1)


def broken(part: Any, x: Tensor) -> Tensor:
    y = part.up(x).tanh()
    torch._dynamo.graph_break()
    return part.down(y.sin())


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * 0.5


def with_a_function(part: Any, x: Tensor) -> Tensor:
    return part.down(Scaled.apply(part.up(x).tanh()))


def frozen_and_cast(part: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return part.down(part.up(x).relu()).float()


BODIES = {
    f.__name__: f
    for f in (
        feed_forward,
        dropped,
        normed,
        counts,
        routed,
        writes_its_input,
        returns_a_view,
        broken,
        with_a_function,
        frozen_and_cast,
    )
}
LONG = ("normed", "routed", "frozen_and_cast")
"""Bodies whose kernels take long to compile. By default they run operator by operator."""
MODES: dict[str, Any] = {
    "full": Full(),
    "products": Selective(save=["matmul"]),
    "regions": Selective(save=["compiled"]),
    "by module": Rules([Rule("save", module="*.rest"), Rule("recompute")]),
    "everything": SaveEverything(),
}


def built(body: Any, num_blocks: int = 3, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(Part(body, **options)) for _ in range(num_blocks)))


def trained(model: nn.Module, lengths: list[int], mode: Any = None) -> tuple[list[Tensor], Report | None]:
    """Train; return losses, gradients, buffers and the generator's state."""
    before = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(5)
    found: list[Tensor] = []
    report = None
    applied = actmem.apply(model, mode, blocks="*") if mode is not None else None
    for length in lengths:
        model.zero_grad(set_to_none=True)
        loss = model(torch.linspace(-1, 1, length * WIDTH).reshape(length, WIDTH)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    found += [b.clone() for b in model.buffers()] + [torch.get_rng_state()]
    if applied is not None:
        report = applied.report()
        applied.remove()
    model.load_state_dict(before)
    return found, report


def regions(report: Report | None) -> list[Any]:
    assert report is not None
    return [row for kind in report.kinds for row in kind.rows if row.op == REGION]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "inductor") for name in BODIES if name not in LONG),
        *((name, "aot_eager") for name in LONG),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_training_is_that_of_the_compiled_model_to_the_bit(name: str, backend: str) -> None:
    model = built(BODIES[name], backend=backend)
    plain, _ = trained(model, [8, 8, 8])
    for mode in MODES.values():
        if backend == "aot_eager" and mode is MODES["regions"]:
            continue  # no operator is a compiled graph there
        ours, report = trained(model, [8, 8, 8], mode)
        assert len(plain) == len(ours) and all(map(torch.equal, plain, ours)), mode
        rows = regions(report)
        if backend == "aot_eager":
            assert not rows and report is not None and {part.module for part in report.compiled_parts} == {"part"}
            continue
        assert rows and {row.module for row in rows} == {"part"}
        saved = isinstance(mode, SaveEverything) or mode is MODES["regions"]
        assert any(row.replayed for row in rows) is not saved
        assert report is not None and (saved or report.held_bytes < 0.5 * report.plain_bytes), str(report)


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_lengths_and_graphs_that_are_compiled_in_between(dynamic: bool | None) -> None:
    lengths = [8, 8, 5, 8, 11, 5]
    model = built(dropped, dynamic=dynamic)
    plain, _ = trained(model, lengths)
    ours, _ = trained(model, lengths, Full())
    assert all(map(torch.equal, plain, ours))
    torch._dynamo.reset()
    fresh, _ = trained(built(dropped, dynamic=dynamic), lengths, Full())
    assert all(map(torch.equal, plain, fresh)), "compiled for the first time under the tape"


@torch.library.custom_op("actmem_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x * 2


CALLS: list[int] = []
counted.register_fake(torch.empty_like)
counted.register_autograd(lambda ctx, grad: grad * 2)


def with_an_operator_of_its_own(part: Any, x: Tensor) -> Tensor:
    return part.down(counted(part.up(x).tanh()).exp())


def test_what_must_not_run_again_is_held_and_the_report_says_so() -> None:
    model = built(with_an_operator_of_its_own)
    plain, _ = trained(model, [8, 8])
    CALLS.clear()
    ours, report = trained(model, [8, 8], Full())
    assert all(map(torch.equal, plain, ours))
    assert len(CALLS) == 6
    rows = regions(report)
    assert rows and not any(row.replayed for row in rows)
    assert report is not None and any(note.startswith("held because ") and "part" in note for note in report.notes)


def test_a_part_that_is_called_twice_and_one_without_a_gradient() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = self.part(x)
            return self.part(self.part(x) + shift) + self.rest(x)

    torch.manual_seed(3)
    model = nn.Sequential(*(Twice(Part(feed_forward)) for _ in range(2)))
    plain, _ = trained(model, [8, 8, 8])
    for mode in MODES.values():
        ours, _ = trained(model, [8, 8, 8], mode)
        assert all(map(torch.equal, plain, ours)), mode


def test_nothing_is_left_when_the_graph_is_gone_and_classes_are_as_they_were() -> None:
    model = built(feed_forward)
    with actmem.apply(model, Full(), blocks="*"):
        for _ in range(3):
            model(torch.ones(8, WIDTH)).sum().backward()
        gc.collect()
        before = sum(isinstance(o, Tensor) for o in gc.get_objects())
        for _ in range(3):
            model(torch.ones(8, WIDTH)).sum().backward()
        gc.disable()
        try:
            model(torch.ones(8, WIDTH)).sum().backward()
            assert sum(isinstance(o, Tensor) for o in gc.get_objects()) == before
        finally:
            gc.enable()


def test_graphs_of_aot_eager_are_seen_operator_by_operator() -> None:
    model = built(feed_forward, backend="aot_eager")
    plain, _ = trained(model, [8, 8, 8])
    ours, report = trained(model, [8, 8, 8], Selective(save=["matmul"]))
    assert all(map(torch.equal, plain, ours))
    assert report is not None and not regions(report)
    ops = {row.op: row.decision for kind in report.kinds for row in kind.rows if row.module == "part"}
    assert ops["aten.addmm.default"] == "save"


def reads_a_number(part: Any, x: Tensor) -> Tensor:
    y = part.up(x).tanh()
    return part.down(y * (2.0 if y.sum().item() > 0 else 0.5))


class Broken(Block):
    """A block that no single graph can hold."""

    def __init__(self) -> None:
        super().__init__(Part(reads_a_number))
        self.part._compiled_call_impl = None


@pytest.mark.parametrize(
    ("how", "backend"),
    [("blocks", "inductor"), ("model", "aot_eager"), pytest.param("model", "inductor", marks=pytest.mark.slow)],
)
def test_a_block_that_breaks_the_graph_keeps_its_compiled_pieces(how: str, backend: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(Broken() for _ in range(3)))

    def compile_it() -> None:
        torch._dynamo.reset()
        for part in [model] if how == "model" else list(model):
            part.compile(backend=backend)

    compile_it()
    plain, _ = trained(model, [8, 8, 8, 8])
    counts: list[int] = []
    model.register_forward_hook(lambda *_: counts.append(torch._dynamo.utils.counters["frames"]["total"]))
    for mode in (Full(), Selective(save=["compiled" if backend == "inductor" else "matmul"])):
        compile_it()
        counts.clear()
        ours, report = trained(model, [8, 8, 8, 8], mode)
        assert all(map(torch.equal, plain, ours)), mode
        assert counts[1] == counts[-1], "nothing is compiled after the second step"
        assert report is not None
        if backend == "inductor":
            assert any(row.replayed for row in regions(report)) is isinstance(mode, Full)
        else:
            assert report.compiled_parts and all(part.is_divided for part in report.compiled_parts)
            assert not regions(report) and report.num_replayed > 0
        assert any(note.startswith("the graph breaks inside 0 ... 2 (3 blocks)") for note in report.notes)


def test_under_a_plan_that_names_modules_pieces_end_with_these_and_the_report_says_what_runs_where() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(Broken() for _ in range(3)))
    for block in model:
        block.compile(backend="aot_eager")
    plain, _ = trained(model, [8, 8, 8])
    ours, report = trained(model, [8, 8, 8], Rules([Rule("save", module="*.rest"), Rule("recompute")]))
    assert all(map(torch.equal, plain, ours))
    assert report is not None
    assert [(part.module, part.num_calls, part.is_divided) for part in report.compiled_parts] == [("part", 6, True)]
    (note,) = report.notes
    assert note.startswith("the graph breaks inside 0 ... 2 (3 blocks) (Unsupported Tensor.item() call")
    assert "compiled pieces run in part, and the rest in eager, in the block itself, rest." in note
    saved = {row.module for kind in report.kinds for row in kind.rows if row.decision == "save"}
    assert saved == {"rest"}
