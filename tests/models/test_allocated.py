"""What is predicted of a step is what is measured, and what torch's allocator sees of a step that nobody watches."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import actmem
from tests.further_models import CLASSES, build
from tests.planner.steps import DEVICE
from tests.unit.measuring.allocator_programs import allocated
from tests.zoo import ZOO

QUICK = ["bert", "t5", "moe_topk", "lstm"]
"""Dropout, a value used by every layer, indexing by a router, and a kernel with a large workspace."""


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # BigBird draws its blocks from it


def zoo_step(name: str) -> tuple[nn.Module, Callable[[], None]]:
    case = ZOO[name]
    model = case.build()
    batch = case.batch(model)

    def step() -> None:
        seed()
        case.step(model, batch).backward()
        model.zero_grad()

    return model, step


def further_step(name: str) -> tuple[nn.Module, Callable[[], None]]:
    model, batch = build(name)

    def step() -> None:
        torch.manual_seed(0)
        model(**batch).loss.backward()
        model.zero_grad()

    return model, step


MODES: dict[str, Any] = {
    "save": actmem.SaveEverything(),
    "full": actmem.Full(),
    "matmul": actmem.Selective(save=["matmul", "convolution", "attention"]),
    "half": actmem.Selective(save=[actmem.every_second("matmul|batched_matmul|convolution")]),
    "pointwise": actmem.Rules([actmem.Rule("recompute", op="pointwise"), actmem.Rule("save")]),
}


def measured(step: Callable[[], None], model: nn.Module) -> int:
    """Return the peak of the third step, after comparing it with what the allocator sees of a further one."""
    for _ in range(2):
        step()
    gc.collect()
    found = actmem.measure(step, model=model, check=True)
    assert abs(found.step_bytes - allocated(step)) <= 64
    assert found.check is not None and found.check.agrees, str(found.check)
    return found.peak_bytes


def compare(model: nn.Module, step: Callable[[], None], modes: Sequence[str] = tuple(MODES)) -> None:
    """Compare plain training, modes and a fitted budget. Only Python numbers that autograd holds may be missing."""
    measured(step, model)
    profile = actmem.profile(model, step=step, fake=False)
    least, most = (actmem.predict(profile, MODES[mode], DEVICE).peak_bytes for mode in ("full", "save"))
    budget = int(least + 0.5 * (most - least)) + profile.numbers_bytes
    plans = {mode: MODES[mode] for mode in modes}
    if most > least:
        plans["budget"] = actmem.fit(model, step=step, fake=False, budget=f"{budget}B", headroom=0)
    for name, mode in plans.items():
        predicted = actmem.predict(profile, mode, DEVICE).peak_bytes
        with actmem.apply(model, mode):
            found = measured(step, model)
        assert -64 <= found - predicted <= max(64, profile.numbers_bytes), f"{name}: {predicted}, measured {found}"
        assert name != "budget" or found <= budget


@pytest.mark.parametrize("name", QUICK)
def test_a_models_predicted_and_measured_peak_is_the_allocators(name: str) -> None:
    compare(*zoo_step(name), modes=["full", "half"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO.keys() - set(QUICK)))
def test_every_models_predicted_and_measured_peak_is_the_allocators(name: str) -> None:
    compare(*zoo_step(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa is scripted
@pytest.mark.parametrize("name", CLASSES)
def test_the_predicted_and_measured_peak_of_further_classes_is_the_allocators(name: str) -> None:
    compare(*further_step(name))
