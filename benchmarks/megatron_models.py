"""Megatron-LM's GPT, BERT and T5 as one rank of a job has them, stated again from its public source.

What matters for memory is which tensors an operator makes, saves and overwrites. Kernels that torch does not have are
autograd Functions that save and allocate what the kernels' sources say; they compute nothing of use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Function
from torch.nn import functional

__all__ = ["T5", "BertStage", "GptStage", "LayerFacts", "padded_vocabulary"]


@dataclass(frozen=True)
class LayerFacts:
    """What a transformer layer is, and how it is divided among the ranks of its tensor group."""

    width: int
    inner: int
    num_heads: int
    tp: int = 1
    group: dist.ProcessGroup | None = None
    own: bool = False
    """Whether the layers are Megatron's (`--transformer-impl local`), not Transformer Engine's."""
    fused_softmax: bool = True
    padded: bool = False
    """Whether attention masks padding, as in BERT and T5, not what comes later, as in GPT."""
    bias: bool = True
    gated: bool = False
    rotary: bool = False


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


# --------------------------------------------------------------------------------------- kernels, one by one


class PutOff:
    """What the gradient of the output layer's weight will be computed from, after the last backward pass."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept: list[tuple[Tensor, Tensor]] = []

    def keeps(self, x: Tensor, grad: Tensor) -> bool:
        """Keep the operands of one micro-batch, up to the limit."""
        if len(self.kept) >= self.limit:
            return False
        self.kept.append((x.detach(), grad))
        return True


