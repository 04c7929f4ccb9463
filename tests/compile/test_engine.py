"""Compiled training under a plan: the bits of compiled plain training, less saved, and a report of what was made of it.

With `aot_eager` the operators of a compiled graph run one by one, as plain training compiled by it runs them: bits must
be equal, and `actmem.measure` sees every byte. inductor fuses, so plain and managed graphs round differently there: the
distance to eager plain training must not be larger than that of compiled plain training.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import (
    Applied,
    Full,
    Offload,
    Report,
    Rule,
    Rules,
    Selective,
    Targets,
    every_second,
)
from actmem.modes import Mode
from tests.compile.blocks import fresh_compiler
from tests.compile.compiling import (
    HOW,
    Stack,
    Tiny,
    Trained,
    compiled,
    differing,
    distance,
    dynamo_counts,
    trained,
)
from tests.zoo import ZOO, Case
from tests.zoo_titan import TitanLike

MODES: dict[str, Callable[[Case], Mode]] = {
    "full": lambda case: Full(),
    "selective": lambda case: Selective(save=["attention", every_second(case.selective or "matmul")]),
    "norm": lambda case: Targets(["norm"]),
}
TAKEN_IN = (
    *("llama", "gpt2_dropout", "torchtitan_like", "mixtral", "deepseek_v3", "transformer_encoder", "bert", "resnet"),
    *("llama_lora", "qwen3", "t5", "qwen3_moe", "gpt_oss", "gemma3_sliding", "vision_language", "vit", "unet"),
)
"""Models whose blocks a graph takes in whole, however they are compiled."""
DEFAULT = {
    ("llama", "selective", "torch.compile(block)"),
    ("gpt2_dropout", "selective", "block.compile"),
    ("torchtitan_like", "full", "model"),
    ("mixtral", "full", "block.compile"),
    ("transformer_encoder", "norm", "block.compile"),
    ("resnet", "norm", "torch.compile(block)"),
}
"""Every mode with every way to compile, or nearly; the rest of the matrix is slow."""

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def cells() -> Iterator[Any]:
    for name in TAKEN_IN:
        for mode in MODES:
            for how in HOW:
                slow = (name, mode, how) not in DEFAULT
                yield pytest.param(name, mode, how, marks=[pytest.mark.slow] if slow else [])


def assert_taken_in(run: Trained) -> None:
    """Assert that compiled graphs have every block, and the tape has none."""
    assert run.applied is not None
    report = run.applied.report()
    assert report.compiled and not report.kinds and not report.unobserved, report.notes
    assert sum(graph.num_asked.get("recompute", 0) for graph in report.compiled) > 0


# ---------------------------------------------------------------- the same bits, and less saved


@pytest.mark.parametrize(("name", "mode", "how"), list(cells()))
def test_gradients_are_those_of_compiled_plain_training_and_less_is_saved(name: str, mode: str, how: str) -> None:
    case = ZOO[name]
    plain = trained(case, None, how)
    plain_bytes = plain.measure().saved_bytes
    managed = trained(case, MODES[mode](case), how)
    assert torch.equal(plain.loss, managed.loss)
    assert differing(plain.gradients, managed.gradients) == []
    assert_taken_in(managed)
    if mode == "norm":
        assert_norms_are_not_held(managed)
    else:
        assert managed.measure().saved_bytes < plain_bytes


def assert_norms_are_not_held(run: Trained) -> None:
    """Compiled plain training recomputes what is cheap, norms too. To save all but them can take more than it does."""
    assert run.applied is not None
    rows = [row for block in run.applied.trace().blocks for row in block.rows if row.decision == "recompute"]
    norms = {(row.module, row.op) for row in rows}
    held = {(kept.module, kept.op) for graph in run.applied.report().compiled for kept, _ in graph.saved}
    assert norms and not norms & held


def parts_by_block(applied: Applied) -> dict[str, set[str]]:
    """Return the modules that were compiled in each block that no graph took in, and "" for each of the others."""
    parts = {part.module for part in applied.report().compiled_parts}
    return {path: parts if b.engine == "tape" else {""} for b in applied.trace().blocks for path in b.paths}


GIVEN_UP = ("llama_use_cache", "moe_topk", "torchtitan_moe", "gemma4_shared_kv")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if (name, mode) == ("moe_topk", "selective") else [pytest.mark.slow])
        for name in GIVEN_UP
        for mode in MODES
    ],
)
def test_a_block_that_no_graph_takes_in_has_the_bits_of_plain_training(name: str, mode: str) -> None:
    """Under a plan that names modules (norm) its modules are compiled one by one, and plain training's are too."""
    case = ZOO[name]
    managed = trained(case, MODES[mode](case), "block.compile")
    assert isinstance(managed.applied, Applied)
    plain = trained(case, None, "parts", parts=parts_by_block(managed.applied) if mode == "norm" else {})
    assert torch.equal(plain.loss, managed.loss)
    assert differing(plain.gradients, managed.gradients) == []
    report = managed.applied.report()
    assert report.kinds and report.num_replayed > 0
    if name != "llama_use_cache":  # there Dynamo gives up before it reaches the block
        assert any(note.startswith("the graph breaks inside ") for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [("torchtitan_like", "selective"), ("gpt2_dropout", "full"), ("llama", "norm")]
)
def test_with_inductor_gradients_are_no_further_from_eager_than_those_of_compiled_plain_training(
    name: str, mode: str
) -> None:
    """The measure is the largest absolute difference of one element, over all gradients, in double."""
    case = ZOO[name]
    with torch._inductor.config.patch(fallback_random=True):  # else inductor draws other numbers than eager does
        eager = trained(case, None, "eager")
        plain = trained(case, None, "block.compile", backend="inductor")
        managed = trained(case, MODES[mode](case), "block.compile", backend="inductor")
    assert_taken_in(managed)
    assert distance(eager.gradients, managed.gradients) <= distance(eager.gradients, plain.gradients)


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("how", ["block.compile", pytest.param("model", marks=pytest.mark.slow)])
def test_apply_may_come_before_or_after_compile_or_after_a_compiled_step_and_can_be_undone(how: str) -> None:
    case = ZOO["torchtitan_like"]
    mode = MODES["selective"](case)
    plain = trained(case, None, how)
    plain_bytes = plain.measure().saved_bytes
    before = trained(case, mode, how)
    assert differing(plain.gradients, before.gradients) == []
    saved_bytes = before.measure().saved_bytes
    assert saved_bytes < plain_bytes

    after = trained(case, mode, how, compile_first=True)
    assert differing(plain.gradients, after.gradients) == []
    assert after.measure().saved_bytes == saved_bytes

    later = trained(case, None, how)
    with actmem.apply(later.model, mode) as applied:
        later.step()
        assert differing(plain.gradients, _gradients(later.model)) == []
        assert applied.report().compiled and not applied.report().kinds
        assert later.measure().saved_bytes == saved_bytes
    later.step()
    assert differing(plain.gradients, _gradients(later.model)) == []
    assert later.measure().saved_bytes == plain_bytes, "removed, a compiled model is plain again"


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_twelve_equal_blocks_share_as_few_graphs_as_in_plain_training() -> None:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    counts: list[dict[str, int]] = []
    for mode in (None, Selective(save=["attention", every_second("matmul")]), Full(every=2)):
        torch._dynamo.reset()
        model = TitanLike(layers=12).train()
        applied = None if mode is None else actmem.apply(model, mode)
        compiled(model, "block.compile")
        with dynamo_counts() as found:
            for _ in range(2):
                model(ids).square().mean().backward()
        counts.append(found)
        if applied is not None:
            (graph,) = applied.report().compiled
            assert len(graph.blocks) + len(graph.shared_with) == (12 if isinstance(mode, Selective) else 6)
    plain, selective, every_second_layer = counts
    assert plain == {"graphs": 1, "breaks": 0}
    assert selective == plain
    assert every_second_layer == {"graphs": 2, "breaks": 0}, "one for the layers that save all, one for the others"


