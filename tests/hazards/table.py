"""Measure every hazard and write the table of docs/hazards.md: `python -m tests.hazards.table`."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from tests.hazards.comparing import OTHER_FORM, Hazard, Row, measure_row
from tests.hazards.registry import HAZARDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "hazards.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = (
    "you may rely on",
    "what you do",
    "what `torch.utils.checkpoint` does",
    "and in its other form",
    "what actmem does",
    "reported at",
)


def promise(hazard: Hazard) -> str:
    """Return the first cell of a hazard's row: its class and the test's name as words."""
    return f"{hazard.need} {hazard.name.replace('_', ' ')}"


def render(hazard: Hazard, row: Row) -> str:
    links = ", ".join(f"[{_label(address)}]({address})" for address in hazard.reported)
    other = f"{OTHER_FORM[hazard.form.name].name}: {row.other}" if row.other else "-"
    return _line(promise(hazard), hazard.does, f"{hazard.form.name}: {row.torch}", other, row.actmem_text, links or "-")


def rows_of(document: str) -> dict[str, list[str]]:
    """Read the rows of the document's table, by first cell."""
    lines = document[document.index(BEGIN) : document.index(END)].splitlines()
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return {cells[0]: cells for cells in rows[2:]}


def write() -> None:
    """Measure, and write what was measured; end with an error if a hazard does not hold."""
    torch.set_num_threads(1)
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in ("torch", "transformers", "peft"))
    lines = [f"Measured with {versions} on a CPU.", "", _line(*HEADER), "|" + " --- |" * len(HEADER)]
    broken: list[str] = []
    for hazard in HAZARDS.values():
        row = measure_row(hazard)
        lines.append(render(hazard, row))
        try:
            hazard.check(row)
        except AssertionError as error:
            broken.append(f"{hazard.name}: {error}")
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")
    sys.stdout.write(f"wrote {len(HAZARDS)} rows to {DOCUMENT}\n")
    if broken:
        sys.exit("these do not hold:\n" + "\n".join(broken))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _label(address: str) -> str:
    owner, name, number = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)/(?:issues|pull)/(\d+)", address).groups()  # type: ignore[union-attr]
    return f"{name}#{number}" if name != owner else f"{owner}#{number}"


if __name__ == "__main__":
    write()
