"""Packed batches: a plan holds for the worst of its examples, and the guard looks at documents, not only at shapes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.errors import BudgetError
from actmem.planner import Guard
from tests.planner.steps import DEVICE, Training, peaks, zoo

DIM = 16


class Block(nn.Module):
    """Attention over each document by itself, with weights that are there as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, edges: list[int]) -> Tensor:
        parts: list[Tensor] = []
        for begin, end in itertools.pairwise(edges):
            q, k, v = self.qkv(x[begin:end]).chunk(3, dim=-1)
            parts.append((q @ k.T).softmax(-1) @ v)
        return x + self.out(torch.cat(parts))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        edges = cu_seqlens.tolist()
        for block in self.blocks:
            x = block(x, edges)
        return x.square().mean()


def itself(loss: Tensor) -> Tensor:
    return loss


def packed(*lengths: int) -> dict[str, Any]:
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return {"x": torch.randn(sum(lengths), DIM), "cu_seqlens": edges}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List the predictions that the guard makes."""
    made: list[int] = []
    peak_of = Guard._peak
    monkeypatch.setattr(Guard, "_peak", lambda *args, **rest: (made.append(1), peak_of(*args, **rest))[1])
    return made


def test_another_packing_of_as_many_tokens_passes_and_a_longer_document_or_more_tokens_are_refused_with_the_reason(
    asked: list[int],
) -> None:
    training = Training(Packed(), packed(64, 64, 64, 64), itself)
    full, plain = peaks(training.profile())
    plan = training.fit((full + plain) // 2)
    with actmem.apply(training.model, plan):
        for lengths in ((64, 64, 64, 64), (64, 32, 64, 64), (64, 64, 64), (1, 2, 3, 4)):
            training.model(**packed(*lengths)).backward()
        assert asked == []
        with pytest.raises(BudgetError) as caught:
            training.model(**packed(256))  # as many tokens, in a tensor that is smaller
        assert "here longest document of cu_seqlens int32 [256] is larger than [64]. With a budget" in str(caught.value)
        with pytest.raises(BudgetError) as caught:
            training.model(**packed(*[64] * 8))
        assert "x float32 [512, 16] is larger than [256, 16]" in str(caught.value)
        assert "tokens of cu_seqlens int32 [512] is larger than [256]" in str(caught.value)
        assert len(asked) == 2


def test_more_documents_are_predicted_once_and_what_is_no_larger_then_passes(asked: list[int]) -> None:
    training = Training(Packed(), packed(128, 128), itself)
    _, plain = peaks(training.profile())
    plan = training.fit(plain)
    with actmem.apply(training.model, plan):
        for lengths in ([32] * 8, [16] * 8, [32, 64, 32, 32, 32, 64], [1] * 8, [32] * 8):
            training.model(**packed(*lengths)).backward()
    assert len(asked) == 2  # of eight documents, and of one of 64 among six


@pytest.mark.parametrize("as_mode", [True, False], ids=["Budget", "fit"])
def test_a_plan_holds_for_the_worst_of_its_examples_and_none_of_them_is_asked_about(
    as_mode: bool, asked: list[int]
) -> None:
    model, short, long = Packed(), packed(*[32] * 12), packed(256)
    full, plain = peaks(actmem.profile(model, long, optimizer=None))
    budget = (full + plain) // 2
    if as_mode:
        asked_for = actmem.Budget("2GiB", device="h100-80gb", optimizer=None)
        applied = actmem.apply(model, asked_for, examples=[short, long])
    else:
        plan = actmem.fit(model, examples=[short, long], budget=budget, optimizer=None, device=DEVICE)
        assert plan == actmem.Plan.from_json(plan.to_json())
        assert plan.predicted is not None and len(plan.predicted.examples) == 1
        assert "and for 1 other example" in str(plan)
        peak = max(Training(model, each, itself).measured(plan).peak_bytes for each in (short, long))
        assert peak == plan.predicted.peak_bytes <= budget
        applied = actmem.apply(model, plan)
    with applied:
        for each in (short, long, packed(200), packed(*[16] * 12)):
            model(**each).backward()
    assert asked == []


def test_where_the_plan_for_the_highest_plain_peak_is_not_enough_another_example_decides() -> None:
    model = Packed()
    many, one = packed(*[8] * 100), packed(200)
    examples = [many, one]
    smallest = [peaks(actmem.profile(model, each, optimizer=None))[0] for each in examples]
    plan = actmem.fit(model, examples=examples, budget=int(1.05 * max(smallest)), optimizer=None, device=DEVICE)
    assert plan.predicted is not None
    for each in examples:
        assert Training(model, each, itself).measured(plan).peak_bytes <= plan.predicted.budget_bytes


def positions(*lengths: int) -> dict[str, Any]:
    ids = torch.arange(sum(lengths)).remainder(50)[None]
    rows = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": rows}


def test_packed_positions_of_a_transformers_model_are_planned_for_and_pass_however_they_are_packed(
    asked: list[int],
) -> None:
    training = zoo("llama", positions(16, 16, 16, 16))
    training.model.config.use_cache = False
    found = training.profile()
    assert "documents of position_ids int64 [4]" in map(str, found.shapes)
    full, plain = peaks(found)
    plan = training.fit((full + plain) // 2)
    assert plan.predicted is not None
    measured = training.measured(plan)
    assert measured.peak_bytes == plan.predicted.peak_bytes
    with actmem.apply(training.model, plan):
        for lengths in ((16, 16, 16, 16), (16, 8, 16), (16, 16, 16, 12)):
            training.model(**positions(*lengths)).loss.backward()
        assert asked == []
        training.model(**positions(48, 16)).loss.backward()  # longer, but a mask takes the same
        training.model(**positions(48, 8, 8)).loss.backward()
        assert len(asked) == 2
        with pytest.raises(BudgetError, match=r"longest document of position_ids int64 \[256\] is larger than \[16\]"):
            training.model(**positions(256))


def test_packed_positions_are_not_taken_for_those_of_one_document() -> None:
    """transformers makes a mask for them, which one document does not need."""
    training = zoo("llama", positions(64))
    training.model.config.use_cache = False
    _, plain = peaks(training.profile())
    plan = training.fit(plain)
    with actmem.apply(training.model, plan), pytest.raises(BudgetError, match=r"documents of position_ids int64 \[4\]"):
        training.model(**positions(16, 16, 16, 16))


def test_numbered_documents_and_the_length_of_the_longest_count_too() -> None:
    from actmem.profiling import documents_of

    numbered = documents_of({"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2]]), "max_seqlen": 3, "labels": torch.arange(6)})
    assert list(map(str, numbered)) == [
        "longest document of seq_idx int64 [3]",
        "documents of seq_idx int64 [3]",
        "max_seqlen int [3]",
    ]
    assert documents_of({"cu_seqlens": torch.tensor([0, 4], device="meta"), "position_ids": torch.empty(2, 4)}) == ()
