"""What the tests of modes that offload share: a small model, the forms of offloading, and what must be even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem import Full, Offload, OffloadActivations, Report, Rule, Rules
from actmem.modes import Mode

Gradients = dict[str, Tensor]
PLACES = ("disk", "host")


def to(place: str, **rest: Any) -> Offload:
    """Offload everything, however small; one value at a time, so that what is away is away when it is measured."""
    return Offload(**{"to": place, "min_bytes": 0, "copy_cpu": place == "host", "in_flight_bytes": 1, **rest})


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(want: Gradients, got: Gradients) -> None:
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def assert_even(report: Report) -> None:
    """All that went out came back, or was dropped."""
    moved = report.moved
    assert moved is not None
    assert moved.out_bytes > 0, "nothing was moved"
    assert moved.out_bytes == moved.back_bytes + moved.dropped_bytes
    assert moved.waiting_bytes == 0


class Block(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(block: Callable[[], nn.Module] = Block) -> Stack:
    torch.manual_seed(0)
    return Stack(block)


def batch(seed: int = 0, rows: int = 16) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


SIMPLE: dict[str, Callable[[str], Mode]] = {
    "everything": lambda place: OffloadActivations(to=place, min_bytes=0, copy_cpu=place == "host"),
    "inputs": lambda place: Full(offload_inputs=to(place)),
    "mixed": lambda place: Rules(
        [Rule("offload", module="*.up"), Rule("save", module="*.down"), Rule("recompute")], offload=to(place)
    ),
}

every_form = pytest.mark.parametrize("form", SIMPLE)
every_place = pytest.mark.parametrize("place", PLACES)
