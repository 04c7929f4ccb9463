"""A budget that no plan keeps is refused before training, with the smallest that one does; bad input is refused too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import actmem
from actmem.errors import ActmemError, BudgetError, DeviceError, ModeError
from tests.planner.steps import DEVICE, Training, rows, stack, tokens, zoo


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def refused(training: Training, budget: Any, **options: Any) -> str:
    with pytest.raises(BudgetError) as caught:
        training.fit(budget, **options)
    return str(caught.value)


def stated(text: str) -> int:
    found = re.search(r"budget=(\d+)", text)
    assert found is not None
    return int(found[1])


def test_the_message_has_the_smallest_peak_what_takes_it_and_what_would_help(snapshot: SnapshotAssertion) -> None:
    training = Training(stack(), rows(20_000), mean)
    assert refused(training, "2MiB", optimizer="adamw") == snapshot


@pytest.mark.parametrize("headroom", [0.0, 0.05])
def test_the_stated_budget_works_and_what_is_proven_to_be_too_little_does_not(headroom: float) -> None:
    training = Training(stack(), rows(20_000), mean)
    text = refused(training, "2MiB", headroom=headroom)
    plan = training.fit(stated(text), headroom=headroom)
    assert plan.predicted is not None
    assert training.measured(plan).peak_bytes <= stated(text)
    proven = re.search(r"can be below ([\d.]+) MiB", text)
    assert proven is not None
    refused(training, int((float(proven[1]) - 0.1) * 2**20))


@pytest.mark.parametrize("budget", ["100MiB", "68MiB", "56MiB"])
def test_the_number_of_ranks_that_is_named_is_enough_and_one_less_is_not(budget: str) -> None:
    training = Training(stack(width=512), rows(64, 512), mean)
    text = refused(training, budget, optimizer="adamw")
    named = re.search(r"shard=(\d+)", text)
    assert named is not None, text
    num_ranks = int(named[1])
    plan = training.fit(budget, optimizer="adamw", shard=num_ranks)
    assert plan.predicted is not None
    assert num_ranks <= 8
    if num_ranks > 2:
        refused(training, budget, optimizer="adamw", shard=num_ranks - 1)


def test_what_is_said_of_the_parts_is_true() -> None:
    training = Training(stack(), rows(20_000), mean)
    text = refused(training, "2MiB", optimizer="adamw")
    size = sum(p.nbytes for p in training.model.parameters())
    assert f"parameters {size / 1024:.1f} KiB" in text
    assert f"of which all gradients {size / 1024:.1f} KiB" in text
    profile = training.profile(optimizer="adamw")
    assert f"optimizer state {profile.optimizer_bytes / 1024:.1f} KiB (adamw, float32)" in text
    least = re.search(r"smallest peak is ([\d.]+) MiB", text)
    half = re.search(r"half the batch or half the sequence: about ([\d.]+) MiB", text)
    assert least is not None and half is not None
    training.batch = rows(10_000)
    text = refused(training, "1MiB", optimizer="adamw")
    found = re.search(r"smallest peak is ([\d.]+) MiB", text)
    assert found is not None
    assert float(half[1]) == pytest.approx(float(found[1]), rel=0.02)
    assert float(found[1]) < 0.6 * float(least[1])


def test_a_peak_at_the_step_of_the_optimizer_is_said_to_lie_outside_the_blocks() -> None:
    text = refused(Training(stack(), rows(1), mean), "1000B", optimizer="adamw")
    assert "at optimizer step outside the blocks" in text
    assert "computed in chunks" not in text


def test_several_batches_of_which_one_cannot_be_kept_are_refused() -> None:
    training = Training(stack(), rows(16), mean)
    with pytest.raises(BudgetError, match="The smallest peak is"):
        actmem.fit(training.model, examples=[rows(16), rows(20_000)], budget="2MiB", loss=mean, device=DEVICE)


# -------------------------------------------------------------------- bad input


class Named(nn.Module):
    """A model whose forward has named arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.blocks(x).square().mean() * scale


def fit(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: actmem.fit(
        model, **{"example": {"x": rows(4)[0]}, "budget": "1GiB", "device": DEVICE, **options}
    )


def budget(*args: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: actmem.apply(model, actmem.Budget(*args, **options), example={"x": rows(4)[0]})


BAD: dict[str, tuple[Callable[[nn.Module], Any], type[ActmemError]]] = {
    "bananas": (fit(budget="20 bananas"), ModeError),
    "nothing": (fit(budget=0), ModeError),
    "no_unit": (fit(budget=72), ModeError),
    "no_unit_as_a_mode": (budget(72), ModeError),
    "less_than_nothing": (fit(budget=-1), ModeError),
    "more_than_all": (fit(budget=2.0), ModeError),
    "a_list": (fit(budget=[1]), ModeError),
    "bananas_as_a_mode": (budget("20 bananas"), ModeError),
    "device_unknown": (fit(device="h10"), DeviceError),
    "device_unknown_as_a_mode": (budget("1GiB", device="h10"), DeviceError),
    "no_example": (fit(example=None), ModeError),
    "headroom_above_one": (fit(headroom=1.5), ModeError),
    "headroom_below_zero": (fit(headroom=-0.1), ModeError),
    "no_ranks": (fit(shard=0), ModeError),
    "half_a_batch": (fit(microbatches=0.5), ModeError),
    "offload_to_nowhere": (fit(offload="gpu"), ModeError),
    "offload_to_the_host_on_a_cpu": (fit(offload="host", device=None), ModeError),
    "optimizer_unknown": (fit(optimizer="lion"), ModeError),
    "optimizer_unknown_as_a_mode": (budget("1GiB", optimizer="lion"), ModeError),
    "routing_unknown": (fit(routing="fair"), ModeError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_the_model_is_untouched(name: str, snapshot: SnapshotAssertion) -> None:
    wrong, error = BAD[name]
    model = Named()
    before = [(type(m), sorted(vars(m)), len(m._forward_pre_hooks)) for m in model.modules()]
    with pytest.raises(ActmemError) as caught:
        wrong(model)
    assert type(caught.value) is error
    assert str(caught.value) == snapshot
    assert [(type(m), sorted(vars(m)), len(m._forward_pre_hooks)) for m in model.modules()] == before
    assert actmem.verify(model, {"x": rows(4)[0]}, actmem.Full()).ok


MISFITS: dict[str, tuple[Any, type[Exception], str]] = {
    "width": ({"x": rows(4, 31)[0]}, RuntimeError, r"expected input with shape \[(\*, )?32\], but got.*\[4, 31\]"),
    "name": ({"y": rows(4)[0]}, TypeError, r"forward\(\) got an unexpected keyword argument 'y'"),
    "missing": ({}, TypeError, r"forward\(\) missing 1 required positional argument: 'x'"),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_an_example_that_does_not_fit_the_model_gives_the_error_of_the_model(name: str, fake: bool) -> None:
    example, error, text = MISFITS[name]
    model = Named()
    with pytest.raises(error, match=text):
        actmem.fit(model, example, budget="1GiB", device=DEVICE, fake=fake)
    assert actmem.verify(model, {"x": rows(4)[0]}, actmem.Full()).ok


def test_an_output_that_is_no_loss_is_refused_with_the_argument_that_helps() -> None:
    batch = {"input_ids": tokens(2, 8)["input_ids"]}  # no labels, and so no loss
    with pytest.raises(ModeError, match=r"neither a scalar nor has a \.loss. Pass loss="):
        actmem.fit(zoo("llama").model, batch, budget="1GiB", device=DEVICE)
    assert not torch.is_inference_mode_enabled()
