"""Models in torchtitan's shape: plain PyTorch, layers in a ModuleDict, `attention`, `feed_forward` or `moe`.

The zoo registers them; large enough sizes make `TitanLike` the benchmarks' model.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rope_table(head_dim: int, length: int) -> Tensor:
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[:, None, :]).flatten(-2).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, table), rotate(k, table)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    """Choose the best experts of each token; weights are not normalised."""

    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(self.gate(x).float().sigmoid(), self.top_k, sorted=False)


class GroupedExperts(nn.Module):
    """All experts in three parameters of three dimensions, one grouped product each."""

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim))

    def forward(self, x: Tensor, num_tokens: Tensor) -> Tensor:
        ends = num_tokens.cumsum(0).to(torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        x16 = x.bfloat16()
        hidden = F.silu(torch._grouped_mm(x16, w1, offs=ends)) * torch._grouped_mm(x16, w3, offs=ends)
        return torch._grouped_mm(hidden, w2, offs=ends).type_as(x)


class MoE(nn.Module):
    """Sort the tokens by expert, let the experts run on them, and put them back beside what the shared expert says."""

    def __init__(self, dim: int, hidden: int, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.router = Router(dim, num_experts, top_k)
        self.experts = GroupedExperts(dim, hidden, num_experts)
        self.shared_experts = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores, chosen = self.router(flat)
        order = torch.argsort(chosen.flatten(), stable=True)
        num_tokens = torch.bincount(chosen.flatten(), minlength=self.router.gate.out_features)
        token = order // self.router.top_k
        routed = self.experts(flat[token], num_tokens) * scores.flatten()[order, None].type_as(flat)
        out = self.shared_experts(flat)
        return out.index_add(0, token, routed.to(out.dtype)).reshape(x.shape)


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads)
        self.sparse = sparse
        if sparse:
            self.moe = MoE(dim, ffn)
        else:
            self.feed_forward = FeedForward(dim, ffn)
        self.attention_norm = nn.RMSNorm(dim)
        self.ffn_norm = nn.RMSNorm(dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        dense_or_sparse = self.moe if self.sparse else self.feed_forward
        return x + dense_or_sparse(self.ffn_norm(x))


class TitanLike(nn.Module):
    """A Llama-like decoder whose layers are a ModuleDict; large enough sizes make it the benchmarks' model.

    Called with token ids it returns logits; called with labels too, the loss.
    """

    table: Tensor

    def __init__(
        self,
        *,
        dim: int = 32,
        layers: int = 3,
        heads: int = 4,
        kv_heads: int = 2,
        ffn: int = 48,
        vocab: int = 64,
        max_length: int = 4096,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        # As in DeepSeek's models, the first layer of a sparse one is dense.
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(dim, heads, kv_heads, ffn, sparse=sparse and i > 0) for i in range(layers)}
        )
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("table", rope_table(dim // heads, max_length), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.tok_embeddings(ids)
        table = self.table[: ids.shape[1]]
        for layer in self.layers.values():
            x = layer(x, table)
        logits = self.output(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
