"""Peaks of real trainings that others published: a section of `benchmarks/validation.py`.

`published_filter.py` says which rows are predicted, and was written before any of them was.
"""

from __future__ import annotations

import csv
import functools
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.megatron_steps import MegatronStep, megatron_step
from benchmarks.outcome import Bound, Outcome
from benchmarks.published_filter import reason
from benchmarks.published_steps import (
    CARDS,
    PredictedPeak,
    PublishedStep,
    Row,
    megatron_peak,
    nemo_llama_1b,
    predicted,
    prime_rl_sft,
    torchtitan_8b,
)
from benchmarks.table import rows

__all__ = ["documents", "peak_of", "run", "tables"]

GIB = 2**30
MISS = 0.05
"""A row that is off by more is listed by itself."""

_DOCUMENTS = Path(__file__).with_name("published_documents.toml")
_DOCUMENT_STEPS: Mapping[str, Callable[[], PublishedStep]] = {
    "nemo_baseline": nemo_llama_1b,
    "nemo_fsdp": lambda: nemo_llama_1b(8),
    "nemo_checkpointing": lambda: nemo_llama_1b(8, parts=True),
    "nemo_cut_loss": lambda: nemo_llama_1b(8, parts=True, cut=True),
    "torchtitan_8": lambda: torchtitan_8b(8, 2),
    "torchtitan_128": lambda: torchtitan_8b(128, 2),
    "torchtitan_first": lambda: torchtitan_8b(8, 1, selective=False, raised=False),
}


def documents() -> list[dict[str, Any]]:
    """Return the peaks that stand in single documents."""
    return tomllib.loads(_DOCUMENTS.read_text(encoding="utf-8"))["documents"]


@functools.cache
def _of_prime_rl(told: tuple[tuple[str, str], ...]) -> PredictedPeak:
    return predicted(prime_rl_sft(dict(told)))


def peak_of(table: str, row: Row) -> PredictedPeak:
    """Predict the peak of a row that the filter admits. Rows that tell the same step are predicted once."""
    if table == "documents":
        return predicted(_DOCUMENT_STEPS[row["name"]]())
    if table == "megatron":
        return megatron_peak(row)
    told = {name: row[name] for name in ("model", "seq", "micro_batches", "gpus")}
    card = row["device"] if row["device"] in CARDS else ""  # the others have the same workspaces
    return _of_prime_rl((*told.items(), ("device", card)))


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
                name, figures = _told(path.stem, row)
                peaks[name] = _compared(figures, peak_of(path.stem, row))
    found = Counter[str]()
    for each in documents():
        found[each["reason"]] += each["rows"]
        if not each["reason"]:
            figures = {"source": each["source"], "step": each["what"], "metric": each["metric"], "rows": each["rows"]}
            figures |= {"parallel": each["parallel"], "published_bytes": round(each["peak"] * GIB)}
            peaks[each["name"]] = _compared(figures, peak_of("documents", each))
    counts["documents"] = dict(sorted(found.items()))
    outcome = Outcome("published", {"rows": _num_rows(peaks)}, exact={"filter": counts, "peaks": peaks})
    parallel = {name: each for name, each in peaks.items() if each["parallel"]}
    alone = {name: each for name, each in peaks.items() if not each["parallel"]}
    outcome.bounds = [
        Bound("60 over the number of rows of parallel jobs", 60 / max(1, _num_rows(parallel)), 1.0),
        Bound("median error, parallel jobs", statistics.median(_errors(parallel)), 0.05),
        Bound("share of parallel rows that are off by more than 10 %", _share(parallel, 0.1), 0.1),
        Bound("median error, single ranks", statistics.median(_errors(alone)), 0.03),
        Bound("largest error, single ranks", max(_errors(alone)), 0.1),
        Bound("largest shortfall, single ranks", max(0.0, *(-_off(each) for each in alone.values())), 0.05),
    ]
    return outcome