# ---------------------------------------------------------------- blocks of our own


def stepped(model: nn.Module, call: Any, x: Tensor | None = None) -> dict[str, Tensor]:
    """Train one step; return the gradients."""
    model.zero_grad()
    torch.manual_seed(5)
    x = torch.ones(2, 6, 8).cumsum(1).sin() if x is None else x
    call(x.requires_grad_()).square().mean().backward()
    return _gradients(model)


class Breaks(nn.Module):
    """Reads a number on the host in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        scale = 2.0 if h.sum().item() > 0 else 1.0
        return x + self.down(h) * scale


@pytest.mark.parametrize("how", HOW)
def test_a_block_that_breaks_the_graph_goes_to_the_tape_and_the_report_says_so(how: str) -> None:
    model = Stack(Breaks)
    plain = stepped(model, model)
    with actmem.apply(model, Full()) as applied:
        call = compiled(model, how)
        for _ in range(2):
            assert differing(plain, _renamed(stepped(model, call))) == []
        report = applied.report()
    assert not report.compiled
    assert [kind.paths for kind in report.kinds] == [("layers.0", "layers.1")]
    assert report.held_bytes < report.plain_bytes and report.num_replayed > 0
    assert any(note.startswith("the graph breaks inside layers.0 ... layers.1 (2 blocks) (") for note in report.notes)


def _renamed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients.items()}


class InPlace(nn.Module):
    """Writes on what it has made, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.mul_(0.5)
        h = self.drop(h.relu_())
        out = self.down(h)
        out += x
        return nn.functional.dropout(out, 0.2)


