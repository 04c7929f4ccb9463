"""The same inputs give the same plan: in any process, under any load, whatever the clock says."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import actmem
from actmem.errors import BudgetError
from actmem.planner import work
from tests.children import child, ended
from tests.planner.steps import DEVICE, peaks

PLANNER = Path(work.__file__).parent
BUSY = "import time\nend = time.monotonic() + 8\nwhile time.monotonic() < end: pass"


def test_processes_side_by_side_write_the_same_plans_to_the_byte() -> None:
    with contextlib.ExitStack() as running:
        first = running.enter_context(child("-m", "tests.planner.planned", env={"PYTHONHASHSEED": "1"}))
        for _ in range(2):
            running.enter_context(child("-c", BUSY))
        second = running.enter_context(child("-m", "tests.planner.planned", env={"PYTHONHASHSEED": "2"}))
        (one, complaints), (other, more) = ended(first), ended(second)
    assert first.returncode == second.returncode == 0, complaints + more
    assert one == other
    found = json.loads(one)
    assert len(found) == 6
    assert not any(json.loads(plan)["predicted"]["time_limit_hit"] for plan in found.values())


def clock(speed: float) -> Callable[[], float]:
    """Return a clock that runs so many times as fast as the real one."""
    real = work.perf_counter
    return lambda: speed * real()


def fitted(part: float, **options: float) -> actmem.Plan:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)])
    batch = (torch.zeros(512, 64),)
    full, plain = peaks(actmem.profile(model, batch, loss=torch.sum, optimizer=None))
    budget = int(full + part * (plain - full))
    return actmem.fit(model, batch, loss=torch.sum, optimizer=None, budget=budget, device=DEVICE, headroom=0, **options)


@pytest.mark.parametrize("speed", [0.01, 100.0])
def test_a_clock_that_runs_fast_or_slow_changes_nothing(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    plans = [fitted(part).to_json() for part in (0.1, 0.5)]
    monkeypatch.setattr(work, "perf_counter", clock(speed))
    assert [fitted(part, time_limit=1e6).to_json() for part in (0.1, 0.5)] == plans


def test_only_the_brake_reads_a_clock() -> None:
    reading = re.compile(r"^\s*(import time|from time import|import datetime|from datetime import)", re.MULTILINE)
    assert [path.name for path in sorted(PLANNER.glob("*.py")) if reading.search(path.read_text())] == ["work.py"]


def test_a_plan_that_the_time_limit_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fitted(0.5)
    assert plan.predicted is not None
    assert not plan.predicted.time_limit_hit
    assert "time_limit" not in str(plan)
    monkeypatch.setattr(work, "perf_counter", clock(1e9))
    plan = fitted(0.5, time_limit=1.0)
    assert plan.predicted is not None
    assert plan.predicted.time_limit_hit
    assert "stopped by time_limit before the search was done" in str(plan)
    assert plan.predicted.peak_bytes <= plan.predicted.budget_bytes
    assert actmem.Plan.from_json(plan.to_json()) == plan


def test_a_refusal_that_the_time_limit_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError) as refused:
        fitted(-0.5)
    assert "time_limit" not in str(refused.value)
    monkeypatch.setattr(work, "perf_counter", clock(1e9))
    with pytest.raises(BudgetError, match="stopped by time_limit: a longer one may find a smaller peak"):
        fitted(-0.5, time_limit=1.0)
