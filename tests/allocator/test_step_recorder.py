"""`actmem.record`: what can be known of it without a card. It has not run on one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import actmem
from actmem import torchcompat
from actmem.allocator import read_snapshot, reenact
from tests.allocator.recorder import Recorder

without_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")


@without_card
def test_without_a_card_it_is_refused_before_anything_runs(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    path = tmp_path / "step.pickle.xz"
    with pytest.raises(actmem.UnsupportedError) as raised, actmem.record(path):
        raise AssertionError("the step ran")
    assert str(raised.value) == snapshot
    assert not path.exists()


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(actmem.ModeError, match=r"must end in .pickle.xz"), actmem.record(tmp_path / "step.json"):
        raise AssertionError("the step ran")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Put the simulated allocator's record in the place of a card's: only its form is checked."""
    recorder = Recorder.example()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="a card", total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torchcompat, "start_memory_history", lambda: None)
    monkeypatch.setattr(torchcompat, "taken_memory_history", recorder.snapshot)
    return recorder


def test_the_file_has_snapshot_plan_prediction_and_versions(tmp_path: Path, card: Recorder) -> None:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    profile = actmem.profile(model, (torch.randn(2, 8),), loss=torch.sum, optimizer=None)
    foretold = actmem.predict(profile, actmem.Full(), "h100-80gb")
    path = tmp_path / "step.pickle.xz"
    with actmem.apply(model, actmem.Full()) as applied, actmem.record(path, plan=applied.plan, prediction=foretold):
        pass
    found = read_snapshot(path)
    assert reenact(found, 0).is_exact
    assert found.attachment.plan is not None
    assert actmem.Plan.from_json(found.attachment.plan) == applied.plan
    assert found.attachment.predicted_bytes == foretold.peak_bytes
    assert found.attachment.timeline == foretold.timeline
    assert found.attachment.versions["torch"] == torch.__version__
    assert found.attachment.versions["card"] == "a card"


def test_a_step_that_fails_is_recorded_and_its_error_is_raised(tmp_path: Path, card: Recorder) -> None:
    path = tmp_path / "step.pickle.xz"
    with pytest.raises(torch.OutOfMemoryError, match="the step"), actmem.record(path):
        raise torch.OutOfMemoryError("the step")
    assert read_snapshot(path).devices == [0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_step_is_recorded_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "step.pickle.xz"
    model = torch.nn.Linear(1024, 1024, device="cuda")
    with actmem.record(path):
        model(torch.randn(64, 1024, device="cuda")).sum().backward()
    found = reenact(read_snapshot(path), 0)
    assert found.allocations > 0
    assert found.is_exact
