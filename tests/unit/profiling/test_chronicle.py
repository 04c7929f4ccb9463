"""A profile has written down every operator of a step: its work, and what is alive after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import actmem

ROWS, WIDTH, BLOCKS = 8, 16, 3


def build() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


@pytest.mark.parametrize("fake", [True, False])
def test_the_work_of_a_replay_is_that_of_the_operators_it_runs(fake: bool) -> None:
    profile = actmem.profile(build(), (torch.ones(ROWS, WIDTH),), loss=loss, fake=fake)
    product = 2 * ROWS * WIDTH * WIDTH
    assert actmem.predict(profile, actmem.Full(), "h100-80gb").replayed_flops == BLOCKS * product
    assert actmem.predict(profile, actmem.Full(every=2), "h100-80gb").replayed_flops == 2 * product
    assert actmem.predict(profile, actmem.SaveEverything(), "h100-80gb").replayed_flops == 0


@pytest.mark.parametrize("fake", [True, False])
def test_the_peak_is_the_measured_one(fake: bool) -> None:
    model, x = build(), torch.ones(ROWS, WIDTH)
    profile = actmem.profile(model, (x,), loss=loss, fake=fake, optimizer=None)

    def step() -> None:
        out = model(x)
        loss(out).backward()

    measured = actmem.measure(step, model=model)
    assert actmem.predict(profile, actmem.SaveEverything(), "h100-80gb").tensor_bytes == measured.tensor_bytes
