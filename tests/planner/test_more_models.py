"""Models with an unusual way of attending, sharing or routing: what is predicted of them is what they take."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import actmem
from actmem import Rule
from actmem.devices import device
from actmem.planner import fit_profile
from actmem.planner.solver import smallest_peak
from actmem.units import size
from tests.further_models import UNUSUAL, build
from tests.planner.steps import DEVICE

MODES: dict[str, Any] = {
    "save": actmem.SaveEverything(),
    "full": actmem.Full(),
    "matmul": actmem.Selective(save=["matmul", "convolution", "attention"]),
    "half": actmem.Selective(save=[actmem.every_second("matmul|batched_matmul|convolution")]),
    "pointwise": actmem.Rules([Rule("recompute", op="pointwise"), Rule("save")]),
}
BY_DATA = frozenset(("bigbird_pegasus", "led", "nllb_moe"))
"""Models that look at numbers in tensors, so that only a real step tells what they do."""


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def measured(name: str, mode: Any) -> int:
    """Return the peak of the third step."""
    model, batch = build(name)

    def step() -> None:
        out: Any = model(**batch)
        out.loss.backward()

    with actmem.apply(model, mode):
        for _ in range(2):
            _begin(model)
            step()
        _begin(model)
        return actmem.measure(step, model=model).tensor_bytes


def _begin(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    seed()


def profiled(name: str, *, fake: bool) -> actmem.Profile:
    model, batch = build(name)
    seed()
    return actmem.profile(model, batch, fake=fake, optimizer=None)


def same(name: str, mode: Any, *, fake: bool) -> None:
    assert actmem.predict(profiled(name, fake=fake), mode).tensor_bytes == measured(name, mode)


@pytest.mark.parametrize(("name", "mode"), [*zip(UNUSUAL, [*MODES][1:] * 2, strict=True)])
def test_a_real_profile_predicts_what_is_measured(name: str, mode: str) -> None:
    same(name, MODES[mode], fake=False)


def test_a_fake_profile_of_one_block_that_is_called_three_times_is_no_other() -> None:
    same("albert", MODES["full"], fake=True)


def test_a_budget_below_every_exact_plan_is_kept_by_a_named_mode() -> None:
    profile = profiled("mra", fake=False)
    least = actmem.predict(profile, MODES["full"]).peak_bytes
    assert least < smallest_peak(profile)[0]
    plan = fit_profile([profile], least, device(DEVICE))
    assert plan.predicted is not None
    assert not plan.exact and plan.predicted.bound == 1.0 and plan.predicted.gap > 0
    assert measured("mra", plan) == actmem.predict(profile, plan).tensor_bytes <= least
    with pytest.raises(actmem.BudgetError) as error:
        fit_profile([profile], least // 2, device(DEVICE))
    assert f"The smallest peak is {size(least)}" in str(error.value)
    assert "can be below" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_every_mode_takes_what_is_predicted(name: str, mode: str, fake: bool) -> None:
    if fake and name in BY_DATA:
        with pytest.raises(actmem.UnsupportedError, match="fake"):
            profiled(name, fake=True)
        return
    same(name, MODES[mode], fake=fake)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_fitted_plan_takes_what_is_predicted_and_keeps_its_budget(name: str, share: float) -> None:
    profile = profiled(name, fake=False)
    least, most = smallest_peak(profile)[0], actmem.predict(profile, MODES["save"]).peak_bytes
    budget = int(least + share * (most - least))
    model, batch = build(name)
    seed()
    plan = actmem.fit(model, batch, budget=f"{budget}B", headroom=0, fake=False, optimizer=None, device=DEVICE)
    assert plan.predicted is not None
    assert measured(name, plan) == actmem.predict(profile, plan).tensor_bytes
    assert plan.predicted.peak_bytes <= budget
