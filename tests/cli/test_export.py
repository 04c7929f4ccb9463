"""`actmem export`: a plan as the settings of another system, on the screen, in a file and as a document."""

import json
import tomllib
from pathlib import Path

from tests.cli.conftest import Run

MINE = ("mine:make", "--device", "flat")


def test_a_fitted_plan_is_written_with_what_both_take_and_what_is_lost(run: Run, tmp_path: Path) -> None:
    assert run("fit", *MINE, "--budget", "700KiB", "--frontier", "0", "--out", "plan.json").code == 0
    words = ("export", *MINE, "--plan", "plan.json", "--to", "torchtitan", "--out", "ac.toml")
    asked = run(*words, "--json")
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    fitted = json.loads((tmp_path / "plan.json").read_text())["predicted"]
    assert found["planned"]["peak_bytes"] == fitted["peak_bytes"]
    assert found["settings"] == tomllib.loads((tmp_path / "ac.toml").read_text())
    assert found["lost"]
    said = run(*words).out
    assert found["text"] in said
    assert "written to ac.toml" in said


def test_the_options_of_the_fit_are_needed_again(run: Run) -> None:
    run("fit", *MINE, "--budget", "700KiB", "--frontier", "0", "--microbatches", "2", "--out", "plan.json")
    asked = run("export", *MINE, "--plan", "plan.json", "--to", "megatron")
    assert asked.code == 2
    assert "the plan was made for microbatches = 2" in asked.err
    asked = run("export", *MINE, "--plan", "plan.json", "--to", "megatron", "--microbatches", "2")
    assert asked.code == 0, asked.err


def test_without_a_plan_there_is_nothing_to_export(run: Run) -> None:
    asked = run("export", *MINE, "--to", "nemo")
    assert asked.code == 2
    assert "there is nothing to export" in asked.err
