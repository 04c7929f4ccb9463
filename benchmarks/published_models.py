"""The models of published peaks, stated again from the public source of the programs that trained them.

What matters for memory is which tensors an operator makes, saves and overwrites. Fused kernels that torch does not have
are stated as autograd Functions that save and allocate what the kernels' sources say; they compute nothing of use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

__all__ = ["FusedDecoder", "MegatronT5"]


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


class _FusedSoftmax(Function):
    """Softmax with scale and mask of apex (scaled_masked_softmax.h): saves its result; backward is in place."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(out := scores * 1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(ctx.saved_tensors[0])


class _BiasDropoutAdd(Function):
    """`bias_dropout_add` of Megatron, compiled into one kernel: saves a mask of one byte for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0, bias)
        return x + residual

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(grad), torch.empty_like(ctx.saved_tensors[1]), grad


class _BiasGelu(Function):
    """`bias_gelu` of Megatron (fusions/fused_bias_gelu.py): saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(grad), torch.empty_like(ctx.saved_tensors[1])


class _AccumulatingLinear(Function):
    """A matrix product of Megatron (tensor_parallel/layers.py), whose backward adds to `main_grad` in float32.

    Autograd receives an empty gradient of the weight, in its dtype, which a hook drops at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        out = x @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        _, weight = ctx.saved_tensors
        back = grad @ weight
        return back, torch.empty_like(weight), grad.sum((0, 1)) if ctx.bias else None


class _VocabularyLoss(Function):
    """Cross-entropy of Megatron (tensor_parallel/cross_entropy.py): one copy of the logits in float32, in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        raised = logits.float()
        most = raised.amax(-1, keepdim=True)
        raised.sub_(most).exp_()
        raised.div_(raised.sum(-1, keepdim=True))
        ctx.save_for_backward(raised, torch.empty_like(targets, dtype=torch.bool), torch.empty_like(targets))
        return most.squeeze(-1).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raised = ctx.saved_tensors[0].detach()
        return raised.mul_(grad.unsqueeze(-1)).bfloat16(), None


# --------------------------------------------------------------------------------------- Megatron's T5, `local` layers


class _Linear(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(num_out, num_in)), nn.Parameter(torch.empty(num_out))

    def forward(self, x: Tensor) -> Tensor:
        return _AccumulatingLinear.apply(x, self.weight, None)

    def with_bias(self, x: Tensor) -> Tensor:
        return _AccumulatingLinear.apply(x, self.weight, self.bias)


class _CoreAttention(nn.Module):
    """Attention by two matrix products, with scores, probabilities and a dropout mask as tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_q, batch, heads, width = q.shape
        q, k, v = (t.reshape(t.shape[0], batch * heads, width).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2))
        weights: Tensor = _FusedSoftmax.apply(scores)
        del scores
        weights = functional.dropout(weights, 0.1)
        out = torch.bmm(weights, v).view(batch, heads, num_q, width)
        return out.permute(2, 0, 1, 3).contiguous().view(num_q, batch, heads * width)


class _SelfAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = _Linear(width, 3 * width), _Linear(width, width)
        self.core_attention = _CoreAttention()
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.linear_qkv.with_bias(x)
        mixed = mixed.view(*mixed.shape[:2], self.num_heads, -1)
        q, k, v = torch.split(mixed, mixed.shape[-1] // 3, dim=-1)
        return self.linear_proj(self.core_attention(q, k, v))


class _CrossAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.linear_q, self.linear_kv = _Linear(width, width), _Linear(width, 2 * width)
        self.linear_proj = _Linear(width, width)
        self.core_attention = _CoreAttention()
        self.num_heads = num_heads

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        mixed = self.linear_kv.with_bias(other)
        mixed = mixed.view(*mixed.shape[:2], self.num_heads, -1)
        k, v = torch.split(mixed, mixed.shape[-1] // 2, dim=-1)
        q = self.linear_q.with_bias(x)
        return self.linear_proj(self.core_attention(q.view(*q.shape[:2], self.num_heads, -1), k, v))


class _MegatronLayer(nn.Module):
    def __init__(self, width: int, inner: int, num_heads: int, *, crosses: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attention = _SelfAttention(width, num_heads)
        self.pre_cross_attn_layernorm = nn.LayerNorm(width) if crosses else None
        self.cross_attention = _CrossAttention(width, num_heads) if crosses else None
        self.pre_mlp_layernorm = nn.LayerNorm(width)
        self.linear_fc1, self.linear_fc2 = _Linear(width, inner), _Linear(inner, width)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        attention = self.self_attention
        x = _added(attention(self.input_layernorm(x)), attention.linear_proj.bias, x)
        if self.cross_attention is not None and self.pre_cross_attn_layernorm is not None:
            assert other is not None
            crossed = self.cross_attention(self.pre_cross_attn_layernorm(x), other)
            x = _added(crossed, self.cross_attention.linear_proj.bias, x)
        inner: Tensor = _BiasGelu.apply(self.linear_fc1(self.pre_mlp_layernorm(x)), self.linear_fc1.bias)
        return _added(self.linear_fc2(inner), self.linear_fc2.bias, x)


def _added(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return _BiasDropoutAdd.apply(x, bias, residual)


class MegatronT5(nn.Module):
    """T5 of Megatron Core with its own layers (`--transformer-impl local`), for one rank that has all of it."""

    def __init__(self, num_layers: int, width: int, inner: int, num_heads: int, vocab: int, positions: int) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = (nn.Embedding(n, width) for n in (vocab, positions))
        self.encoder, self.decoder = (
            nn.ModuleList(_MegatronLayer(width, inner, num_heads, crosses=crosses) for _ in range(num_layers))
            for crosses in (False, True)
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head_bias = nn.Parameter(torch.empty(vocab))

    def _embedded(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.word_embeddings(tokens) + self.position_embeddings(places)
        return functional.dropout(x.transpose(0, 1).contiguous(), 0.1)

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token."""
        x = self._embedded(tokens)
        for layer in self.encoder:
            x = layer(x)
        x = self.encoder_norm(x)
        y = self._embedded(decoder_tokens)
        for layer in self.decoder:
            y = layer(y, x)
        y = self.decoder_norm(y)
        logits = _AccumulatingLinear.apply(y, self.word_embeddings.weight, self.head_bias)
        return _VocabularyLoss.apply(logits, targets.t())


# --------------------------------------------------------------------------------------- decoders with fused kernels


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, self.weight)


class _FusedLayer(nn.Module):
    def __init__(
        self, width: int, inner: int, num_heads: int, num_kv_heads: int, head_width: int, *, qk_norm: bool
    ) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = _Norm(width), _Norm(width)
        self.q_proj = nn.Linear(width, num_heads * head_width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, num_kv_heads * head_width, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(num_heads * head_width, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.q_norm, self.k_norm = (_Norm(head_width), _Norm(head_width)) if qk_norm else (nn.Identity(), nn.Identity())
        self.head_width = head_width

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head_width)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)  # rotary positions are written into both in place
        attended: Tensor = _FlashAttention.apply(q, k, v)
        x = x + self.o_proj(attended.flatten(-2))
        h = self.post_attention_layernorm(x)
        gated = _FusedGate.apply(self.gate_proj(h), self.up_proj(h))
        return x + self.down_proj(gated)


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

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embed_tokens.weight)
