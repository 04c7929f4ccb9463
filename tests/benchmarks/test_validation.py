"""The validation against recordings and published figures: its frame, and the page that it writes."""

import json
import pickle
from pathlib import Path

import pytest

from benchmarks import published, recordings, validation
from benchmarks.outcome import RESULTS
from benchmarks.published_steps import nemo_llama_1b, predicted
from tests.allocator.recorder import MIB, Recorder


def shared(folder: Path) -> Path:
    """Make a folder with recordings of the simulated allocator: one from its start, one from its middle."""
    (folder / "recordings").mkdir(parents=True)
    recorder = Recorder.example()
    index = []
    for name, keep in (("whole", None), ("end", 3)):
        (folder / "recordings" / name).write_bytes(pickle.dumps(recorder.snapshot(keep)))
        index.append({"file": name, "repo": "somebody/model", "path": f"{name}.pickle", "commit": "0123456789abcdef"})
    (folder / "recordings" / "index.json").write_text(json.dumps(index))
    return folder


def test_every_recording_is_counted_and_its_table_is_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- allocator: from here -->\n<!-- allocator: to here -->\nafter\n")
    results = tmp_path / "results"
    assert validation.main(["allocator"], shared=shared(tmp_path / "shared"), results=results, document=page) == 0
    found = json.loads((results / "allocator.json").read_text())
    assert len(found["exact"]) == 2
    whole = next(figures for name, figures in found["exact"].items() if "whole" in name)
    assert whole["alone_reserved_bytes"] == whole["peak_reserved_bytes"] == 22 * MIB
    text = page.read_text()
    assert "| all | 2 | 4 of 4 |" in text
    assert text.startswith("before\n") and text.endswith("after\n")


def test_a_wrong_decision_breaks_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actmem.allocator import caching_allocator

    folder = shared(tmp_path / "shared")
    monkeypatch.setattr(caching_allocator, "segment_bytes", lambda size: 64 * MIB)
    outcome = recordings.run(folder)
    assert not all(bound.kept for bound in outcome.bounds)


def test_without_recordings_or_with_an_unknown_section_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validation.main([], shared=tmp_path / "nowhere", results=tmp_path / "results") == 2
    assert validation.main(["alocator"], shared=tmp_path) == 2
    assert "Sections: allocator" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_page_has_the_committed_results(tmp_path: Path) -> None:
    copy = tmp_path / "validation.md"
    copy.write_text(validation.DOCUMENT.read_text())
    validation.update(copy, RESULTS / "validation")
    assert copy.read_text() == validation.DOCUMENT.read_text()


SHARED = validation.SHARED


def test_a_published_peak_is_predicted_from_the_source_of_its_program() -> None:
    row = next(each for each in published.documents() if not each["reason"])
    assert row["name"] == "nemo_llama_1b"
    assert predicted(nemo_llama_1b()).allocated_bytes == pytest.approx(row["peak"] * 2**30, rel=0.001)


def test_the_filter_has_a_reason_for_every_row_that_is_not_predicted() -> None:
    found = json.loads((RESULTS / "validation" / "published.json").read_text())
    counts = found["exact"]["filter"]
    assert {table: sum(each.values()) for table, each in counts.items()} == {
        "megatron": 480,
        "prime_rl": 45,
        "documents": 89,
    }
    assert sum(each.get("", 0) for each in counts.values()) == len(found["exact"]["peaks"]) == 15
    assert all(bound["kept"] for bound in found["bounds"])


@pytest.mark.slow
def test_every_published_peak_that_the_filter_admits_keeps_the_bounds() -> None:
    if not SHARED.exists():
        pytest.skip("there are no published figures next to the project")
    outcome = published.run(SHARED)
    assert outcome.exact["peaks"] and all(bound.kept for bound in outcome.bounds)
