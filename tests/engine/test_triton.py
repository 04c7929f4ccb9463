"""Real Triton kernels inside blocks, by Triton's interpreter."""

import importlib.util

import pytest

from tests.children import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_triton_kernels_in_blocks_are_right_held_or_run_again() -> None:
    done = run("-m", "pytest", "-q", "-rs", "tests/engine/interpreted_kernels.py", env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
