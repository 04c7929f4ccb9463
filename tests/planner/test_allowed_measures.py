"""A planner uses what it is allowed to, and nothing else; what it finds is kept, applied and measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import actmem
from actmem.cli import main
from actmem.cli.shared import save_plan
from actmem.units import UNITS, size
from tests.flat_device import FLAT
from tests.stepping.trainings import DIM, adamw, made, mean

BATCH = (torch.randn(256, DIM, generator=torch.Generator().manual_seed(0)),)
DISK = actmem.OptimizerState(to="disk", min_bytes=1024)


@pytest.fixture(scope="module")
def profile() -> actmem.Profile:
    model = made()
    return actmem.profile(model, BATCH, loss=mean, blocks="layers.*", optimizer=adamw(model))


def fit(profile: actmem.Profile, part: float, **options: Any) -> actmem.Plan:
    full = actmem.predict(profile, actmem.Full(), FLAT).tensor_bytes
    return actmem.fit(profile, budget=int(part * full) + 5000, device=FLAT, **options)


def used(plan: actmem.Plan) -> set[str]:
    found = {name for name in ("split", "step_in_backward", "optimizer_state") if getattr(plan, name) is not None}
    return found | ({"offload"} if plan.offload is not None else set())


@pytest.mark.parametrize(
    "allow", [(), ("step_in_backward",), ("optimizer_state",), ("step_in_backward", "optimizer_state", "offload")]
)
def test_nothing_is_used_that_is_not_allowed(profile: actmem.Profile, allow: tuple[str, ...]) -> None:
    for part in (1.2, 0.9, 0.75):
        try:
            plan = fit(profile, part, allow=allow)
        except actmem.BudgetError:
            assert "optimizer_state" not in allow
            continue
        assert used(plan) <= {*allow}
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes <= plan.predicted.budget_bytes
        assert actmem.predict(profile, plan, FLAT).live_bytes == plan.predicted.peak_bytes


def test_what_is_not_needed_is_not_used(profile: actmem.Profile) -> None:
    everything = ("step_in_backward", "optimizer_state", "offload")
    assert used(fit(profile, 4.0, allow=everything)) == set()
    tight = fit(profile, 0.75, allow=everything)
    assert "optimizer_state" in used(tight)
    assert tight.predicted is not None and tight.predicted.step_time_ratio > 1.0  # the copies take time


def test_a_plan_with_measures_is_kept_applied_and_measured(tmp_path: Path) -> None:
    model = made()
    optimizer = adamw(model)
    how: dict[str, Any] = {"step_in_backward": actmem.StepInBackward(), "optimizer_state": DISK}
    found = actmem.profile(model, BATCH, loss=mean, blocks="layers.*", optimizer=optimizer)
    full = actmem.predict(found, actmem.Full(), FLAT).tensor_bytes
    plan = actmem.fit(
        model, BATCH, loss=mean, blocks="layers.*", optimizer=optimizer, budget=int(0.75 * full), device=FLAT, **how
    )
    for name in ("plan.json", "plan.toml"):
        save_plan(plan, tmp_path / name)
        assert actmem.Plan.load(tmp_path / name) == plan
    assert plan.bitwise and plan.predicted is not None

    def step() -> None:
        out = model(*BATCH)
        loss = mean(out)
        loss.backward()
        optimizer.step()

    with actmem.apply(model, plan, optimizer=optimizer):
        for _ in range(3):
            step()
        measured = actmem.measure(step, model=model, optimizer=optimizer)
    assert abs(measured.tensor_bytes - plan.predicted.peak_bytes) <= 64
    assert all(t.numel() for state in optimizer.state.values() for t in state.values())  # all of it is back


def test_a_budget_chooses_too_and_what_is_said_twice_is_refused() -> None:
    model = made()
    optimizer = adamw(model)
    found = actmem.profile(model, BATCH, loss=mean, blocks="layers.*", optimizer=optimizer)
    full = actmem.predict(found, actmem.Full(), FLAT).tensor_bytes
    budget = actmem.Budget(int(0.97 * full), allow=["step_in_backward"])
    with actmem.apply(model, budget, example=BATCH, loss=mean, blocks="layers.*", optimizer=optimizer) as applied:
        assert used(applied.plan) == {"step_in_backward"}
        mean(model(*BATCH)).backward()
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(actmem.ModeError, match=r"optimizer_state and allow=\['optimizer_state'\] cannot be combined"):
        actmem.fit(found, budget=full, device=FLAT, optimizer_state=DISK, allow=["optimizer_state"])
    with pytest.raises(actmem.ModeError, match="Expected a list of: split, optimizer_state, step_in_backward, offload"):
        actmem.Budget(full, allow=["optimiser"])


def said(text: str) -> dict[tuple[str, ...], tuple[int, bool]]:
    """Return what a refusal offers: measures -> the bytes that it names, and whether they fit."""
    offers = re.findall(r"What would help: allow=\[(.*?)\]: ([\d.]+) (\w+).*?, (which fits|not enough)", text)
    return {
        tuple(re.findall(r"\w+", names)): (round(float(number) * UNITS[unit]), verdict == "which fits")
        for names, number, unit, verdict in offers
    }


def test_a_refusal_names_each_measure_that_would_help_and_the_peak_that_it_would_have(profile: actmem.Profile) -> None:
    with pytest.raises(actmem.BudgetError) as caught:
        fit(profile, 0.8)
    offers = said(str(caught.value))
    assert ("optimizer_state",) in offers and ("step_in_backward",) in offers and ("split",) not in offers
    for names, (num_bytes, fits) in offers.items():
        plan = actmem.fit(profile, budget=int(1.05 * num_bytes), device=FLAT, allow=names)
        assert used(plan) <= {*names}
        if fits:
            assert used(fit(profile, 0.8, allow=names)) == {*names}
        else:
            with pytest.raises(actmem.BudgetError):
                fit(profile, 0.8, allow=names)


def test_where_no_measure_is_enough_by_itself_those_that_are_together_are_named(profile: actmem.Profile) -> None:
    alone = {name: smallest(profile, name) for name in ("step_in_backward", "optimizer_state")}
    both = smallest(profile, *alone)
    assert both < min(alone.values())
    budget = (both + min(alone.values())) // 2
    with pytest.raises(actmem.BudgetError) as caught:
        actmem.fit(profile, budget=budget, device=FLAT)
    offers = said(str(caught.value))
    assert [fits for _, fits in offers.values()] == [False, False, True]
    assert offers["step_in_backward", "optimizer_state"][0] == pytest.approx(both, rel=0.05)
    with pytest.raises(actmem.BudgetError, match=r"'optimizer_state'\]: .*, still not enough"):
        actmem.fit(profile, budget=both // 2, device=FLAT)


def smallest(profile: actmem.Profile, *allow: str) -> int:
    with pytest.raises(actmem.BudgetError) as caught:
        actmem.fit(profile, budget="1KiB", device=FLAT, allow=allow)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


class Headed(torch.nn.Module):
    """Blocks with a head that is so wide that the loss has the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32)) for _ in range(4)])
        self.head = torch.nn.Linear(32, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.blocks(x)), x[:, 0].long().abs())


