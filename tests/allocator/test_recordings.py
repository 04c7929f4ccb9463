"""Public recordings of CUDA memory: every allocation lies where the simulation puts it.

The recordings are not part of the project. They are read where they lie, next to it, by a reader that imports nothing.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from actmem.allocator import read_snapshot, reenact

FOLDER = Path(__file__).parents[3] / "shared" / "recordings"
EXPLAINED: dict[str, str] = {}
"""Recordings that are not found again, and the setting that explains it. There is none."""

SMALL = (
    "NiuHuang",  # from an empty allocator
    "bolongcheng",  # expandable segments
    "Maphsge4",  # retries after failed requests
    "Muduard",  # two devices, and a list of segments without a trace
    "cranberrii",  # a version of torch that does not write its settings
    "volcengine",  # pools of CUDA graphs
)
"""A few owners whose recordings differ most from one another."""


@cache
def index() -> list[dict[str, Any]]:
    path = FOLDER / "index.json"
    return json.loads(path.read_text()) if path.exists() else []


def chosen(*, few: bool) -> list[Any]:
    if not index():
        return [pytest.param(None, marks=pytest.mark.skip(f"no recordings in {FOLDER.parent.name}/{FOLDER.name}"))]
    found: list[Any] = []
    counts: dict[str, int] = {}
    for record in index():
        owner = record["repo"].partition("/")[0]
        is_quick = owner in SMALL and counts.get(owner, 0) < 3
        counts[owner] = counts.get(owner, 0) + 1
        if is_quick == few:
            found.append(pytest.param(record, id=record["file"].partition(".pickle.xz")[0]))
    return found


def check(record: dict[str, Any]) -> None:
    snapshot = read_snapshot(FOLDER / record["file"])
    if record["file"] in EXPLAINED:
        pytest.skip(EXPLAINED[record["file"]])
    recorded = {device["device"]: device for device in record.get("devices", ())}
    assert set(recorded) <= set(snapshot.devices)
    for device in snapshot.devices:
        found = reenact(snapshot, device)
        assert found.at_recorded_address == found.allocations
        assert found.device_requests_right == found.device_requests
        assert found.releases_right == found.releases
        assert found.is_end_right
        assert found.settings.tie == "address"
        if device in recorded:
            told = recorded[device]
            assert found.allocations == told["allocations"]
            assert found.peak_allocated_bytes == told["peak_allocated"]
            assert found.peak_reserved_bytes == told["peak_reserved"]
            assert found.peak_requested_bytes == told["peak_requested"]
            assert found.final_allocated_bytes == told["final_allocated"]
            assert found.final_reserved_bytes == told["final_reserved"]


@pytest.mark.parametrize("record", chosen(few=True))
def test_every_decision_of_a_recording_is_made_again(record: dict[str, Any]) -> None:
    check(record)


@pytest.mark.slow
@pytest.mark.parametrize("record", chosen(few=False))
def test_every_decision_of_every_other_recording_is_made_again(record: dict[str, Any]) -> None:
    check(record)


@pytest.mark.slow
@pytest.mark.skipif(not index(), reason="there are no recordings next to the project")
def test_the_recordings_tell_a_wrong_rule_from_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from actmem.allocator import caching_allocator

    monkeypatch.setattr(caching_allocator, "segment_bytes", lambda size: -(-size // 2**21) * 2**21)  # type: ignore[misc]
    records = [record for record in index() if record["repo"].startswith("NiuHuang")]
    found = [reenact(read_snapshot(FOLDER / record["file"]), 0) for record in records]
    assert found
    assert not any(each.is_exact for each in found)
