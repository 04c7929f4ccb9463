"""In front of a trainer of TRL the mixin takes its argument over: TRL's own offloading is neither made nor entered."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actmem.compat.axolotl import ActivationOffloadingMixin, OffloadActivations
from tests.integrations.test_trl import WORDS, sentences, tokenizer
from tests.integrations.training import arguments, build_llama, differing, lora_config, losses_of, weights_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:accelerate",
    "ignore::UserWarning:torch.utils.data",
    "ignore::UserWarning:trl",
    "ignore::FutureWarning:trl",
)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def said(i: int) -> str:
    return " ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(6))


def pairs() -> Any:
    from datasets import Dataset

    rows = range(12)
    return Dataset.from_dict(
        {
            "prompt": [f"{said(i)} " for i in rows],
            "chosen": [said(i + 3) for i in rows],
            "rejected": [said(i + 7) for i in rows],
        }
    )


def liked() -> Any:
    from datasets import Dataset

    rows = range(12)
    return Dataset.from_dict(
        {
            "prompt": [f"{said(i)} " for i in rows],
            "completion": [said(i + 3) for i in rows],
            "label": [i % 2 == 0 for i in rows],
        }
    )


def scoring_llama() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, num_labels=1, **sizes)
    config.pad_token_id = 0
    return LlamaForSequenceClassification(config)


def trainer_of(kind: str, folder: Path, *, offload: bool = True, lora: bool = False, **given: Any) -> Any:
    import trl

    base, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    made = type(f"Offloading{kind}", (ActivationOffloadingMixin, base), {}) if offload else base
    args = arguments(folder, config, max_length=32, **given)
    if offload:
        args.activation_offloading_copy_cpu = True
    data = {"SFT": sentences, "DPO": pairs, "KTO": liked, "Reward": lambda: pairs().remove_columns("prompt")}[kind]()
    judge = {"ref_model": build_llama()} if kind in ("DPO", "KTO") else {}
    return made(
        model=scoring_llama() if kind == "Reward" else build_llama(),
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=lora_config() if lora else None,
        **judge,
    )


@pytest.mark.parametrize("kind", ["SFT", *(pytest.param(k, marks=pytest.mark.slow) for k in ("DPO", "KTO", "Reward"))])
def test_a_trainer_of_trl_offloads_by_actmem_alone_and_trains_as_without(kind: str, tmp_path: Path) -> None:
    plain = trainer_of(kind, tmp_path, offload=False)
    plain.train()
    trainer = trainer_of(kind, tmp_path, activation_offloading=True)
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert len(set(losses_of(plain))) > 1
    assert differing(weights_of(plain.model), weights_of(trainer.model)) == []
    assert isinstance(trainer.activation_offload_context, OffloadActivations)
    moved = trainer.activation_offload_context.ledger
    assert moved.out_bytes == moved.back_bytes + moved.dropped_bytes > 0
    assert trainer.args.activation_offloading is True, "what is saved with the model says what was done"


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "Reward"])
def test_the_trainers_of_trl_read_the_same_argument(kind: str) -> None:
    import trl

    names = {field.name for field in dataclasses.fields(getattr(trl, f"{kind}Config"))}
    assert "activation_offloading" in names


@pytest.mark.parametrize("value", ["hidden_states", pytest.param("legacy", marks=pytest.mark.slow)])
def test_with_adapters_and_the_checkpointing_that_trl_switches_on_the_weights_are_the_same(
    value: str, tmp_path: Path
) -> None:
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "lora": True}
    plain = trainer_of("SFT", tmp_path, offload=False, **given)
    plain.train()
    trainer = trainer_of("SFT", tmp_path, activation_offloading=value, **given)
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert differing(weights_of(plain.model), weights_of(trainer.model)) == []
    assert trainer.activation_offload_context.ledger.out_bytes > 0
    if value == "hidden_states":
        stats = trainer.activation_offload_context.stats
        assert stats.marked_tensors == stats.offloaded_tensors == stats.restored_tensors == 2, "two layers, last step"


def test_what_trl_would_enter_itself_is_not_there(tmp_path: Path) -> None:
    """On a CPU making it raises; with an accelerator it would be entered inside actmem's, and take every tensor."""
    from trl.models import activation_offloading as theirs

    trainer = trainer_of("SFT", tmp_path, activation_offloading=True)
    own = trainer.maybe_activation_offload_context
    assert not isinstance(own, theirs.OffloadActivations)
    seen: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda kept: kept), own:
        torch.ones(3, requires_grad=True).exp()
    assert len(seen) == 1, "hooks around it see what is saved inside"
