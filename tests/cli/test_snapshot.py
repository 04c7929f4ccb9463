"""`actmem snapshot` on recordings of the simulated allocator: what it says is what was recorded."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actmem.allocator import Attachment, write_recording
from actmem.plan import FitRecord, Plan
from tests.allocator.recorder import MIB, Recorder
from tests.cli.conftest import Run


def plan_of(peak_bytes: int) -> Plan:
    from actmem import Rule

    told = FitRecord(peak_bytes, 64 * MIB, 1.1, 0, 1.0, 0.0, "NVIDIA H100", "none", ())
    return Plan((Rule("save"),), ("layers.0",), "9f2c", "Budget('64MiB')", predicted=told)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder.example()


def test_json_has_the_counts_and_the_peaks_of_every_device(run: Run, tmp_path: Path, recorder: Recorder) -> None:
    Path("step.pickle").write_bytes(pickle.dumps(recorder.snapshot()))
    asked = run("snapshot", "step.pickle", "--json", "--largest", "1")
    assert asked.code == 0, asked.err
    (device,) = json.loads(asked.out)["devices"]
    assert (device["allocations"], device["at_recorded_address"]) == (3, 3)
    assert (device["device_requests"], device["device_requests_right"]) == (2, 2)
    assert device["is_exact"]
    assert device["peak_reserved_bytes"] == 22 * MIB
    assert device["peak_allocated_bytes"] == 12 * MIB + 1024
    assert device["at_peak"]["split_bytes"] == 10 * MIB - 1024
    assert device["settings"]["expandable_segments"] is False
    (largest,) = device["largest"]
    assert largest["num_bytes"] == 12 * MIB
    assert largest["place"] == {"file": "model.py", "line": 2, "function": "forward"}


def test_a_snapshot_without_a_trace_has_zero_counts_and_its_end_state(run: Run, recorder: Recorder) -> None:
    Path("step.pickle").write_bytes(pickle.dumps(recorder.snapshot()["segments"]))
    (device,) = json.loads(run("snapshot", "step.pickle", "--json").out)["devices"]
    assert [device[key] for key in ("allocations", "at_recorded_address", "device_requests", "releases")] == [0] * 4
    assert device["peak_reserved_bytes"] == device["final_reserved_bytes"] == 22 * MIB
    assert device["peak_allocated_bytes"] == device["final_allocated_bytes"] == 12 * MIB + 1024
    assert not device["has_settings"]
    said = run("snapshot", "step.pickle").out
    assert "without a trace" in said and "assumed" in said


def test_the_text_says_what_is_unusable_and_where_the_largest_tensors_were_made(run: Run, recorder: Recorder) -> None:
    Path("step.pickle").write_bytes(pickle.dumps(recorder.snapshot()))
    said = run("snapshot", "step.pickle").out
    for text in (
        "peak allocated   12.0 MiB (12,583,936 bytes)",
        "peak reserved    22.0 MiB (23,068,672 bytes)",
        "3 of 3 allocations at the recorded address, 2 of 2 requests to the driver and 0 of 0 releases",
        "free pieces",
        "model.py:2 forward",
    ):
        assert text in said


def test_a_simulation_that_differs_says_so(run: Run, recorder: Recorder) -> None:
    content = recorder.snapshot()
    content["allocator_settings"]["expandable_segments"] = True  # not what was in force
    Path("step.pickle").write_bytes(pickle.dumps(content))
    (device,) = json.loads(run("snapshot", "step.pickle", "--json").out)["devices"]
    assert not device["is_exact"]
    assert device["device_requests_right"] < device["device_requests"]
    assert "may be off" in run("snapshot", "step.pickle").out


def test_a_plan_is_shown_beside_the_recording(run: Run, recorder: Recorder) -> None:
    Path("step.pickle").write_bytes(pickle.dumps(recorder.snapshot()))
    plan_of(10 * MIB).save("plan.json")
    told = json.loads(run("snapshot", "step.pickle", "--plan", "plan.json", "--json").out)["plan"]
    assert (told["predicted_bytes"], told["recorded_bytes"]) == (10 * MIB, 12 * MIB + 1024)
    said = run("snapshot", "step.pickle", "--plan", "plan.json").out
    assert "predicted peak   10.0 MiB of 64.0 MiB; recorded 12.0 MiB, +2.0 MiB" in said
    replace(plan_of(1), predicted=None).save("rules.json")
    refused = run("snapshot", "step.pickle", "--plan", "rules.json")
    assert refused.code == 2 and "predicts no peak" in refused.err


def test_a_recording_brings_its_own_plan_and_versions(run: Run, recorder: Recorder) -> None:
    attachment = Attachment({"torch": "2.13.0"}, plan_of(9 * MIB).to_json(), 9 * MIB, (MIB, 9 * MIB))
    write_recording("step.pickle.xz", recorder.snapshot(), attachment)
    found = json.loads(run("snapshot", "step.pickle.xz", "--json").out)
    assert found["plan"]["predicted_bytes"] == 9 * MIB
    assert found["versions"] == {"torch": "2.13.0"}


def test_the_page_is_one_file_that_points_nowhere_and_has_the_numbers(run: Run, recorder: Recorder) -> None:
    content = recorder.snapshot()
    for event in content["device_traces"][0]:
        event["frames"] = [{"filename": "</script>", "line": 1, "name": "</script>"}] * 2
    write_recording("a<script>.pickle.xz", content, Attachment({}, None, 9 * MIB, (MIB, 9 * MIB)))
    asked = run("snapshot", "a<script>.pickle.xz", "--report", "page.html")
    assert asked.code == 0, asked.err
    text = Path("page.html").read_text()
    assert "://" not in text and "default-src 'none'" in text
    assert text.count("</script>") == 3
    assert f'data-part="free pieces" data-bytes="{10 * MIB - 1024}"' in text
    assert "3 of\n  3 allocations" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_nothing_is_recorded_and_the_refusal_says_what_to_do(run: Run) -> None:
    asked = run("record", "mine:make", "--mode", "full", "--json")
    assert asked.code == 3
    assert json.loads(asked.out)["error"] == "UnsupportedError"
    assert "torch.cuda.is_available()" in json.loads(asked.out)["message"]
    assert not Path("step.pickle.xz").exists()
