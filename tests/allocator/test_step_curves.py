"""A plan's predicted step lies over the steps of a recording; where the recording differs, they part."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.allocator import Alloc, DeviceRecording, compare_step, find_steps, reenact, snapshot_from, step_curve
from actmem.plan import FitRecord, Plan
from actmem.profiles import Profile
from actmem.reporting.memory_page import memory_page
from actmem.simulation import on_card
from actmem.simulation.card_usage import step_changes, training_events
from tests.allocator.recorder import MIB, Recorder
from tests.cli.conftest import Run, run  # noqa: F401  # a fixture

H100 = actmem.device("h100-80gb")


class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 768), nn.Linear(768, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@functools.cache
def planned() -> tuple[Profile, Plan, FitRecord]:
    model = nn.Sequential(*(Widening() for _ in range(4))).to("meta")
    profile = on_card(actmem.profile(model, (torch.empty(9_000, 256, device="meta"),), loss=torch.sum), H100)
    plan = actmem.fit(profile, budget=H100.outside_bytes + 300 * MIB, device=H100)
    assert plan.predicted is not None
    return profile, plan, plan.predicted


def recorded(num_steps: int, more_bytes: int = 0) -> Recorder:
    """Train on the simulated allocator, and hold something more from the middle of each step to its end."""
    profile, plan, _ = planned()
    changes, _ = step_changes(profile, plan)
    recorder, names, more, now = Recorder(), dict[int | str, int](), None, "0"
    for _, event in training_events(profile, changes, H100.blas_workspace_bytes or 0, num_steps):
        step, _, storage = str(event.name).partition(": ")
        if step != now and storage and more is not None:
            recorder.free(more)
            more = None
        now = step if storage else now
        if isinstance(event, Alloc):
            made = recorder.alloc(event.num_bytes)
            assert made is not None
            names[event.name] = made
        else:
            recorder.free(names.pop(event.name))
        if more_bytes and storage == str(_middle(changes)) and isinstance(event, Alloc):
            more = recorder.alloc(more_bytes)
    return recorder


def _middle(changes: list[object]) -> int:
    made = [change for change in changes if isinstance(change, tuple) and change[1]]
    return made[len(made) // 2][0]


def reenacted(recorder: Recorder) -> DeviceRecording:
    return reenact(snapshot_from(recorder.snapshot(), "step"), 0)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_predicted_step_lies_over_the_recorded_ones(num_steps: int) -> None:
    _, _, told = planned()
    compared = compare_step(reenacted(recorded(num_steps)), told.curve)
    assert compared is not None
    assert len(compared.steps) == max(1, num_steps - 1)  # the first is another one: it makes the optimizer's state
    if num_steps > 2:  # otherwise all of the recording is compared
        assert compared.recorded == compared.predicted == told.curve
        assert compared.parting is None


def test_where_something_more_is_held_they_part() -> None:
    _, _, told = planned()
    recorder = recorded(5, 30 * MIB)
    compared = compare_step(reenacted(recorder), told.curve)
    assert compared is not None and compared.parting is not None
    assert 20 < compared.parting < 90
    assert 25 * MIB < compared.apart[compared.farthest] <= 30 * MIB


def test_the_command_says_peak_beside_peak_and_where_they_part(run: Run) -> None:  # noqa: F811
    _, plan, told = planned()
    plan.save("plan.json")
    for name, more_bytes in (("equal", 0), ("more", 30 * MIB)):
        Path(f"{name}.pickle").write_bytes(pickle.dumps(recorded(4, more_bytes).snapshot()))
    found = json.loads(run("snapshot", "equal.pickle", "--plan", "plan.json", "--json").out)["plan"]
    assert found["predicted_bytes"] == found["recorded_bytes"] == max(told.curve)
    assert found["predicted_reserved_bytes"] == found["recorded_reserved_bytes"] == told.reserved_bytes
    assert (found["step"]["parts_at"], found["step"]["farthest_by"], found["step"]["num_steps"]) == (None, 0, 3)
    said = run("snapshot", "more.pickle", "--plan", "plan.json").out
    assert "has 3 equal steps, of which the last is compared" in said
    assert "the curves part" in said and "% into the step, at model.py:" in said and "recorded +" in said


def test_the_page_draws_the_predicted_step_over_each_recorded_one() -> None:
    _, _, told = planned()
    recorder = recorded(4)
    snapshot = snapshot_from(recorder.snapshot(), "step")
    found = reenact(snapshot, 0)
    (device,) = memory_page("step.pickle", snapshot, [found], told).devices
    assert device.predicted.allocated == [*told.curve] * 3
    drawn = dict(zip(range(len(found.curve)), found.curve, strict=True))
    peak = device.predicted.allocated.index(max(told.curve))
    assert any(drawn[at][0] == max(told.curve) for at in range(device.predicted.moments[peak], len(drawn)))


def test_a_plan_without_a_curve_and_a_recording_without_a_trace_are_not_compared() -> None:
    _, _, told = planned()
    recorder = recorded(2)
    assert compare_step(reenacted(recorder), ()) is None
    ended = reenact(snapshot_from({**recorder.snapshot(), "device_traces": [[]]}, "step"), 0)
    assert compare_step(ended, told.curve) is None


def test_small_repetitions_are_not_taken_for_steps() -> None:
    step = [*[7] * 40, *range(100, 160), *[5] * 30]
    sizes = [1, 2, 3, *step * 3]
    allocated = [1000 - at % len(step) for at in range(len(sizes))]
    assert [len(each) for each in find_steps(sizes, allocated)][-2:] == [len(step)] * 2
    assert len(step_curve(step, step)) == 100
