"""The command line as a process of its own."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.children import child, ended, run

COLUMNS = {"COLUMNS": "100"}
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
    time.sleep(600)
"""


def test_help_and_devices_need_no_torch() -> None:
    for words, text in ((("--help",), "Exit codes"), (("fit", "--help"), "--budget"), (("devices",), "h100-80gb")):
        done = run("-c", LEAN, *words, env=COLUMNS)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    with child("-m", "actmem", "devices", env=COLUMNS) as process:
        assert process.stdout is not None
        process.stdout.close()  # as `head` does
        process.stdout = None
        assert (ended(process)[1], process.returncode) == ("", 0)


@pytest.mark.slow
def test_a_process_prints_one_document_and_nothing_else() -> None:
    done = run("-m", "actmem", "show", "tiny:llama-3.1-8b", "--mode", "full", "--json", env=COLUMNS)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["command"] == "show"


@pytest.mark.usefixtures("flat_device")
def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = ("-m", "actmem", "fit", "slow:make", "--device", "flat", "--budget", "2MiB")
    with child(*command, cwd=tmp_path, env=COLUMNS) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = ended(process)
        assert (process.returncode, out, err) == (130, "", "interrupted\n")
