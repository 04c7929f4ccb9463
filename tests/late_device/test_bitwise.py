"""On a device that is late, training under every mode and through every lane is plain training, to the bit."""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.late_device import late
from tests.late_device.stage import needs_compiler, on_late_device
from tests.late_device.trainings import LAGS, MODES, Lag, Model, Trained, differences, lanes, model, random_lag, train

pytestmark = needs_compiler
NUM_LAGS, NUM_CHILDREN = 300, 6


def on_streams() -> Model:
    late.library().late_poison_at_free(False)  # what is freed may be read until its stream, ordered, uses it again
    made = model()
    made.streams = [torch.Stream("late") for _ in range(2)]
    return made


def on_two_devices() -> Model:
    made = model()
    made.blocks[1:].to("late:1")
    return made


@contextlib.contextmanager
def without_record_stream() -> Iterator[None]:
    late.library().late_records_streams(False)
    try:
        yield
    finally:
        late.library().late_records_streams(True)


@contextlib.contextmanager
def poisoned_when_reused() -> Iterator[None]:
    try:
        yield
    finally:
        late.library().late_poison_at_free(True)


@dataclass(frozen=True)
class Setting:
    """How the model is trained, apart from what is done with its activations."""

    make: Callable[[], Model] = model
    autocast: bool = False
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def train(self, mode: Any = None, lag: Lag = contextlib.nullcontext) -> Trained:
        with self.around():
            return train(mode, lag, made=self.make(), autocast=self.autocast)


SETTINGS = {
    "plain": Setting(),
    "autocast": Setting(autocast=True),
    "streams of one's own": Setting(on_streams, around=poisoned_when_reused),
    "two devices": Setting(on_two_devices),
    "no record_stream": Setting(around=without_record_stream),
}
Case = tuple[str, str, str]
"""The names of a mode or lane, of a setting, and of a lag."""


def ways(folder: str = ".") -> dict[str, Callable[[], Any]]:
    return {**MODES, **{f"lane, {name}": way for name, way in lanes(folder).items()}}


def compare(cases: Iterable[Case]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        way_of = ways(folder)
        want = {name: setting.train() for name, setting in SETTINGS.items()}
        wrong = [
            f"{way}, {setting}, {lag}: {found}"
            for way, setting, lag in cases
            if (found := differences(want[setting], SETTINGS[setting].train(way_of[way](), LAGS[lag])))
        ]
    assert not wrong, "\n".join(wrong)


def is_possible(way: str, setting: str) -> bool:
    """Return whether a way can be used in a setting: the plan of the budget is for the model on one device."""
    return way != "budget" or setting not in ("two devices", "streams of one's own")


def chosen() -> list[Case]:
    """Return each mode once and each lane at two lags, so that every lag occurs in every setting."""
    late_ones, names = ("all held", "copies late", "kernels late"), list(SETTINGS)
    cases = [(way, names[n % 5], late_ones[n % 2 * 2]) for n, way in enumerate(MODES)]
    for n, way in enumerate(list(ways())[len(MODES) :]):
        cases += [(way, names[(n + k * 2) % 5], late_ones[(n + k) % 3]) for k in range(2)]
    return cases


def some_of_each() -> None:
    compare(chosen())


def every_way_at_every_lag(setting: str) -> None:
    compare((way, setting, lag) for way in ways() if is_possible(way, setting) for lag in LAGS)


def random_lags(part: str) -> None:
    want = train()
    with tempfile.TemporaryDirectory() as folder:
        its = list(lanes(folder).items())[int(part) :: NUM_CHILDREN]
        wrong = [
            f"{name}, lags of seed {seed}"
            for name, way in its
            for seed in range(NUM_LAGS)
            if differences(want, train(way(), random_lag(seed)))
        ]
    assert not wrong, "\n".join(wrong)


def test_the_cases_that_are_always_tried_have_every_way_and_every_lag_in_every_setting() -> None:
    cases = chosen()
    assert {way for way, _, _ in cases} == {*ways()}
    assert {(setting, lag) for _, setting, lag in cases} >= {
        (setting, lag) for setting in SETTINGS for lag in ("all held", "copies late", "kernels late")
    }
    assert all(is_possible(way, setting) for way, setting, _ in cases)


def test_every_mode_and_lane_is_plain_training_to_the_bit() -> None:
    on_late_device(some_of_each)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_mode_and_lane_at_every_lag(setting: str) -> None:
    on_late_device(every_way_at_every_lag, argument=setting)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_CHILDREN))
def test_every_lane_at_many_random_lags(part: int) -> None:
    on_late_device(random_lags, argument=str(part))
