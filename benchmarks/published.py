"""Peaks of real trainings that others published: a section of `benchmarks/validation.py`.

The filter, written down before any of these rows was predicted. A row of a published table is predicted if all of this
holds:

- one rank, or ranks that only hold copies of the model: no tensor, sequence, context, pipeline or expert parallelism,
  no sharded parameters, no distributed optimizer (those are layouts);
- the loss is computed from whole logits (no split loss);
- it ran in eager, or it can be predicted as it was compiled;
- its kernels are torch's own, or a source says what they save and allocate;
- the batch, the sequence and the sizes of the model are stated.

Rows that fail are counted by the first of these reasons that holds. Which rows pass is decided by this file alone.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.outcome import Outcome
from benchmarks.table import rows

__all__ = ["reason", "run", "tables"]

_LAYOUTS = {"tp": "1", "pp": "1", "cp": "1", "ep": "1"}


def reason(table: str, row: dict[str, str]) -> str:
    """Return why a row is not predicted; "" if it is.

    >>> reason("prime_rl", {"gpus": "8"}), reason("prime_rl", {"gpus": "1"})
    ('layout: sharded parameters', 'compiled: not predicted as compiled yet')
    """
    if table == "prime_rl":
        return "compiled: not predicted as compiled yet" if row["gpus"] == "1" else "layout: sharded parameters"
    for name, alone in _LAYOUTS.items():
        if row.get(name) not in (None, "", alone):
            return "layout: parallel ranks"
    if row.get("distributed_optimizer") or row.get("fsdp"):
        return "layout: sharded parameters"
    return "kernels: Transformer Engine, and no source says what they save"


def run(shared: Path) -> Outcome:
    """Apply the filter to every published row."""
    outcome = Outcome("published", {})
    for path in sorted((shared / "published").glob("*.csv")):
        with path.open(newline="") as file:
            found = Counter(reason(path.stem, row) for row in csv.DictReader(file))
        outcome.exact[path.stem] = dict(sorted(found.items()))
    return outcome


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the section's lines for the page."""
    yield from rows(
        ["table", "reason for which rows are not predicted", "rows"],
        [
            [name, why or "none: predicted", f"{n:,}"]
            for name, each in result["exact"].items()
            for why, n in each.items()
        ],
    )
