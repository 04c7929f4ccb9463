import pytest
import torch
from torch import nn

from actmem.structure import ROLES, find_blocks, roles
from tests.zoo import ZOO


def roles_of(case: str, index: int = 0) -> dict[str, tuple[str, ...]]:
    return roles(find_blocks(ZOO[case].build())[index].module)


LLAMA = {
    "norm": ("input_layernorm", "post_attention_layernorm"),
    "attention": ("self_attn",),
    "attn_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "mlp": ("mlp",),
}
MOE = {
    "norm": LLAMA["norm"],
    "attention": LLAMA["attention"],
    "attn_proj": LLAMA["attn_proj"],
    "routed_experts": ("mlp.experts",),
}

EXPECTED = {
    ("llama", 0): LLAMA,
    ("llama_lora", 0): LLAMA,
    ("mixtral", 0): {**MOE, "router": ("mlp.gate",)},
    ("gpt_oss", 0): {**MOE, "router": ("mlp.router",)},
    ("gpt2_dropout", 0): {
        "norm": ("ln_1", "ln_2"),
        "attention": ("attn",),
        "attn_proj": ("attn.c_attn", "attn.c_proj"),
        "mlp": ("mlp",),
    },
    ("bert", 0): {
        "norm": ("attention.output.LayerNorm", "output.LayerNorm"),
        "attention": ("attention.self",),
        "attn_proj": (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
        ),
        "mlp": ("intermediate", "output.dense"),
    },
    ("transformer_encoder", 0): {
        "norm": ("norm1", "norm2"),
        "attention": ("self_attn",),
        "attn_proj": ("self_attn.out_proj",),
        "mlp": ("linear1", "linear2"),
    },
    ("torchtitan_like", 0): {
        "norm": ("attention_norm", "ffn_norm"),
        "attention": ("attention",),
        "attn_proj": ("attention.wq", "attention.wk", "attention.wv", "attention.wo"),
        "mlp": ("feed_forward",),
    },
    ("qwen3_next", 0): {
        "norm": ("linear_attn.norm", "input_layernorm", "post_attention_layernorm"),
        "linear_attn": ("linear_attn",),
        "routed_experts": ("mlp.experts",),
        "shared_experts": ("mlp.shared_expert",),
        "router": ("mlp.gate",),
    },
    ("moe_topk", 0): {
        "norm": ("norm", "moe_norm"),
        "routed_experts": ("moe.experts",),
        "router": ("moe.router",),
    },
    ("resnet", 2): {"norm": ("bn1", "bn2", "downsample.1")},
    ("unet", 0): {"norm": ("conv.1",)},
}


@pytest.mark.parametrize(("case", "index"), EXPECTED)
def test_roles_are_read_from_names_and_structure(case: str, index: int) -> None:
    assert roles_of(case, index) == EXPECTED[case, index]


def test_latent_attention_has_up_projections_and_a_dense_and_a_sparse_layer() -> None:
    dense, sparse = roles_of("deepseek_v3", 0), roles_of("deepseek_v3", 1)
    assert dense["mla_up_proj"] == sparse["mla_up_proj"] == ("self_attn.q_b_proj", "self_attn.kv_b_proj")
    assert dense["mlp"] == ("mlp",) and "routed_experts" not in dense
    assert sparse["shared_experts"] == ("mlp.shared_experts",) and sparse["router"] == ("mlp.gate",)
    assert "mlp" not in sparse


def test_a_decoder_of_two_attentions_has_both() -> None:
    found = roles_of("t5", 2)
    assert found["attention"] == ("layer.0.SelfAttention", "layer.1.EncDecAttention")
    assert found["mlp"] == ("layer.2.DenseReluDense",)


@pytest.mark.parametrize("case", ZOO)
def test_every_role_is_a_known_one_and_every_path_a_module_of_the_block(case: str) -> None:
    for block in find_blocks(ZOO[case].build()):
        found = roles(block.module)
        assert "norm" in found and found.keys() <= ROLES.keys()
        for role_paths in found.values():
            assert role_paths and all(block.module.get_submodule(path) for path in role_paths)


def test_a_norm_of_weights_is_no_norm_of_activations() -> None:
    block = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.LayerNorm(2))
    assert roles(block) == {"norm": ("1",)}


def test_a_block_without_any_role_has_none() -> None:
    assert roles(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == {}


def test_a_block_that_is_itself_the_dense_part_has_the_empty_path() -> None:
    class FeedForward(nn.Sequential):
        pass

    assert roles(FeedForward(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))) == {"mlp": ("",)}