def test_a_spike_of_the_loss_is_called_one_and_what_would_lower_it_is_said_unless_it_was_allowed() -> None:
    model, batch = Headed(), (torch.randn(512, 32),)
    options: dict[str, Any] = {"device": FLAT, "optimizer": None}
    plan = actmem.fit(model, batch, budget="1GiB", **options)
    assert plan.predicted is not None
    assert any("one spike of the loss" in text and ": allow split" in text for text in plan.predicted.peak_words)
    allowed = actmem.fit(model, batch, budget="1GiB", allow=["split"], **options)
    assert allowed.predicted is not None
    assert not any(": allow split" in text for text in allowed.predicted.peak_words)
    with pytest.raises(actmem.BudgetError) as caught:
        actmem.fit(model, batch, budget=plan.predicted.peak_bytes // 2, **options)
    num_bytes, fits = said(str(caught.value))["split",]
    assert fits
    split = actmem.fit(model, batch, budget=int(1.05 * num_bytes), allow=["split"], **options)
    assert split.split is not None


def test_a_plan_that_fits_says_what_stepping_otherwise_would_make_of_its_peak(profile: actmem.Profile) -> None:
    plan = fit(profile, 1.2)
    assert plan.predicted is not None
    (text,) = [text for text in plan.predicted.peak_words if text.startswith("What was not allowed and would lower it")]
    state = actmem.OptimizerState(to="disk")
    lower = actmem.predict(profile, replace(plan, optimizer_state=state), FLAT).peak_bytes
    assert f"allow=['optimizer_state']: {size(lower)}" in text
    allowed = fit(profile, 1.2, allow=["optimizer_state", "step_in_backward"])
    assert allowed.predicted is not None
    assert not any("not allowed" in text for text in allowed.predicted.peak_words)


def test_the_command_line_lists_what_each_measure_gains(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["largest", "tiny:llama-3.1-8b", "--vary", "sequence", "--device", "h100-80gb", "--budget", "1400MiB"]
    assert main([*arguments, "--multiple", "4096", "--allow", "split,step_in_backward"]) == 0
    printed = capsys.readouterr().out
    assert "with nothing allowed (1.00x" in printed
    assert "with split, step_in_backward allowed" in printed
