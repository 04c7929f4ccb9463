"""A test that needs what plain torch cannot do on every machine tries plain first, and skips with torch's reason."""

from collections.abc import Callable
from typing import Any

import pytest

# What oneDNN says where it has no kernel for this processor: for an LSTM in bfloat16 without AVX-512, say.
_NO_KERNEL = "could not create a primitive"


def skip_unless_plain_runs(step: Callable[[], Any]) -> None:
    """Run a plain step; skip the test if this processor has no kernel for it. Any other error is the test's own."""
    try:
        step()
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        pytest.skip(f"plain torch cannot do this on this machine: {error}")
