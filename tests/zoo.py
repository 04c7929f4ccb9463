"""Small models of many kinds, each with a batch and what a test must know about it.

    case = ZOO["llama"]
    model = case.build()              # seeded, in train mode
    loss = case.step(model)           # one forward pass on the case's own batch
    loss.backward()

All weights are random and no network is used. The batch and the weights depend on fixed seeds only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo_titan import TitanLike

Batch = dict[str, Any] | tuple[Any, ...]

VOCAB = 64
SEQ = 12
DENSE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "num_hidden_layers": 4}


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module], Batch]
    num_blocks: int
    loss: Callable[[Any], Tensor] | None = None
    """From the model's output; None means `output.loss`."""
    blocks: str | None = None
    """The glob to use where the finder is not expected to find the blocks."""
    selective: Literal["matmul", "convolution"] | None = "matmul"
    """The operator group whose every second member a selective mode saves."""
    tags: frozenset[str] = field(default_factory=frozenset)

    def step(self, model: nn.Module, batch: Batch | None = None) -> Tensor:
        batch = self.batch(model) if batch is None else batch
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        return output.loss if self.loss is None else self.loss(output)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return awakened(make().train())

    return build


def awakened(model: nn.Module) -> nn.Module:
    """Give parameters that start at zero a value: behind a zero every gradient is equal, right or wrong."""
    for parameter in model.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.02)
    return model


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def square_mean(output: Tensor) -> Tensor:
    return output.float().square().mean()


# ---------------------------------------------------------------- batches


def tokens(model: nn.Module) -> Batch:
    ids = torch.randint(3, VOCAB, (2, SEQ), generator=generator())
    return {"input_ids": ids, "labels": ids.clone()}


def padded_tokens(model: nn.Module) -> Batch:
    ids = torch.randint(3, VOCAB, (2, SEQ), generator=generator())
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def cached_tokens(model: nn.Module) -> Batch:
    return {**padded_tokens(model), "use_cache": True}


def image_and_tokens(model: nn.Module) -> Batch:
    batch = tokens(model)
    ids = batch["input_ids"]
    ids[:, 1:5] = model.config.image_token_id  # four patches an image
    labels = ids.masked_fill(ids == model.config.image_token_id, -100)
    pixels = torch.randn(2, 3, 16, 16, generator=generator())
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "labels": labels}


def audio_and_tokens(model: nn.Module) -> Batch:
    batch = tokens(model)
    ids = batch["input_ids"]
    ids[:, 1:5] = model.config.audio_token_id  # four frames of audio
    labels = ids.masked_fill(ids == model.config.audio_token_id, -100)
    frames = torch.randn(2, 8, 16, generator=generator())
    heard = torch.ones(2, 16, dtype=torch.long)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {**text, "input_features": frames, "feature_attention_mask": heard}


def image_and_class(model: nn.Module) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator()), "labels": torch.tensor([1, 3])}


def ids_only(model: nn.Module) -> Batch:
    return (torch.randint(0, VOCAB, (2, SEQ), generator=generator()),)


def sequence(model: nn.Module) -> Batch:
    return (torch.randn(2, SEQ, 32, generator=generator()),)


def image(model: nn.Module) -> Batch:
    return (torch.randn(2, 3, 16, 16, generator=generator()),)


# ---------------------------------------------------------------- transformers


def causal_lm(model_type: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**DENSE, **config}))

    return seeded(make)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=1, eos_token_id=2))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    dropouts = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    sizes = {k: v for k, v in DENSE.items() if k != "num_key_value_heads"}
    return BertForMaskedLM(BertConfig(**sizes, **dropouts))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0))


def _llama_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(causal_lm("llama")(), config)


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**DENSE), image_token_id=VOCAB - 1)
    )


def _qwen2_audio() -> nn.Module:
    from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2AudioForConditionalGeneration, Qwen2Config

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    audio = Qwen2AudioEncoderConfig(**sizes, num_mel_bins=8, max_source_positions=8)
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=audio, text_config=Qwen2Config(**DENSE), audio_token_index=VOCAB - 1)
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))


# ---------------------------------------------------------------- plain PyTorch: images


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class DownBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(channels_in, channels, 3, 1, 1), nn.GroupNorm(4, channels), nn.SiLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.conv(x)
        return F.max_pool2d(skip, 2), skip


class UpBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels_in, channels, 2, 2)
        self.conv = nn.Sequential(nn.Conv2d(2 * channels, channels, 3, 1, 1), nn.GroupNorm(4, channels), nn.SiLU())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([self.up(x), skip], 1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DownBlock(3, 8), DownBlock(8, 16)])
        self.middle = nn.Conv2d(16, 32, 3, 1, 1)
        self.up = nn.ModuleList([UpBlock(32, 16), UpBlock(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.down:
            x, skip = block(x)
            skips.append(skip)
        x = F.silu(self.middle(x))
        for block in self.up:
            x = block(x, skips.pop())
        return self.head(x)


# ---------------------------------------------------------------- plain PyTorch: sequences


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


class LSTMBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.out(self.lstm(self.norm(x))[0]))


class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LSTMBlock(32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class TopKMoE(nn.Module):
    """Send each token to its best experts, one expert after the other."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.router(flat).softmax(-1), self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            result = expert(flat[token]) * weights[token, slot, None]
            out.index_add_(0, token, result.to(out.dtype))
        return out.reshape(x.shape)


class MoEBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.moe_norm = nn.LayerNorm(dim)
        self.moe = TopKMoE(dim, 2 * dim, num_experts=4, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.silu(self.mix(self.norm(x))).cumsum(1) / x.shape[1]
        return x + self.moe(self.moe_norm(x))


class MoEModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoEBlock(32) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---------------------------------------------------------------- the registry


def _titan_moe() -> nn.Module:
    return TitanLike(sparse=True, ffn=32)


def _case(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[nn.Module], Batch],
    num_blocks: int,
    tags: str,
    **rest: Any,
) -> Case:
    return Case(name=name, build=build, batch=batch, num_blocks=num_blocks, tags=frozenset(tags.split()), **rest)


_CASES = (
    _case("llama", causal_lm("llama"), padded_tokens, 3, "hf decoder dense"),
    _case("llama_use_cache", causal_lm("llama"), cached_tokens, 3, "hf decoder dense cache"),
    _case("llama_lora", seeded(_llama_lora), padded_tokens, 3, "hf decoder dense adapter dropout random"),
    _case("gpt2_dropout", seeded(_gpt2), tokens, 3, "hf decoder dense dropout random"),
    _case("qwen3", causal_lm("qwen3", head_dim=8), padded_tokens, 3, "hf decoder dense"),
    _case("bert", seeded(_bert), padded_tokens, 3, "hf encoder dropout random"),
    _case("t5", seeded(_t5), padded_tokens, 4, "hf encoder_decoder dropout random unfused_attention"),
    _case("mixtral", causal_lm("mixtral", num_local_experts=4, num_experts_per_tok=2), tokens, 3, "hf decoder moe"),
    _case("qwen3_moe", causal_lm("qwen3_moe", num_experts=4, head_dim=8, **EXPERTS), tokens, 3, "hf decoder moe"),
    _case(
        "deepseek_v3",
        causal_lm(
            "deepseek_v3",
            **EXPERTS,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        tokens,
        3,
        "hf decoder moe mla",
    ),
    _case(
        "gpt_oss",
        causal_lm(
            "gpt_oss",
            **SLIDING,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        tokens,
        4,
        "hf decoder moe sliding unfused_attention",
    ),
    _case(
        "qwen3_next",
        causal_lm(
            "qwen3_next",
            **EXPERTS,
            num_experts=4,
            shared_expert_intermediate_size=16,
            head_dim=8,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        tokens,
        3,
        "hf decoder moe linear_attn",
    ),
    _case(
        "nemotron_h",
        causal_lm(
            "nemotron_h",
            **EXPERTS,
            num_hidden_layers=4,
            layers_block_type=["mamba", "moe", "attention", "mlp"],
            head_dim=8,
            ssm_state_size=8,
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=2,
            chunk_size=8,
            n_routed_experts=4,
            moe_shared_expert_intermediate_size=16,
        ),
        tokens,
        4,
        "hf decoder moe mamba",
    ),
    _case("gemma3_sliding", causal_lm("gemma3_text", **SLIDING, head_dim=8), tokens, 4, "hf decoder dense sliding"),
    _case(
        "gemma3n_shared_kv",
        causal_lm(
            "gemma3n_text",
            **SLIDING,
            head_dim=8,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
            laurel_rank=4,
            activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
        ),
        tokens,
        4,
        "hf decoder dense sliding shared_kv",
    ),
    _case(
        "gemma4_shared_kv",
        causal_lm(
            "gemma4_text",
            **SLIDING,
            head_dim=8,
            global_head_dim=16,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
        ),
        tokens,
        4,
        "hf decoder dense sliding shared_kv",
    ),
    _case("vision_language", seeded(_llava), image_and_tokens, 3, "hf decoder vision"),
    _case("audio_language", seeded(_qwen2_audio), audio_and_tokens, 3, "hf decoder audio"),
    _case("vit", seeded(_vit), image_and_class, 3, "hf encoder vision"),
    _case("resnet", seeded(ResNet), image, 4, "plain vision batch_norm", loss=square_mean, selective="convolution"),
    _case("unet", seeded(UNet), image, 4, "plain vision skips", loss=square_mean, selective="convolution"),
    _case("transformer_encoder", seeded(Encoder), ids_only, 3, "plain encoder dropout random", loss=square_mean),
    _case("lstm", seeded(LSTMModel), sequence, 3, "plain recurrent", loss=square_mean),
    _case("moe_topk", seeded(MoEModel), sequence, 3, "plain moe", loss=square_mean),
    _case("torchtitan_like", seeded(TitanLike), ids_only, 3, "plain decoder dense", loss=square_mean),
    _case("torchtitan_moe", seeded(_titan_moe), ids_only, 3, "plain decoder moe", loss=square_mean),
)

ZOO: dict[str, Case] = {case.name: case for case in _CASES}
