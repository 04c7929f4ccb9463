"""What is measured is what torch's allocator sees of a step that nobody watches."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import actmem
from actmem.errors import UnsupportedError
from actmem.measuring import AllocatorCheck, measure
from actmem.measuring.inplace_formulas import FORMULAS
from tests.children import run
from tests.unit.measuring.allocator_programs import AS_THEY_ARE, IN_PLACE

STATE = torch.default_generator.get_state().nbytes


def programs(*arguments: str) -> dict[str, tuple[int, int]]:
    """Run all programs in a process of its own. Return what was allocated and what was measured."""
    child = run("-m", "tests.unit.measuring.allocator_programs", *arguments)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_every_formula_is_counted_as_torch_runs_it_unwatched() -> None:
    found = programs()
    assert found.keys() == IN_PLACE.keys() | AS_THEY_ARE.keys()
    assert {name: both for name, both in found.items() if abs(both[0] - both[1]) > 64} == {}


def test_without_the_list_every_formula_on_it_is_counted_too_high() -> None:
    found = programs("forget")
    assert {name for name, (allocated, measured) in found.items() if measured > allocated + 64} == IN_PLACE.keys()


def test_each_operator_of_the_list_is_one_that_torch_has() -> None:
    for name in FORMULAS:
        _, packet, overload = name.split(".")
        assert getattr(getattr(torch.ops.aten, packet), overload) is not None


def test_the_workspace_of_a_kernel_is_counted_and_listed() -> None:
    lstm, x = nn.LSTM(16, 32), torch.randn(20, 4, 16)
    found = measure(lambda: lstm(x)[0].sum().backward(), model=lstm)
    assert found.peak_op is not None and found.unseen[found.peak_op.op] > 1000
    assert found.peak_bytes == sum(found.by_category.values()) == found.tensor_bytes + sum(found.unseen.values())


def test_the_state_of_a_generator_that_is_kept_for_a_replay_is_counted() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))
    x = torch.ones(8, 8, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()
        x.grad = None

    with actmem.apply(model, actmem.Full()):
        for _ in range(2):
            step()
        found = measure(step, model=model, check=True)
    assert 3 * STATE <= found.unseen["aten.bernoulli_.float"] <= 4 * STATE + 64  # one more while it is replayed
    assert found.check is not None and found.check.agrees


def test_torchs_own_checkpoint_keeps_states_too() -> None:
    x = torch.ones(8, 8, requires_grad=True)

    def step() -> None:
        y = checkpoint(lambda x: nnf.dropout(x.sin(), 0.5).sin(), x, use_reentrant=False)
        y.sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
        x.grad = None

    step()
    found = measure(step, check=True)
    assert sum(found.unseen.values()) >= STATE
    assert found.check is not None and found.check.agrees


def test_a_check_says_how_far_a_measurement_is_off() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        torch.ones(1000 * len(calls))  # twice as much the second time

    found = measure(step, check=True)
    assert len(calls) == 2
    assert found.check == AllocatorCheck(allocated_bytes=8000, measured_bytes=4000)
    assert not found.check.agrees
    assert "DIFFERS from the allocator, which gave out 8,000 bytes where 4,000 were measured (-4,000)" in str(found)


def test_a_step_is_run_once_unless_a_check_is_asked_for() -> None:
    calls: list[int] = []
    found = measure(lambda: calls.append(1))
    assert (len(calls), found.check) == (1, None)


def test_within_a_profiler_a_step_is_measured_without_what_only_the_allocator_sees() -> None:
    lstm, x = nn.LSTM(16, 32), torch.randn(20, 4, 16)

    def step() -> None:
        lstm(x)[0].sum().backward()

    with profile(activities=[ProfilerActivity.CPU]):
        found = measure(step, model=lstm)
        with pytest.raises(UnsupportedError, match="another profiler is running"):
            measure(step, model=lstm, check=True)
    assert found.unseen == {}
    assert found.peak_bytes == found.tensor_bytes > 0


def test_nothing_waits_for_a_device_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    running, waited = [False], list[bool]()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: waited.append(running[0]))
    with FakeTensorMode() as mode:
        weight = nn.Parameter(FakeTensor(mode, torch.empty(4, 4, device="meta"), torch.device("cuda")))
        weight.grad = torch.empty_like(weight)
        optimizer = torch.optim.SGD([weight], foreach=False)

        def step() -> None:
            running[0] = True
            weight.detach() * 2
            optimizer.step()
            running[0] = False

        found = measure(step, optimizer=optimizer)
    assert found.device == "cuda:0" and {sample.phase for sample in found.timeline} == {"forward", "optimizer"}
    assert waited == [False], "only when the step is over"


def test_an_operator_that_raises_leaves_the_next_ones_counted() -> None:
    def step() -> None:
        x = torch.ones(100)
        with pytest.raises(RuntimeError, match="size"):
            x + torch.ones(7)
        x.sort()

    found = measure(step, check=True)
    assert found.check is not None and found.check.agrees
