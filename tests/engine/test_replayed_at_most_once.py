"""How often operators run again: once each, however long the chain. Counted, never timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    Checkpointed,
    Operators,
    Program,
    batch,
    compare,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def running_sum(num_terms: int) -> Any:
    def body(block: Program, h: Tensor) -> Tensor:
        out = h @ block.v
        for _ in range(num_terms):
            h = h + 0.01
            out = out + h.sigmoid()
        return out

    return body


def written_rows(num_rows: int) -> Any:
    def body(block: Program, h: Tensor) -> Tensor:
        out = h.new_zeros(num_rows, *h.shape)
        for n in range(num_rows):
            h = (h @ block.v).sin()
            out[n] = h
        return out.sum(0)

    return body


def experts(num_experts: int) -> Any:
    def body(block: Program, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for n in range(num_experts):
            rows = torch.arange(n % 2, 6, 2)
            out.index_add_(0, rows, (h[rows] @ block.v * (n + 1)).tanh())
        return out + h

    return body


def num_replayed_operators(body: Any, mode: Any) -> int:
    model = stack(body, num_blocks=1)
    with actmem.apply(model, mode, blocks="0"):
        simple_step(model, batch())  # the observed step
        loss = total(model(batch()))
        with Operators() as operators:
            loss.backward()
    return sum(operators.replayed.values())


@both
@pytest.mark.parametrize("program", [running_sum, written_rows, experts])
def test_a_chain_of_twice_the_length_replays_twice_the_operators(program: Any, mode: Any) -> None:
    small, double, quadruple = (num_replayed_operators(program(n), mode) for n in (25, 50, 100))
    assert small > 0
    assert quadruple - double == 2 * (double - small)
    assert quadruple <= 4 * small + 8


@both
@pytest.mark.parametrize("program", [running_sum, written_rows, experts])
def test_a_long_chain_is_bitwise(program: Any, mode: Any) -> None:
    compare(lambda: stack(program(60)), mode)


def test_no_operator_is_replayed_twice_and_none_that_checkpoint_would_not_run() -> None:
    num_terms = 100
    body = running_sum(num_terms)
    model = stack(body, num_blocks=1)
    plain = Operators()
    with plain:
        model(batch())
    wrapped = nn.Sequential(Checkpointed(stack(body, num_blocks=1)[0]))
    loss = total(wrapped(batch()))
    by_checkpoint = Operators()
    with by_checkpoint:
        loss.backward()
    with actmem.apply(model, RECOMPUTE, blocks="0"):
        simple_step(model, batch())
        loss = total(model(batch()))
        ours = Operators()
        with ours:
            loss.backward()
    computing = [
        name
        for name in ours.replayed
        if not name.startswith(("aten.as_strided", "aten.detach", "aten.empty", "aten.set_"))
    ]
    assert computing
    for name in computing:
        assert ours.replayed[name] <= plain.others[name], name
    assert ours.replayed["aten.sigmoid.default"] == num_terms
    assert sum(ours.replayed[name] for name in computing) <= sum(by_checkpoint.others.values())


def test_the_transient_of_a_long_chain_is_no_more_than_that_of_checkpoint() -> None:
    def build() -> nn.Module:
        return stack(running_sum(60), num_blocks=2, width=64)

    def peak(model: nn.Module) -> int:
        x = batch(64, 64)
        simple_step(model, x)
        model.zero_grad()
        return actmem.measure(lambda: simple_step(model, x), model=model).step_bytes

    managed = build()
    wrapped = nn.Sequential(*[Checkpointed(block) for block in build()])
    with actmem.apply(managed, RECOMPUTE):
        assert peak(managed) <= 1.02 * peak(wrapped)


@both
def test_a_tape_of_many_operators_needs_no_deep_recursion(mode: Any) -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        h = h @ block.v
        for _ in range(6000):
            h = h + 0.001
        return h.sin()

    model = stack(body, num_blocks=1)
    with actmem.apply(model, mode, blocks="0") as applied:
        simple_step(model, batch(2))
        assert applied.report().num_replayed > 0


@pytest.mark.slow
def test_a_tape_of_120_000_operators() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        h = h @ block.v
        for _ in range(60_000):
            h = (h + 0.0001).sin()
        return h

    compare(lambda: stack(body, num_blocks=1), RECOMPUTE, blocks="0", x=lambda: batch(2))
