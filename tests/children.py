"""Python processes that tests start: with this source, open to Ctrl-C, and never left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import actmem
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def child(*arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start Python with these arguments and pipes to it. It has ended when the block has, by force if need be."""
    with _interruptible():
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=_environment(env),
        )
    with process:  # closes the pipes and waits
        try:
            yield process
        finally:
            process.kill()  # does nothing to one that was waited for


def ended(process: subprocess.Popen[str], given: str | None = None) -> tuple[str, str]:
    """Wait until a child has ended; return what else it wrote to its output and to its errors."""
    return process.communicate(given, timeout=PATIENCE_SECONDS)


def run(*arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end."""
    with child(*arguments, cwd=cwd, env=env) as process:
        out, errors = ended(process)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """Return this environment, in which a child finds what this process has imported, wherever it starts."""
    paths = [str(ROOT), str(Path(actmem.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(more or {})}


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have children start with the usual SIGINT. A shell starts what runs in the background with SIGINT ignored, and
    that is inherited; a handler is not.
    """
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
