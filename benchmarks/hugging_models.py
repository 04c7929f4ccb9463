"""Models of Hugging Face for `overhead.py`: a tiny Mixtral in all forms that are compared, and a Llama under LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import FORMS

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LoraSize:
    """The sizes of a Llama under LoRA."""

    width: int = 256
    num_layers: int = 12
    length: int = 128
    batch: int = 1
    rank: int = 8
    vocab: int = 512

    def tokens(self) -> Batch:
        """Return a seeded batch."""
        return _tokens(self.vocab, self.batch, self.length)


def mixtral(num_layers: int, form: str) -> nn.Module:
    """Build a tiny Mixtral in train mode, under one of `FORMS`: 4 experts, of which 2 are chosen."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = _seeded(
        lambda: MixtralForCausalLM(
            MixtralConfig(**sizes, **experts, **_SPECIAL, num_hidden_layers=num_layers, vocab_size=64)
        )
    )
    FORMS[form](model)
    return model


def mixtral_tokens() -> Batch:
    """Return a seeded batch for the tiny Mixtral."""
    return _tokens(64, 1, 8)


def lora(size: LoraSize) -> Any:
    """Build a Llama with frozen weights in train mode, and LoRA on all its projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": size.width, "intermediate_size": size.width * 43 // 16, "vocab_size": size.vocab}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": size.num_layers}
    adapters = LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=list(ADAPTED))
    return _seeded(lambda: get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes, **heads, **_SPECIAL)), adapters))


def checkpoint_as_people_do(model: Any) -> None:
    """Switch on the gradient checkpointing of transformers, as its documentation says for PEFT."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}


def _seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().train()


def _tokens(vocab: int, batch: int, length: int) -> Batch:
    tokens = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}
