"""Which targets are found where, in every family of models: a table, so that a change of any line is seen."""

from collections.abc import Callable

import pytest
from torch import nn

from actmem.structure import find_blocks, layer_type, roles
from tests.zoo import ZOO
from tests.zoo_shapes import SHAPES

Row = tuple[str | None, dict[str, tuple[str, ...]]]

BUILDERS: dict[str, Callable[[], nn.Module]] = {**{name: case.build for name, case in ZOO.items()}, **SHAPES}


def row(kind: str | None, **paths: str) -> Row:
    """Expand a line: `attn_proj` is `attention`, and `moe_act` is `routed_experts`, unless the line says otherwise."""
    found = {role: tuple(text.split()) for role, text in paths.items()}
    for role, same in (("attn_proj", "attention"), ("moe_act", "routed_experts")):
        if same in found:
            found.setdefault(role, found[same])
    return kind, found


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LN = "input_layernorm post_attention_layernorm"
QK = f"self_attn.q_norm self_attn.k_norm {LN}"
FF = "pre_feedforward_layernorm post_feedforward_layernorm"
MLA = f"self_attn.q_a_layernorm self_attn.kv_a_layernorm {LN}"
UP = "self_attn.q_b_proj self_attn.kv_b_proj"
PER_LAYER = "post_per_layer_input_norm"
ALTUP = f"altup.router_norm laurel.post_laurel_norm {PER_LAYER}"
LLAMA = {"norm": LN, "attention": "self_attn", "mlp": "mlp"}
EXPERTS = {"routed_experts": "mlp.experts", "router": "mlp.gate"}
SHARED = {**EXPERTS, "shared_experts": "mlp.shared_experts"}
QWEN_SHARED = {**EXPERTS, "shared_experts": "mlp.shared_expert"}
GRANITE = {
    "routed_experts": "block_sparse_moe.experts",
    "router": "block_sparse_moe.router",
    "shared_experts": "shared_mlp",
}
TITAN = {"norm": "attention_norm ffn_norm", "attention": "attention"}
WHISPER = {"norm": "self_attn_layer_norm final_layer_norm", "attention": "self_attn", "mlp": "activation_fn fc1 fc2"}
QFORMER = {"mlp": "intermediate_query output_query.dense"}

# Family, block: the layer type and the paths. Of a multimodal model, the tower before the block.
TABLE: dict[str, Row] = {
    "llama 0": row(FULL, **LLAMA),
    "llama_lora 0": row(FULL, **LLAMA),
    "qwen3 0": row(FULL, norm=QK, attention="self_attn", mlp="mlp"),
    "gpt2_dropout 0": row(FULL, norm="ln_1 ln_2", attention="attn", mlp="mlp"),
    "gpt_neo 0": row(FULL, norm="ln_1 ln_2", attention="attn.attention", mlp="mlp"),
    "gpt_neo 1": row(SLIDING, norm="ln_1 ln_2", attention="attn.attention", mlp="mlp"),
    "mistral 0": row(SLIDING, **LLAMA),
    "moshi 0": row(SLIDING, **LLAMA),
    "opt 0": row(FULL, **WHISPER),
    "bert 0": row(
        FULL,
        norm="attention.output.LayerNorm output.LayerNorm",
        attention="attention.self",
        attn_proj="attention.self attention.output.dense",
        mlp="intermediate output.dense",
    ),
    "t5 0": row(
        FULL,
        norm="layer.0.layer_norm layer.1.layer_norm",
        attention="layer.0.SelfAttention",
        mlp="layer.1.DenseReluDense",
    ),
    "t5 2": row(
        FULL,
        norm="layer.0.layer_norm layer.1.layer_norm layer.2.layer_norm",
        attention="layer.0.SelfAttention layer.1.EncDecAttention",
        mlp="layer.2.DenseReluDense",
    ),
    "mixtral 0": row(FULL, norm=LN, attention="self_attn", **EXPERTS),
    "qwen3_moe 0": row(FULL, norm=QK, attention="self_attn", **EXPERTS),
    "deepseek_v3 0": row(FULL, norm=MLA, attention="self_attn", mla_up_proj=UP, mlp="mlp"),
    "deepseek_v3 1": row(FULL, norm=MLA, attention="self_attn", mla_up_proj=UP, **SHARED),
    # The indexer of sparse attention has an up-projection too, which is none of latent attention.
    "deepseek_v32 0": row(
        "indexed_attention",
        norm=f"self_attn.q_a_layernorm self_attn.kv_a_layernorm self_attn.indexer.k_norm {LN}",
        attention="self_attn",
        mla_up_proj=UP,
        mlp="mlp",
    ),
    "longcat_flash 0": row(
        FULL,
        norm="self_attn.0.q_a_layernorm self_attn.0.kv_a_layernorm self_attn.1.q_a_layernorm "
        "self_attn.1.kv_a_layernorm input_layernorm.0 input_layernorm.1 post_attention_layernorm.0 "
        "post_attention_layernorm.1",
        attention="self_attn.0 self_attn.1",
        mla_up_proj="self_attn.0.q_b_proj self_attn.0.kv_b_proj self_attn.1.q_b_proj self_attn.1.kv_b_proj",
        mlp="mlps.0 mlps.1",
        routed_experts="mlp.experts",
        router="mlp.router",
    ),
    "gpt_oss 0": row(SLIDING, norm=LN, attention="self_attn", routed_experts="mlp.experts", router="mlp.router"),
    "gpt_oss 1": row(FULL, norm=LN, attention="self_attn", routed_experts="mlp.experts", router="mlp.router"),
    "llama4 0": row("chunked_attention", norm=f"self_attn.qk_norm {LN}", attention="self_attn", mlp="feed_forward"),
    "llama4 1": row(
        FULL,
        norm=LN,
        attention="self_attn",
        routed_experts="feed_forward.experts",
        shared_experts="feed_forward.shared_expert",
        router="feed_forward.router",
    ),
    "gemma3_sliding 0": row(SLIDING, norm=f"{QK} {FF}", attention="self_attn", mlp="mlp"),
    "gemma3_sliding 1": row(FULL, norm=f"{QK} {FF}", attention="self_attn", mlp="mlp"),
    "gemma3n_shared_kv 0": row(
        SLIDING,
        norm=f"self_attn.q_norm self_attn.k_norm self_attn.v_norm {LN} {FF} {ALTUP}",
        attention="self_attn",
        mlp="mlp",
    ),
    "gemma3n_shared_kv 3": row(FULL, norm=f"self_attn.q_norm {LN} {FF} {ALTUP}", attention="self_attn", mlp="mlp"),
    "gemma4_shared_kv 0": row(
        SLIDING,
        norm=f"self_attn.q_norm self_attn.k_norm self_attn.v_norm {LN} {FF} {PER_LAYER}",
        attention="self_attn",
        mlp="mlp",
    ),
    "gemma4_shared_kv 3": row(FULL, norm=f"self_attn.q_norm {LN} {FF} {PER_LAYER}", attention="self_attn", mlp="mlp"),
    "gemma4_moe 1": row(
        FULL,
        norm=f"self_attn.q_norm self_attn.k_norm self_attn.v_norm {LN} {FF} {PER_LAYER} router.norm "
        "post_feedforward_layernorm_1 post_feedforward_layernorm_2 pre_feedforward_layernorm_2",
        attention="self_attn",
        mlp="mlp",
        routed_experts="experts",
        router="router",
    ),
    "qwen3_next 0": row(LINEAR, norm=f"linear_attn.norm {LN}", linear_attn="linear_attn", **QWEN_SHARED),
    "qwen3_next 1": row(FULL, norm=QK, attention="self_attn", **QWEN_SHARED),
    "kimi_linear 0": row(LINEAR, norm=f"self_attn.o_norm {LN}", linear_attn="self_attn", mlp="mlp"),
    "kimi_linear 1": row(
        FULL,
        norm=f"self_attn.kv_a_layernorm {LN}",
        attention="self_attn",
        mla_up_proj="self_attn.kv_b_proj",
        **SHARED,
    ),
    "mamba2 0": row(LINEAR, norm="norm mixer.norm", linear_attn="mixer"),
    "nemotron_h 0": row(LINEAR, norm="norm mixer.norm", linear_attn="mixer"),
    "nemotron_h 1": row(
        "moe", norm="norm", routed_experts="mixer.experts", shared_experts="mixer.shared_experts", router="mixer.gate"
    ),
    "nemotron_h 2": row(FULL, norm="norm", attention="mixer"),
    "nemotron_h 3": row("mlp", norm="norm", mlp="mixer"),
    "falcon_h1 0": row(
        "hybrid",
        norm="input_layernorm pre_ff_layernorm",
        attention="self_attn",
        linear_attn="mamba",
        mlp="feed_forward",
    ),
    "granitemoehybrid 0": row(LINEAR, norm=f"{LN} mamba.norm", linear_attn="mamba", **GRANITE),
    "granitemoehybrid 1": row(FULL, norm=LN, attention="self_attn", **GRANITE),
    "rwkv 1": row(LINEAR, norm="ln1 ln2", linear_attn="attention", mlp="feed_forward"),
    "recurrent_gemma 0": row(
        LINEAR, norm="temporal_pre_norm channel_pre_norm", linear_attn="temporal_block", mlp="mlp_block"
    ),
    "recurrent_gemma 2": row(
        SLIDING, norm="temporal_pre_norm channel_pre_norm", attention="temporal_block", mlp="mlp_block"
    ),
    "vit 0": row(FULL, norm="layernorm_before layernorm_after", attention="attention", mlp="mlp"),
    "swin 0": row(None, norm="layernorm_before layernorm_after", attention="attention", mlp="mlp"),
    "wav2vec2 0": row(FULL, norm="layer_norm final_layer_norm", attention="attention", mlp="feed_forward"),
    "vision_language vision 0": row(FULL, norm="layer_norm1 layer_norm2", attention="self_attn", mlp="mlp"),
    "vision_language language 0": row(FULL, **LLAMA),
    "audio_language audio 0": row(FULL, **WHISPER),
    "audio_language language 0": row(FULL, **LLAMA),
    "qwen2_5_vl vision 0": row(None, norm="norm1 norm2", attention="attn", mlp="mlp"),
    "qwen2_5_vl language 0": row(FULL, **LLAMA),
    "omni audio 0": row(None, **WHISPER),
    "omni vision 0": row(None, norm="norm1 norm2", attention="attn", mlp="mlp"),
    "omni language 0": row(FULL, **LLAMA),
    "blip2 vision 39": row(
        FULL,
        norm="attention.output.LayerNorm crossattention.output.LayerNorm output_query.LayerNorm",
        attention="attention.attention crossattention.attention",
        attn_proj="attention.attention attention.output.dense crossattention.attention crossattention.output.dense",
        **QFORMER,
    ),
    "torchtitan_like 0": row(None, **TITAN, mlp="feed_forward"),
    "torchtitan_moe 0": row(None, **TITAN, mlp="feed_forward"),
    "torchtitan_moe 1": row(
        None, **TITAN, routed_experts="moe.experts", shared_experts="moe.shared_experts", router="moe.router"
    ),
    "moe_topk 0": row(None, norm="norm moe_norm", routed_experts="moe.experts", router="moe.router"),
    "transformer_encoder 0": row(None, norm="norm1 norm2", attention="self_attn", mlp="linear1 linear2"),
    "lstm 0": row(None, norm="norm"),
    "resnet 2": row(None, norm="bn1 bn2 downsample.1"),
    "unet 0": row(None, norm="conv.1"),
}


@pytest.mark.parametrize("line", TABLE)
def test_every_family_has_these_targets_at_these_paths_and_this_layer_type(line: str) -> None:
    name, *tower, index = line.split()
    block = find_blocks(BUILDERS[name](), scope=tower or None)[int(index)].module
    assert (layer_type(block), roles(block)) == TABLE[line]


def test_every_model_of_the_zoo_is_in_the_table() -> None:
    assert BUILDERS.keys() - {"llama_use_cache"} == {line.split()[0] for line in TABLE}
