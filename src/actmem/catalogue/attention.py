"""Grouped-query attention with norms, windows and sinks, and multi-head latent attention.

NOTE [ sinks through a fused kernel ]

A sink is an extra logit for each query head: softmax runs over the scores and this logit, and the probability that the
sink gets is discarded. Fused kernels do not support sinks. So one position is prepended: its value is zero, and its key
yields the wanted logit against any query. To do so, heads are widened by as many columns as query heads share a key
head: query head h has a one in column h of its group, real keys have zeros there, and the prepended key has the sinks
of its group, divided by the scale. The prepended query only keeps the causal diagonal aligned; its result is dropped.

NOTE [ equal widths ]

Fused kernels need values as wide as keys. Narrower values are padded with zeros and the result is cut, as is usual for
multi-head latent attention; otherwise torch falls back to a kernel that holds all scores.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue.layers import Factory, Linear, RMSNorm, Rotary, rotate
from actmem.catalogue.model_configs import DecoderConfig, LatentConfig

__all__ = ["Attention", "LatentAttention", "window_mask"]

# Head widths are kept a multiple of this, as kernels require.
_ALIGNMENT = 8


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: DecoderConfig, factory: Factory) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_heads // config.num_kv_heads
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, width, bias=bias, **factory)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=bias, **factory)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=bias, **factory)
        self.o_proj = Linear(width, config.hidden_size, bias=bias, **factory)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, factory, plus_one=config.gemma_norms)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, factory, plus_one=config.gemma_norms)
        self.sinks = nn.Parameter(torch.empty(config.num_heads, **factory)) if config.sinks else None
        self.attend: Callable[..., Tensor] = attend  # a ring of ranks has its own

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Mix the positions of (batch, positions, hidden); no mask means all earlier positions."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        q, k = rotate(q, rotary), rotate(k, rotary)
        if self.sinks is None:
            out = self.attend(q, k, v, mask, scale=self.head_dim**-0.5)
        else:
            out = self._attend_with_sinks(q, k, v, mask, self.sinks)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def _attend_with_sinks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
        # NOTE [ sinks through a fused kernel ]
        scale = self.head_dim**-0.5
        extra = -(-self.num_groups // _ALIGNMENT) * _ALIGNMENT
        batch, num_kv_heads, length, _ = k.shape
        member = torch.eye(self.num_groups, extra, device=q.device, dtype=q.dtype).repeat(num_kv_heads, 1)
        q = torch.cat((q, member[None, :, None].expand(batch, -1, length, -1)), dim=-1)
        front = functional.pad((sinks / scale).view(1, num_kv_heads, 1, -1), (self.head_dim, extra - self.num_groups))
        k = torch.cat((front.expand(batch, -1, -1, -1), functional.pad(k, (0, extra))), dim=2)
        out = self.attend(functional.pad(q, (0, 0, 1, 0)), k, functional.pad(v, (0, extra, 1, 0)), mask, scale=scale)
        return out[:, :, 1:, : self.head_dim]


class LatentAttention(nn.Module):
    """Attention with queries, keys and values projected up from narrow latents."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig, factory: Factory) -> None:
        super().__init__()
        self.latent = latent
        self.num_heads = config.num_heads
        self.head_dim = latent.nope_head_dim + latent.rope_head_dim
        hidden, heads = config.hidden_size, config.num_heads
        self.q_a_proj = Linear(hidden, latent.query_rank, bias=False, **factory)
        self.q_a_layernorm = RMSNorm(latent.query_rank, config.norm_eps, factory)
        self.q_b_proj = Linear(latent.query_rank, heads * self.head_dim, bias=False, **factory)
        self.kv_a_proj_with_mqa = Linear(hidden, latent.key_value_rank + latent.rope_head_dim, bias=False, **factory)
        self.kv_a_layernorm = RMSNorm(latent.key_value_rank, config.norm_eps, factory)
        self.kv_b_proj = Linear(
            latent.key_value_rank, heads * (latent.nope_head_dim + latent.value_head_dim), bias=False, **factory
        )
        self.o_proj = Linear(heads * latent.value_head_dim, hidden, bias=False, **factory)
        self.attend: Callable[..., Tensor] = attend

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        """Mix the positions of (batch, positions, hidden); no mask means all earlier positions."""
        nope, rope = self.latent.nope_head_dim, self.latent.rope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((nope, rope), dim=-1)
        compressed, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent.key_value_rank, rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((nope, self.latent.value_head_dim), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, rotary)), dim=-1)
        k = torch.cat((k_nope, rotate(k_rope.unsqueeze(1), rotary).expand(-1, self.num_heads, -1, -1)), dim=-1)
        # NOTE [ equal widths ]
        v = functional.pad(v, (0, self.head_dim - self.latent.value_head_dim))
        out = self.attend(q, k, v, mask, scale=self.head_dim**-0.5)[..., : self.latent.value_head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """Attend to all earlier positions, or as a mask says; several query heads may share a key head."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def window_mask(length: int, window: int, *, sink: bool, like: Tensor) -> Tensor:
    """Return the mask of all sliding layers: what is added to the scores, in the dtype of `like`.

    There is one mask per step. A boolean mask would be converted to this one, and held, by each layer separately.

    >>> window_mask(3, 2, sink=False, like=torch.zeros(1)).exp().int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    keys = torch.arange(length + sink, device=like.device)
    queries = keys[:, None]
    hidden = (keys > queries) | (keys <= queries - window)
    if sink:
        hidden = hidden & (keys != 0)
    return torch.zeros(hidden.shape, device=like.device, dtype=like.dtype).masked_fill(hidden, float("-inf"))
