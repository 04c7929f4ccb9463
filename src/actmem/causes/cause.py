"""The form of what is known about a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cause", "github"]

Pairs = Literal["empty", "doubled", "rows", "precision", "shifted", "kind"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Say what one kind of message comes from, and what to do."""

    name: str
    """A short name, unique."""
    message: str
    """A regular expression that finds the message in a text whose white space is single blanks."""
    what: str
    """What happened."""
    fix: str
    """What to change where torch, or another library, recomputes."""
    actmem: str
    """What actmem does about it: the line to write, or that it changes nothing."""
    pairs: Pairs | None = None
    """How the saved and the recomputed tensors that the message lists must differ; see `pairs.py`."""
    hints: tuple[str, ...] = ()
    """Regular expressions for what makes it more likely: names in the traceback, other lines of the log."""
    needs_hint: bool = False
    """One of the hints must be there."""
    general: bool = False
    """It is named only if nothing more special fits the same message."""
    warning: bool = False
    """The message does not stop a program, so an error in the same text is named first."""
    reports: tuple[str, ...] = ()
    """Public threads in which it was seen."""


def github(*threads: str) -> tuple[str, ...]:
    """Write out `owner/name#number` as addresses.

    >>> github("pytorch/pytorch#82156")
    ('https://github.com/pytorch/pytorch/issues/82156',)
    """
    return tuple(f"https://github.com/{thread.replace('#', '/issues/')}" for thread in threads)
