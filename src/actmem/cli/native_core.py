"""`actmem native build`: compile the native core of the tape, check it, and keep it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actmem.cli.commands import Native
from actmem.cli.schema import Document
from actmem.cli.screen import Screen, seconds_text

__all__ = ["NativeShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class NativeShown(Document):
    """Output of `actmem native build`."""

    command: Literal["native"] = "native"
    library: str
    """The file that was built, or was there already."""
    seconds: float
    """How long compiling and checking took; 0 if it was there already."""


def run(asked: Native, screen: Screen) -> tuple[NativeShown, int]:
    """Build the core, unless it is there for this torch, this Python and this source."""
    from actmem.native import build

    screen.note("compiling the native core and comparing it with the Python tape: about half a minute")
    built = build(again=asked.again)
    return NativeShown(library=str(built.library), seconds=built.seconds), 0


def show(shown: NativeShown, screen: Screen) -> None:
    """Print where the core is, and how to use it."""
    took = f"built and checked in {seconds_text(shown.seconds)}" if shown.seconds else "built before"
    screen.out.print(f"{shown.library}: {took}. Use it: actmem.apply(model, mode, native=True).", markup=False)
