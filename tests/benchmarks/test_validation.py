"""The validation against recordings and published figures: its frame, and the page that it writes."""

import json
import pickle
from pathlib import Path

import pytest

from benchmarks import published, published_filter, recordings, validation
from benchmarks.megatron_steps import schedule
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
    row = next(each for each in published.documents() if each.get("name") == "nemo_baseline")
    assert predicted(nemo_llama_1b()).allocated_bytes == pytest.approx(row["peak"] * 2**30, rel=0.001)


MEGATRON_GPT = {
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "seq": "1024",
    "micro_batch": "4",
    "global_batch": "32",
    "bf16": "True",
    "attention_backend": "unfused",
    "gpu": "dev_dgx_a100",
}


@pytest.mark.parametrize(
    ("layout", "allocated_bytes"),
    [
        ({"case": "gpt/gpt3_mcore_te_tp2_pp2", "tp": "2", "pp": "2"}, 1_900_158_464),
        (
            {
                "case": "gpt/gpt3_mcore_te_tp1_pp4_vp1_decoupled_lr",
                "tp": "1",
                "pp": "4",
                "virtual_pp_or_layers_per_stage": "1",
            },
            4_120_607_232,
        ),
    ],
    ids=["tensor and pipeline parallel", "virtual stages"],
)
def test_the_last_rank_of_a_parallel_job_has_its_published_peak(layout: dict[str, str], allocated_bytes: int) -> None:
    row = MEGATRON_GPT | layout
    assert published_filter.reason("megatron", row) == ""
    assert published.peak_of("megatron", row).allocated_bytes == pytest.approx(allocated_bytes, rel=0.01)


def test_a_pipeline_forgets_no_micro_batch() -> None:
    for num_stages, micro_batches, group in ((1, 3, 1), (2, 4, 2), (3, 4, 4), (3, 10, 5)):
        order = list(schedule(num_stages, micro_batches, group))
        pending = dict.fromkeys(range(num_stages), 0)
        for kind, stage in order:
            pending[stage] += 1 if kind == "forward" else -1
            assert pending[stage] >= 0
        assert len(order) == 2 * num_stages * micro_batches
        assert set(pending.values()) == {0}


def test_the_filter_has_a_reason_for_every_row_that_is_not_predicted() -> None:
    found = json.loads((RESULTS / "validation" / "published.json").read_text())
    counts = found["exact"]["filter"]
    assert {table: sum(each.values()) for table, each in counts.items()} == {
        "megatron": 480,
        "prime_rl": 45,
        "documents": 89,
    }
    predicted_rows = sum(each["rows"] for each in found["exact"]["peaks"].values())
    assert sum(each.get("", 0) for each in counts.values()) == predicted_rows == 168
    assert all(bound["kept"] for bound in found["bounds"])


@pytest.mark.slow
def test_every_published_peak_that_the_filter_admits_keeps_the_bounds() -> None:
    if not SHARED.exists():
        pytest.skip("there are no published figures next to the project")
    outcome = published.run(SHARED)
    assert outcome.exact["peaks"] and all(bound.kept for bound in outcome.bounds)
