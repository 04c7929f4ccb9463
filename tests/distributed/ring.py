"""Causal attention over a sequence that is spread over ranks: keys and values travel round a ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Sent:
    """Tensors on their way to the next rank of the ring, while those of the previous one arrive."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, direction: int = 1) -> None:
        size, rank = group.size(), group.rank()
        there, back = (rank + direction) % size, (rank - direction) % size
        self.arriving = [torch.empty_like(t) for t in tensors]
        sends = [dist.P2POp(dist.isend, t, group=group, group_peer=there) for t in tensors]
        receives = [dist.P2POp(dist.irecv, t, group=group, group_peer=back) for t in self.arriving]
        # Even ranks send first, so that two that face each other do not wait for each other.
        self.works: list[Any] = dist.batch_isend_irecv(sends + receives if rank % 2 == 0 else receives + sends)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.arriving


def scores_of(q: Tensor, k: Tensor, *, is_here: bool) -> Tensor:
    """Return how much each position attends to each of another part, or of its own, where the future is hidden."""
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if is_here:
        hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


class Ring(torch.autograd.Function):
    """Join the results for each part by their weights as they come. The next part travels meanwhile."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        size, rank = group.size(), group.rank()
        here = k, v = k.contiguous(), v.contiguous()
        most = torch.full_like(q[..., :1], float("-inf"))
        out, weight = torch.zeros_like(q), torch.zeros_like(most)
        for step in range(size):
            sent = Sent([k, v], group) if step < size - 1 else None
            if step <= rank:  # later parts of the sequence are not attended to
                scores = scores_of(q, k, is_here=step == 0)
                now = torch.maximum(most, scores.amax(-1, keepdim=True))
                parts, shrink = (scores - now).exp(), (most - now).exp()
                out, weight = out * shrink + parts @ v, weight * shrink + parts.sum(-1, keepdim=True)
                most = now
            if sent is not None:
                k, v = sent.wait()
        out = out / weight
        ctx.save_for_backward(q, *here, out, most + weight.log())
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, norm = ctx.saved_tensors
        size, rank = ctx.group.size(), ctx.group.rank()
        of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        shared = (grad * out).sum(-1, keepdim=True)
        for step in range(size):
            if step <= rank:
                weights = (scores_of(q, k, is_here=step == 0) - norm).exp()
                of_v = of_v + weights.transpose(-1, -2) @ grad
                of_scores = weights * (grad @ v.transpose(-1, -2) - shared) * q.size(-1) ** -0.5
                of_q = of_q + of_scores @ k
                of_k = of_k + of_scores.transpose(-1, -2) @ q
            # The gradients travel with what they belong to, and after the last step are back home.
            k, v, of_k, of_v = Sent([k, v, of_k, of_v], ctx.group).wait()
        return of_q, of_k, of_v, None


class Shift(torch.autograd.Function):
    """Give a tensor to the next rank and take that of the previous one; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _shifted(tensor, group, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _shifted(grad, ctx.group, -1), None


def _shifted(tensor: Tensor, group: dist.ProcessGroup, direction: int) -> Tensor:
    tensor = tensor.contiguous()
    size, rank = group.size(), group.rank()
    received = torch.empty_like(tensor)
    actions = [
        lambda: dist.send(tensor, group=group, group_dst=(rank + direction) % size),
        lambda: dist.recv(received, group=group, group_src=(rank - direction) % size),
    ]
    for act in actions if rank % 2 == 0 else reversed(actions):
        act()
    return received


def ring_of_operators(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Do the same with operators that autograd knows."""
    out = weight = torch.zeros(())
    for step in range(group.size()):
        if step:
            k, v = Shift.apply(torch.stack([k, v]), group).unbind()
        weights = scores_of(q, k, is_here=step == 0).exp()
        if step > group.rank():
            weights = weights * 0  # every rank takes part in the travel of gradients
        out, weight = out + weights @ v, weight + weights.sum(-1, keepdim=True)
    return out / weight
