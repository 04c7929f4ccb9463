"""Write the tables of docs/benchmarks.md from `benchmarks/results/`: `python -m benchmarks.table`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.outcome import RESULTS, alike, shown

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN = "<!-- results: written by `python -m benchmarks.table`, from here -->"
END = "<!-- results: to here -->"


def update(document: Path, results: Path) -> None:
    """Replace what stands between the two marks of `document` by tables of all results."""
    before, rest = document.read_text().split(BEGIN)
    _, after = rest.split(END)
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    text = "\n".join(line for result in found for line in _section(result))
    document.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def _section(result: dict[str, Any]) -> Iterator[str]:
    env = result["environment"]
    yield f"## {result['name'].capitalize()}"
    yield ""
    yield (
        f"torch {env['torch']}, Python {env['python']}, actmem {env['actmem']}, {env['machine']}, "
        f"{env['cores']} cores, {env['threads']} thread(s)."
    )
    yield ""
    yield from _rows(
        ["promise", "value", "at most", "kept"],
        [
            [b["name"], shown("", b["value"]), shown("", b["limit"]), "yes" if b["kept"] else "**no**"]
            for b in result["bounds"]
        ],
    )
    for group in alike(result["exact"]) + alike(result["measured"]):
        keys = list(next(iter(group.values())))
        headings = ["variant", *(k.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ") for k in keys)]
        yield from _rows(headings, [[name, *(shown(k, f[k]) for k in keys)] for name, f in group.items()])


def _rows(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "| --- |" + " ---: |" * (len(headings) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


if __name__ == "__main__":
    update(DOCUMENT, RESULTS)
