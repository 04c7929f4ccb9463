"""What one block call did, value by value."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem import Full
from actmem.decisions import Reason
from actmem.engine.observation import Observation, ObservedOperator
from actmem.engine.operators import describe
from actmem.engine.values import Node, Value, geometry
from actmem.torchcompat import storage_key
from tests.engine.cases import Program, batch, simple_step, stack, total

aten = torch.ops.aten


class Handle:
    """What autograd would hold."""

    def __init__(self, value: Value) -> None:
        self.value = value


def value_of(tensor: Tensor, why: Reason | None = None, node: Any = None) -> Value:
    return Value(weakref.ref(tensor.untyped_storage()), node, 0, why)


def observed(body: Any, *, backward: bool = True, num_steps: int = 1) -> tuple[list[ObservedOperator], Observation]:
    model = stack(body, num_blocks=1)
    with actmem.apply(model, Full(), blocks="0") as applied:
        for _ in range(num_steps):
            loss = total(model(batch()))
            if backward:
                loss.backward()
        found = applied._runners[0].observation
    assert found is not None
    return found.rows, found


# -------------------------------------------------------------------- by hand


def test_what_is_made_and_what_is_given_are_told_apart() -> None:
    weight, buffer, x, out = nn.Parameter(torch.ones(2)), torch.ones(2), torch.ones(2), torch.ones(2, 3)
    seen = Observation(frozenset({storage_key(weight.untyped_storage()), storage_key(buffer.untyped_storage())}))
    values = [value_of(t, Reason.EXTERNAL) for t in (weight, buffer, x)]
    for value, t in zip(values, (weight, buffer, x), strict=True):
        seen.given(value, t, t.nbytes)
    seen.begin(aten.mm.default)
    node = Node(aten.mm.default, [None], None, [(0, -1, v, *geometry(x)) for v in values])
    made = value_of(out, node=node)
    seen.made(made, describe(aten.mm.default), "mlp.up", out)
    assert [(r.kind, r.op, r.index) for r in seen.rows] == [
        ("state", "parameter", -1),
        ("state", "buffer", -1),
        ("input", "input", -1),
        ("made", "aten.mm.default", 0),
    ]
    row = made.row
    assert row is seen.rows[3] and row.parents == tuple(seen.rows[:3])
    assert (row.module, row.shape, row.dtype, row.num_bytes) == ("mlp.up", (2, 3), "float32", 24)
    assert str(row) == "mlp.up aten.mm.default [2, 3] float32" and str(seen.rows[2]) == "input [2] float32"


def test_bytes_are_those_of_the_storage() -> None:
    seen = Observation(frozenset())
    out = torch.ones(10)[:2]
    seen.begin(aten.mm.default)
    value = value_of(out)
    seen.made(value, describe(aten.mm.default), "", out)
    assert value.row.num_bytes == 40 and value.row.shape == (2,)


def test_saved_and_held_are_what_is_alive_when_it_is_asked() -> None:
    seen = Observation(frozenset())
    x, y = torch.ones(2), torch.ones(2)
    values = [value_of(x), value_of(y)]
    for value, t in zip(values, (x, y), strict=True):
        seen.begin(aten.sin.default)
        seen.made(value, describe(aten.sin.default), "", t)
    handles = [Handle(v) for v in values]
    for value, handle in zip(values, handles, strict=True):
        seen.saved(value, handle)
    values[1].held, values[1].why = y, Reason.BARRIER
    seen.settle()
    assert [(r.saved, r.held, r.why) for r in seen.rows] == [(True, False, None), (True, True, Reason.BARRIER)]
    del handles[1], handle, value, values[1]  # a branch without a gradient dies
    seen.settle()
    assert [(r.saved, r.held) for r in seen.rows] == [(True, False), (False, False)]


def test_the_same_program_has_the_same_signature() -> None:
    def signature(*ops: Any, size: int = 2) -> Any:
        seen = Observation(frozenset())
        for op in ops:
            t = torch.ones(size)
            seen.begin(op)
            seen.made(value_of(t), describe(op), "", t)
        seen.settle()
        return seen.signature()

    first = signature(aten.sin.default, aten.cos.default)
    assert first == signature(aten.sin.default, aten.cos.default) and hash(first) is not None
    assert first != signature(aten.cos.default, aten.sin.default)
    assert first != signature(aten.sin.default, aten.cos.default, size=3)
    assert first != signature(aten.sin.default)


def test_a_forgotten_program_keeps_its_rows() -> None:
    rows, found = observed(lambda block, h: (h @ block.v).sin())
    assert found.funcs == [] and rows and all(r.parents == () for r in rows)


# -------------------------------------------------------------------- in a block


def test_every_operator_is_a_row_with_its_place() -> None:
    rows, _ = observed(
        lambda block, h: (h @ block.v).sin().exp(),
    )
    made = [(r.op, r.index) for r in rows if r.kind == "made"]
    assert made == [
        ("aten.mm.default", 0),
        ("aten.tanh.default", 1),
        ("aten.mm.default", 2),
        ("aten.sin.default", 3),
        ("aten.exp.default", 4),
    ]
    by_op = {r.op: r for r in rows if r.kind == "made"}
    assert by_op["aten.tanh.default"].saved and by_op["aten.tanh.default"].replayed == 1
    assert not by_op["aten.sin.default"].saved and by_op["aten.sin.default"].replayed == 1  # on the way to exp
    assert by_op["aten.exp.default"].saved and not any(r.held for r in by_op.values())
    assert {r.op for r in rows if r.held and r.kind == "input"} == {"input"}


def test_views_are_no_rows() -> None:
    rows, _ = observed(lambda block, h: (h.t().t().view(6, 8) @ block.v).sin())
    ops = {r.op for r in rows}
    assert not any("view" in op or op.startswith("aten.t.") for op in ops)


def test_a_branch_that_nothing_needs_is_neither_saved_nor_held() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        (h @ block.v).exp()  # dies at once
        return h.cos()

    rows, _ = observed(body)
    assert [r.saved for r in rows if r.op == "aten.exp.default"] == [False]
    assert not any(r.replayed for r in rows if r.op == "aten.exp.default")


def test_overwritten_values_are_marked_and_copies_too() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        routed = h.detach().topk(8).values  # never replayed
        out = (h @ block.v) * (routed + 1).sin()  # what is saved here is replayed from it
        routed.mul_(2)
        return out

    rows, _ = observed(body)
    assert [(r.op, r.shape, r.dtype) for r in rows if r.overwritten] == [("aten.topk.default", (6, 8), "float32")]
    assert [r.op for r in rows if r.copied] == ["aten.topk.default"]


def test_an_observation_holds_no_tensor() -> None:
    kept: list[weakref.ref[Any]] = []

    def body(block: Program, h: Tensor) -> Tensor:
        out = (h @ block.v).sin()
        kept.extend(weakref.ref(t.untyped_storage()) for t in (h, out))
        return out.exp()

    model = stack(body, num_blocks=1)
    with actmem.apply(model, Full(), blocks="0") as applied:
        gc.disable()
        try:
            out = model(batch())
            kept.append(weakref.ref(out.untyped_storage()))
            del out
            assert len(kept) == 3 and all(reference() is None for reference in kept)
        finally:
            gc.enable()
        assert applied._runners[0].observation is not None


def test_a_later_step_leaves_the_observation_alone() -> None:
    model = stack(lambda block, h: (h @ block.v).sin(), num_blocks=1)
    with actmem.apply(model, Full(), blocks="0") as applied:
        simple_step(model, batch())
        first = applied._runners[0].observation
        assert first is not None
        replayed = [r.replayed for r in first.rows]
        simple_step(model, batch())
        assert applied._runners[0].observation is first and [r.replayed for r in first.rows] == replayed
