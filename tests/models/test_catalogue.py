"""Catalogue models train, are computed as their originals are, and lose nothing under actmem."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, Selective
from actmem.catalogue import DecoderConfig, build, example, moe, names, tiny
from actmem.structure import find_blocks, find_roles, layer_type

# Longer than the window of the tiny models, so that sliding layers need their mask.
LENGTH = 20
# The three Llamas differ in size alone: tiny, they are one.
NAMES = [name for name in names() if name not in ("llama-3.1-70b", "llama-3.1-405b")]
DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow)]


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
    config = tiny(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config, device="cpu", dtype=dtype)
    length = LENGTH if isinstance(config, DecoderConfig) else None
    return model, example(config, batch=2, sequence=length, device="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_trains_every_parameter(name: str, dtype: torch.dtype) -> None:
    model, batch = built(name, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(**batch).loss
    before.backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), path
    optimizer.step()
    assert model(**batch).loss < before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [Full(), Selective(save=["attention"])], ids=["full", "selective"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_under_actmem_is_the_same_to_the_bit(name: str, mode: Any, dtype: torch.dtype) -> None:
    model, batch = built(name, dtype)
    verified = actmem.verify(model, batch, mode)
    assert verified.ok, verified.difference


MLP = {"norm", "attention", "attn_proj", "mlp"}
MOE = {"norm", "attention", "attn_proj", "routed_experts", "moe_act", "router"}
ROLES = {
    "deepseek-v3": [MLP | {"mla_up_proj"}] + [MOE | {"mla_up_proj", "shared_experts"}] * 2,
    "gpt-oss-20b": [MOE] * 4,
    "gemma-3-12b": [MLP] * 4,
    "mixtral-8x7b": [MOE] * 2,
    "qwen3-235b-a22b": [MOE] * 2,
}


@pytest.mark.parametrize("name", NAMES)
def test_blocks_and_roles_are_found(name: str) -> None:
    model, _ = built(name)
    blocks = find_blocks(model)
    assert [block.path.rpartition(".")[2] for block in blocks] == [str(index) for index in range(tiny(name).num_layers)]
    assert [set(found) for found in find_roles(model, blocks)] == ROLES.get(name, [MLP] * 2)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-12b"])
def test_sliding_and_full_layers_take_turns(name: str) -> None:
    model, _ = built(name)
    assert [layer_type(block.module) for block in find_blocks(model)] == ["sliding_attention", "full_attention"] * 2


def test_a_sliding_layer_sees_its_window_and_no_more() -> None:
    model, batch = built("gemma-3-12b")
    layer, window = model.model.layers[0], tiny("gemma-3-12b").window
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.append(output))
    moved = batch["input_ids"].clone()
    moved[:, 2] = (moved[:, 2] + 1) % 128
    model(batch["input_ids"])
    model(moved)
    handle.remove()
    changed = (seen[0] != seen[1]).any(-1).all(0).nonzero().flatten().tolist()
    assert changed == list(range(2, 2 + window))


# ---------------------------------------------------------------- the originals


def original(name: str) -> nn.Module:
    """Build a tiny model as transformers has it, with plain rotary frequencies."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

    config = tiny(name)
    if not isinstance(config, DecoderConfig):
        sizes = {"image_size": config.image_size, "patch_size": config.patch_size, "num_labels": config.num_classes}
        sizes |= {"num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads}
        sizes |= {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
        vit = AutoConfig.for_model("vit", **sizes, layer_norm_eps=config.norm_eps)
        return AutoModelForImageClassification.from_config(vit)
    types = {"llama": "llama", "qwen3-8b": "qwen3", "qwen3-235": "qwen3_moe", "deepseek": "deepseek_v3"}
    types |= {"gpt-oss": "gpt_oss", "gemma": "gemma3_text", "mixtral": "mixtral"}
    model_type = next(kind for prefix, kind in types.items() if name.startswith(prefix))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "attn_implementation": "eager",
    }
    if config.sliding_rope_theta is not None:
        sliding = {**rope, "rope_theta": config.sliding_rope_theta}
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
        fields["query_pre_attn_scalar"] = config.head_dim
    if config.window is not None:
        fields["sliding_window"] = config.window
        fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if config.experts is not None:
        experts = config.experts
        fields |= {"num_experts_per_tok": experts.num_chosen, "norm_topk_prob": True}
        fields |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts.num_experts)
        dense = model_type in ("qwen3_moe", "deepseek_v3")
        fields["moe_intermediate_size" if dense else "intermediate_size"] = experts.intermediate_size
    if config.experts is not None and config.latent is not None:
        latent = config.latent
        fields |= {"n_shared_experts": config.experts.num_shared, "n_group": config.experts.num_groups}
        fields |= {"topk_group": config.experts.num_chosen_groups, "first_k_dense_replace": config.num_dense_layers}
        fields |= {"routed_scaling_factor": config.experts.scaling, "rope_interleave": False}
        fields |= {"q_lora_rank": latent.query_rank, "kv_lora_rank": latent.key_value_rank}
        fields |= {"qk_rope_head_dim": latent.rope_head_dim, "qk_nope_head_dim": latent.nope_head_dim}
        fields |= {"v_head_dim": latent.value_head_dim}
        fields.pop("head_dim")
    attention = fields.pop("attn_implementation")
    hf = AutoConfig.for_model(model_type, **fields)
    return AutoModelForCausalLM.from_config(hf, attn_implementation=attention)


def renamed(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give weights the names and layouts that transformers has for them."""
    if name == "vit-l":
        moved = {key.replace("embeddings.proj", "embeddings.patch_embeddings.proj"): t for key, t in state.items()}
        return {key if key.startswith("classifier") else f"vit.{key}": t for key, t in moved.items()}
    if name != "gpt-oss-20b":
        return state

    def interleaved(t: Tensor) -> Tensor:
        return torch.stack(t.chunk(2, dim=-1), dim=-1).flatten(-2)

    out: dict[str, Tensor] = {}
    for key, t in state.items():
        if key.endswith(("gate_up_proj", "down_proj")):
            t = t.transpose(-2, -1)
        if "gate_up_proj" in key:
            t = interleaved(t)
        out[key.replace("mlp.gate.", "mlp.router.")] = t
    return out


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_loss_are_those_of_the_original(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # In bfloat16 a router behind an expert may choose others. A real CPU can do these products in float32 too.
    monkeypatch.setattr(moe, "PRODUCT_DTYPE", torch.float32)
    model, batch = built(name)
    generator = torch.Generator().manual_seed(1)
    other = original(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # Weights so large that every part is seen in the logits; norms are moved off the identity.
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.2 + (1.0 if "norm" in path else 0.0))
        other.load_state_dict(renamed(name, model.state_dict()))
        ours, theirs = model(**batch), other(**batch)
    scale = float(theirs.logits.abs().max())
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
