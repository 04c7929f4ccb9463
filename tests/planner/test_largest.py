"""The largest batch that fits does fit, and the next does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import actmem
from actmem.errors import BudgetError, ModeError
from tests.planner.steps import DEVICE, Training, rows, stack, tokens, zoo


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


OPTIONS: Any = {"device": DEVICE, "headroom": 0.0, "optimizer": None}


def test_the_largest_batch_fits_by_measurement_and_the_next_one_by_none() -> None:
    model, budget = stack(), 2**20
    tried: dict[int, bool] = {}
    found = actmem.largest(
        model, rows, budget=budget, vary="batch", loss=mean, step=16, progress=tried.__setitem__, **OPTIONS
    )
    assert found.size % 16 == 0
    assert found.refused == found.size + 16
    assert tried[found.size] and not tried[found.refused]
    assert found.plan.predicted is not None
    measured = Training(model, rows(found.size), mean).measured(found.plan).peak_bytes
    assert measured == found.plan.predicted.peak_bytes <= budget
    with pytest.raises(BudgetError):
        actmem.fit(model, rows(found.refused), budget=budget, loss=mean, **OPTIONS)
    assert Training(model, rows(found.size), mean).measured().peak_bytes > budget  # so that a plan was needed


def test_sequences_are_tried_in_steps_of_128_unless_another_is_given() -> None:
    training = zoo("torchtitan_like", tokens(1, 16))
    tried: list[int] = []

    def batch(n: int) -> Any:
        tried.append(n)
        return (torch.ones(1, n, dtype=torch.long),)

    options: Any = {**OPTIONS, "loss": training.loss}
    found = actmem.largest(training.model, batch, budget="64MiB", most=512, **options)
    assert (found.size, found.refused) == (512, None)
    assert tried == [128, 256, 512]
    tried.clear()
    found = actmem.largest(training.model, batch, budget="64MiB", most=100, step=24, **options)
    assert (found.size, found.refused) == (96, None)


def test_if_not_even_the_smallest_fits_that_is_said() -> None:
    with pytest.raises(BudgetError, match="The smallest peak is"):
        actmem.largest(stack(), rows, budget=1000, vary="batch", loss=mean, **OPTIONS)


def test_what_may_vary_is_said() -> None:
    with pytest.raises(ModeError, match=r"vary = 'depth' is not known\. Permitted: 'sequence' and 'batch'"):
        actmem.largest(stack(), rows, budget="1MiB", vary="depth", loss=mean)
