"""A model whose head is split: less memory, as predicted, and training within rounding of plain training."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import actmem
from actmem.errors import BudgetError, ModeError
from actmem.splitting import DeferredLogits

CLASSES = 2000
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": CLASSES,
}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def tied_and_soft_capped() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**SMALL))


def qwen() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, CLASSES, (2, 256))
    return {"input_ids": ids, "labels": ids}


def made(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


def peak(model: nn.Module, given: dict[str, Tensor]) -> int:
    def step() -> None:
        out = model(**given)
        out.loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    found = actmem.measure(step, model=model).peak_bytes
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("build", [llama, tied_and_soft_capped, qwen])
def test_training_is_within_rounding_of_plain_training(build: Any) -> None:
    found = actmem.verify(made(build), batch(), actmem.Full(), split=actmem.Split(loss=16))
    assert found.ok, found
    assert found.rounding is not None and found.rounding.largest_ulps < 1000
    assert "lm_head: logits in 16 chunks of tokens, for cross_entropy." in found.report.notes
    assert not any("whole tensor" in note for note in found.report.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [llama, tied_and_soft_capped])
def test_the_predicted_peak_is_the_measured_one_and_lower_than_any_plan_of_blocks(
    build: Any, dtype: torch.dtype
) -> None:
    model = made(build).to(dtype)
    with pytest.raises(BudgetError):
        actmem.fit(model, batch(), budget="9MiB", optimizer=None)
    plan = actmem.fit(model, batch(), budget="9MiB", optimizer=None, split=actmem.Split(loss=16))
    assert plan.split == actmem.Split(loss=16) and not plan.bitwise
    assert actmem.Plan.from_json(plan.to_json()) == plan
    assert "in pieces: Split(loss=16)" in str(plan)
    with actmem.apply(model, plan):
        assert abs(peak(model, batch()) - plan.predicted.peak_bytes) <= 64
    assert peak(model, batch()) > 2 * plan.predicted.peak_bytes


def test_a_planner_that_may_split_does_so_only_where_less_is_then_recomputed() -> None:
    model = made(llama)
    plain = actmem.fit(model, batch(), budget="1GiB", optimizer=None, allow=["split"])
    assert plain.split is None
    plan = actmem.fit(model, batch(), budget="9MiB", optimizer=None, allow=["split"])
    assert plan.split == actmem.Split(loss="auto")
    with actmem.apply(model, actmem.Budget("9MiB", optimizer=None, allow=("split",)), example=batch()) as applied:
        assert applied.plan.split == actmem.Split(loss="auto")
        assert peak(model, batch()) <= 9 * 2**20


def test_the_loss_takes_an_eighth_of_what_it_took() -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 8000, bias=False)
    hidden, labels = torch.randn(1024, 64), torch.randint(0, 8000, (1024,))

    def taken() -> int:
        def step() -> None:
            x = hidden.detach().requires_grad_()
            F.cross_entropy(head(x), labels).backward()

        head.weight.grad = None
        found = actmem.measure(step, model=head)
        weights = 2 * head.weight.nbytes  # with its gradient
        return found.peak_bytes - weights - 2 * hidden.nbytes

    whole = taken()
    with actmem.apply(
        nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)]), "lm_head": head}),
        actmem.SaveEverything(),
        blocks="layers.*",
        split=actmem.Split(loss=16),
    ):
        assert taken() <= whole / 8


def test_a_loop_of_ones_own_and_whoever_needs_whole_logits_are_served() -> None:
    model, given = made(llama), batch()
    with actmem.apply(model, actmem.Full(), split=actmem.Split(loss=8)) as applied:
        logits = model(given["input_ids"]).logits
        assert isinstance(logits, DeferredLogits)
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, CLASSES), given["labels"][:, 1:].reshape(-1), label_smoothing=0.1
        )
        loss.backward()
        assert not any("whole" in note for note in applied.report().notes)
        logits.topk(3)
        assert any(
            "whole tensor of logits was made for topk at test_split_models.py" in n for n in applied.report().notes
        )
    assert not isinstance(model(given["input_ids"]).logits, DeferredLogits)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"])
def test_a_copy_of_a_split_model_is_not_split(copied: Any) -> None:
    model, given = made(llama), batch()
    wanted = model(**given).logits
    with actmem.apply(model, actmem.Full(), split=actmem.Split(loss=8)) as applied:
        other = copied(model)
        assert isinstance(model(**given).logits, DeferredLogits)
        logits = other(**given).logits
        assert type(logits) is Tensor and torch.equal(logits, wanted)
        assert other.lm_head._compiled_call_impl is None
        applied.report()
    assert type(model(**given).logits) is Tensor


def test_gradients_accumulated_over_two_batches_are_those_of_plain_training_up_to_the_order_of_sums() -> None:
    model = made(llama).double()
    halves = [{name: ids[i : i + 1] for name, ids in batch().items()} for i in range(2)]

    def accumulated() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        for half in halves:
            (model(**half).loss / 2).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain = accumulated()
    with actmem.apply(model, actmem.Full(), split=actmem.Split(loss=8)) as applied:
        found = accumulated()
        assert "lm_head: logits in 8 chunks of tokens, for cross_entropy (2 times)." in applied.report().notes
    for name, gradient in plain.items():  # transformers casts logits to float32
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda m: actmem.apply(m, actmem.Full(), split=16), "is not a Split"),
        (lambda m: actmem.Split(loss=0), "number of chunks"),
        (lambda m: actmem.apply(m, actmem.Full(), split=actmem.Split(loss=4, head="model.norm")), "not a linear layer"),
        (lambda m: actmem.apply(m, actmem.Full(), split=actmem.Split(loss=4, head="modle")), "no module 'modle'"),
        (lambda m: actmem.fit(m, batch(), budget="1GiB", allow=["everything"]), "Expected a list of: split"),
        (
            lambda m: actmem.fit(m, batch(), budget="1GiB", allow=["split"], split=actmem.Split(loss=4)),
            "cannot be combined",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(wrong: Any, said: str) -> None:
    model = made(llama)
    with pytest.raises(ModeError, match=said):
        wrong(model)
    assert not isinstance(model(**batch()).logits, DeferredLogits)
