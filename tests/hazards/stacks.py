"""The smallest model with blocks: a projection, three blocks of one kind, a head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DIM = 16


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return self.head(x)


def stack(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds a stack of such blocks from a fixed seed."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Stack(make).train()

    return build


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 6, DIM)), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return model(inputs(), *args, **kwargs).float().square().mean()


def train(model: nn.Module) -> Tensor:
    """Run one step."""
    loss = loss_of(model)
    loss.backward()
    return loss
