"""`actmem explain`: the cause of an error message."""

from __future__ import annotations

import sys
from pathlib import Path

from actmem.causes import explain
from actmem.cli.commands import Explain
from actmem.cli.failing import ANSWER_IS_NO
from actmem.cli.schema import Cause, ExplainShown
from actmem.cli.screen import Screen, field
from actmem.errors import ModeError

__all__ = ["run", "show"]


def run(asked: Explain, screen: Screen) -> tuple[ExplainShown, int]:
    """Read the text, and look for what is known of it."""
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
    found = explain(text)
    causes = tuple(
        Cause(
            name=each.cause.name,
            what=each.cause.what,
            fix=each.cause.fix,
            actmem=each.cause.actmem,
            evidence=each.evidence,
            reports=each.cause.reports,
        )
        for each in found.candidates
    )
    return ExplainShown(known=bool(causes), causes=causes), 0 if causes else ANSWER_IS_NO


def show(shown: ExplainShown, screen: Screen) -> None:
    """Print the causes, the likeliest first."""
    if not shown.known:
        screen.out.print("No known cause fits this text.")
        screen.out.print(
            "Look at the model and its settings: actmem doctor --model MODEL --trainer-args FILE", markup=False
        )
        return
    for number, cause in enumerate(shown.causes, 1):
        screen.out.print(f"[bold]{number}. {cause.name}[/]")
        seen = "; ".join(cause.evidence)
        parts = {"cause": cause.what, "fix": cause.fix, "actmem": cause.actmem, "seen": seen}
        for name, text in (parts | {"reports": " ".join(cause.reports)}).items():
            if text:
                screen.out.print(field(name, text))
