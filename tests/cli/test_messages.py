"""What a user reads: every help, and every message of the command line."""

import platform
import re
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import actmem
from actmem.cli.commands import COMMANDS
from actmem.cli.runner import parsed
from tests.cli.conftest import Run

H100 = ("--device", "flat", "--budget", "1MiB")
WRONG = {
    "no command": (),
    "an unknown command": ("fitt",),
    "an unknown option": ("fit", "mine:make", "--budgt", "1MiB"),
    "no budget": ("fit", "mine:make"),
    "a budget that is none": ("fit", "mine:make", "--device", "flat", "--budget", "lots"),
    "a budget without its unit": ("fit", "mine:make", "--device", "flat", "--budget", "72"),
    "a multiple above the most": ("largest", "mine:make", *H100, "--vary", "batch", "--multiple", "16", "--most", "8"),
    "largest with --step": ("largest", "mine:make", *H100, "--vary", "batch", "--step", "16"),
    "a batch that does not depend on its size": ("largest", "mine:ignoring", *H100, "--vary", "batch"),
    "a number that is none": ("fit", "mine:make", *H100, "--shard", "two"),
    "no model of that name": ("fit", "llama-3.1-8", *H100),
    "no tiny model of that name": ("fit", "tiny:llama", *H100),
    "no device": ("fit", "mine:make", "--budget", "1MiB"),
    "no device of that name": ("fit", "mine:make", "--device", "h10", "--budget", "1MiB"),
    "a sequence of nothing": ("fit", "llama-3.1-8b", *H100, "--sequence", "0"),
    "a sequence for images": ("fit", "vit-l", *H100, "--sequence", "8"),
    "a sequence that a function does not take": ("fit", "mine:make", *H100, "--sequence", "8"),
    "no module of that name": ("fit", "yours:make", *H100),
    "no function of that name": ("fit", "mine:mak", *H100),
    "a function without a loss": ("fit", "mine:without_loss", *H100),
    "a function without a batch": ("fit", "mine:without_batch", *H100),
    "a batch that is none": ("fit", "mine:a_list", *H100),
    "a function that returns something else": ("fit", "mine:a_number", *H100),
    "no config of that name": ("fit", "nowhere/config.json", *H100),
    "a config that is none": ("fit", "empty.json", *H100),
    "a frontier of one point": ("fit", "mine:make", *H100, "--frontier", "1"),
    "a headroom above one": ("fit", "mine:make", *H100, "--headroom", "2"),
    "allocator settings that are not simulated": ("fit", "mine:make", *H100, "--allocator", "backend:cudaMallocAsync"),
    "offloading to the host of a CPU": (
        *("fit", "mine:make", "--device", "this", "--budget", "1MiB", "--offload", "host"),
    ),
    "a plan file of another form": ("fit", "mine:make", *H100, "--out", "plan.yaml"),
    "a report in no folder": ("fit", "mine:make", *H100, "--report", "nowhere/page.html"),
    "nothing to show": ("show", "mine:make"),
    "no mode of that name": ("show", "mine:make", "--mode", "ful"),
    "a mode that does not take this": ("show", "mine:make", "--mode", "full:attention"),
    "a mode without names": ("show", "mine:make", "--mode", "selective"),
    "an operator group that is none": ("show", "mine:make", "--mode", "selective:atention"),
    "an option that is none": ("show", "mine:make", "--mode", "full:evry=2"),
    "a mode beside a plan": ("show", "mine:make", "--mode", "full", "--plan", "plan.json"),
    "no plan of that name": ("show", "mine:make", "--plan", "plan.json"),
    "nothing to verify": ("verify", "mine:make"),
    "a model on meta is not run": ("verify", "mine:on_meta", "--mode", "full"),
    "a device that is not here": ("verify", "mine:make", "--mode", "full", "--on", "nonsense"),
    "a size beside its search": ("largest", "mine:make", *H100, "--vary", "batch", "--batch", "8"),
    "nothing for the doctor": ("doctor",),
    "no file to explain": ("explain", "nowhere.txt"),
    "no snapshot of that name": ("snapshot", "nowhere.pickle"),
    "a snapshot that is none": ("snapshot", "mine.py"),
    "a page of another form": ("snapshot", "mine.py", "--report", "page.pdf"),
    "a recording of another form": ("record", "mine:make", "--out", "step.json"),
    "no schema of that name": ("schema", "fitt"),
}
SEVERAL = {
    "fit": (
        (
            "fit",
            "llama-3.1-8",
            "--budget",
            "72",
            "--shard",
            "0",
            "--headroom",
            "2",
            "--out",
            "plan.yaml",
            "--batch",
            "0",
        ),
        (
            "no device was named",
            "72 bytes?",
            "--headroom 2",
            "--shard 0",
            "--batch 0",
            "no model 'llama-3.1-8'",
            "--out",
        ),
    ),
    "largest": (
        (
            *(
                "largest",
                "nowhere/config.json",
                "--vary",
                "batch",
                "--batch",
                "4",
                "--device",
                "h10",
                "--budget",
                "lots",
            ),
            *("--multiple", "16", "--most", "8"),
        ),
        ("device 'h10' is not known", "'lots' is not", "no file 'nowhere/config.json'", "--batch 4", "Write --most 16"),
    ),
    "show": (
        ("show", "mine:mak", "--mode", "ful", "--device", "h10"),
        ("mode 'ful' is not known", "device 'h10' is not known", "no function 'mak'"),
    ),
    "measure": (
        ("measure", "mine:large", "--batch", "4", "--plan", "plan.json", "--on", "nonsense"),
        ("plan.json", "--on nonsense", "takes no argument 'batch'"),
    ),
    "verify": (
        ("verify", "llama-9", "--on", "meta"),
        ("there is nothing to verify", "--on meta", "no model 'llama-9'"),
    ),
}
FAILING = {
    "an error in the user's function": ("fit", "mine:raising", *H100),
    "an error in the user's model": ("fit", "mine:narrow", *H100),
}


