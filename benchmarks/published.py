"""Peaks of real trainings that others published: a section of `benchmarks/validation.py`.

The filter, written down before any of these rows was predicted. A row of a published table is predicted if all of this
holds:

- it has a measured peak of a training process that does nothing else;
- no layout: no rank shares the model with another one. No tensor, sequence, context, pipeline or expert parallelism;
  no parameters, gradients or optimizer state that are divided among ranks. Ranks that hold copies may be many, and FSDP
  over a single rank divides nothing;
- no split loss: the logits of a batch are one tensor;
- model, step, batch, sequence, dtypes and optimizer are stated, in the row or in the public source of the program;
- its kernels are torch's own, or fused ones whose public source states what they save and allocate in a few lines.
  Transformer Engine's modules are not among these.

Whether it ran in eager or compiled does not matter. Rows that fail are counted by the first reason that holds, in this
order. Which rows pass is decided by this file and by `published_documents.toml` alone.
"""

from __future__ import annotations

import csv
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.outcome import Outcome
from benchmarks.table import rows

__all__ = ["reason", "run", "tables"]

FAILED = "no peak: the run failed"
LAYOUT = "layout: more than one rank shares the model"
OTHER_WORK = "other work: an inference engine lives in the same process"
SPLIT = "split loss"
KERNELS = "kernels: Transformer Engine"

_LAYOUTS = ("tp", "pp", "cp", "ep")
_DOCUMENTS = Path(__file__).with_name("published_documents.toml")


def reason(table: str, row: dict[str, str]) -> str:
    """Return why a row of a table is not predicted; "" if it is.

    >>> reason("prime_rl", {"success": "True", "gpus": "8"})
    'layout: more than one rank shares the model'
    >>> reason("prime_rl", {"success": "True", "gpus": "1", "kind": "sft"})
    ''
    """
    return _of_prime_rl(row) if table == "prime_rl" else _of_megatron(row)


def _of_prime_rl(row: dict[str, str]) -> str:
    if row["success"] != "True":
        return FAILED
    if row["gpus"] != "1":
        return LAYOUT
    return SPLIT if row["kind"] == "rl" else ""  # its RL trainer's head goes through the vocabulary in chunks of 2048


def _of_megatron(row: dict[str, str]) -> str:
    shares = any(row.get(name) not in (None, "", "1") for name in _LAYOUTS)
    if shares or row.get("distributed_optimizer") or row.get("fsdp"):
        return LAYOUT
    if "_grpo_" in row["case"]:
        return OTHER_WORK
    return "" if row["case"].startswith("t5/t5_mcore_tp1_pp1") else KERNELS  # the one case with `transformer-impl local`


def documents() -> list[dict[str, Any]]:
    """Return the peaks that stand in single documents."""
    return tomllib.loads(_DOCUMENTS.read_text(encoding="utf-8"))["documents"]


def run(shared: Path) -> Outcome:
    """Apply the filter to every published row."""
    outcome = Outcome("published", {})
    for path in sorted((shared / "published").glob("*.csv")):
        with path.open(newline="") as file:
            found = Counter(reason(path.stem, row) for row in csv.DictReader(file))
        outcome.exact[path.stem] = dict(sorted(found.items()))
    found = Counter[str]()
    for each in documents():
        found[each["reason"]] += each["rows"]
    outcome.exact["documents"] = dict(sorted(found.items()))
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
