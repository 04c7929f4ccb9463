"""The models and steps of public memory recordings, stated again from what is known of them.

They are course work on one small decoder: pre-norm, RMSNorm, RoPE, SwiGLU, an untied head, no biases, attention written
by hand. What matters for memory is the order of the operators and which variable holds what for how long, so the
functions below keep their intermediate results in variables exactly where the originals do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Decoder", "OwnAdamW", "cross_entropy"]


class Linear(nn.Module):
    """A matrix product by `einsum`, without a bias."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    """Root mean square normalisation in fp32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * rms
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Rotary positions from a table of cosines and sines."""

    table: Tensor

    def __init__(self, context: int, width: int, theta: float = 10000.0, *, gathers: bool = True) -> None:
        super().__init__()
        self.gathers = gathers
        """Whether rows of the table are gathered, into a new tensor, or are a slice of it."""
        frequencies = theta ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        cos_sin = self.table[:, positions] if self.gathers else self.table[:, : x.shape[-2]]
        cos, sin = cos_sin[0], cos_sin[1]
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        return torch.stack((turned_first, turned_second), -1).flatten(-2)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, by hand."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    raised = torch.exp(shifted)
    return raised / torch.sum(raised, dim=-1, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention, by hand."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, width) for _ in range(3))
        self.output_proj = Linear(width, width)
        self.num_heads, self.rotary = num_heads, rotary

    def forward(self, x: Tensor) -> Tensor:
        *batch, length, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.view(*batch, length, self.num_heads, -1).transpose(-3, -2) for t in (q, k, v))
        positions = torch.arange(length, device=x.device)[None, None]
        q = self.rotary(q, positions)
        k = self.rotary(k, positions)
        index = torch.arange(length, device=x.device)
        mask = index[:, None] >= index[None, :]
        out = attention(q, k, v, mask)
        out = out.transpose(-3, -2).flatten(-2)
        return self.output_proj(out)


class SwiGLU(nn.Module):
    """The feed-forward part."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Tensor) -> Tensor:
    """Activate, by hand."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self, width: int, num_heads: int, inner: int, rotary: Rotary) -> None:
        super().__init__()
        self.attn = Attention(width, num_heads, rotary)
        self.ffn = SwiGLU(width, inner)
        self.ln1, self.ln2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.ln1(x))
        middle = x + attended
        fed = self.ffn(self.ln2(middle))
        return middle + fed


class Decoder(nn.Module):
    """The whole model."""

    def __init__(
        self,
        num_layers: int,
        width: int,
        inner: int,
        num_heads: int,
        context: int,
        vocab: int,
        *,
        gathers: bool = True,
    ) -> None:
        super().__init__()
        self.token_embeddings = nn.Parameter(torch.empty(vocab, width))
        rotary = Rotary(context, width // num_heads, gathers=gathers)
        self.layers = nn.ModuleList(Block(width, num_heads, inner, rotary) for _ in range(num_layers))
        self.ln_final = RMSNorm(width)
        self.lm_head = Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.token_embeddings[tokens]
        for layer in self.layers:
            x = layer(x)
        x = self.ln_final(x)
        return self.lm_head(x)


def log_softmax(x: Tensor) -> Tensor:
    """Log-softmax over the last dimension, by hand."""
    most = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - most
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, by hand."""
    losses = -log_softmax(logits)
    return torch.mean(torch.gather(losses, -1, targets.unsqueeze(-1)))


class OwnAdamW(torch.optim.Optimizer):
    """AdamW, by hand: one parameter after the other, each moment a new tensor."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter."""
        for group in self.param_groups:
            lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                grad = p.grad.data
                p.data -= lr * decay * p.data
                t = state.get("t", 1)
                before_m = state.get("m", torch.zeros_like(grad))
                before_v = state.get("v", torch.zeros_like(grad))
                m = beta1 * before_m + (1 - beta1) * grad
                v = beta2 * before_v + (1 - beta2) * torch.square(grad)
                rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p.data -= rate * m / (torch.sqrt(v) + eps)
                state["t"], state["m"], state["v"] = t + 1, m, v
