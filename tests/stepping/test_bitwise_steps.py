"""Stepping in the backward pass, with state elsewhere, or both, is bitwise the plain loop; peaks are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actmem
from tests.flat_device import FLAT
from tests.stepping.trainings import DIM, NUM_STEPS, Run, adamw, is_same, made, mean, sgd

HOW: dict[str, dict[str, Any]] = {
    "in backward": {"step_in_backward": actmem.StepInBackward()},
    "on disk": {"optimizer_state": actmem.OptimizerState(to="disk", min_bytes=1024)},
    "in host memory": {"optimizer_state": actmem.OptimizerState(to="host", min_bytes=0, copy_cpu=True)},
    "both": {
        "step_in_backward": actmem.StepInBackward(),
        "optimizer_state": actmem.OptimizerState(to="disk", min_bytes=1024),
    },
}


@pytest.fixture(scope="module", params=[adamw, sgd], ids=["AdamW", "SGD"])
def plain(request: Any) -> tuple[Any, Any]:
    run = Run(request.param)
    run.train(0, NUM_STEPS)
    return request.param, run.state()


@pytest.mark.parametrize("how", HOW)
def test_twenty_steps_resumed_from_a_checkpoint_are_those_of_the_plain_loop(
    plain: tuple[Any, Any], how: str, tmp_path: Path
) -> None:
    make, expected = plain
    first = Run(make, **HOW[how])
    first.train(0, NUM_STEPS // 2)
    first.save(tmp_path / "checkpoint")
    assert first.applied is not None
    first.applied.remove()
    second = Run(make, **HOW[how])
    second.load(tmp_path / "checkpoint")
    second.train(NUM_STEPS // 2, NUM_STEPS)
    assert is_same(second.state(), expected)
    assert second.applied is not None
    second.applied.remove()
    assert is_same(second.state(), expected)  # all of the state is back in the optimizer


@pytest.mark.parametrize("how", ["in backward", "both"])
def test_checkpoints_are_those_of_the_plain_loop_in_either_direction(how: str, tmp_path: Path) -> None:
    whole = Run(adamw)
    whole.train(0, 6)
    parts = [Run(adamw), Run(adamw, **HOW[how]), Run(adamw)]
    for n, part in enumerate(parts):
        if n:
            part.load(tmp_path / "checkpoint")
        part.train(2 * n, 2 * n + 2)
        part.save(tmp_path / "checkpoint")
    assert is_same(parts[-1].state(), whole.state())


# -------------------------------------------------------------------- bytes


def measured(model: nn.Module, optimizer: Any, rows: int) -> actmem.Measurement:
    batch = torch.randn(rows, DIM)

    def step() -> None:
        out = model(batch)
        loss = mean(out)
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
        optimizer.zero_grad()
    return actmem.measure(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize("make", [adamw, sgd], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows", [8, 512], ids=["state", "activations"])
def test_the_peak_is_the_predicted_one(make: Any, how: str, rows: int) -> None:
    model = made()
    optimizer = make(model)
    found = actmem.profile(model, (torch.randn(rows, DIM),), loss=mean, blocks="layers.*", optimizer=optimizer)
    with actmem.apply(model, actmem.Full(), blocks="layers.*", optimizer=optimizer, **HOW[how]) as applied:
        predicted = actmem.predict(found, applied.plan, FLAT)
        assert abs(predicted.tensor_bytes - measured(model, optimizer, rows).tensor_bytes) <= 64
    plain = actmem.predict(found, replace(applied.plan, step_in_backward=None, optimizer_state=None), FLAT)
    assert predicted.tensor_bytes < plain.tensor_bytes or how == "in host memory"
    assert abs(plain.tensor_bytes - measured_plain(model, optimizer, rows)) <= 64


def measured_plain(model: nn.Module, optimizer: Any, rows: int) -> int:
    with actmem.apply(model, actmem.Full(), blocks="layers.*"):
        return measured(model, optimizer, rows).tensor_bytes
