"""A planner uses what it is allowed to, and nothing else; what it finds is kept, applied and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import actmem
from actmem.cli import main
from actmem.cli.shared import save_plan
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


def test_the_command_line_lists_what_each_measure_gains(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["largest", "tiny:llama-3.1-8b", "--vary", "sequence", "--device", "h100-80gb", "--budget", "1400MiB"]
    assert main([*arguments, "--multiple", "512", "--allow", "split,step_in_backward"]) == 0
    printed = capsys.readouterr().out
    assert "with nothing allowed (1.00x" in printed
    assert "with split, step_in_backward allowed" in printed
