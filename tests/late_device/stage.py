"""Run a function of a test module on the late device, in a process of its own.

A test passes the function, whose assertions then fail in the child and are reported with the child's errors.
"""

import importlib
import os
import sys
from collections.abc import Callable

import pytest

from tests.children import run
from tests.late_device import late

needs_compiler = pytest.mark.skipif(
    late.compiler() is None, reason="no C++ compiler (g++, or CXX): the late device is compiled by its tests"
)


def on_late_device(*functions: Callable[..., None], argument: str | None = None) -> None:
    """Call functions of one module, one after the other, in a child that has the device."""
    late.build()
    named = [functions[0].__module__, *(function.__name__ for function in functions)]
    given = {} if argument is None else {_ARGUMENT: argument}
    ended = run("-X", "faulthandler", "-m", "tests.late_device.stage", *named, env=given)
    assert ended.returncode == 0, f"in a child process:\n{ended.stdout[-4000:]}{ended.stderr[-8000:]}"


_ARGUMENT = "LATE_DEVICE_ARGUMENT"

if __name__ == "__main__":
    late.load()
    module = importlib.import_module(sys.argv[1])
    given = [os.environ[_ARGUMENT]] if _ARGUMENT in os.environ else []
    for name in sys.argv[2:]:
        getattr(module, name)(*given)
        late.synchronise()
