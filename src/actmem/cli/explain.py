"""`actmem explain`: the cause of an error message."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actmem.cli.commands import Explain
from actmem.cli.failures import ANSWER_IS_NO
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, field
from actmem.diagnosis import explain
from actmem.errors import ModeError

__all__ = ["ExplainShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class CauseShown(Document):
    """One possible cause of a message, without the patterns that recognise it."""

    name: str
    what: str
    """What happened."""
    fix: str
    actmem: str
    """What actmem does about it."""
    evidence: tuple[str, ...]
    """What was seen in the text."""
    reports: tuple[str, ...]
    """Public threads in which it was seen."""


@dataclass(frozen=True, kw_only=True)
class ExplainShown(Document):
    """Output of `actmem explain`."""

    command: Literal["explain"] = "explain"
    known: bool
    """Whether a cause was found."""
    causes: tuple[CauseShown, ...]
    """Most likely first."""


def run(asked: Explain, screen: Screen) -> tuple[ExplainShown, int]:
    """Read the text and look up its known causes."""
    if asked.file == "-":
        if sys.stdin.isatty():
            screen.note("Paste the message, then press Ctrl-D.")
        text = sys.stdin.read()
    else:
        try:
            text = Path(asked.file).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ModeError(
                f"cannot read {asked.file!r}: {error.strerror}. Name a file with the message, or - for stdin."
            ) from None
    candidates = explain(text, model=asked.model, sequence=asked.sequence, batch=asked.batch).candidates
    causes = tuple(project(CauseShown, each.cause, evidence=each.evidence) for each in candidates)
    return ExplainShown(known=bool(causes), causes=causes), 0 if causes else ANSWER_IS_NO


def show(shown: ExplainShown, screen: Screen) -> None:
    """Print the causes, most likely first."""
    if not shown.known:
        screen.out.print("No known cause fits this text.")
        screen.out.print(
            "Check the model and its settings: actmem doctor --model MODEL --trainer-args FILE", markup=False
        )
        return
    for number, cause in enumerate(shown.causes, 1):
        screen.out.print(f"[bold]{number}. {cause.name}[/]")
        seen = "; ".join(cause.evidence)
        parts = {"cause": cause.what, "fix": cause.fix, "actmem": cause.actmem, "seen": seen}
        for name, text in (parts | {"reports": " ".join(cause.reports)}).items():
            if text:
                screen.out.print(field(name, text))
