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
import functools
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.outcome import Bound, Outcome
from benchmarks.published_steps import QWEN3, PredictedPeak, Row, megatron_t5, nemo_llama_1b, predicted, prime_rl_sft
from benchmarks.table import rows

__all__ = ["documents", "peak_of", "reason", "run", "tables"]

GIB = 2**30
FAILED = "no peak: the run failed"
LAYOUT = "layout: more than one rank shares the model"
OTHER_WORK = "other work: an inference engine lives in the same process"
SPLIT = "split loss"
NOT_STATED = "not stated: model, step or batch"
KERNELS = "kernels: Transformer Engine"
COMPILED = "kernels: compiled layers that are not checkpointed"

_LAYOUTS = ("tp", "pp", "cp", "ep")
_DOCUMENTS = Path(__file__).with_name("published_documents.toml")


def reason(table: str, row: dict[str, str]) -> str:
    """Return why a row of a table is not predicted; "" if it is.

    >>> reason("prime_rl", {"success": "True", "gpus": "8"})
    'layout: more than one rank shares the model'
    >>> row = {"success": "True", "gpus": "1", "kind": "sft", "model": "Qwen/Qwen3-0.6B", "ac": "Recompute"}
    >>> reason("prime_rl", row)
    ''
    """
    return _of_prime_rl(row) if table == "prime_rl" else _of_megatron(row)


def _of_prime_rl(row: dict[str, str]) -> str:
    if row["success"] != "True":
        return FAILED
    if row["gpus"] != "1":
        return LAYOUT
    if row["kind"] == "rl":  # the RL trainer's head goes through the vocabulary in chunks of 2048
        return SPLIT
    if row["model"] not in QWEN3:
        return NOT_STATED
    return "" if row["ac"] == "Recompute" else COMPILED


def _of_megatron(row: dict[str, str]) -> str:
    shares = any(row.get(name) not in (None, "", "1") for name in _LAYOUTS)
    if shares or row.get("distributed_optimizer") or row.get("fsdp"):
        return LAYOUT
    if "_grpo_" in row["case"]:
        return OTHER_WORK
    return (
        "" if row["case"].startswith("t5/t5_mcore_tp1_pp1") else KERNELS
    )  # the one case with `transformer-impl local`


def documents() -> list[dict[str, Any]]:
    """Return the peaks that stand in single documents."""
    return tomllib.loads(_DOCUMENTS.read_text(encoding="utf-8"))["documents"]


@functools.cache
def _predicted(table: str, told: tuple[tuple[str, str], ...]) -> PredictedPeak:
    row = dict(told)
    if table == "documents":
        return predicted(nemo_llama_1b())
    return predicted(prime_rl_sft(row) if table == "prime_rl" else megatron_t5(row))


def peak_of(table: str, row: Row) -> PredictedPeak:
    """Predict the peak of a row that the filter admits. Rows that tell the same step are predicted once."""
    counts = ("model", "seq", "micro_batches", "device", "hidden", "heads", "ffn", "micro_batch")
    return _predicted(table, tuple((name, row[name]) for name in counts if name in row))


def run(shared: Path) -> Outcome:
    """Apply the filter to every published row, and predict those that it admits."""
    counts: dict[str, dict[str, int]] = {}
    peaks: dict[str, dict[str, Any]] = {}
    for path in sorted((shared / "published").glob("*.csv")):
        with path.open(newline="") as file:
            published = list(csv.DictReader(file))
        counts[path.stem] = dict(sorted(Counter(reason(path.stem, row) for row in published).items()))
        for row in published:
            if not reason(path.stem, row):
                name, step, metric, seen = _told(path.stem, row)
                peaks[name] = _compared(step, metric, seen, peak_of(path.stem, row))
    found = Counter[str]()
    for each in documents():
        found[each["reason"]] += each["rows"]
        if not each["reason"]:
            seen = round(each["peak"] * GIB)
            peaks[each["source"]] = _compared(each["what"], each["metric"], seen, peak_of("documents", {}))
    counts["documents"] = dict(sorted(found.items()))
    outcome = Outcome("published", {"rows": len(peaks)}, exact={"filter": counts, "peaks": peaks})
    errors = [_off(each) for each in peaks.values()]
    outcome.bounds = [
        Bound("median error", statistics.median(map(abs, errors)), 0.03),
        Bound("share of rows that are off by more than 10 %", sum(abs(e) > 0.1 for e in errors) / len(errors), 0.1),
        Bound("largest shortfall", max(0.0, *(-e for e in errors)), 0.05),
    ]
    return outcome


def _told(table: str, row: Row) -> tuple[str, str, str, int]:
    """Return a row's name, its step, what was measured, and its bytes."""
    if table == "prime_rl":
        step = f"{row['model']}, fine-tuning, {row['micro_batches']} x {row['seq']} tokens, checkpointed and compiled"
        return f"prime-rl, {row['device']}", step, "reserved", round(float(row["peak_reserved_gib"]) * GIB)
    step = f"T5, 2 x 12 layers, {row['hidden']} wide, {row['micro_batch']} x (512 + 128) tokens, bf16"
    return f"Megatron-LM, {row['case']}, {row['gpu']}", step, "allocated", int(row["peak_allocated_last_step"])


def _compared(step: str, metric: str, seen: int, found: PredictedPeak) -> dict[str, Any]:
    bytes_there = found.allocated_bytes if metric == "allocated" else found.reserved_bytes
    return {"step": step, "metric": metric, "published_bytes": seen, "predicted_bytes": bytes_there}


def _off(figures: dict[str, Any]) -> float:
    return figures["predicted_bytes"] / figures["published_bytes"] - 1


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the section's lines for the page."""
    yield from rows(
        ["source", "step", "measured", "published", "predicted", "off"],
        [
            [
                name,
                each["step"],
                each["metric"],
                f"{each['published_bytes'] / GIB:.3f} GiB",
                f"{each['predicted_bytes'] / GIB:.3f} GiB",
                f"{_off(each):+.2%}",
            ]
            for name, each in result["exact"]["peaks"].items()
        ],
    )
    errors = [_off(each) for each in result["exact"]["peaks"].values()]
    different = {each["step"] for each in result["exact"]["peaks"].values()}
    yield (
        f"{len(errors)} rows of {len(different)} different steps: the median error is "
        f"{statistics.median(map(abs, errors)):.2%}, the largest {max(map(abs, errors)):.2%}, and none is below by "
        f"more than {-min(errors):.2%}."
    )
    yield ""
    yield from rows(
        ["table", "reason for which rows are not predicted", "rows"],
        [
            [name, why or "none: predicted", f"{n:,}"]
            for name, each in result["exact"]["filter"].items()
            for why, n in each.items()
        ],
    )
