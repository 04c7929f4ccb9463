"""How long a test waits for what must come: so long that only a hang is given up, on a machine of any load."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 900.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait until something is so; return whether it became so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