def plain(text: str, folder: Path) -> str:
    """Leave out what differs between machines, and trailing blanks."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(
        r"^[ ^~]+\n", "", text, flags=re.MULTILINE
    )  # marks in tracebacks, which Python versions set in their own ways
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def test_the_help_of_actmem_says_what_there_is_and_what_exit_codes_mean(run: Run, snapshot: SnapshotAssertion) -> None:
    asked = run("--help")
    assert (asked.code, asked.err) == (0, "")
    assert asked.out == snapshot


def test_the_version_is_that_of_the_package(run: Run) -> None:
    asked = run("--version")
    assert (asked.code, asked.err) == (0, "")
    found = re.fullmatch(r"actmem (\S+), torch (\S+), Python (\S+)\n", asked.out)
    assert found is not None
    assert (found[1], found[3]) == (actmem.__version__, platform.python_version())
    assert found[2] in (torch.__version__, torch.__version__.partition("+")[0])  # a package may leave out its build


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_names_its_options(run: Run, snapshot: SnapshotAssertion, command: str) -> None:
    asked = run(command, "--help")
    assert (asked.code, asked.err) == (0, "")
    assert asked.out == snapshot


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_is_told_what_is_wrong_and_ends_with_2(
    run: Run, snapshot: SnapshotAssertion, tmp_path: Path, case: str
) -> None:
    if case == "no device" and torch.accelerator.is_available():
        pytest.skip("there is an accelerator here, which is taken then")
    (tmp_path / "empty.json").write_text("{}")
    asked = run(*WRONG[case])
    assert (asked.code, asked.out) == (2, "")
    assert "Traceback" not in asked.err
    assert plain(asked.err, tmp_path) == snapshot


@pytest.mark.parametrize("command", SEVERAL)
def test_all_mistakes_of_a_command_are_named_at_once(run: Run, command: str) -> None:
    words, wanted = SEVERAL[command]
    if torch.accelerator.is_available():
        wanted = tuple(text for text in wanted if text != "no device was named")
    asked = run(*words)
    assert (asked.code, asked.out) == (2, "")
    first, *lines = asked.err.splitlines()
    assert first == f"error: this command has {len(wanted)} mistakes:"
    assert [line[:3] for line in lines] == [f"{n}. " for n in range(1, len(wanted) + 1)]
    for text in wanted:
        assert any(text in line for line in lines), text


@pytest.mark.parametrize("case", FAILING)
def test_an_error_in_the_users_code_shows_the_users_part_only_and_ends_with_3(
    run: Run, snapshot: SnapshotAssertion, tmp_path: Path, case: str
) -> None:
    asked = run(*FAILING[case])
    assert (asked.code, asked.out) == (3, "")
    assert "actmem/" not in asked.err
    assert "mine.py" in asked.err
    assert plain(asked.err, tmp_path) == snapshot


def test_a_function_that_ends_the_process_does_not_look_like_success(run: Run) -> None:
    asked = run("fit", "mine:leaving", *H100)
    assert (asked.code, asked.out, asked.err) == (3, "", "error: the model's code ended the process: exit(0)\n")


def test_a_budget_that_cannot_be_kept_ends_with_1_and_says_what_would_help(
    run: Run, snapshot: SnapshotAssertion, tmp_path: Path
) -> None:
    asked = run("fit", "mine:large", "--device", "flat", "--budget", "10KiB")
    assert (asked.code, asked.out) == (1, "")
    assert asked.err == snapshot


@pytest.mark.parametrize("page", ["cli.md"])
def test_every_command_in_the_documentation_can_be_typed(page: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    typed = re.findall(r"^\$ (?:.*\| )?actmem (.*)$", text, re.MULTILINE)
    assert len(typed) > 10
    assert {type(parsed(line.split())).__name__.lower() for line in typed} >= COMMANDS.keys() - {"demo"}


def test_a_model_that_fits_no_memory_here_is_not_built(run: Run) -> None:
    asked = run("measure", "deepseek-v3", "--on", "cpu")
    assert (asked.code, asked.out) == (2, "")
    assert re.search(r"needs at least [\d.]+ GiB .* but cpu has only [\d.]+ [GM]iB free", asked.err)
    assert "actmem fit deepseek-v3, or run its small form: tiny:deepseek-v3" in asked.err


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_whole_traceback_is_shown_on_request(run: Run, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "variable":
        monkeypatch.setenv("ACTMEM_TRACEBACK", "1")
    asked = run("show", "mine:make", "--mode", "ful", *(["--traceback"] if how == "option" else []))
    assert asked.code == 2
    assert "Traceback (most recent call last)" in asked.err
    assert "actmem/cli/" in asked.err
