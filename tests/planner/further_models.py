"""Further models of transformers in small: architectures with an unusual way of attending, sharing or routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FURTHER", "built"]

VOCABULARY = 96


def _ids(rows: int = 2, columns: int = 16) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, columns))


def _classify(_: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": _ids(), "attention_mask": torch.ones(2, 16, dtype=torch.long), "labels": torch.tensor([0, 1])}


def _translate(_: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": _ids(), "labels": _ids(columns=8)}


def _masked(_: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


FURTHER: dict[str, tuple[str, str, dict[str, Any], Callable[[nn.Module], dict[str, Tensor]]]] = {
    "bigbird_pegasus": (
        "BigBirdPegasusConfig",
        "BigBirdPegasusForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "attention_type": "block_sparse",
            "block_size": 4,
            "num_random_blocks": 1,
        },
        lambda _: {"input_ids": _ids(columns=48), "labels": _ids(columns=8)},
    ),
    "prophetnet": (
        "ProphetNetConfig",
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "ngram": 2,
        },
        _translate,
    ),
    "led": (
        "LEDConfig",
        "LEDForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 8,
        },
        _translate,
    ),
    "nllb_moe": (
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "max_position_embeddings": 64,
        },
        _translate,
    ),
    "mra": (
        "MraConfig",
        "MraForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 66,
            "block_per_row": 1,
        },
        lambda _: {"input_ids": _ids(columns=64), "labels": _ids(columns=64)},
    ),
    "squeezebert": (
        "SqueezeBertConfig",
        "SqueezeBertForSequenceClassification",
        {
            "vocab_size": VOCABULARY,
            "embedding_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        },
        _classify,
    ),
    "fnet": (
        "FNetConfig",
        "FNetForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        },
        _masked,
    ),
    "albert": (
        "AlbertConfig",
        "AlbertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "embedding_size": 16,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
        },
        _masked,
    ),
}
"""Name -> the classes of its configuration and of the model, sizes, and a batch."""


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model with random weights, in training mode, and a batch for it."""
    import transformers

    config, kind, sizes, batch = FURTHER[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).train()
    return model, batch(model)
