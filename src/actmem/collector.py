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
            gc.enable()
