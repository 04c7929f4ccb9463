"""Real steps from the command line, the doctor, the explainer, and documents that keep their published form."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from actmem.cli.runner import DOCUMENTED, document_of
from actmem.cli.schema import schema_of
from actmem.devices import known_devices
from tests.allocator.recorder import Recorder
from tests.cli.conftest import Run
from tests.cli.schemas import PUBLISHED

TINY = "tiny:llama-3.1-8b"
DOCUMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fit": (0, ("fit", "mine:make", "--device", "flat", "--budget", "700KiB", "--frontier", "2")),
    "show": (0, ("show", TINY, "--mode", "full", "--device", "a100-40gb")),
    "measure": (0, ("measure", TINY, "--mode", "full", "--sequence", "16", "--on", "cpu")),
    "verify": (0, ("verify", TINY, "--mode", "full", "--sequence", "16")),
    "largest": (
        0,
        ("largest", "mine:make", "--vary", "batch", "--budget", "1MiB", "--device", "flat", "--most", "2"),
    ),
    "frontier": (0, ("frontier", "mine:make", "--device", "flat", "--points", "2")),
    "ranks": (
        0,
        ("ranks", TINY, "--tokens-per-step", "64", "--sequence", "32", "--device", "flat", "--budget", "40MiB"),
    ),
    "doctor": (0, ("doctor", "--model", TINY)),
    "explain": (0, ("explain", "log.txt")),
    "snapshot": (0, ("snapshot", "recorded.pickle")),
    "devices": (0, ("devices",)),
    "native": (0, ("native", "build")),
    "error": (2, ("fit", "llama-9", "--device", "flat", "--budget", "2MiB")),
}


def checked(command: str, text: str) -> Any:
    found = json.loads(text)  # raises if there is anything beside one document
    jsonschema.Draft202012Validator(schema_of(document_of(command))).validate(found)
    return found


@pytest.mark.parametrize("command", DOCUMENTS)
def test_what_is_printed_has_the_published_form(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "log.txt").write_text("ValueError: Unexpected keyword arguments: max_seqlen")
    (tmp_path / "recorded.pickle").write_bytes(pickle.dumps(Recorder.example().snapshot()))
    code, words = DOCUMENTS[command]
    asked = run(*words, "--json")
    assert asked.code == code, asked.err
    checked(command, asked.out)


@pytest.mark.slow
def test_the_demo_has_the_published_form_and_works(run: Run) -> None:
    asked = run("demo", "--json")
    assert asked.code == 0, asked.err
    assert checked("demo", asked.out)["ok"]


@pytest.mark.parametrize("command", DOCUMENTED)
def test_the_published_schema_is_the_one_that_is_printed(run: Run, command: str) -> None:
    printed = run("schema", command)
    assert printed.code == 0
    assert (PUBLISHED / f"{command}.json").read_text() == printed.out, "write it again: python -m tests.cli.schemas"
    jsonschema.Draft202012Validator.check_schema(json.loads(printed.out))


def test_a_command_that_is_not_understood_still_prints_one_document(run: Run) -> None:
    asked = run("fit", "--json")
    assert asked.code == 2
    assert checked("error", asked.out)["exit_code"] == 2


def test_a_measured_peak_is_the_predicted_one_to_the_byte(run: Run) -> None:
    asked = run("measure", TINY, "--mode", "selective:attention,every_second(matmul)", "--on", "cpu", "--json")
    found = checked("measure", asked.out)
    for step in (found["plain"], found["under_mode"]):
        assert step["tensor_bytes"] == step["predicted_bytes"]
        assert step["tensor_bytes"] <= step["peak_bytes"] == sum(step["by_category"].values())
    assert found["under_mode"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert found["under_mode"]["replayed_flops"] > 0 == found["plain"]["replayed_flops"]
    assert found["under_mode"]["forward_flops"] == found["plain"]["forward_flops"]


def test_a_model_that_looks_at_numbers_is_measured_and_verified_as_it_runs_here_anyway(run: Run) -> None:
    found = json.loads(run("measure", "mine:looking", "--mode", "full", "--json").out)
    assert found["under_mode"]["tensor_bytes"] == found["under_mode"]["predicted_bytes"]
    assert run("verify", "mine:looking", "--mode", "full").code == 0


def test_a_model_that_looks_at_numbers_is_planned_by_a_real_step_if_asked(run: Run) -> None:
    words = ("mine:looking", "--device", "flat", "--budget", "1MiB")
    refused = run("fit", *words)
    assert refused.code == 3
    assert "Profile a real step: actmem fit ... --no-fake." in " ".join(refused.err.split())
    assert run("fit", *words, "--frontier", "0", "--no-fake").code == 0
    assert run("show", "mine:looking", "--mode", "full", "--no-fake").code == 0


def test_a_batch_that_does_not_fit_the_model_gives_the_error_of_plain_training_and_asks_for_no_report(run: Run) -> None:
    asked = run("fit", "mine:misfit", "--device", "flat", "--budget", "1MiB")
    said = " ".join(asked.err.split())
    assert asked.code == 3
    assert "mat1 and mat2 shapes cannot be multiplied (8x63 and 64x64)" in said
    assert "Plain training raises the same." in said and "report this" not in said and "fake_tensor" not in said


def test_code_that_ends_the_process_still_prints_one_document(run: Run) -> None:
    asked = run("verify", "mine:leaving", "--mode", "full", "--json")
    assert (asked.code, json.loads(asked.out)["error"]) == (3, "SystemExit")


def test_a_reader_sees_both_steps_beside_each_other(run: Run) -> None:
    asked = run("measure", TINY, "--mode", "full", "--sequence", "16", "--on", "cpu", "--optimizer", "sgd")
    assert asked.code == 0
    for text in ("measured peak", "predicted peak", "plain", "Full()", "replayed", "time per step"):
        assert text in asked.out


def test_a_step_that_differs_ends_with_1_and_says_what_differs(run: Run) -> None:
    asked = run("verify", "mine:spoiled", "--mode", "full", "--json")
    assert asked.code == 1
    found = checked("verify", asked.out)
    assert not found["equal"] and not found["irreproducible"]
    assert found["difference"].startswith("loss: ")
    assert run("verify", "mine:spoiled", "--mode", "full").out.startswith("differs")


def test_a_plain_step_that_is_not_reproducible_is_named_and_is_not_called_equal(run: Run) -> None:
    asked = run("verify", "mine:drifting", "--mode", "full", "--json")
    found = checked("verify", asked.out)
    assert (asked.code, found["equal"], found["difference"]) == (1, False, None)
    assert "loss" in found["irreproducible"]
    shown = run("verify", "mine:drifting", "--mode", "full").out
    assert shown.startswith("cannot be compared") and "two plain runs" in " ".join(shown.split())


def test_a_step_that_is_equal_ends_with_0(run: Run) -> None:
    asked = run("verify", "mine:make", "--mode", "full:every=2", "--on", "cpu")
    assert (asked.code, asked.out.partition(" ")[0]) == (0, "equal")


def test_the_doctor_ends_with_1_where_there_is_a_problem(run: Run, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(
        json.dumps(
            {
                "gradient_checkpointing": True,
                "fsdp": "full_shard",
                "fsdp_config": {"activation_checkpointing": True},
            }
        )
    )
    asked = run("doctor", "--model", TINY, "--trainer-args", "args.json", "--json")
    assert asked.code == 1, asked.err
    found = checked("doctor", asked.out)
    assert not found["ok"]
    assert any("fsdp" in finding["found"] for finding in found["findings"])
    assert "problem" in run("doctor", "--trainer-args", "args.json").out


def test_explain_reads_a_file_or_stdin_and_ends_with_1_if_nothing_is_known(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ValueError: Unexpected keyword arguments: max_seqlen"))
    known = run("explain")
    assert known.code == 0
    assert "use_reentrant=False" in known.out
    monkeypatch.setattr("sys.stdin", io.StringIO("all is well"))
    assert run("explain", "-").code == 1


def test_every_device_is_listed_with_the_source_of_each_figure(run: Run) -> None:
    found = checked("devices", run("devices", "--json").out)
    assert {"h100-80gb", "a100-40gb"} <= {device["key"] for device in found["devices"]}
    assert all("memory_bytes" in device["sources"] for device in found["devices"])
    assert "NVIDIA H100 datasheet" in run("devices", "h100-80gb").out
    assert "h100-80gb" in run("devices").out


NARROW: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "devices": (("devices",), tuple(known_devices())),
    "one device": (("devices", "h100-80gb"), ("host_link_bytes_per_second", "flops_per_second.bf16")),
    "show": (
        ("show", TINY, "--mode", "full", "--device", "flat"),
        ("_scaled_dot_product_flash_attention_for_cpu", "post_attention_layernorm", "self_attn.q_proj", "16.0 KiB"),
    ),
    "fit": (
        ("fit", "mine:make", "--device", "flat", "--budget", "700KiB", "--frontier", "2", "--out", "p/plan.json"),
        ("save everything", 'actmem.apply(model, actmem.FromPlan("p/plan.json"))', "activations outside the blocks"),
    ),
    "measure": (
        ("measure", TINY, "--mode", "selective:attention,every_second(matmul)", "--sequence", "16", "--on", "cpu"),
        ("Selective(save=['attention', every_second('matmul')])", "measured peak", "under the mode"),
    ),
}


@pytest.mark.parametrize("case", NARROW)
def test_on_80_columns_every_name_and_every_number_stays_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    (tmp_path / "p").mkdir()
    monkeypatch.setenv("COLUMNS", "80")
    words, wanted = NARROW[case]
    asked = run(*words)
    assert asked.code == 0, asked.err
    for name in wanted:
        assert name in asked.out
    if case != "measure":  # whose seconds differ from run to run
        monkeypatch.setenv("COLUMNS", "300")
        assert whole_words(run(*words).out) <= whole_words(asked.out)


def whole_words(text: str) -> set[str]:
    return {word.strip(",:-─") for word in text.split()} - {""}
