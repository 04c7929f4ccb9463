"""The memory of a step as a curve that a page can draw: thinned where it is long, with the peak kept exact."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from actmem.page.data import Curve, Label
from actmem.planner.walking import Moments
from actmem.profiles import Profile

__all__ = ["NUM_DRAWN", "Labels", "curve"]

NUM_DRAWN = 1200
"""A curve of more moments than this is thinned."""


class Labels:
    """A table of labels, each of them once."""

    def __init__(self, profile: Profile) -> None:
        self.rows: list[Label] = []
        self._profile = profile
        self._known: dict[tuple[int, int, str, str], int] = {}

    def index(self, moments: Moments, at: int) -> int:
        """Return which row says what runs at a moment."""
        key = moments.costs[at], moments.layers[at], moments.modules[at], moments.phases[at]
        if key not in self._known:
            cost, layer, module, phase = key
            self._known[key] = len(self.rows)
            block = self._profile.layers[layer].path if layer >= 0 else ""
            found = {"op": self._profile.costs[cost].op, "block": block, "module": module, "phase": phase}
            self.rows.append(Label.model_validate(found))
        return self._known[key]


def curve(moments: Moments, labels: Labels, seconds: Sequence[float]) -> Curve:
    """Return the curve of a step. Of each run of moments the highest and the lowest are kept, so the peak is, too."""
    totals, num = moments.totals, len(moments.totals)
    bucket = 1 if num <= NUM_DRAWN else -(-2 * num // NUM_DRAWN)
    drawn = list(range(num)) if bucket == 1 else _thinned(totals, bucket)
    backward = next((n for n, phase in enumerate(moments.phases) if phase != "forward"), num)
    end = next((n for n in range(backward, num) if moments.phases[n] == "optimizer"), num)
    clock = [0.0, *itertools.accumulate(seconds[cost] for cost in moments.costs)]
    return Curve(
        num_moments=num,
        bucket=bucket,
        moments=drawn,
        labels=[labels.index(moments, at) for at in drawn],
        series={c: [series[at] for at in drawn] for c, series in moments.by_category.items() if any(series)},
        peak=drawn.index(moments.peak),
        backward=backward,
        end=end,
        seconds=[float(f"{clock[at + 1]:.6g}") for at in drawn],
        backward_seconds=clock[backward],
        end_seconds=clock[end],
        total_seconds=clock[-1],
    )


def _thinned(totals: list[int], bucket: int) -> list[int]:
    found: set[int] = set()
    for start in range(0, len(totals), bucket):
        run = range(start, min(start + bucket, len(totals)))
        found |= {max(run, key=totals.__getitem__), min(run, key=totals.__getitem__)}
    return sorted(found)
