"""Small trainings with two parameter groups and a learning-rate schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import actmem

DIM, NUM_STEPS = 64, 20


class Small(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(4)
        )
        self.head = nn.Linear(DIM, DIM)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def made() -> Small:
    torch.manual_seed(0)
    return Small()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    wide, narrow = ([p for p in model.parameters() if (p.dim() > 1) is is_wide] for is_wide in (True, False))
    return [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 2e-3}]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-3)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9)


def mean(x: Tensor) -> Tensor:
    return x.square().mean()


class Run:
    """A training: model, optimizer, schedule, and what is applied."""

    def __init__(self, make: Callable[[nn.Module], Optimizer], **settings: Any) -> None:
        self.model = made()
        self.optimizer = make(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.applied: actmem.Applied | None = None
        if settings:
            self.applied = actmem.apply(
                self.model, actmem.Full(), blocks="layers.*", optimizer=self.optimizer, **settings
            )

    def train(self, begin: int, end: int) -> None:
        for n in range(begin, end):
            x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(n))
            loss = mean(self.model(x))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, path: Path) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()], path)

    def load(self, path: Path) -> None:
        for each, state in zip((self.model, self.optimizer, self.schedule), torch.load(path), strict=True):
            each.load_state_dict(state)

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)
