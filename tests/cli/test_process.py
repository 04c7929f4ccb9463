"""The command line as a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LEAN = """
import sys

from actmem.cli import main

code = main()
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""
SLOW = """
import time


def make():
    print("ready", flush=True)
    time.sleep(60)
"""


def started(*words: str, program: str | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    start = ["-m", "actmem"] if program is None else ["-c", program]
    return subprocess.Popen(
        [sys.executable, *start, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_help_and_devices_need_no_torch() -> None:
    for words, text in ((("--help",), "Exit codes"), (("fit", "--help"), "--budget"), (("devices",), "h100-80gb")):
        process = started(*words, program=LEAN)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert text in out


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    with started("devices") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `head` does
        assert (process.wait(timeout=60), process.stderr.read()) == (0, "")


@pytest.mark.slow
def test_a_process_prints_one_document_and_nothing_else() -> None:
    words = ("show", "tiny:llama-3.1-8b", "--mode", "full", "--json")
    process = started(*words)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["command"] == "show"


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = started("fit", "slow:make", "--device", "h100-80gb", "--budget", "2MiB", cwd=tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
