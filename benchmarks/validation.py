"""Check simulations and predictions against what others recorded: `python -m benchmarks.validation [section ...]`.

Recordings and published figures are material of others, and no part of the project: they are read in the folder
`shared` next to it. Each section writes its figures to `benchmarks/results/validation/`, and its tables into
docs/validation.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import published, recorded_steps, recordings
from benchmarks.outcome import RESULTS, Outcome
from benchmarks.table import replaced

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
DOCUMENT = ROOT / "docs" / "validation.md"


@dataclass(frozen=True)
class Section:
    """One kind of evidence."""

    run: Callable[[Path], Outcome]
    """Makes the figures from the folder of recordings and published figures."""
    tables: Callable[[dict[str, Any]], Iterator[str]]
    """Makes the page's lines from the written figures."""


SECTIONS = {
    "allocator": Section(recordings.run, recordings.tables),
    "steps": Section(recorded_steps.run, recorded_steps.tables),
    "published": Section(published.run, published.tables),
}


def main(
    names: Sequence[str], *, shared: Path = SHARED, results: Path = RESULTS / "validation", document: Path = DOCUMENT
) -> int:
    """Run the named sections, or all. Return 1 if a bound is broken, 2 if there is nothing to check against."""
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not shared.exists():
        why = f"unknown: {', '.join(unknown)}. Sections: {', '.join(SECTIONS)}."
        print(why if unknown else f"there are no recordings at {shared}.", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 200)
    broken: list[str] = []
    for name in names or SECTIONS:
        outcome = SECTIONS[name].run(shared)
        outcome.write(results)
        shown = Table("promise", "value", "at most", title=name)
        for bound in outcome.bounds:
            shown.add_row(bound.name, f"{bound.value:g}", f"{bound.limit:g}")
        console.print(shown)
        broken += [f"{name}: {bound.name}" for bound in outcome.bounds if not bound.kept]
    update(document, results)
    for line in broken:
        print(f"broken bound: {line}", file=sys.stderr)
    return 1 if broken else 0


def update(document: Path, results: Path) -> None:
    """Write the tables of all sections that have results into the page."""
    text = document.read_text()
    for name, section in SECTIONS.items():
        path = results / f"{name}.json"
        if path.exists():
            begin, end = (f"<!-- {name}: {where} -->" for where in ("from here", "to here"))
            text = replaced(text, begin, end, "\n".join(section.tables(json.loads(path.read_text()))))
    document.write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
