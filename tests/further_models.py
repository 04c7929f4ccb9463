"""Twenty-five further classes of transformers, in tiny configurations, each with a batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 64
LENGTHS = {"mra": 32, "bigbird_pegasus": 48}
"""Where 16 tokens are too few for the attention that is meant."""
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}

CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bigbird_pegasus": (
        "BigBirdPegasusConfig",
        "BigBirdPegasusForConditionalGeneration",
        SEQ2SEQ | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    ),
    "prophetnet": (
        "ProphetNetConfig",
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "encoder_ffn_dim": 64,
            "num_encoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "decoder_ffn_dim": 64,
            "num_decoder_layers": 2,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "led": (
        "LEDConfig",
        "LEDForConditionalGeneration",
        SEQ2SEQ | {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    ),
    "nllb_moe": (
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        SEQ2SEQ | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 16},
    ),
    "mra": ("MraConfig", "MraForMaskedLM", TEXT | {"block_per_row": 1}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", TEXT | {"num_hidden_layers": 3, "embedding_size": 16}),
    "squeezebert": (
        "SqueezeBertConfig",
        "SqueezeBertForSequenceClassification",
        TEXT | {"num_hidden_layers": 3, "embedding_size": 32},
    ),
    "fnet": ("FNetConfig", "FNetForMaskedLM", TEXT),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    ),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", TEXT | {"embedding_size": 32}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", TEXT),
    "deberta_v2": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", TEXT),
    "convbert": ("ConvBertConfig", "ConvBertForMaskedLM", TEXT | {"embedding_size": 32}),
    "roformer": ("RoFormerConfig", "RoFormerForMaskedLM", TEXT | {"embedding_size": 32}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        }
        | TOKENS,
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4} | TOKENS,
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "window_size": 8,
        }
        | TOKENS,
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT | TOKENS),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | TOKENS,
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", TEXT | TOKENS),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4} | TOKENS,
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", SEQ2SEQ),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", SEQ2SEQ),
    "switch_transformers": (
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_experts": 4,
            "expert_capacity": 16,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
    ),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGE),
    "beit": ("BeitConfig", "BeitForImageClassification", IMAGE),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", IMAGE),
}
"""Name -> configuration class, model class, what is set."""


UNUSUAL = ("bigbird_pegasus", "prophetnet", "led", "nllb_moe", "mra", "squeezebert", "fnet", "albert")
"""Those with an unusual way of attending, sharing or routing."""


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model with random weights, in training mode, and a batch for it."""
    config_class, model_class, settings = CLASSES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config).train()
    generator = torch.Generator().manual_seed(0)
    if "image_size" in settings:
        return model, {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, VOCAB, (2, LENGTHS.get(name, 16)), generator=generator)
    if "Classification" in model_class:
        return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor([0, 1])}
    return model, {"input_ids": tokens, "labels": tokens}
