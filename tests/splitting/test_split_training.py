"""Training steps as people write them, with the loss in chunks: bytes, their prediction, the distance to the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import actmem
from actmem.errors import UnsupportedError

CLASSES, CHUNKS = 4000, 16
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": CLASSES,
}
IDS = torch.randint(0, CLASSES, (2, 256), generator=torch.Generator().manual_seed(1))


def own(out: Any) -> Tensor:
    """The loss that transformers computes."""
    return out.loss


def smoothed(out: Any) -> Tensor:
    """A plain loop's loss."""
    logits = out.logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, CLASSES), IDS[:, 1:].reshape(-1), label_smoothing=0.1)


def grpo(out: Any) -> Tensor:
    """GRPO with an entropy bonus, by TRL's own functions, for advantages of two completions."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = out.logits[:, :-1]
    logs = selective_log_softmax(logits, IDS[:, 1:], temperature=0.9)
    ratio = torch.exp(logs - logs.detach())
    advantages = torch.tensor([[1.0], [-0.5]], dtype=logs.dtype)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.min(ratio * advantages, clipped * advantages).mean() - 0.01 * entropy_from_logits(logits).mean()


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    labels: bool

    def batch(self) -> dict[str, Tensor]:
        return {"input_ids": IDS, "labels": IDS} if self.labels else {"input_ids": IDS}


CASES = {
    "llama": Case(lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), own, labels=True),
    "gemma3, tied and soft-capped": Case(
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, final_logit_softcapping=30.0)), own, labels=True
    ),
    "a loop with label smoothing": Case(lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), smoothed, labels=False),
    "qwen3, grpo": Case(lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)), grpo, labels=False),
}


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().train()


def measured(model: Any, case: Case) -> tuple[int, int]:
    """Return the peak of a step, and how far it is above what is alive before the head."""
    given, kept = case.batch(), []

    def step() -> None:
        out = model(**given)
        case.loss(out).backward()

    step()
    model.zero_grad(set_to_none=True)
    peak_bytes = actmem.measure(step, model=model).tensor_bytes
    model.zero_grad(set_to_none=True)
    before = actmem.measure(lambda: kept.append(model.model(input_ids=IDS)), model=model)
    return peak_bytes, peak_bytes - before.timeline[-1].live_bytes


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_takes_an_eighth_and_what_was_predicted(name: str, gradients: Any) -> None:
    case, split = CASES[name], actmem.Split(loss=CHUNKS, gradients=gradients)
    model = built(case)
    _, whole = measured(model, case)
    with actmem.apply(model, actmem.SaveEverything(), split=split) as applied:
        peak_bytes, phase_bytes = measured(model, case)
        assert not any("whole tensor" in note for note in applied.report().notes)
    weight = model.lm_head.weight.nbytes  # its gradient is not the loss's
    assert phase_bytes - weight <= whole / 8
    found = actmem.profile(model, case.batch(), loss=case.loss, optimizer=None, split=split)
    assert abs(actmem.predict(found, actmem.SaveEverything()).tensor_bytes - peak_bytes) <= 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_no_further_from_the_truth_than_twice_as_far_as_plain_training(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for gradients in ("forward", "backward"):
        split = actmem.Split(loss=CHUNKS, gradients=gradients)
        found = actmem.verify(built(case).to(dtype), case.batch(), actmem.Full(), loss=case.loss, split=split)
        assert found.ok, found
        assert found.rounding is not None


def test_gradients_found_in_the_backward_pass_permit_two_of_them() -> None:
    case = CASES["a loop with label smoothing"]
    model = built(case).double()
    with actmem.apply(model, actmem.SaveEverything(), split=actmem.Split(loss=CHUNKS, gradients="backward")):
        loss = case.loss(model(**case.batch()))
        loss.backward(retain_graph=True)
        once = model.lm_head.weight.grad.clone()
        loss.backward()
        assert torch.equal(model.lm_head.weight.grad, 2 * once)


def adapted(*, on_head: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "lm_head"] if on_head else ["q_proj", "v_proj"]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), config).train()


@pytest.mark.parametrize("reduction", ["own", "none"])
def test_with_a_frozen_head_exact_chunks_are_bitwise_plain_training(reduction: str) -> None:
    def each(out: Any) -> Tensor:
        return (F.cross_entropy(out.logits.flatten(0, 1), IDS.flatten(), reduction="none") ** 2).sum()

    case = Case(adapted, own if reduction == "own" else each, labels=reduction == "own")
    model = adapted()
    with torch.no_grad():
        hidden = torch.randn(IDS.numel(), 16)
        rows = hidden.split(IDS.numel() // CHUNKS)
        if not torch.equal(torch.cat([model.lm_head(x) for x in rows]), model.lm_head(hidden)):
            pytest.skip("this machine's matrix product gives other bits for fewer rows")
    split = actmem.Split(loss=CHUNKS, exact=True)
    found = actmem.verify(model, case.batch(), actmem.Full(), loss=case.loss, split=split)
    assert found.ok and found.rounding is None, found
    assert any("logits in 16 chunks of tokens, for cross_entropy." in note for note in found.report.notes)
    with actmem.apply(model, actmem.Full(), split=split) as applied:
        assert applied.plan.bitwise and "in the same order" in str(applied.plan)


def test_exact_chunks_of_a_head_that_is_trained_are_refused_with_the_reason() -> None:
    case = CASES["llama"]
    with (
        actmem.apply(model := built(case), actmem.Full(), split=actmem.Split(loss=CHUNKS, exact=True)),
        pytest.raises(UnsupportedError, match=r"lm_head takes a gradient.*requires_grad_\(False\)"),
    ):
        model(**case.batch())
    model.lm_head.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    with (
        actmem.apply(model, actmem.Full(), split=actmem.Split(loss=CHUNKS, exact=True)),
        pytest.raises(UnsupportedError, match="label smoothing"),
    ):
        smoothed(model(input_ids=IDS))


def test_exact_parts_are_bitwise_where_their_weights_are_frozen_and_refused_otherwise() -> None:
    split = actmem.Split(parts={"mlp": 4}, exact=True)
    found = actmem.verify(adapted(), CASES["llama"].batch(), actmem.Full(), split=split)
    assert found.ok and found.rounding is None, found
    case = CASES["llama"]
    with (
        actmem.apply(model := built(case), actmem.Full(), split=split),
        pytest.raises(UnsupportedError, match="its weights take gradients"),
    ):
        model(**case.batch())


def test_adapters_on_the_head_are_trained_as_without_chunks() -> None:
    split = actmem.Split(loss=CHUNKS)
    found = actmem.verify(adapted(on_head=True), CASES["llama"].batch(), actmem.Full(), split=split)
    assert found.ok, found
    assert any("logits in 16 chunks of tokens" in note for note in found.report.notes)


def test_a_head_named_by_its_path_is_the_one_that_is_split() -> None:
    case = CASES["llama"]
    split = actmem.Split(loss=CHUNKS, head="lm_head")
    assert actmem.verify(built(case), case.batch(), actmem.Full(), split=split).ok


def test_a_head_without_tokens_is_left_alone_and_the_report_says_so() -> None:
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config)
    given = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    found = actmem.verify(model, given, actmem.Full(), split=actmem.Split(loss=CHUNKS))
    assert found.ok and found.rounding is not None and found.rounding.largest_ulps == 0
    assert "the output of classifier was not split: it has 2 rows, fewer than 16 chunks." in found.report.notes
