"""The caching allocator's settings are an argument of planning: used, kept, printed; refused where not simulated."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.allocator import AllocatorSettings
from actmem.errors import BudgetError, ModeError
from actmem.plan import Plan
from actmem.profiles import Profile

H100 = actmem.device("h100-80gb")
EXPANDABLE = "expandable_segments:True"
MIB = 2**20


class Widening(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@functools.cache
def fragmenting() -> Profile:
    """A step whose tensors have many sizes, so that few fit into the place of one that was freed."""
    model = nn.Sequential(*(Widening(256, 256 * k) for k in (3, 5, 4, 7, 6, 9))).to("meta")
    return actmem.profile(model, (torch.empty(4 * 4096, 256, device="meta"),), loss=torch.sum)


def fitted(mib: int, allocator: str | AllocatorSettings = "") -> Plan:
    return actmem.fit(fragmenting(), budget=H100.outside_bytes + mib * MIB, device=H100, allocator=allocator)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_a_budget_that_is_too_small_by_default_is_kept_with_expandable_segments_and_the_refusal_says_so() -> None:
    with pytest.raises(BudgetError, match="What would help: expandable segments") as caught:
        fitted(900)
    line = re.search(r"allocator='([^']*)'.* PYTORCH_CUDA_ALLOC_CONF=(\S+) ", str(caught.value))
    assert line is not None and line[1] == line[2] == EXPANDABLE
    told = fitted(900, line[1]).predicted
    assert told is not None and told.reserved_bytes is not None and told.reserved_bytes <= 900 * MIB
    with pytest.raises(BudgetError) as caught:
        fitted(400)  # the tensors alone are more
    assert "expandable" not in str(caught.value)


def test_a_plan_keeps_and_prints_its_settings_and_a_prediction_of_it_uses_them(tmp_path: Path) -> None:
    plan = fitted(1000, EXPANDABLE)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.predicted is not None and again.predicted.allocator == EXPANDABLE
    assert f"(allocator: {EXPANDABLE})" in str(again)
    assert fitted(1000, AllocatorSettings(expandable_segments=True)) == plan
    assert actmem.predict(fragmenting(), again, H100).reserved_bytes == again.predicted.reserved_bytes
    by_default = actmem.predict(fragmenting(), again, H100, allocator="").reserved_bytes
    assert by_default != again.predicted.reserved_bytes
    assert "(allocator: the defaults)" in str(fitted(1200))


def test_a_budget_takes_the_settings_to_the_plan_that_it_applies() -> None:
    model = nn.Sequential(*(Widening(8, 16) for _ in range(3)))
    mode = actmem.Budget("2GiB", device="h100-80gb", allocator=EXPANDABLE)
    applied = actmem.apply(model, mode, example=(torch.randn(2, 8),), loss=torch.sum)
    assert applied.plan.predicted is not None and applied.plan.predicted.allocator == EXPANDABLE


@pytest.mark.parametrize(
    ("variable", "allocator", "said"),
    [
        (EXPANDABLE, "", rf"the plan is for the defaults\. .* allocator='{EXPANDABLE}'"),
        ("", EXPANDABLE, rf"the plan is for {EXPANDABLE}\. .* leave allocator out"),
        ("backend:cudaMallocAsync", "", "another number of bytes: .* leaves all decisions to the driver"),
        (EXPANDABLE, f"{EXPANDABLE},garbage_collection_threshold:0.8", None),
        ("pinned_use_background_threads:True", "", None),
    ],
)
def test_the_environment_is_not_used_but_a_plan_for_other_settings_says_so(
    monkeypatch: pytest.MonkeyPatch, variable: str, allocator: str, said: str | None
) -> None:
    without = fitted(1200, allocator)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:8")  # the older variable is read first
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", variable)
    plan = fitted(1200, allocator)
    assert plan.predicted is not None and without.predicted is not None
    assert replace(plan, predicted=replace(plan.predicted, notes=())) == without
    assert len(plan.predicted.notes) == (said is not None)
    if said is not None:
        assert re.search(f"note: PYTORCH_CUDA_ALLOC_CONF is {variable!r} here, and .*{said}", str(plan))


@pytest.mark.parametrize(
    ("allocator", "device", "message"),
    [
        ("backend:cudaMallocAsync", "h100-80gb", "only `native` is simulated"),
        ("expandable_segment:True", "h100-80gb", "Did you mean 'expandable_segments'"),
        (EXPANDABLE, None, "is for a card"),
        (7, "h100-80gb", "allocator = 7 is not permitted"),
    ],
)
def test_settings_that_are_not_simulated_are_refused(allocator: str, device: str | None, message: str) -> None:
    with pytest.raises(ModeError, match=message):
        actmem.fit(fragmenting(), budget="2GiB", device=device, allocator=allocator)


def test_settings_cannot_be_combined_with_compiled_blocks() -> None:
    model = nn.Sequential(*(Widening(8, 16) for _ in range(3)))
    with pytest.raises(ModeError, match="adds to their graphs is not simulated"):
        actmem.fit(model, (torch.randn(2, 8),), budget="2GiB", device=H100, compiled=True, allocator=EXPANDABLE)
