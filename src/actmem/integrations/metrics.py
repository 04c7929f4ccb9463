"""Metrics of a step as a plain dict, one per step and rank, for any logger."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actmem.applying import Applied
from actmem.decisions import Decision
from actmem.measuring import Measurement
from actmem.reporting import Report

__all__ = ["Metrics", "Recorder", "step_metrics"]

Metrics = dict[str, int | float]
"""Metrics by name. Names of byte counts end in `_bytes`, of times in `_seconds`; other counts begin with `num_`."""

_DECISIONS = {"saved": Decision.SAVE, "recomputed": Decision.RECOMPUTE, "offloaded": Decision.OFFLOAD}


def step_metrics(applied: Applied, measurement: Measurement | None = None) -> Metrics:
    """Return the metrics of the latest observed step. Bytes and counts are for this rank, over all its blocks.

    Args:
        applied: what `apply` returned.
        measurement: what `actmem.measure` returned for a step, if any: its peak by category and the seconds of replay
            are added.

    >>> import actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> applied = actmem.apply(model, actmem.Full())
    >>> model(torch.randn(2, 8)).sum().backward()
    >>> found = step_metrics(applied)
    >>> found["recomputed_bytes"], found["num_recomputed"], found["num_replayed"]
    (192, 3, 3)
    """
    return {"rank": _rank(), **_observed(applied.report()), **_measured(applied, measurement)}


class Recorder:
    """Pass the metrics of each step to a function, re-reading what the blocks did only when it can have changed."""

    def __init__(self, applied: Applied, receive: Callable[[Metrics], object]) -> None:
        self._applied, self._receive = applied, receive
        self._observed: Metrics | None = None

    def step(self, number: int) -> None:
        """Report the metrics of step `number`."""
        if self._observed is None or "sent_bytes" in self._observed:  # offloaded bytes add up from step to step
            self._observed = _observed(self._applied.report())
        self._receive({"step": number, "rank": _rank(), **self._observed, **_measured(self._applied, None)})


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _observed(report: Report) -> Metrics:
    found: Metrics = {"plain_bytes": report.plain_bytes, "held_bytes": report.held_bytes}
    for name, decision in _DECISIONS.items():
        found[f"{name}_bytes"] = getattr(report, f"{name}_bytes")
        found[f"num_{name}"] = sum(
            k.num_blocks * r.count for k in report.kinds for r in k.rows if r.decision == decision
        )
    found["num_replayed"] = report.num_replayed
    if report.compiled:
        found["num_graphs"] = len(report.compiled)
        found["graph_saved_bytes"] = sum(graph.saved_bytes for graph in report.compiled)
    if report.moved is not None:
        found |= {"sent_bytes": report.moved.out_bytes, "fetched_bytes": report.moved.back_bytes}
    return found


def _measured(applied: Applied, measurement: Measurement | None) -> Metrics:
    found: Metrics = {}
    if applied.plan.predicted is not None:
        found["predicted_peak_bytes"] = applied.plan.predicted.peak_bytes
    if torch.accelerator.is_available():
        found["allocator_peak_bytes"] = torch.accelerator.max_memory_allocated()
    if measurement is not None:
        found["peak_bytes"] = measurement.peak_bytes
        found |= {f"peak_{name}_bytes": value for name, value in measurement.by_category.items()}
        found["replay_seconds"] = measurement.replay_seconds
    return found
