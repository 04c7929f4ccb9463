"""The decision trace: a row for each operator, a table, a log line once for each operator, and what is subsumed."""

import logging

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import actmem
from actmem import Applied, Full, Rule, Rules, SaveEverything, Selective, Targets, every_second
from actmem.engine.operators import describe
from actmem.engine.verdicts import Traced, Tracer, log_once, resolve, subsumed
from actmem.modes import Mode

aten = torch.ops.aten


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.up(x)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def applied(mode: Mode, num_steps: int = 1, own: dict[str, tuple[str, ...]] | None = None) -> Applied:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    model.actmem_targets = own
    handle = actmem.apply(model, mode)
    for _ in range(num_steps):
        model(torch.ones(4, 8)).sum().backward()
    return handle


# ---------------------------------------------------------------- rows


def test_there_is_a_row_for_each_operator_of_a_block_in_order() -> None:
    (block,) = applied(Selective(save=["matmul"])).trace().blocks
    assert block.paths == ("0", "1", "2")
    assert block.engine == "tape"
    assert [(row.module, row.op, row.decision) for row in block.rows] == [
        ("norm", "aten.native_layer_norm.default", "recompute"),
        ("mlp.gate", "aten.addmm.default", "save"),
        ("mlp", "aten.sigmoid.default", "recompute"),
        ("mlp.up", "aten.mm.default", "save"),
        ("mlp", "aten.mul.Tensor", "recompute"),
        ("", "aten.add.Tensor", "recompute"),
    ]
    assert [row.rule for row in block.rows] == [1, 0, 1, 0, 1, 1]
    assert [row.num_bytes for row in block.rows] == [4 * 8 * 4 + 2 * 4 * 4, *[4 * 8 * 4] * 5], "a norm has statistics"
    assert all(row.never is None and row.targets == () for row in block.rows)


def test_blocks_that_were_decided_otherwise_are_listed_apart() -> None:
    first, second = applied(Full(every=2)).trace().blocks
    assert (first.paths, second.paths) == (("0", "2"), ("1",))
    assert {row.decision for row in first.rows} == {"recompute"}
    assert {row.decision for row in second.rows} == {"save"}
    assert [row.address for row in first.rows] == [row.address for row in second.rows]


def test_calls_of_one_operator_in_one_module_are_numbered() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.lin(torch.tanh(self.lin(x))))

    model = nn.Sequential(Twice(), Twice())
    with actmem.apply(model, Selective(save=[every_second("matmul")])) as handle:
        model(torch.ones(4, 8)).sum().backward()
        (block,) = handle.trace().blocks
    assert [(*row.address, row.decision) for row in block.rows] == [
        ("lin", "aten.mm.default", 0, "save"),
        ("", "aten.tanh.default", 0, "recompute"),
        ("lin", "aten.mm.default", 1, "recompute"),
        ("", "aten.tanh.default", 1, "recompute"),
    ]


def test_before_a_step_there_is_nothing_to_trace() -> None:
    trace = applied(Full(), num_steps=0).trace()
    assert trace.blocks == ()
    assert str(trace) == "nothing has been decided yet: run a training step, then print the trace again.\n"


def test_a_later_step_is_not_traced_unless_it_is_observed() -> None:
    model = nn.Sequential(Block(), Block())
    handle = actmem.apply(model, Full())
    model(torch.ones(4, 8)).sum().backward()
    model(torch.ones(2, 8)).sum().backward()
    assert handle.trace().blocks[0].rows[-1].num_bytes == 4 * 8 * 4
    handle.check_replay()
    model(torch.ones(2, 8)).sum().backward()
    assert handle.trace().blocks[0].rows[-1].num_bytes == 2 * 8 * 4


def test_what_is_never_replayed_says_why() -> None:
    class Routed(Block):
        def forward(self, x: Tensor) -> Tensor:
            weights, _ = torch.topk(x, 2)
            return super().forward(x) * weights.sum(-1, keepdim=True)

    model = nn.Sequential(Routed(), Routed())
    with actmem.apply(model, Full()) as handle:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        trace = handle.trace()
    (row,) = [row for row in trace.blocks[0].rows if row.op == "aten.topk.default"]
    assert (row.decision, row.never) == ("recompute", "routing")
    assert "never (routing)" in str(trace)


def test_a_tracer_decides_as_the_verdicts_do() -> None:
    verdicts = resolve(
        Selective(save=[every_second("matmul")]).rules(), layer=0, num_layers=1, modules={"": "layers.0"}, roles={}
    )
    tracer = Tracer(verdicts)
    counts, out = tracer.new_counts(), torch.empty(3)
    made = [tracer.decide(describe(aten.mm.default), "", counts, out) for _ in range(3)]
    assert made == ["save", "recompute", "save"]
    assert tracer.known == {}, "or later calls would not be asked for"
    assert [(row.nth, row.decision, row.rule, row.num_bytes) for row in tracer.rows] == [
        (0, "save", 1, 12),
        (1, "recompute", 2, 12),
        (2, "save", 1, 12),
    ]


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize(
    "mode",
    [
        Selective(save=["*.mlp::matmul"]),
        Targets(["mlp", "norm"], layers="1:"),
        SaveEverything(),
    ],
    ids=repr,
)
def test_the_table_reads_like_this(mode: Mode, snapshot: SnapshotAssertion) -> None:
    text = str(applied(mode).trace())
    assert text == snapshot
    assert max(map(len, text.splitlines())) <= 140


