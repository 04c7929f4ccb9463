"""Models of transformers that are only looked at: real sizes, few layers, no memory (they are on the meta device)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def shape(model_type: str, auto: str = "AutoModelForCausalLM", **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = transformers.AutoConfig.for_model(model_type, **config)
        with torch.device("meta"):
            return getattr(transformers, auto).from_config(made)

    return build


def _omni() -> nn.Module:
    """Build a model that hears, sees and reads."""
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    config = Qwen2_5OmniThinkerConfig(
        audio_config={"encoder_layers": 2}, vision_config={"depth": 2}, text_config={"num_hidden_layers": 2}
    )
    with torch.device("meta"):
        return Qwen2_5OmniThinkerForConditionalGeneration(config)


_ALTERNATING = ["linear_attention", "full_attention"]

SHAPES: dict[str, Callable[[], nn.Module]] = {
    "mamba2": shape("mamba2", num_hidden_layers=2),
    "rwkv": shape("rwkv", num_hidden_layers=2),
    "recurrent_gemma": shape("recurrent_gemma", num_hidden_layers=3),
    "falcon_h1": shape("falcon_h1", num_hidden_layers=2),
    "granitemoehybrid": shape(
        "granitemoehybrid", num_hidden_layers=2, layer_types=_ALTERNATING, num_local_experts=4, num_experts_per_tok=2
    ),
    "kimi_linear": shape("kimi_linear", num_hidden_layers=2, layer_types=_ALTERNATING, first_k_dense_replace=1),
    "longcat_flash": shape("longcat_flash", num_layers=1, num_hidden_layers=2, n_routed_experts=4),
    "deepseek_v32": shape("deepseek_v32", num_hidden_layers=2, n_routed_experts=8, n_group=2),
    "llama4": shape(
        "llama4_text",
        num_hidden_layers=2,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        moe_layers=[1],
        num_local_experts=4,
    ),
    "gemma4_moe": shape(
        "gemma4_text",
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
    "mistral": shape("mistral", num_hidden_layers=2),
    "gpt_neo": shape("gpt_neo", num_layers=2, attention_types=[[["global", "local"], 1]]),
    "moshi": shape("moshi", num_hidden_layers=2),
    "opt": shape("opt", num_hidden_layers=2),
    "swin": shape("swin", "AutoModelForImageClassification"),
    "wav2vec2": shape("wav2vec2", "AutoModelForAudioClassification", num_hidden_layers=2),
    "blip2": shape("blip-2", "AutoModelForImageTextToText"),
    "qwen2_5_vl": shape(
        "qwen2_5_vl", "AutoModelForImageTextToText", text_config={"num_hidden_layers": 2}, vision_config={"depth": 2}
    ),
    "omni": _omni,
}