@pytest.mark.parametrize("mode", [Full(), Selective(save=["matmul"]), Selective(save=[every_second("matmul")])])
def test_in_place_operators_and_dropout_keep_their_bits(mode: Mode) -> None:
    model = Stack(InPlace)
    plain = stepped(model, compiled(model, "model"))
    torch._dynamo.reset()
    with actmem.apply(model, mode) as applied:
        call = compiled(model, "model", fullgraph=True)
        for _ in range(2):
            assert differing(plain, stepped(model, call)) == []
        assert applied.report().compiled and not applied.report().kinds


def test_with_inductor_a_small_model_is_no_further_from_eager_than_compiled_plain_training() -> None:
    model = Stack(Tiny)
    eager = stepped(model, model)
    plain = stepped(model, compiled(model, "model", "inductor"))
    torch._dynamo.reset()
    with actmem.apply(model, Selective(save=["matmul"], force_recompute=[])) as applied:
        managed = stepped(model, compiled(model, "model", "inductor"))
        (graph,) = applied.report().compiled
    assert graph.num_asked == {"save": 4, "recompute": 6} and graph.num_asked_and_saved == 3
    assert distance(eager, managed) <= distance(eager, plain)


# ---------------------------------------------------------------- the report


def words(report: Report) -> str:
    """Return the text of a report without its line breaks."""
    return " ".join(str(report).split())


def test_the_report_says_which_engine_ran_what_was_asked_and_what_the_partitioner_saved_to_the_byte() -> None:
    """Of two products, backward needs the first: its result is 2 * 6 rows of 16 floats. Of the second it needs none."""
    model = Stack(Tiny)
    first = {"module": "up", "op": "aten.mm.default", "shape": (12, 16), "dtype": "float32", "num_bytes": 12 * 16 * 4}
    with actmem.apply(model, Selective(save=["matmul"], force_recompute=[])) as applied:
        compiled(model, "block.compile")
        assert "not run yet: layers.0 ... layers.1 (2 blocks)" in str(applied.report())
        stepped(model, model)
        report = applied.report()
        trace = applied.trace()
    (graph,) = report.compiled
    assert (graph.blocks, graph.shared_with) == (("layers.0",), ("layers.1",))
    assert graph.num_asked == {"save": 2, "recompute": 3}, "the activation, and a view behind each product"
    assert [({name: getattr(kept, name) for name in first}, kept.asked, n) for kept, n in graph.saved] == [
        (first, "save", 1)
    ]
    assert (graph.saved_bytes, graph.against_plan_bytes, graph.num_asked_and_saved) == (768, 0, 1)
    text = words(report)
    assert "layers.0: a compiled graph, also used by layers.1" in text
    asked = "The plan asked to save the results of 2 operators; it holds those of 1"
    assert f"the partitioner saves 768 B. {asked}" in text
    (block,) = trace.blocks
    assert block.engine == "compiled"
    assert [(row.module, row.op, row.decision) for row in block.rows] == [
        ("up", "aten.mm.default", "save"),
        ("up", "aten._unsafe_view.default", "recompute"),
        ("", "aten.gelu.default", "recompute"),
        ("down", "aten.mm.default", "save"),
        ("down", "aten._unsafe_view.default", "recompute"),
    ]


