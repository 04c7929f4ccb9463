"""The result of `doctor`: findings, and a report to read, print or serialise."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["SEVERITIES", "Diagnosis", "Finding", "NotMadeError", "Severity", "Skipped", "paths"]

Severity = Literal["problem", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of a check."""

    check: str
    """The check that found it."""
    severity: Severity
    """"problem": training fails or is wrong, or the setting has no effect. "warning": it may. "note": good to know."""
    found: str
    """What was found, and where."""
    why: str
    """Why it matters."""
    change: str
    """The line to change."""
    actmem: str
    """What actmem does about it."""


@dataclass(frozen=True)
class Skipped:
    """A check that could not be run."""

    check: str
    reason: str


class NotMadeError(Exception):
    """Raised inside a check that cannot be run, with the reason."""


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found, worst first. Print it."""

    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    """Checks that found nothing."""
    skipped: tuple[Skipped, ...]
    """Checks that could not be run, and why."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found. There may be warnings and notes."""
        return not any(f.severity == "problem" for f in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        counts = [(sum(f.severity == s for f in self.findings), s) for s in SEVERITIES]
        head = ", ".join(f"{n} {s}{'' if n == 1 else 's'}" for n, s in counts if n) or "nothing found"
        lines = [f"{head}; {len(self.passed)} checks passed, {len(self.skipped)} could not be run"]
        for finding in self.findings:
            lines += ["", *_wrapped(f"{finding.severity}: ", f"{finding.found} [{finding.check}]")]
            rows = (("why", finding.why), ("change", finding.change), ("actmem", finding.actmem))
            for label, value in rows:
                lines += _wrapped(f"  {label:8}", value)
        if self.skipped:
            lines += ["", "not checked:"]
            for skipped in self.skipped:
                lines += _wrapped("  ", f"{skipped.check}: {skipped.reason}")
        return "\n".join(lines)


def paths(found: list[str], *, most: int = 3) -> str:
    """Format a list of module paths: name the first few, count the rest.

    >>> paths(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    named = [path or "the model itself" for path in found[:most]]
    return ", ".join(named) + (f" and {len(found) - most} more" if len(found) > most else "")


def _wrapped(label: str, text: str) -> list[str]:
    hang = " " * (10 if label.startswith("  ") else 2)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=label, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )
