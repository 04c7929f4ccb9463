"""Python's collector of cyclic garbage, out of the way while a plan is found.

A profile has a hundred thousand small entries, which the collector would walk through again and again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator

__all__ = ["uncollected"]


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Keep the collector from running, if it is on.

    What was made meanwhile counts as old afterwards, so that the first collection does not walk through all of it. That
    takes the way through frozen objects; where a program has frozen some itself, they stay as they are.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
