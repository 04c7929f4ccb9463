"""Expert parallel: each rank has some of a layer's experts, and tokens travel to theirs and back.

As in torchtitan, a rank has neighbouring experts, tells the others how many rows it sends to each of theirs, and every
row travels, however many choose the same expert. Two all-to-alls carry rows in the forward pass, two their gradients in
the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from actmem.catalogue import Experts, MoE
from actmem.distributedcompat import exchanged_rows

__all__ = ["SpreadExperts", "spread_experts"]


class SpreadExperts(Experts):
    """This rank's part of the experts of a layer. It is called as all of them are."""

    def __init__(self, whole: Experts, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.activation = whole.activation
        self.group = group
        self.num_experts = len(whole.down_proj)
        count = self.num_experts // group.size()
        first = group.rank() * count
        self.gate_up_proj_bias = self.down_proj_bias = None
        for name, value in whole.named_parameters():
            setattr(self, name, nn.Parameter(value.detach()[first : first + count].clone()))

    def forward(self, rows: Tensor, expert_of_row: Tensor) -> Tensor:
        """Run each row through its expert, on the rank that has it; the rows of one expert are adjacent."""
        num_ranks = self.group.size()
        counts = torch.bincount(expert_of_row, minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)  # pyright: ignore[reportUnknownMemberType]
        sent, received = (_summed(c, num_ranks) for c in (counts, theirs))
        there = exchanged_rows(rows, received, sent, self.group)
        # They come by rank, and from each rank by expert.
        here = torch.arange(self.num_experts // num_ranks, device=rows.device).repeat(num_ranks)
        expert_of_row, order = here.repeat_interleave(theirs).sort(stable=True)
        out = super().forward(there.index_select(0, order), expert_of_row).index_select(0, order.argsort())
        return exchanged_rows(out, sent, received, self.group)


def _summed(counts: Tensor, num_ranks: int) -> list[int]:
    """Return how many rows belong to the experts of each rank, or come from it."""
    by_rank: Any = counts.view(num_ranks, -1).sum(1)
    return by_rank.tolist()


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave only this rank's experts in every layer of a model.

    Args:
        model: a model of the catalogue, or a stage of one.
        mesh: one dimension: the ranks that share the experts.
    """
    for module in [m for m in model.modules() if isinstance(m, MoE)]:
        module.experts = SpreadExperts(module.experts, mesh.get_group())