class Residual(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_what_the_report_says_a_graph_saves_is_what_a_measured_step_saves() -> None:
    """Full recomputation saves the inputs of the blocks alone, so the difference to it is what the report lists."""
    measured: dict[str, int] = {}
    for name, mode in (("full", Full()), ("selective", Selective(save=["matmul"], force_recompute=[]))):
        torch._dynamo.reset()
        model = Stack(Residual, 3)
        with actmem.apply(model, mode) as applied:
            compiled(model, "block.compile")
            stepped(model, model)
            measured[name] = actmem.measure(lambda: stepped(model, model), model=model).saved_bytes  # noqa: B023
            (graph,) = applied.report().compiled
            assert len(graph.shared_with) == 2
    assert measured["selective"] - measured["full"] == 3 * graph.saved_bytes == 3 * 12 * 16 * 4


def test_where_two_blocks_meet_in_one_graph_what_the_partitioner_holds_is_named() -> None:
    """The result of the first block is the input of the second: the graph holds it, whatever the plan says."""
    model = Stack(Tiny)
    with actmem.apply(model, Full()) as applied:
        stepped(model, compiled(model, "model"))
        report = applied.report()
    (graph,) = report.compiled
    assert graph.blocks == ("layers.0", "layers.1")
    edge_bytes = 2 * 6 * 8 * 4
    assert graph.saved_bytes == graph.against_plan_bytes == edge_bytes
    assert f"{edge_bytes} B is held although the plan says recompute" in words(report)


def test_dense_and_moe_blocks_of_one_model_have_a_graph_each() -> None:
    managed = trained(ZOO["deepseek_v3"], Selective(save=["attention", "grouped_matmul"]), "block.compile")
    assert managed.applied is not None
    report = managed.applied.report()
    dense, moe = report.compiled
    assert (dense.blocks, dense.shared_with) == (("model.layers.0",), ())
    assert (moe.blocks, moe.shared_with) == (("model.layers.1",), ("model.layers.2",))
    grouped = [kept for kept, _ in moe.saved if kept.op == "aten._grouped_mm.default"]
    assert grouped and all(kept.asked == "save" and kept.module == "mlp.experts" for kept in grouped)
    assert not [kept for kept, _ in dense.saved if kept.op == "aten._grouped_mm.default"]
    assert "mlp.experts" in str(report)


# ---------------------------------------------------------------- shapes, eval, one graph


@pytest.mark.parametrize("marked", [False, True], ids=["automatic", "mark_dynamic"])
def test_batches_of_several_lengths_are_right_and_reported(marked: bool) -> None:
    lengths = [6, 9, 7, 12]

    def steps(model: nn.Module, call: Any) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        for length in lengths:
            x = torch.ones(2, length, 8).cumsum(1).sin().requires_grad_()
            if marked:
                torch._dynamo.mark_dynamic(x, 1)
            found.append(stepped(model, call, x))
        return found

    model = Stack(Tiny)
    with dynamo_counts() as plain_count:
        plain = steps(model, compiled(model, "model"))
    torch._dynamo.reset()
    with actmem.apply(model, Selective(save=["matmul"], force_recompute=[])) as applied:
        with dynamo_counts() as count:
            managed = steps(model, compiled(model, "model", fullgraph=True))
        report = applied.report()
    assert [differing(p, m) for p, m in zip(plain, managed, strict=True)] == [[]] * len(lengths)
    assert count == plain_count == {"graphs": 1 if marked else 2, "breaks": 0}
    assert len(report.compiled) == count["graphs"]
    assert all(graph.saved_bytes > 0 for graph in report.compiled)
    assert "a compiled graph" in str(report)


CHECKPOINT = "tag_activation_checkpoint"


class Looking:
    """A backend that runs a graph as it is, and keeps the names of its operators."""

    def __init__(self) -> None:
        self.graphs: list[set[str]] = []

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward


def test_in_eval_and_without_gradients_there_is_no_checkpoint_in_the_graph() -> None:
    model, looking, x = Stack(Tiny), Looking(), torch.ones(2, 6, 8)
    with actmem.apply(model, Full()):
        call = torch.compile(model, backend=looking)
        call(x)
        assert CHECKPOINT in looking.graphs[-1], "in training there is one"
        with torch.no_grad():
            call(x)
        assert len(looking.graphs) == 2 and CHECKPOINT not in looking.graphs[-1]
        model.eval()
        call(x)
        assert len(looking.graphs) == 3 and CHECKPOINT not in looking.graphs[-1]
        model.train()
        call(x)
        assert len(looking.graphs) == 3, "back in training the first graph serves"


def test_layers_that_save_everything_have_no_checkpoint_in_the_graph() -> None:
    model, looking = Stack(Tiny, 3), Looking()
    with actmem.apply(model, Full(layers="1")):
        for layer in model.layers:
            layer.compile(backend=looking)
        model(torch.ones(2, 6, 8, requires_grad=True))
    assert [CHECKPOINT in graph for graph in looking.graphs] == [False, True]


def test_a_model_compiled_as_one_graph_stays_one_graph() -> None:
    case = ZOO["torchtitan_like"]
    with dynamo_counts() as count:
        managed = trained(case, MODES["selective"](case), "model", fullgraph=True)
    assert count == {"graphs": 1, "breaks": 0}
    assert managed.applied is not None
    (graph,) = managed.applied.report().compiled
    assert graph.blocks == ("layers.0", "layers.1", "layers.2")


def test_engine_tape_keeps_the_blocks_out_of_compiled_graphs() -> None:
    model = Stack(Tiny)
    plain = stepped(model, model)
    with actmem.apply(model, Full(), engine="tape") as applied:
        assert differing(plain, stepped(model, compiled(model, "model"))) == []
        report = applied.report()
    assert not report.compiled and report.num_replayed > 0


# ---------------------------------------------------------------- offloaded


@pytest.mark.parametrize("how", HOW)
def test_an_offload_decision_in_a_compiled_block_is_carried_out_at_the_border_of_its_graphs(
    how: str, tmp_path: Path
) -> None:
    model = Stack(Tiny)
    plain = stepped(model, compiled(model, how))
    torch._dynamo.reset()
    model = Stack(Tiny)
    how_far = Offload(to="disk", directory=str(tmp_path), min_bytes=0)
    with actmem.apply(model, Rules([Rule("offload", op="matmul"), Rule("save")], offload=how_far)) as applied:
        call = compiled(model, how)
        for _ in range(3):
            assert differing(_renamed(plain), _renamed(stepped(model, call))) == []
        report = applied.report()
    assert report.offloaded_bytes > 0
    assert any(note.startswith("the plan offloads at the borders of the graphs of ") for note in report.notes)


# ---------------------------------------------------------------- one part after the other


class Part(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width, bias=False), nn.Linear(width, 8, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Both(nn.Module):
    """g, then f."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.f = Part(torch.tanh, 256), Part(nn.functional.silu, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.g(x))


def test_with_f_after_g_the_replay_of_f_is_freed_before_g_is_replayed() -> None:
    """One block, whose plan saves what goes from g to f. When g's first operator runs again, nothing of f is left."""
    model = Stack(Both, 1)
    x = torch.ones(4, 8, 8)
    rows, wide_bytes, narrow_bytes = 4 * 8, 4 * 8 * 256 * 4, 4 * 8 * 8 * 4

    def step() -> None:
        model(x).sum().backward()

    with actmem.apply(model, Selective(save=["*.g.down::matmul"], force_recompute=[])):
        step()
        step()  # gradients are there: what a step adds at its peak is activations
        measured = actmem.measure(step, model=model)
    timeline = [s for s in measured.timeline if s.phase in ("replay", "backward")]
    replayed = [(i, s.op) for i, s in enumerate(timeline) if s.phase == "replay" and s.op != "aten.t.default"]
    wide = [op for _, op in replayed if op in ("aten.mm.default", "aten.silu.default", "aten.tanh.default")]
    assert wide == ["aten.mm.default", "aten.silu.default", "aten.mm.default", "aten.tanh.default"], "f first, then g"
    first_of_g = [i for i, op in replayed if op == "aten.mm.default"][1]
    base_bytes = timeline[0].live_bytes
    before_g = timeline[first_of_g - 1].live_bytes - base_bytes
    during_f = max(s.live_bytes for s in timeline[:first_of_g]) - base_bytes
    during_g = max(s.live_bytes for s in timeline[first_of_g:]) - base_bytes
    assert rows * 256 * 4 == wide_bytes
    assert during_f >= 2 * wide_bytes and during_g >= 2 * wide_bytes, "each needs its own"
    assert before_g < wide_bytes, "nothing wide is left of f"
    assert before_g <= 4 * narrow_bytes
