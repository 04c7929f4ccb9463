"""The memory timeline is a Chrome trace whose highest counter is the predicted peak."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import actmem
from actmem.reporting import timeline, write_timeline
from tests.page.conftest import DEVICE, Case


@pytest.mark.parametrize("device", [None, DEVICE])
def test_the_highest_counter_is_the_predicted_peak(small: Case, device: str | None) -> None:
    events = timeline(small.profile, small.plan, device)["traceEvents"]
    counters = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert small.plan.predicted is not None
    assert max(counters) == small.plan.predicted.peak_bytes
    assert len(counters) == len(actmem.predict(small.profile, small.plan, DEVICE).timeline)


def test_the_file_is_a_trace_that_viewers_read(small: Case, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_timeline(path, small.profile, small.plan, DEVICE)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    needed = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "C": {"name", "ts", "pid", "args"},
        "M": {"name", "pid", "args"},
    }
    for event in trace["traceEvents"]:
        assert needed[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    for tid in (1, 2, 3):
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == tid]
        assert slices
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(slices))


def test_operators_name_their_module_and_the_phases_come_in_order(small: Case) -> None:
    events = timeline(small.profile, small.plan)["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 1] == ["forward", "backward", "optimizer"]
    operators = [e for e in events if e["ph"] == "X" and e["tid"] == 3]
    assert {e["cat"] for e in operators} == {"forward", "backward", "replay", "optimizer"}
    assert {"0.up", "11.down", "5.norm"} <= {e["args"]["module"] for e in operators if e["cat"] == "forward"}
    again = [e for e in operators if e["cat"] == "replay"]
    found = actmem.predict(small.profile, small.plan, DEVICE)
    assert len(again) == found.num_replayed


def test_the_length_of_a_trace_is_the_predicted_step_time(small: Case) -> None:
    events = timeline(small.profile, small.plan, DEVICE)["traceEvents"]
    found = actmem.predict(small.profile, small.plan, DEVICE)
    seconds = sum(e["dur"] for e in events if e["ph"] == "X" and e["tid"] == 3) / 1e6
    assert seconds == pytest.approx(found.step_seconds + found.replay_seconds, rel=1e-9)


def test_a_folder_that_is_not_there_is_named(small: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(actmem.ModeError, match=r"cannot write the timeline 'nowhere/trace.json': No such file"):
        write_timeline("nowhere/trace.json", small.profile, small.plan)
