"""Experts that are spread over ranks, with a router whose choices are forced: tokens travel to them and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

NUM_EXPERTS, NUM_CHOICES = 4, 2
CAPACITY_FACTOR = 1.25


def forced(kind: str, rank: int, layer: int, num_tokens: int) -> Tensor:
    """Return the experts that each token of a rank chooses in a layer: by chance, or two neighbours for all."""
    if kind == "first":
        return torch.arange(NUM_CHOICES).expand(num_tokens, -1)
    if kind == "last":
        return torch.arange(NUM_EXPERTS - NUM_CHOICES, NUM_EXPERTS).expand(num_tokens, -1)
    preferred = torch.tensor([0.6, 0.25, 0.1, 0.05]).roll(rank + layer)
    generator = torch.Generator().manual_seed(10 * layer + rank)
    return torch.multinomial(preferred.expand(num_tokens, -1), NUM_CHOICES, generator=generator)


def counts_of(kind: str, num_ranks: int, num_layers: int, num_tokens: int) -> list[list[list[int]]]:
    """Return how many tokens choose each expert, by layer and by rank."""
    return [
        [
            torch.bincount(forced(kind, rank, layer, num_tokens).flatten(), minlength=NUM_EXPERTS).tolist()
            for rank in range(num_ranks)
        ]
        for layer in range(num_layers)
    ]


class Routed(nn.Module):
    """A router, and this rank's part of the experts."""

    def __init__(self, choice: Tensor, width: int, group: dist.ProcessGroup, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.group, self.num_ranks = group, group.size()
        self.gate = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(NUM_EXPERTS // self.num_ranks)])
        self.register_buffer("preference", torch.zeros(len(choice), NUM_EXPERTS).scatter(1, choice, 100.0))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = (self.gate(rows) + self.preference).softmax(-1).topk(NUM_CHOICES)
        return (self.run(rows, chosen) * weights.unsqueeze(-1)).sum(1).view_as(x)

    def run(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Return the results of the chosen experts, [token, choice, width]."""
        raise NotImplementedError

    def exchange(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return all_to_all_single_autograd(rows, received, sent, self.group)


class DropLess(Routed):
    """Every token reaches its experts, however many choose the same. Ranks tell each other how many they send."""

    def run(self, rows: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        theirs = self.counts_of_others(counts).view(self.num_ranks, -1)
        sent, received = counts.view(self.num_ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        there = self.exchange(rows[order // NUM_CHOICES], received, sent)
        # They come sorted by rank, then by expert.
        expert_of = torch.arange(theirs.shape[1]).repeat(self.num_ranks).repeat_interleave(theirs.flatten())
        by_expert = expert_of.argsort(stable=True)
        parts = there[by_expert].split(theirs.sum(0).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out = torch.empty_like(out).index_copy(0, by_expert, out)
        back = self.exchange(out, sent, received)
        return torch.empty_like(back).index_copy(0, order, back).unflatten(0, (-1, NUM_CHOICES))

    def counts_of_others(self, counts: Tensor) -> Tensor:
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        return theirs


class GatheredCounts(DropLess):
    """The same; every rank learns the counts of all."""

    def counts_of_others(self, counts: Tensor) -> Tensor:
        every = [torch.empty_like(counts) for _ in range(self.num_ranks)]
        dist.all_gather(every, counts, group=self.group)
        return torch.stack(every).view(self.num_ranks, self.num_ranks, -1)[:, self.group.rank()].contiguous()


class WithCapacity(Routed):
    """An expert takes a fixed number of tokens from each rank. What is above that is dropped."""

    def run(self, rows: Tensor, chosen: Tensor) -> Tensor:
        capacity = math.ceil(CAPACITY_FACTOR * chosen.numel() / NUM_EXPERTS)
        flat = chosen.flatten()
        place = (F.one_hot(flat, NUM_EXPERTS).cumsum(0) - 1).gather(1, flat[:, None])[:, 0]
        slot = torch.where(place < capacity, flat * capacity + place, NUM_EXPERTS * capacity)
        sent = rows.new_zeros(NUM_EXPERTS * capacity + 1, rows.shape[1])
        sent = sent.index_copy(0, slot, rows.repeat_interleave(NUM_CHOICES, 0))[:-1]
        parts = [len(sent) // self.num_ranks] * self.num_ranks
        there = self.exchange(sent, parts, parts).unflatten(0, (self.num_ranks, len(self.experts), capacity))
        out = torch.stack([expert(there[:, n]) for n, expert in enumerate(self.experts)], 1)
        back = self.exchange(out.flatten(0, 2), parts, parts)
        return F.pad(back, (0, 0, 0, 1))[slot].unflatten(0, (-1, NUM_CHOICES))
