"""The Llama 3 8B of torchtitan's published peaks, in eager under FSDP, stated again from its public source."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["build_titan"]

WIDTH, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 4096, 14_336, 32, 8, 32, 128_256


class _Norm(nn.Module):
    """RMSNorm by operators, in float32 (torchtitan/models/norms.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        raised = x.float()
        return (raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


def _repeated(x: Tensor) -> Tensor:
    batch, length, heads, width = x.shape
    times = HEADS // KV_HEADS
    return x[:, :, :, None].expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        key_width = WIDTH // HEADS * KV_HEADS
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, key_width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv))
        q, k = _rotated(q, turns), _rotated(k, turns)
        k, v = _repeated(k), _repeated(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().flatten(-2))


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = _Attention(), _FeedForward()
        self.attention_norm, self.ffn_norm = _Norm(), _Norm()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class _Llama(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.register_buffer("turns", torch.empty(length, WIDTH // HEADS // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm, self.output = _Norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.get_buffer("turns"))
        return self.output(self.norm(x))


def _contexts() -> Any:
    """Save the results of attention and of every second matrix product (torchtitan's selective checkpointing, `op`)."""
    counts = Counter[bool]()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        product = operator == torch.ops.aten.mm.default
        counts[ctx.is_recompute] += product
        saves = operator == attention or (product and counts[ctx.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build_titan(ranks: int, batch: int, *, selective: bool, raised: bool) -> tuple[nn.Module, Callable[[], object]]:
    """Make the model and its step: parameters in float32, computation in bfloat16, gradients reduced in float32."""
    length = 8192
    model = _Llama(length)
    if selective:
        wrapped = functools.partial(checkpoint_wrapper, context_fn=_contexts, preserve_rng_state=False)
        model.layers = nn.ModuleList(wrapped(layer) for layer in model.layers)
    mesh = init_device_mesh("cpu", (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not model.layers[-1])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens, targets = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))

    def train() -> None:
        optimizer.zero_grad()
        logits = model(tokens).flatten(0, 1)
        loss = functional.cross_entropy(logits.float() if raised else logits, targets.flatten(0, 1))
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return model, train
