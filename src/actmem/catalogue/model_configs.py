"""The published numbers of the catalogue's models. Plain data: nothing here imports torch.

NOTE [ what the numbers are ]

Each config names the public file that its numbers were read from, and the tests compare the parameter count of the
built model with the published one. Numbers that affect neither a shape nor an operator are omitted: dropout of zero,
and the scaling of rotary frequencies for long contexts (Llama 3.1, YaRN), which only fills the same table with
different values.
"""

from dataclasses import dataclass, replace
from typing import Literal

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = [
    "CONFIGS",
    "Config",
    "DecoderConfig",
    "ExpertsConfig",
    "LatentConfig",
    "VisionConfig",
    "find",
    "scaled",
    "tiny",
]

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
Scores = Literal["softmax", "softmax_of_chosen", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts."""

    num_experts: int
    """Number of routed experts in a layer."""
    num_chosen: int
    """Number of routed experts that a token passes through."""
    intermediate_size: int
    """Width inside one routed expert."""
    num_shared: int = 0
    """Number of experts that every token passes through."""
    scores: Scores = "softmax"
    """How router logits become weights: softmax over all experts, over the chosen ones only, or sigmoid of each."""
    scaling: float = 1.0
    """Factor on the weights of the chosen experts."""
    num_groups: int = 1
    """Number of groups that the experts are divided into."""
    num_chosen_groups: int = 1
    """Number of groups that a token may choose from."""
    bias: bool = False
    """Whether router and experts have biases."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention."""

    query_rank: int
    """Width that queries are compressed to."""
    key_value_rank: int
    """Width that keys and values are compressed to."""
    rope_head_dim: int
    """Width of the part of a query or key head that carries the position."""
    nope_head_dim: int
    """Width of the part of a query or key head that does not carry the position."""
    value_head_dim: int
    """Width of a value head."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only language model."""

    name: str
    """Name in the catalogue."""
    source: str
    """Where the numbers were read from."""
    num_layers: int
    """Number of decoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside a dense feed-forward layer."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Width of a head."""
    vocab_size: int
    """Rows of the embedding."""
    rope_theta: float
    """Base of the rotary frequencies."""
    norm_eps: float
    """Epsilon that RMSNorm adds to the mean of squares."""
    tie_embeddings: bool = False
    """Whether the output head shares the embedding's weight."""
    attention_bias: bool = False
    """Whether the projections of attention have biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    sinks: bool = False
    """Whether each head has a sink: a learned logit that lets it attend to nothing."""
    window: int | None = None
    """Number of keys that a sliding layer sees."""
    full_every: int = 1
    """One in this many layers sees all keys; the others slide."""
    sliding_rope_theta: float | None = None
    """Base of the rotary frequencies in sliding layers, if it differs."""
    activation: Activation = "silu"
    """Activation function of the gate in a feed-forward layer."""
    gemma_norms: bool = False
    """Whether norms scale by one plus their weight, and also follow attention and feed-forward."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    latent: LatentConfig | None = None
    """Multi-head latent attention, if the model has it."""
    experts: ExpertsConfig | None = None
    """The mixture of experts, if the model has one."""
    num_dense_layers: int = 0
    """Number of leading layers with a dense feed-forward part in a model whose other layers have experts."""
    dtype: str = "bfloat16"
    """The dtype that the model is published in."""

    def slides(self, layer: int) -> bool:
        """Return whether a layer sees only a sliding window."""
        return self.window is not None and (layer + 1) % self.full_every != 0


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision transformer that classifies images."""

    name: str
    """Name in the catalogue."""
    source: str
    """Where the numbers were read from."""
    num_layers: int
    """Number of encoder layers."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside a feed-forward layer."""
    num_heads: int
    """Number of attention heads."""
    image_size: int
    """Height and width of an image."""
    patch_size: int
    """Height and width of a patch."""
    num_classes: int
    """Number of classes."""
    norm_eps: float = 1e-6
    """Epsilon that LayerNorm adds to the variance."""
    dtype: str = "float32"
    """The dtype that the model is published in."""


Config = DecoderConfig | VisionConfig


def _llama(name: str, num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(
        name=name,
        source="torchtitan models/llama3/flavors.py; oumi recipes/llama3_1; MaxText models/llama3.1-405b.yml",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        rope_theta=500000.0,
        norm_eps=1e-5,
    )


_ALL: tuple[Config, ...] = (
    _llama("llama-3.1-8b", 32, 4096, 14336, 32),
    _llama("llama-3.1-70b", 80, 8192, 28672, 64),
    _llama("llama-3.1-405b", 126, 16384, 53248, 128),
    DecoderConfig(
        name="qwen3-8b",
        source="MaxText configs/models/qwen3-8b.yml; transformers models/qwen3",
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qk_norm=True,
    ),
    DecoderConfig(
        name="qwen3-235b-a22b",
        source="slime scripts/models/qwen3-235B-A22B.sh; MaxText configs/models/qwen3-235b-a22b.yml",
        num_layers=94,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qk_norm=True,
        experts=ExpertsConfig(num_experts=128, num_chosen=8, intermediate_size=1536),
    ),
    DecoderConfig(
        name="deepseek-v3",
        source="transformers models/deepseek_v3 (defaults); MaxText configs/models/deepseek3-671b.yml",
        num_layers=61,
        hidden_size=7168,
        intermediate_size=18432,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        vocab_size=129280,
        rope_theta=10000.0,
        norm_eps=1e-6,
        latent=LatentConfig(
            query_rank=1536, key_value_rank=512, rope_head_dim=64, nope_head_dim=128, value_head_dim=128
        ),
        experts=ExpertsConfig(
            num_experts=256,
            num_chosen=8,
            intermediate_size=2048,
            num_shared=1,
            scores="sigmoid",
            scaling=2.5,
            num_groups=8,
            num_chosen_groups=4,
        ),
        num_dense_layers=3,
    ),
    DecoderConfig(
        name="gpt-oss-20b",
        source="openai/gpt-oss gpt_oss/torch/model.py; MaxText configs/models/gpt-oss-20b.yml",
        num_layers=24,
        hidden_size=2880,
        intermediate_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201088,
        rope_theta=150000.0,
        norm_eps=1e-5,
        attention_bias=True,
        sinks=True,
        window=128,
        full_every=2,
        activation="clamped_swiglu",
        experts=ExpertsConfig(
            num_experts=32, num_chosen=4, intermediate_size=2880, scores="softmax_of_chosen", bias=True
        ),
    ),
    # The language model alone, with Google's vocabulary; the file for transformers pads it by 64 rows.
    DecoderConfig(
        name="gemma-3-12b",
        source="MaxText configs/models/gemma3-12b.yml; transformers models/gemma3 (layer pattern, query scale)",
        num_layers=48,
        hidden_size=3840,
        intermediate_size=15360,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        vocab_size=262144,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        tie_embeddings=True,
        qk_norm=True,
        window=1024,
        full_every=6,
        sliding_rope_theta=10000.0,
        activation="gelu_tanh",
        gemma_norms=True,
        scale_embeddings=True,
    ),
    DecoderConfig(
        name="mixtral-8x7b",
        source="transformers models/mixtral (defaults); MaxText configs/models/mixtral-8x7b.yml",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32000,
        rope_theta=1000000.0,
        norm_eps=1e-5,
        experts=ExpertsConfig(num_experts=8, num_chosen=2, intermediate_size=14336),
    ),
    VisionConfig(
        name="vit-l",
        source="google-research/vision_transformer vit_jax/configs/models.py (ViT-L/16); torchvision vit_l_16",
        num_layers=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        image_size=224,
        patch_size=16,
        num_classes=1000,
    ),
)

CONFIGS: dict[str, Config] = {config.name: config for config in _ALL}
"""Every model of the catalogue, by name."""


def find(name: str) -> Config:
    """Return the numbers of a catalogue model.

    Raises:
        ModeError: the catalogue has no such model. The message lists the closest names, and all names.

    >>> find("qwen3-8b").num_layers
    36
    """
    if name not in CONFIGS:
        raise ModeError(
            f"the catalogue has no model {name!r}. It has: {', '.join(CONFIGS)}.{did_you_mean(name, CONFIGS)}"
        )
    return CONFIGS[name]


def scaled(config: Config, scale: float) -> Config:
    """Make a model narrower by a factor: fewer heads, smaller widths and ranks.

    Layers, head widths, numbers of experts, vocabulary and image size stay, so the same example fits. Widths become
    multiples of 64.

    >>> small = scaled(CONFIGS["llama-3.1-8b"], 0.25)
    >>> small.hidden_size, small.num_heads, small.num_kv_heads, small.num_layers
    (1024, 8, 2, 32)
    """

    def width(size: int) -> int:
        return max(64, round(size * scale / 64) * 64)

    narrow = replace(config, hidden_size=width(config.hidden_size), intermediate_size=width(config.intermediate_size))
    if isinstance(narrow, VisionConfig):
        return replace(narrow, num_heads=narrow.hidden_size // 64)
    num_kv_heads = max(1, round(narrow.num_kv_heads * scale))
    latent, experts = narrow.latent, narrow.experts
    return replace(
        narrow,
        num_heads=num_kv_heads * (narrow.num_heads // narrow.num_kv_heads),
        num_kv_heads=num_kv_heads,
        latent=latent
        and replace(latent, query_rank=width(latent.query_rank), key_value_rank=width(latent.key_value_rank)),
        experts=experts and replace(experts, intermediate_size=width(experts.intermediate_size)),
    )


def tiny(name: str) -> Config:
    """Return the smallest model that has every part of a catalogue model, for tests on a CPU.

    >>> config = tiny("deepseek-v3")
    >>> config.num_layers, config.num_dense_layers, config.experts.num_experts
    (3, 1, 8)
    """
    config = find(name)
    if isinstance(config, VisionConfig):
        sizes = {"image_size": 16, "patch_size": 4, "num_classes": 10}
        return replace(config, num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, **sizes)
    latent, experts = config.latent, config.experts
    return replace(
        config,
        num_layers=4 if config.window else 3 if config.num_dense_layers else 2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=4 if latent else 2,
        head_dim=24 if latent else 16,
        vocab_size=128,
        window=config.window and 8,
        full_every=min(config.full_every, 2),
        latent=latent
        and LatentConfig(query_rank=32, key_value_rank=16, rope_head_dim=8, nope_head_dim=16, value_head_dim=16),
        experts=experts
        and replace(
            experts,
            num_experts=8,
            num_chosen=2,
            intermediate_size=32,
            num_groups=min(experts.num_groups, 2),
            num_chosen_groups=1,
        ),
        num_dense_layers=min(config.num_dense_layers, 1),
    )
