"""Small transformer blocks, dense and with experts, and the ways to spread them over two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEAD, NUM_EXPERTS = 16, 4, 4
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, kernel: Kernel = causal) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(self.kernel(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, kernel: Kernel = causal, mlp: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(kernel), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Counted(Block):
    """A block that counts how often its code runs. Torch cannot compile that."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


def stack(num_blocks: int = 2, *, seed: int = 0, kind: type[Block] = Block, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[kind(**options) for _ in range(num_blocks)])


def tokens(seed: int = 0, length: int = 6, num_rows: int = 2) -> Tensor:
    return torch.randn(num_rows, length, WIDTH, generator=torch.Generator().manual_seed(10 + seed))


# -------------------------------------------------------------------- tensor and sequence parallel


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    """Split the matrices of every block over the ranks, and with `sequence` what lies between them too."""
    out: Any = {"output_layouts": Shard(1)} if sequence else {}
    plan: dict[str, Any] = {f"self_attn.{n}": ColwiseParallel() for n in "qkv"}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan |= {"self_attn.o": RowwiseParallel(**out), "mlp.down_proj": RowwiseParallel(**out)}
    if sequence:
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {
            "attn_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "self_attn": gathered,
            "mlp": gathered,
        }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


# -------------------------------------------------------------------- mixture of experts


class Experts(nn.Module):
    """All experts of a rank in two tensors; tokens come sorted by expert."""

    def __init__(self, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        parts = [F.silu(p @ u) @ d for p, u, d in zip(x.split(counts), self.up, self.down, strict=True)]
        return torch.cat(parts)


class Moe(nn.Module):
    """Send every token to the best two of the experts."""

    def __init__(self, num_experts_here: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts(num_experts_here)
        self.routed: list[Tensor] = []
        """The choice of every call."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        self.routed.append(chosen.detach().clone())
        order = chosen.flatten().argsort(stable=True)
        rows = flat[order // 2]
        out = self.run_experts(rows, torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS))
        back = torch.empty_like(out).index_copy(0, order, out).unflatten(0, (-1, 2))
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x)

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.experts(rows, counts.tolist())


class ParallelMoe(Moe):
    """The same with half of the experts on each of two ranks, and tokens sent there and back."""

    def __init__(self, exchange: Callable[[Tensor, list[int], list[int]], Tensor]) -> None:
        super().__init__(NUM_EXPERTS // 2)
        self.exchange = exchange

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        with torch.no_grad():
            theirs = self.exchange(counts, [2, 2], [2, 2]) + 0  # [from which rank, for which of our experts]
        theirs = theirs.view(2, 2)
        sent, received = counts.view(2, 2).sum(1).tolist(), theirs.sum(1).tolist()
        there = self.exchange(rows, received, sent)
        # They come sorted by rank, then by expert.
        parts = there.split(theirs.flatten().tolist())
        mine = torch.cat([parts[0], parts[2], parts[1], parts[3]])
        out = self.experts(mine, theirs.sum(0).tolist())
        sizes = [len(parts[0]), len(parts[2]), len(parts[1]), len(parts[3])]
        a, b, c, d = out.split(sizes)
        return self.exchange(torch.cat([a, c, b, d]), sent, received) + 0


# -------------------------------------------------------------------- context parallel


class GatheredAttention:
    """Attention of this rank's part of the sequence over all of it: keys and values are gathered."""

    def __init__(self, rank: int, group: Any) -> None:
        self.rank, self.group = rank, group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (all_gather_single_autograd(t.contiguous(), 2, self.group) + 0 for t in (k, v))
        first = self.rank * q.size(2)
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(first)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class RingAttention:
    """The same, but keys and values travel round the ranks, and partial results are joined by their weights."""

    def __init__(self, rank: int, group: Any) -> None:
        self.rank, self.group = rank, group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.size(2)
        out = norm = torch.zeros(())
        for step in range(2):
            if step:
                pair = self._pass_on(torch.stack([k, v]))
                k, v = pair[0], pair[1]
            behind = (self.rank - (self.rank + step) % 2) * length
            seen = torch.ones(length, length, dtype=torch.bool).tril(behind)
            scores = (q @ k.transpose(-1, -2) * HEAD**-0.5).masked_fill(~seen, float("-inf")).exp()
            out, norm = out + scores @ v, norm + scores.sum(-1, keepdim=True)
        return out / norm

    def _pass_on(self, t: Tensor) -> Tensor:
        splits = [t.size(0) * r for r in ((0, 1) if self.rank == 0 else (1, 0))]
        return all_to_all_single_autograd(t.contiguous(), splits, splits, self.group) + 0