def _num_rows(peaks: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(each["rows"] for each in peaks.values())


def _errors(peaks: Mapping[str, dict[str, Any]]) -> list[float]:
    """Return the error of each row."""
    return [abs(_off(each)) for each in peaks.values() for _ in range(each["rows"])]


def _share(peaks: Mapping[str, dict[str, Any]], limit: float) -> float:
    errors = _errors(peaks)
    return sum(e > limit for e in errors) / len(errors)


def _told(table: str, row: Row) -> tuple[str, dict[str, Any]]:
    """Return a row's name, and its source, its step, what was measured, and its bytes."""
    if table == "prime_rl":
        step = f"{row['model']}, {row['micro_batches']} x {row['seq']} tokens, checkpointed, FSDP over {row['gpus']}"
        figures = {"source": "prime-rl", "step": step, "metric": "reserved", "parallel": row["gpus"] != "1"}
        figures["published_bytes"] = round(float(row["peak_reserved_gib"]) * GIB)
        return f"{step}, {row['device']}", {**figures, "rows": 1}
    facts = megatron_step(row)
    figures = {"source": "Megatron-LM", "step": _described(row, facts), "metric": "allocated", "rows": 1}
    shared = facts.distributed or facts.tp * facts.pp > 1
    figures |= {"parallel": shared, "published_bytes": int(row["peak_allocated_last_step"])}
    return f"{row['case']}, {row['gpu']}", figures


def _described(row: Row, step: MegatronStep) -> str:
    family = row["case"].split("/")[0]
    layers = {"t5": "2 x 12"}.get(family, row["layers"])
    told = [f"{family.upper()}, {layers} layers of {step.width}, {step.batch} x {step.sequence} tokens"]
    told += [f"{name} {size}" for name, size in (("TP", step.tp), ("PP", step.pp)) if size > 1]
    told += [f"{len(step.stages)} virtual stages"] if len(step.stages) > 1 else []
    told += [f"optimizer over {step.dp}"] if step.distributed else []
    flags = {
        "own layers": step.own,
        "softmax by operators": not step.fused_softmax,
        "fp16": step.half,
        "SwiGLU": step.gated,
        "rotary": step.rotary,
        "no biases": not step.bias,
        "untied": not step.tied,
        "uneven stages": "_uneven_" in row["case"] or "_account_for_" in row["case"],
        "groups of 5": step.group == 5,
        "weight gradient put off": step.deferred > 0,
    }
    return ", ".join([*told, *(name for name, holds in flags.items() if holds)])


def _compared(figures: dict[str, Any], found: PredictedPeak) -> dict[str, Any]:
    metric = figures["metric"]
    bytes_there = {
        "allocated": found.allocated_bytes,
        "reserved": found.reserved_bytes,
        "reserved in the first step": found.first_reserved_bytes,
    }[metric]
    return figures | {"predicted_bytes": bytes_there}


def _off(figures: Mapping[str, Any]) -> float:
    return figures["predicted_bytes"] / figures["published_bytes"] - 1


def _span(values: list[float], shown: Callable[[float], str]) -> str:
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the section's lines for the page."""
    peaks: dict[str, dict[str, Any]] = result["exact"]["peaks"]
    steps: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in peaks.values():
        steps[each["source"], each["step"], each["metric"]].append(each)
    yield from rows(
        ["source", "step", "rows", "measured", "published, GiB", "predicted, GiB", "off"],
        [
            [
                source,
                step,
                f"{sum(each['rows'] for each in found)}",
                metric,
                _span([each["published_bytes"] / GIB for each in found], "{:.2f}".format),
                _span([each["predicted_bytes"] / GIB for each in found], "{:.2f}".format),
                _span([_off(each) for each in found], "{:+.1%}".format),
            ]
            for (source, step, metric), found in steps.items()
        ],
    )
    for name, chosen in (("of parallel jobs", True), ("of single ranks", False)):
        found = {key: each for key, each in peaks.items() if each["parallel"] == chosen}
        errors, signed = _errors(found), [_off(each) for each in found.values()]
        different = {each["step"] for each in found.values()}
        yield (
            f"{len(errors)} rows {name}, of {len(different)} different steps: the median error is "
            f"{statistics.median(errors):.2%}, the largest {max(errors):.1%}; {sum(e <= 0.02 for e in errors)} rows "
            f"are within 2 %, {sum(e <= MISS for e in errors)} within 5 %; the errors reach from {min(signed):+.1%} to "
            f"{max(signed):+.1%}."
        )
        yield ""
    missed = {name: each for name, each in peaks.items() if abs(_off(each)) > MISS}
    yield from rows(
        ["rows that are off by more than 5 %", "published, GiB", "predicted, GiB", "off"],
        [
            [
                f"{each['source']}: {name}",
                f"{each['published_bytes'] / GIB:.3f}",
                f"{each['predicted_bytes'] / GIB:.3f}",
                f"{_off(each):+.1%}",
            ]
            for name, each in missed.items()
        ],
    )
    yield from rows(
        ["table", "reason for which rows are not predicted", "rows"],
        [
            [name, why or "none: predicted", f"{n:,}"]
            for name, each in result["exact"]["filter"].items()
            for why, n in each.items()
        ],
    )
