"""What is said when a step on fake tensors fails: the error of plain training, and the call that was made."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import ModeError, UnsupportedError

pytestmark = pytest.mark.usefixtures("flat_device")


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * (2 if float(x.sum()) > 0 else 1)


class Plain(Looking):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


BUDGET = actmem.Budget("1MiB", device="flat")
BATCH = (torch.ones(4, 8),)
CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "actmem.profile(model, example, fake=False)": lambda m, b: actmem.profile(m, b, loss=torch.sum),
    "actmem.fit(model, batch, budget=..., fake=False)": lambda m, b: actmem.fit(
        m, b, loss=torch.sum, budget="1MiB", device="flat"
    ),
    "actmem.largest(model, make_batch, budget=..., fake=False)": lambda m, b: actmem.largest(
        m, lambda n: b, loss=torch.sum, budget="1MiB", device="flat", vary="batch", most=2
    ),
    "actmem.apply(model, actmem.Budget('1MiB', ...), example=batch, fake=False)": lambda m, b: actmem.apply(
        m, BUDGET, example=b, loss=torch.sum
    ),
}


@pytest.mark.parametrize("line", CALLS)
def test_the_refusal_of_a_fake_step_names_the_call_that_was_made(line: str) -> None:
    with pytest.raises(UnsupportedError, match="looks at the numbers in a tensor") as refused:
        CALLS[line](Looking(), BATCH)
    assert str(refused.value).endswith(f"Profile a real step: {line}.")


def test_a_budget_is_applied_to_a_model_that_looks_at_numbers_by_a_real_step() -> None:
    model = Looking()
    with actmem.apply(model, BUDGET, example=BATCH, loss=torch.sum, fake=False) as applied:
        assert applied.plan.predicted is not None and applied.plan.predicted.peak_bytes <= 2**20
        model(*BATCH).sum().backward()


def test_a_real_step_is_for_a_budget_only() -> None:
    with pytest.raises(ModeError, match="fake = False is for a Budget"):
        actmem.apply(Plain(), actmem.Full(), fake=False)


def test_a_real_step_of_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(ModeError, match="meta device, where it has no numbers"):
        actmem.profile(model, BATCH, loss=torch.sum, fake=False)


@pytest.mark.parametrize("line", CALLS)
def test_a_wrong_batch_gives_the_error_of_plain_training(line: str, caplog: pytest.LogCaptureFixture) -> None:
    wrong = (torch.ones(4, 7),)
    with pytest.raises(RuntimeError) as plain:
        Plain()(*wrong)
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError) as found:
        CALLS[line](Plain(), wrong)
    assert str(found.value) == str(plain.value)
    assert found.value.__notes__ == ["Plain training raises the same.", "The batch: 0 float32 [4, 7]."]
    shown = "".join(traceback.format_exception(found.value))
    assert "torch/_subclasses" not in shown and "_meta_registrations" not in shown
    assert "in forward" in shown and not caplog.records


def test_an_error_that_only_the_model_raises_says_how_to_find_out_whether_plain_training_does() -> None:
    class Raising(Plain):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("my own")

    with pytest.raises(ValueError, match="my own") as found:
        actmem.fit(Raising(), BATCH, loss=torch.sum, budget="1MiB", device="flat")
    assert "actmem.fit(model, batch, budget=..., fake=False)" in found.value.__notes__[-1]
