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
        model, rows, budget=budget, vary="batch", loss=mean, multiple=16, progress=tried.__setitem__, **OPTIONS
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
    found = actmem.largest(training.model, batch, budget="64MiB", most=100, multiple=24, **options)
    assert (found.size, found.refused) == (96, None)


def test_if_not_even_the_smallest_fits_that_is_said() -> None:
    with pytest.raises(BudgetError, match="The smallest peak is"):
        actmem.largest(stack(), rows, budget="1000B", vary="batch", loss=mean, **OPTIONS)


def test_a_step_above_the_most_is_refused_as_no_size_is_left() -> None:
    with pytest.raises(
        ModeError, match=r"multiple = 16 is above most = 8.*Write most=16 or more, or multiple=8 or less"
    ) as caught:
        actmem.largest(stack(), rows, budget="1MiB", vary="batch", loss=mean, multiple=16, most=8, **OPTIONS)
    assert "no multiple" in str(caught.value)
    with pytest.raises(ModeError, match=r"multiple = 128 is above most = 64"):  # that of sequences
        actmem.largest(stack(), rows, budget="1MiB", loss=mean, most=64, **OPTIONS)
    for most in (0, -1, 2.5):
        with pytest.raises(ModeError, match=r"most = .* is not permitted. Expected an int of 1 or more"):
            actmem.largest(stack(), rows, budget="1MiB", vary="batch", loss=mean, most=most, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["1GiB", "1MiB"])
def test_batches_that_do_not_depend_on_n_are_noticed(budget: str) -> None:
    tried: list[int] = []

    def same(n: int) -> Any:
        tried.append(n)
        return rows(256)

    with pytest.raises(ModeError) as caught:
        actmem.largest(stack(), same, budget=budget, vary="batch", loss=mean, multiple=16, **OPTIONS)
    assert str(caught.value) == (
        "make_batch(16) and make_batch(32) return the same batch (0 float32 [256, 32]), so there is no largest batch "
        "to find. Make the batch from n, as in: lambda n: {'input_ids': torch.zeros(n, 1024, dtype=torch.long)}."
    )
    assert tried == [16, 32]


def test_a_batch_in_which_only_a_part_of_a_part_grows_is_tried_further() -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack()

        def forward(self, parts: dict[str, Tensor]) -> Tensor:
            return self.blocks(parts["x"])

    # Up to 64 rows the peak is in the step of the optimizer, so that it is the same for each n.
    options = {**OPTIONS, "optimizer": "adamw"}
    found = actmem.largest(
        Nested(), lambda n: {"parts": {"x": rows(n)[0]}}, budget="1GiB", vary="batch", loss=mean, most=64, **options
    )
    assert (found.size, found.refused) == (64, None)


def test_what_may_vary_is_said() -> None:
    with pytest.raises(ModeError, match=r"vary = 'depth' is not known\. Permitted: 'sequence' and 'batch'"):
        actmem.largest(stack(), rows, budget="1MiB", vary="depth", loss=mean)
