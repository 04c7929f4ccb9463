"""Vision transformers that classify images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue.decoder import Output
from actmem.catalogue.layers import Factory, Linear
from actmem.catalogue.model_configs import VisionConfig

__all__ = ["ImageClassifier"]

_NUM_CHANNELS = 3


class Convolution(nn.Conv2d):
    """A convolution whose weights are drawn once the whole model is built, and never on the meta device."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class PatchEmbeddings(nn.Module):
    """Patch embedding: cuts an image into patches, prepends the class token and adds positions."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        num_patches = (config.image_size // patch) ** 2
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, **factory))
        self.position_embeddings = nn.Parameter(torch.empty(1, num_patches + 1, hidden, **factory))
        self.projection = Convolution(_NUM_CHANNELS, hidden, patch, stride=patch, **factory)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Turn (batch, channels, height, width) into (batch, positions, hidden)."""
        patches = self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)
        front = self.cls_token.expand(len(patches), -1, -1)
        return torch.cat((front, patches), dim=1) + self.position_embeddings


class EncoderAttention(nn.Module):
    """Attention between all patches."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = Linear(config.hidden_size, config.hidden_size, **factory)
        self.k_proj = Linear(config.hidden_size, config.hidden_size, **factory)
        self.v_proj = Linear(config.hidden_size, config.hidden_size, **factory)
        self.o_proj = Linear(config.hidden_size, config.hidden_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of (batch, positions, hidden)."""
        projected = (proj(x).unflatten(-1, (self.num_heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in projected)
        return self.o_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class EncoderMLP(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, **factory)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Project up, activate, project down."""
        return self.fc2(functional.gelu(self.fc1(x)))


class EncoderLayer(nn.Module):
    """One layer: attention, then the feed-forward part, each added to the residual stream."""

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.attention = EncoderAttention(config, factory)
        self.layernorm_before = nn.LayerNorm(config.hidden_size, config.norm_eps, **factory)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, config.norm_eps, **factory)
        self.mlp = EncoderMLP(config, factory)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on (batch, positions, hidden)."""
        x = x + self.attention(self.layernorm_before(x))
        return x + self.mlp(self.layernorm_after(x))


class ImageClassifier(nn.Module):
    """A vision transformer that classifies an image by its class token."""

    input_modalities = ("image",)

    def __init__(self, config: VisionConfig, factory: Factory) -> None:
        super().__init__()
        self.config = config
        self.embeddings = PatchEmbeddings(config, factory)
        self.layers = nn.ModuleList(EncoderLayer(config, factory) for _ in range(config.num_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps, **factory)
        self.classifier = Linear(config.hidden_size, config.num_classes, **factory)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Return the logits and, with labels, the loss.

        Args:
            pixel_values: images, (batch, 3, height, width).
            labels: classes, (batch,).
        """
        x: Tensor = self.embeddings(pixel_values)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.classifier(self.layernorm(x)[:, 0])
        return Output(None if labels is None else functional.cross_entropy(logits.float(), labels), logits)
