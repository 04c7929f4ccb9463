"""Memory against time: from recomputing what can be to saving everything, and no named mode beyond it."""

from __future__ import annotations

from itertools import pairwise

import pytest

import actmem
from actmem.errors import ModeError
from actmem.planner.solver import smallest_peak
from tests.planner.steps import DEVICE, images, peaks, tokens, zoo

BATCHES = {"llama": lambda: tokens(4, 48), "unet": lambda: images(2, 16)}


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "unet"])
def test_more_memory_is_less_time_from_the_smallest_peak_to_saving_everything(name: str) -> None:
    training = zoo(name, BATCHES[name]())
    profile = training.profile()
    told: list[tuple[int, int]] = []
    curve = actmem.frontier(profile, DEVICE, num_points=5, progress=lambda *done: told.append(done))
    assert told[-1] == (5, 5)
    points = curve.points
    assert len(points) >= 3
    for less, more in pairwise(points):
        assert less.peak_bytes < more.peak_bytes
        assert less.step_time_ratio >= more.step_time_ratio
    assert points[0].peak_bytes <= 1.005 * smallest_peak(profile)[0]
    assert (points[-1].peak_bytes, points[-1].step_time_ratio) == (peaks(profile)[1], 1.0)
    assert training.measured(points[1].plan).peak_bytes == points[1].peak_bytes
    # A mode's budget need not be among the points: at its own peak no fitted plan may be slower than it is.
    assert {point.name for point in curve.modes} >= {"save everything", "full", "save attention"}
    for mode in curve.modes:
        assert mode.peak_bytes >= points[0].peak_bytes
        fitted = training.fit(mode.peak_bytes).predicted
        assert fitted is not None
        assert fitted.step_time_ratio <= mode.step_time_ratio + 1e-9
    assert all(point.name in str(curve) for point in (*points, *curve.modes))


def test_a_frontier_has_two_ends() -> None:
    profile = zoo("unet").profile()
    assert len(actmem.frontier(profile, DEVICE, num_points=2).points) == 2
    for wrong in (1, 0, 2.5):
        with pytest.raises(ModeError, match="Expected an int of 2 or more"):
            actmem.frontier(profile, DEVICE, num_points=wrong)