# ---------------------------------------------------------------- the log


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "actmem.decisions"]


def test_each_operator_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="actmem.decisions")
    applied(Selective(save=["matmul"]), num_steps=3)
    assert logged(caplog) == [
        "aten.native_layer_norm.default: recompute by Rule('recompute'), first in norm",
        "aten.addmm.default: save by Rule('save', op='matmul'), first in mlp.gate",
        "aten.sigmoid.default: recompute by Rule('recompute'), first in mlp",
        "aten.mm.default: save by Rule('save', op='matmul'), first in mlp.up",
        "aten.mul.Tensor: recompute by Rule('recompute'), first in mlp",
        "aten.add.Tensor: recompute by Rule('recompute'), first in the block",
    ]
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_an_operator_with_both_decisions_is_logged_with_both(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="actmem.decisions")
    applied(Full(every=2))
    lines = [line for line in logged(caplog) if line.startswith("aten.mm.default")]
    assert lines == [
        "aten.mm.default: recompute by Rule('recompute', layers='0::2'), first in mlp.up",
        "aten.mm.default: save by Rule('save'), first in mlp.up",
    ]


def test_nothing_is_logged_unless_somebody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="actmem.decisions")
    applied(Full())
    assert logged(caplog) == []
    already: set[tuple[str, str]] = set()
    log_once([row("", "aten.mm.default")], (Rule("save"),), already)
    assert already == set(), "what was not logged is logged when somebody listens"


# ---------------------------------------------------------------- targets within targets


def row(module: str, op: str = "aten.mm.default", *targets: int, decision: str = "recompute", rule: int = 0) -> Traced:
    return Traced(module, op, 0, decision, rule, None, targets, 8)


@pytest.mark.parametrize(
    ("covers", "found"),
    [
        # rule -> the operators that it covers
        ({0: "ab", 1: "abc"}, {0: (1,)}),
        ({0: "abc", 1: "ab"}, {1: (0,)}),
        ({0: "abx", 1: "abc"}, {}),  # in part
        ({0: "ab", 1: "cd"}, {}),  # apart
        ({0: "ab", 1: "ab"}, {1: (0,)}),  # of two equal ones the later
        ({0: "ab", 1: "ax", 2: "bx"}, {2: (0, 1)}),  # by others together
        ({0: "a", 1: "ab", 2: "abc"}, {0: (2,), 1: (2,)}),  # one in another in a third
        ({0: "ab", 1: "bc", 2: "ca"}, {2: (0, 1)}),  # a ring: one can go, and then no other
        ({0: "a", 2: "ab"}, {}),  # rule 1 names no target, and might decide otherwise if rule 0 did not
        ({0: "ab", 2: "a"}, {2: (0,)}),  # but not if rule 0 stays
        ({0: "abc"}, {}),
        ({}, {}),
    ],
)
def test_a_target_is_subsumed_if_leaving_it_out_changes_no_decision(
    covers: dict[int, str], found: dict[int, tuple[int, ...]]
) -> None:
    rows = []
    for name in "abcdx":
        targets = [rule for rule, those in covers.items() if name in those]
        if targets:
            rows.append(row(name, "aten.mm.default", *targets, rule=targets[0]))
    assert subsumed(rows) == found


def test_a_target_within_another_that_is_decided_otherwise_is_not_subsumed() -> None:
    kernel_only = [
        row("q", "aten.mm.default", 0, 1, decision="save", rule=0),
        row("", "aten.bmm.default", 1, decision="recompute", rule=1),
    ]
    assert subsumed(kernel_only) == {}
    modes = Rules([Rule("save", target="mlp", op="matmul"), Rule("recompute", target="mlp"), Rule("save")])
    handle = applied(modes)
    assert handle.trace().subsumed == ()
    assert {(r.op, r.decision) for r in handle.trace().blocks[0].rows if r.module.startswith("mlp.")} == {
        ("aten.addmm.default", "save"),
        ("aten.mm.default", "save"),
    }


def test_a_rule_that_decides_nothing_because_of_earlier_ones_is_named() -> None:
    handle = applied(Targets(["mlp", "own:gate"]), own={"own:gate": ("mlp.gate",)})
    (line,) = handle.trace().subsumed
    assert line == "target 'own:gate' adds nothing: everything it covers is also covered by 'mlp'."
    assert line in handle.report().notes
    assert line in str(handle.trace()) and line in str(handle.report())
    covered = {r.op: r.targets for r in handle.trace().blocks[0].rows}
    assert covered["aten.addmm.default"] == (0, 1) and covered["aten.mm.default"] == (0,)


def test_layers_are_part_of_what_a_target_covers() -> None:
    apart = Rules(
        [Rule("recompute", target="mlp", layers="0"), Rule("recompute", target="mlp", layers="1:"), Rule("save")]
    )
    assert applied(apart).trace().subsumed == ()
    within = Rules([Rule("recompute", target="mlp", layers="0"), Rule("recompute", target="mlp"), Rule("save")])
    assert len(applied(within).trace().subsumed) == 1
