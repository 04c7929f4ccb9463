"""The decoders of published peaks, stated again from the public source of the programs that trained them.

What matters for memory is which tensors an operator makes, saves and overwrites. Fused kernels that torch does not have
are stated as autograd Functions that save and allocate what the kernels' sources say; they compute nothing of use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

__all__ = ["CutLoss", "FusedDecoder"]


# --------------------------------------------------------------------------------------- fused kernels, one by one


class _FusedNorm(Function):
    """RMSNorm of Liger (ops/rms_norm.py): saves its input and a number per row; backward overwrites the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.sum(-1, dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.mul_(1), torch.empty_like(ctx.saved_tensors[1])


class _FusedGate(Function):
    """SwiGLU of Liger (ops/swiglu.py): saves both inputs, and backward overwrites them with their gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return a.detach().mul_(grad), b.detach().mul_(grad)


class _FlashAttention(Function):
    """flash-attn (flash_attn_interface.py, csrc/flash_attn/flash_api.cpp): saves q, k, v, its result and a log-sum-exp.

    Backward sums up the gradient of the queries in float32, and has the gradients of k and v once for each query head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q * 1
        ctx.save_for_backward(q, k, v, out, q.sum(-1, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG004
        q, k, v, _, numbers = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        numbers, summed = torch.empty_like(numbers), torch.empty_like(q, dtype=torch.float32)
        if k.shape != q.shape:
            expanded = torch.empty_like(q), torch.empty_like(q)
            del expanded
        del summed, numbers
        return grads


# --------------------------------------------------------------------------------------- decoders with fused kernels


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, self.weight)


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_width: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, num_heads * head_width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, num_kv_heads * head_width, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_width, width, bias=False)
        self.q_norm, self.k_norm = (_Norm(head_width), _Norm(head_width)) if qk_norm else (nn.Identity(), nn.Identity())
        self.head_width = head_width

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (p(h).unflatten(-1, (-1, self.head_width)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)  # rotary positions are written into both in place
        attended: Tensor = _FlashAttention.apply(q, k, v)
        return self.o_proj(attended.flatten(-2))


class _GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(_FusedGate.apply(self.gate_proj(h), self.up_proj(h)))


class _FusedLayer(nn.Module):
    def __init__(
        self, width: int, inner: int, num_heads: int, num_kv_heads: int, head_width: int, *, qk_norm: bool
    ) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = _Norm(width), _Norm(width)
        self.self_attn = _Attention(width, num_heads, num_kv_heads, head_width, qk_norm=qk_norm)
        self.mlp = _GatedMlp(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class CutLoss(Function):
    """Cut cross-entropy (cut_cross_entropy/cce.py): saves hidden states, weight and a number for each token.

    Backward makes the gradients of both, in their dtypes. There are no logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Keep what the kernel keeps."""
        numbers = hidden.sum(-1, dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, numbers)
        return numbers.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        """Make both gradients."""
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.zeros_like(weight)


class FusedDecoder(nn.Module):
    """A Llama or Qwen3 whose norms, gates and attention are fused kernels. Its head is tied to the embedding."""

    def __init__(
        self,
        num_layers: int,
        width: int,
        inner: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        vocab: int,
        *,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            _FusedLayer(width, inner, num_heads, num_kv_heads, head_width, qk_norm=qk_norm) for _ in range(num_layers)
        )
        self.norm = _Norm(width)

    def forward(self, tokens: Tensor, *, hidden: bool = False) -> Tensor:
        """Return the logits, or the hidden states before the head."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if hidden else functional.linear(x, self.embed_tokens.weight)
