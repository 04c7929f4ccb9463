"""Decoder-only language models for training: no cache, one pass over whole sequences."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue.attention import Attention, LatentAttention, window_mask
from actmem.catalogue.layers import Embedding, Factory, GatedMLP, Linear, RMSNorm, Rotary, rotary_table
from actmem.catalogue.model_configs import DecoderConfig
from actmem.catalogue.moe import MoE

__all__ = ["IGNORED", "CausalLM", "Decoder", "DecoderLayer", "Output", "following_tokens", "next_token_loss"]

IGNORED = -100
"""A label that is not predicted."""


class Output(NamedTuple):
    """What a model of the catalogue returns."""

    loss: Tensor | None
    """The mean cross-entropy, in float32; None without labels."""
    logits: Tensor
    """The logits of all tokens or classes."""


class DecoderLayer(nn.Module):
    """One layer: attention, then a feed-forward part, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, index: int, factory: Factory) -> None:
        super().__init__()
        self.attention_type = "sliding_attention" if config.slides(index) else "full_attention"
        latent, experts = config.latent, config.experts
        self.self_attn = LatentAttention(config, latent, factory) if latent else Attention(config, factory)
        if experts is not None and index >= config.num_dense_layers:
            self.mlp = MoE(config, experts, factory)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, factory)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, factory, plus_one=config.gemma_norms)

        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if config.gemma_norms else None
        self.post_feedforward_layernorm = norm() if config.gemma_norms else None

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Run the layer on (batch, positions, hidden)."""
        attended = self.self_attn(self.input_layernorm(x), rotary, mask)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(nn.Module):
    """The embedding and all layers. A stage of a pipeline has some of the layers, and may lack the other parts."""

    embed_tokens: Embedding | None
    norm: RMSNorm | None

    def __init__(self, config: DecoderConfig, factory: Factory) -> None:
        super().__init__()
        self.config = config
        self.spans: tuple[tuple[int, int], ...] | None = None
        """The positions that this process has, if it does not have all."""
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(DecoderLayer(config, index, factory) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, factory, plus_one=config.gemma_norms)

    def forward(self, input_ids: Tensor, length: int | None = None) -> Tensor:
        """Return the normalised residual stream for (batch, positions) tokens.

        Without an embedding, what is given is the residual stream itself; without a norm, it is returned as it is.

        Args:
            input_ids: the tokens, or the residual stream.
            length: number of positions, if another rank has some of them.
        """
        config = self.config
        x: Tensor = input_ids if self.embed_tokens is None else self.embed_tokens(input_ids)
        if config.scale_embeddings and self.embed_tokens is not None:
            x = x * config.hidden_size**0.5
        length = input_ids.shape[1] if length is None else length
        width = config.latent.rope_head_dim if config.latent else config.head_dim
        spans = ((0, length),) if self.spans is None else self.spans
        rotary = sliding = rotary_table(spans, width, config.rope_theta, like=x)
        if config.sliding_rope_theta is not None:
            sliding = rotary_table(spans, width, config.sliding_rope_theta, like=x)
        mask = None
        if config.window is not None and length > config.window:
            mask = window_mask(length, config.window, sink=config.sinks, like=x)
        for layer in self.layers:
            x = layer(x, sliding, mask) if layer.attention_type == "sliding_attention" else layer(x, rotary, None)
        return x if self.norm is None else self.norm(x)


class CausalLM(nn.Module):
    """A model that predicts the next token."""

    def __init__(self, config: DecoderConfig, factory: Factory) -> None:
        super().__init__()
        self.model = Decoder(config, factory)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        if config.tie_embeddings and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Return the logits and, with labels, the loss of predicting each label from the tokens before it.

        Args:
            input_ids: tokens, (batch, positions).
            labels: tokens, usually the same ones; -100 is ignored.
        """
        logits: Tensor = self.lm_head(self.model(input_ids))
        if labels is None:
            return Output(None, logits)
        return Output(next_token_loss(logits, labels), logits)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each label from the tokens before it; -100 is ignored."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), following_tokens(labels).flatten(), ignore_index=IGNORED
    )


def following_tokens(labels: Tensor) -> Tensor:
    """Return the label that each position predicts: that of the next one, and nothing at the end.

    >>> import torch
    >>> following_tokens(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
