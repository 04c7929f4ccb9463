"""What the tests themselves promise: children that can be interrupted, find this source and are never left behind."""

import re
import signal
from pathlib import Path

import pytest

import actmem
from tests.children import ROOT, child, ended, run

WAITS = """
import time

try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_child_can_be_interrupted_where_the_suite_itself_was_started_with_sigint_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what runs in the background
    try:
        with child("-c", WAITS) as process:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "the suite's own is as it was"
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert ended(process) == ("interrupted\n", "")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_child_has_ended_when_its_test_fails() -> None:
    with pytest.raises(AssertionError), child("-c", WAITS) as process:
        raise AssertionError
    assert process.returncode == -signal.SIGKILL
    assert process.stdout is not None and process.stdout.closed


def test_a_child_finds_this_source_wherever_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")  # relative: means nothing elsewhere
    done = run("-c", "import actmem, tests.children; print(actmem.__file__)", cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{actmem.__file__}\n", "")


def test_every_test_starts_python_through_the_one_helper() -> None:
    starts = re.compile(r"\bPopen\(|subprocess\.run\(\s*\[sys\.executable")
    files = [path for folder in (ROOT / "tests").iterdir() if folder.is_dir() for path in folder.rglob("*.py")]
    assert len(files) > 50
    assert [path.name for path in files if starts.search(path.read_text()) and path != Path(__file__)] == []