class _ColumnLinear(Function):
    """A product with columns of a weight (tensor_parallel/layers.py): its input's gradient is summed over the group.

    Autograd receives a gradient of the weight in its dtype, which a hook adds to `main_grad` and drops at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
        own: bool,
        put_off: PutOff | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.group, ctx.put_off = bias is not None, group, put_off
        out = x @ weight.t()
        if bias is None:
            return out
        return out + bias if own else out.add_(bias)  # Transformer Engine's product adds it by itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = _summed(grad @ weight, ctx.group)
        wgrad = None if ctx.put_off is not None and ctx.put_off.keeps(x, grad) else torch.empty_like(weight)
        return back, wgrad, grad.sum((0, 1)) if ctx.bias else None, None, None, None


class _RowLinear(Function):
    """A product with rows of a weight (tensor_parallel/layers.py): its result is summed over the group, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _summed(x @ weight.t(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        _, weight = ctx.saved_tensors
        return grad @ weight, torch.empty_like(weight), None


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
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        ctx.bias = bias
        return x + residual

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        return torch.empty_like(grad), None if ctx.bias is None else torch.empty_like(ctx.bias), grad


class _BiasActivation(Function):
    """`bias_gelu` and `bias_swiglu` of Megatron (fusions/): save their input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias = bias
        return x[..., : x.shape[-1] // 2] * 1 if gated else x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # noqa: ARG004
        return torch.empty_like(ctx.saved_tensors[0]), None if ctx.bias is None else torch.empty_like(ctx.bias), None


class _Rotated(Function):
    """Rotary positions (models/common/embeddings/rope_utils.py): a new tensor, of which nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        return torch.empty(grad.shape, dtype=grad.dtype)


class _VocabularyLoss(Function):
    """Cross-entropy of Megatron (tensor_parallel/cross_entropy.py): one copy of the logits in float32, in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        raised = logits.float()
        most = _summed(raised.amax(-1, keepdim=True), group)
        raised.sub_(most).exp_()
        raised.div_(_summed(raised.sum(-1, keepdim=True), group))
        ctx.save_for_backward(raised, torch.empty_like(targets, dtype=torch.bool), torch.empty_like(targets))
        ctx.dtype = logits.dtype
        return most.squeeze(-1).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        raised = ctx.saved_tensors[0].detach()
        return raised.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None


# --------------------------------------------------------------------------------------- layers


class _Linear(nn.Module):
    """A linear layer of which the rank has `1 / tp`: columns, or rows."""

    def __init__(self, num_in: int, num_out: int, facts: LayerFacts, *, rows: bool = False) -> None:
        super().__init__()
        columns = 1 if rows else facts.tp
        self.weight = nn.Parameter(torch.empty(num_out // columns, num_in // (facts.tp if rows else 1)))
        self.bias = nn.Parameter(torch.empty(num_out // columns)) if facts.bias else None
        self.facts, self.rows = facts, rows

    def forward(self, x: Tensor) -> Tensor:
        if self.rows:
            return _RowLinear.apply(x, self.weight, self.facts.group)
        return _ColumnLinear.apply(x, self.weight, None, self.facts.group, self.facts.own)

    def with_bias(self, x: Tensor) -> Tensor:
        return _ColumnLinear.apply(x, self.weight, self.bias, self.facts.group, self.facts.own)


class _CoreAttention(nn.Module):
    """Attention by two matrix products, with scores, probabilities and a dropout mask as tensors.

    Megatron's own gives `baddbmm` a buffer that it keeps; Transformer Engine's makes one each time, for nothing.
    """

    def __init__(self, facts: LayerFacts) -> None:
        super().__init__()
        self.facts = facts

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_q, batch, heads, width = q.shape
        q, k, v = (t.reshape(t.shape[0], batch * heads, width).transpose(0, 1) for t in (q, k, v))
        if self.facts.own:
            scores = torch.bmm(q, k.transpose(1, 2))
        else:
            scores = torch.empty(q.shape[0], num_q, k.shape[1], dtype=q.dtype)
            scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0.0, alpha=0.1)
        weights = self._weights(scores, batch)
        del scores
        weights = functional.dropout(weights, 0.1)
        out = torch.bmm(weights, v).view(batch, heads, num_q, width)
        return out.permute(2, 0, 1, 3).contiguous().view(num_q, batch, heads * width)

    def _weights(self, scores: Tensor, batch: int) -> Tensor:
        if self.facts.fused_softmax:
            weights: Tensor = _FusedSoftmax.apply(scores)
            if self.facts.padded and not self.facts.own:  # Transformer Engine makes a mask for each layer, and saves it
                mask = torch.zeros(batch, 1, *weights.shape[1:], dtype=torch.bool)
                return weights.view(batch, -1, *weights.shape[1:]).masked_fill(mask, 0).view_as(weights)
            return weights
        raised = scores.float() * 2  # without the fused kernel, in float32 (fusions/fused_softmax.py)
        raised = raised.masked_fill_(torch.zeros(1, *scores.shape[1:], dtype=torch.bool), -10000.0)
        return functional.softmax(raised, dim=-1).to(scores.dtype)


class _SelfAttention(nn.Module):
    def __init__(self, facts: LayerFacts) -> None:
        super().__init__()
        width = facts.width
        self.linear_qkv, self.linear_proj = _Linear(width, 3 * width, facts), _Linear(width, width, facts, rows=True)
        self.core_attention = _CoreAttention(facts)
        self.facts = facts

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.linear_qkv.with_bias(x)
        mixed = mixed.view(*mixed.shape[:2], self.facts.num_heads // self.facts.tp, -1)
        q, k, v = torch.split(mixed, mixed.shape[-1] // 3, dim=-1)
        if self.facts.rotary:
            q, k = _Rotated.apply(q), _Rotated.apply(k)
            v = v.contiguous()  # Transformer Engine copies what does not lie next to the others
        return self.linear_proj(self.core_attention(q, k, v))


class _CrossAttention(nn.Module):
    def __init__(self, facts: LayerFacts) -> None:
        super().__init__()
        width = facts.width
        self.linear_q, self.linear_kv = _Linear(width, width, facts), _Linear(width, 2 * width, facts)
        self.linear_proj = _Linear(width, width, facts, rows=True)
        self.core_attention = _CoreAttention(facts)
        self.num_heads = facts.num_heads // facts.tp

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        mixed = self.linear_kv.with_bias(other)
        mixed = mixed.view(*mixed.shape[:2], self.num_heads, -1)
        k, v = torch.split(mixed, mixed.shape[-1] // 2, dim=-1)
        q = self.linear_q.with_bias(x)
        return self.linear_proj(self.core_attention(q.view(*q.shape[:2], self.num_heads, -1), k, v))


class _Layer(nn.Module):
    def __init__(self, facts: LayerFacts, *, crosses: bool = False) -> None:
        super().__init__()
        width, inner = facts.width, facts.inner
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attention = _SelfAttention(facts)
        self.pre_cross_attn_layernorm = nn.LayerNorm(width) if crosses else None
        self.cross_attention = _CrossAttention(facts) if crosses else None
        self.pre_mlp_layernorm = nn.LayerNorm(width)
        self.linear_fc1 = _Linear(width, inner * (2 if facts.gated else 1), facts)
        self.linear_fc2 = _Linear(inner, width, facts, rows=True)
        self.gated = facts.gated

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        attention = self.self_attention
        x = _added(attention(self.input_layernorm(x)), attention.linear_proj.bias, x)
        if self.cross_attention is not None and self.pre_cross_attn_layernorm is not None:
            assert other is not None
            crossed = self.cross_attention(self.pre_cross_attn_layernorm(x), other)
            x = _added(crossed, self.cross_attention.linear_proj.bias, x)
        inner = self.linear_fc1(self.pre_mlp_layernorm(x))
        inner: Tensor = _BiasActivation.apply(inner, self.linear_fc1.bias, self.gated)
        return _added(self.linear_fc2(inner), self.linear_fc2.bias, x)


def _added(x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return _BiasDropoutAdd.apply(x, bias, residual)


class _Embedding(nn.Module):
    """Words, positions and kinds of tokens (models/common/embeddings/language_model_embedding.py)."""

    def __init__(self, facts: LayerFacts, vocab: int, positions: int, kinds: int = 0) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab // facts.tp, facts.width)
        self.position_embeddings = None if facts.rotary else nn.Embedding(positions, facts.width)
        self.tokentype_embeddings = nn.Embedding(kinds, facts.width) if kinds else None
        self.group = facts.group

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        if self.group is not None:
            x = _Reduced.apply(x, self.group)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(torch.arange(tokens.shape[1]).expand_as(tokens))
        x = x.transpose(0, 1).contiguous()
        if self.tokentype_embeddings is not None:
            x = x + self.tokentype_embeddings(tokens).transpose(0, 1)
        return functional.dropout(x, 0.1)


class _Reduced(Function):
    """A sum over the tensor group, in place (tensor_parallel/mappings.py)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _Head(nn.Module):
    """The output layer: columns of the vocabulary. Its weight is the embedding's where a stage has both."""

    def __init__(
        self, facts: LayerFacts, vocab: int, embedding: _Embedding | None, *, bias: bool, put_off: int = 0
    ) -> None:
        super().__init__()
        self.put_off = PutOff(put_off)
        weight = None if embedding is None else embedding.word_embeddings.weight
        self.weight = nn.Parameter(torch.empty(vocab // facts.tp, facts.width)) if weight is None else weight
        self.bias = nn.Parameter(torch.empty(vocab // facts.tp)) if bias else None
        self.facts = facts

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = _ColumnLinear.apply(x, self.weight, self.bias, self.facts.group, True, self.put_off)
        return _VocabularyLoss.apply(logits, targets, self.facts.group)


# --------------------------------------------------------------------------------------- models


class GptStage(nn.Module):
    """A stage of GPT: a number of layers, with the embedding if it is the first, with the loss if it is the last."""

    def __init__(
        self,
        facts: LayerFacts,
        num_layers: int,
        vocab: int,
        positions: int,
        *,
        first: bool,
        last: bool,
        tied: bool = True,
        put_off: int = 0,
    ) -> None:
        super().__init__()
        self.embedding = _Embedding(facts, vocab, positions) if first else None
        self.layers = nn.ModuleList(_Layer(facts) for _ in range(num_layers))
        self.final_layernorm = nn.LayerNorm(facts.width) if last else None
        shared = self.embedding if tied else None
        self.output_layer = _Head(facts, vocab, shared, bias=False, put_off=put_off) if last else None

    def finish(self) -> None:
        """Add up what was put off."""
        if self.output_layer is not None:
            self.output_layer.put_off.kept.clear()

    def forward(self, tokens: Tensor, targets: Tensor, x: Tensor | None) -> Tensor:
        """Return the stage's result, or the loss of each token."""
        x = self.embedding(tokens) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        if self.final_layernorm is None or self.output_layer is None:
            assert x is not None
            return x
        return self.output_layer(self.final_layernorm(x), targets.t())


class BertStage(nn.Module):
    """A stage of BERT, with its head for masked words and the one for pairs of sentences in the last one."""

    def __init__(
        self,
        facts: LayerFacts,
        num_layers: int,
        vocab: int,
        positions: int,
        *,
        first: bool,
        last: bool,
        pairs: bool = True,
    ) -> None:
        super().__init__()
        width = facts.width
        self.embedding = _Embedding(facts, vocab, positions, 2 if pairs else 0) if first else None
        self.layers = nn.ModuleList(_Layer(facts) for _ in range(num_layers))
        self.final_layernorm, self.head_norm = (nn.LayerNorm(width) if last else None for _ in range(2))
        self.dense = nn.Linear(width, width) if last else None
        self.pooler, self.binary_head = (nn.Linear(width, n) if last and pairs else None for n in (width, 2))
        self.output_layer = _Head(facts, vocab, self.embedding, bias=True) if last else None

    def forward(self, tokens: Tensor, targets: Tensor, x: Tensor | None) -> Tensor:
        """Return the stage's result, or the loss of each token."""
        x = self.embedding(tokens) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        assert x is not None
        if self.final_layernorm is None or self.head_norm is None or self.output_layer is None or self.dense is None:
            return x
        x = self.final_layernorm(x)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(x[0]))
        losses = self.output_layer(self.head_norm(functional.gelu(self.dense(x))), targets.t())
        if self.binary_head is not None:
            losses = losses + self.binary_head(pooled).float().sum()
        return losses


class T5(nn.Module):
    """T5: encoder and decoder, for a rank that has all of its layers."""

    def __init__(self, facts: LayerFacts, num_layers: int, vocab: int, positions: int) -> None:
        super().__init__()
        self.embedding = _Embedding(facts, vocab, positions)
        self.encoder, self.decoder = (
            nn.ModuleList(_Layer(facts, crosses=crosses) for _ in range(num_layers)) for crosses in (False, True)
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(facts.width), nn.LayerNorm(facts.width)
        self.output_layer = _Head(facts, vocab, self.embedding, bias=True)

    def forward(self, tokens: Tensor, decoder_tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token."""
        x = self.embedding(tokens)
        for layer in self.encoder:
            x = layer(x)
        x = self.encoder_norm(x)
        y = self.embedding(decoder_tokens)
        for layer in self.decoder:
            y = layer(y, x)
        return self.output_layer(self.decoder_norm(y), targets.t())


def padded_vocabulary(num_words: int, tp: int) -> int:
    """Return the size of a vocabulary that can be divided: a multiple of 128 for each rank (`vocab_size_with_padding`).

    >>> padded_vocabulary(50257, 4)
    50688
    """
    return math.ceil(num_words / (128 * tp)) * 128 * tp
