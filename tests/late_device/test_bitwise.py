"""On a device that is late, training under every mode and through every lane is plain training, to the bit."""

import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.late_device import late
from tests.late_device.stage import needs_compiler, on_late_device
from tests.late_device.trainings import LAGS, MODES, Lag, Model, differences, lanes, model, random_lag, train

pytestmark = needs_compiler
NUM_LAGS = 300


def compare(ways: dict[str, Callable[[], Any]], lags: dict[str, Lag], **settings: Any) -> None:
    make: Callable[[], Model] = settings.pop("make", model)
    want = train(made=make(), **settings)
    wrong = [
        f"{name}, {lateness}: {found}"
        for name, way in ways.items()
        for lateness, lag in lags.items()
        if (found := differences(want, train(way(), lag, made=make(), **settings)))
    ]
    assert not wrong, "\n".join(wrong)


def some(lags: Iterable[str]) -> dict[str, Lag]:
    return {name: LAGS[name] for name in lags}


def modes() -> None:
    compare({"plain": lambda: None, **MODES}, some(["kernels late", "all held"]))


def every_lane() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare(lanes(folder), some(["kernels late", "copies late", "all held"]))


def autocast() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: way for name, way in lanes(folder).items() if "little" in name}
        compare({"full": MODES["full"], **ways}, some(["copies late", "all held"]), autocast=True)


def random_lags(lane: str) -> None:
    want = train()
    with tempfile.TemporaryDirectory() as folder:
        way = lanes(folder)[lane]
        wrong = [seed for seed in range(NUM_LAGS) if differences(want, train(way(), random_lag(seed)))]
    assert not wrong, f"at the lags of seeds {wrong}"


def on_streams() -> Model:
    late.library().late_poison_at_free(False)  # what is freed may be read until its stream, ordered, uses it again
    made = model()
    made.streams = [torch.Stream("late") for _ in range(2)]
    return made


def on_two_devices() -> Model:
    made = model()
    made.blocks[1:].to("late:1")
    return made


FEW = ("host, little", "disk, little", "inputs to host", "context, disk")


def user_streams() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = {"full": MODES["full"], **{name: lanes(folder)[name] for name in FEW}}
        compare(ways, some(["copies late", "all held"]), make=on_streams)


def two_devices() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = {"full": MODES["full"], **{name: lanes(folder)[name] for name in FEW}}
        compare(ways, some(["kernels late", "all held"]), make=on_two_devices)


def every_way_at_every_lag() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = {**MODES, **{f"lane, {name}": way for name, way in lanes(folder).items()}}
        compare(ways, LAGS)
        compare(ways, LAGS, autocast=True)
        del ways["budget"]  # made for the model on one device
        compare(ways, LAGS, make=on_two_devices)
        compare(ways, LAGS, make=on_streams)


def without_record_stream() -> None:
    late.library().late_records_streams(False)
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: way for name, way in lanes(folder).items() if "little" in name or "context" in name}
        compare(ways, some(["copies late", "all held"]))
    late.library().late_records_streams(True)


def test_modes_and_lanes() -> None:
    on_late_device(modes, every_lane)


def test_autocast_and_a_backend_without_record_stream() -> None:
    on_late_device(autocast, without_record_stream)


def test_streams_of_ones_own_and_two_devices() -> None:
    on_late_device(user_streams, two_devices)


@pytest.mark.slow
def test_every_mode_and_lane_at_every_lag() -> None:
    on_late_device(every_way_at_every_lag)


@pytest.mark.slow
@pytest.mark.parametrize("lane", FEW)
def test_every_lane_at_many_random_lags(lane: str) -> None:
    on_late_device(random_lags, argument=lane)
