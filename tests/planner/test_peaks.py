"""The peak in words: where it is, what it consists of, and only what would really lower it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.log_entries import OpRan
from actmem.units import UNITS, size
from tests.planner.steps import DEVICE, Training, rows, stack


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def amounts(text: str) -> list[int]:
    return [round(float(number) * UNITS[unit]) for number, unit in re.findall(r"([\d.]+) (B|KiB|MiB|GiB)\b", text)]


class Headed(nn.Module):
    """Blocks with a head that is so wide that the loss has the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()
        self.head = nn.Linear(32, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).log_softmax(-1).square().mean()


def headed(num_rows: int = 512) -> Training:
    return Training(Headed(), rows(num_rows), optimizer=torch.optim.AdamW([nn.Parameter(torch.ones(1))]))


def test_the_place_and_the_parts_are_those_of_the_prediction() -> None:
    training = Training(stack(), rows(2048), mean)
    full, plain = (actmem.predict(training.profile(), m, DEVICE) for m in (actmem.Full(), actmem.SaveEverything()))
    plan = training.fit((full.peak_bytes + plain.peak_bytes) // 2)
    assert plan.predicted is not None
    place, parts, largest, _ = plan.predicted.peak_words
    assert place.startswith(f"The peak of {size(plan.predicted.peak_bytes)} is reached in the backward pass, ")
    op, _, block = plan.predicted.peak_at.partition(" in ")
    assert f"in {block}" in place and op.removeprefix("aten.").removesuffix(".default") in place
    assert sum(amounts(parts)) == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert largest.startswith("Most of the saved activations: ")
    assert all(sentence in str(plan) for sentence in plan.predicted.peak_words)
    assert actmem.Plan.from_json(plan.to_json()) == plan
    assert str(actmem.predict(training.profile(), plan, DEVICE)).startswith(place)


def test_what_would_lower_it_does_so_to_what_is_said() -> None:
    training = headed()
    profile = training.profile()
    plan = training.fit("1GiB")
    assert plan.predicted is not None
    peak, text = plan.predicted.peak_bytes, plan.predicted.peak_words[-1]
    assert "outside the blocks" in plan.predicted.peak_words[0]

    def said(what: str) -> int:
        (found,) = re.findall(rf"{what}[^;]*?: (?:about )?([\d.]+ \w+)", text)
        (num_bytes,) = amounts(found)
        return num_bytes

    def predicted(found: actmem.Profile, mode: Any) -> int:
        return actmem.predict(found, mode, DEVICE).peak_bytes

    exact: Any = pytest.approx
    assert said("recomputing every block") == exact(predicted(profile, actmem.Full()), rel=0.01)
    assert said("shard=2") == exact(predicted(training.profile(shard=2), plan), rel=0.01)
    assert said("an optimizer without state") == exact(predicted(training.profile(optimizer=None), plan), rel=0.05)
    half = actmem.profile(training.model, rows(256), optimizer="adamw")
    assert said("half the batch or half the sequence") == exact(predicted(half, plan), rel=0.02)
    offered = [num_bytes for each in text.split("; ") for num_bytes in amounts(each)[:1]]
    assert len(offered) >= 5 and max(offered) < peak


def test_a_loss_in_chunks_does_not_lower_the_step_of_the_optimizer() -> None:
    training = headed()
    profile = training.profile()
    step = profile.log[-1]
    assert isinstance(step, OpRan)  # of the optimizer
    plan = training.fit("1GiB")
    assert plan.predicted is not None
    (found,) = re.findall(r"if the head is a linear layer\): at best ([\d.]+ \w+)", plan.predicted.peak_words[-1])
    assert amounts(found)[0] >= step.live_bytes * 0.99


def test_where_the_optimizer_has_the_peak_neither_batch_nor_plan_is_offered() -> None:
    training = Training(stack(), rows(1), mean)
    words = training.fit("1GiB", optimizer="adamw").predicted.peak_words  # type: ignore[union-attr]
    assert "when the optimizer steps" in words[0]
    assert "half the batch" not in words[-1] and "offload" not in words[-1] and "chunks" not in words[-1]
    assert "an optimizer without state" in words[-1]


def test_a_plan_file_without_the_words_can_still_be_read() -> None:
    plan = Training(stack(), rows(64), mean).fit("1GiB")
    assert plan.predicted is not None
    text = plan.to_json()
    without = re.sub(r'    "peak_words": \[.*?\],\n', "", text, flags=re.DOTALL)
    assert without != text
    assert actmem.Plan.from_json(without) == replace(plan, predicted=replace(plan.predicted, peak_words=()))
