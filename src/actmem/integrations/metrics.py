"""What a step did, as a plain dict: one for each step and rank, for any logger."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actmem.applying import Applied
from actmem.measuring import Measurement
from actmem.report import Report

__all__ = ["Metrics", "Recorder", "step_metrics"]

Metrics = dict[str, int | float]
"""Names to numbers. Bytes end in `_bytes`, seconds in `_seconds`, counts begin with `num_`."""

_DECISIONS = {"saved": "save", "recomputed": "recompute", "offloaded": "offload"}


def step_metrics(applied: Applied, measurement: Measurement | None = None) -> Metrics:
    """Return what the latest observed step did, in numbers. Bytes and counts are of this rank, over all its blocks.

    Args:
        applied: what `apply` returned.
        measurement: what `actmem.measure` returned for a step, if there is one: its peak by category and the seconds
            of replay are added.

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
    """Hand the metrics of each step to a function, and look at what the blocks did only when that can have changed."""

    def __init__(self, applied: Applied, receive: Callable[[Metrics], object]) -> None:
        self._applied, self._receive = applied, receive
        self._observed: Metrics | None = None

    def step(self, number: int) -> None:
        """Send the metrics of step `number`."""
        if self._observed is None or "sent_bytes" in self._observed:  # what was sent away adds up from step to step
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
