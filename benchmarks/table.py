"""Write the tables of docs/benchmarks.md from `benchmarks/results/`: `python -m benchmarks.table`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.outcome import RESULTS, alike, promises, shown

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- results: written by `python -m benchmarks.table`, from here -->"
END = "<!-- results: to here -->"


ELSEWHERE = frozenset({"compile", "targets"})
"""Results whose tables have their own page."""


def update(document: Path, results: Path) -> None:
    """Replace the text between the two marks of `document` by tables of all results except those `ELSEWHERE`."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json")) if path.stem not in ELSEWHERE]
    text = "\n".join(line for result in found for line in _section(result))
    document.write_text(replaced(document.read_text(), BEGIN, END, text))


def replaced(document: str, begin: str, end: str, text: str) -> str:
    """Return the document with the text between two marks replaced by `text`."""
    before, rest = document.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{text}\n{end}{after}"


def _section(result: dict[str, Any]) -> Iterator[str]:
    env = result["environment"]
    yield f"## {result['name'].capitalize()}"
    yield ""
    yield (
        f"torch {env['torch']}, Python {env['python']}, actmem {env['actmem']}, {env['machine']}, "
        f"{env['cores']} cores, {env['threads']} thread(s)."
    )
    yield ""
    headings, *body = promises(result["bounds"])
    yield from rows(headings, [[*row[:-1], "yes" if row[-1] == "yes" else "**no**"] for row in body])
    for group in alike(result["exact"]) + alike(result["measured"]):
        keys = list(next(iter(group.values())))
        headings = ["variant", *(k.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ") for k in keys)]
        yield from rows(headings, [[name, *(shown(k, f[k]) for k in keys)] for name, f in group.items()])


def rows(headings: list[str], body: list[list[str]]) -> Iterator[str]:
    """Write the lines of a table."""
    yield "| " + " | ".join(headings) + " |"
    yield "| --- |" + " ---: |" * (len(headings) - 1)
    for row in body:
        yield "| " + " | ".join(row) + " |"
    yield ""


if __name__ == "__main__":
    update(DOCUMENT, RESULTS)
