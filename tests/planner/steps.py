"""Models that budgets are tried on, and what their steps really take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from tests.flat_device import FLAT
from tests.zoo import VOCAB, ZOO, generator

DEVICE = FLAT
"""Whose speed is planned for. Bytes do not depend on it, and a machine need not be measured."""


@dataclass
class Training:
    """A model with a batch, and an optimizer if one is counted."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Tensor] | None = None
    blocks: str | None = None
    optimizer: torch.optim.Optimizer | None = None
    num_batches: int = 1
    """How many batches the gradients of a step are summed over."""
    options: dict[str, Any] = field(default_factory=dict)
    """What `fit` and `profile` are told besides."""

    def __post_init__(self) -> None:
        counted = "adamw" if self.optimizer is not None else None
        self.options = {"loss": self.loss, "blocks": self.blocks, "optimizer": counted} | self.options

    def backward(self) -> None:
        out = self.model(**self.batch) if isinstance(self.batch, dict) else self.model(*self.batch)
        (out.loss if self.loss is None else self.loss(out)).backward()

    def step(self) -> None:
        self.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def measured(self, mode: Any = None) -> actmem.Measurement:
        """Measure a step in which all that is learnt in the first steps is known: the last of its batches.

        The peak that it has is that of tensors: a fake profile does not know what a kernel takes for itself.
        """
        if mode is not None:
            with actmem.apply(self.model, mode, blocks=None if isinstance(mode, actmem.Plan) else self.blocks):
                return self.measured()
        for _ in range(2):
            self.clear()
            self.step()
        self.clear()
        for _ in range(self.num_batches - 1):
            self.backward()
        found = actmem.measure(self.step, model=self.model, optimizer=self.optimizer)
        self.clear()
        return replace(found, peak_bytes=found.tensor_bytes)

    def profile(self, **options: Any) -> actmem.Profile:
        return actmem.profile(self.model, self.batch, **{**self.options, **options})

    def fit(self, budget: Any, **options: Any) -> actmem.Plan:
        options = {"device": DEVICE, "headroom": 0.0, **self.options, **options}
        return actmem.fit(self.model, self.batch, budget=budget, **options)


def zoo(name: str, batch: Any = None, *, adamw: bool = False, **rest: Any) -> Training:
    """Return a model of the zoo with a batch."""
    case = ZOO[name]
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if adamw else None
    batch = case.batch(model) if batch is None else batch
    return Training(model, batch, case.loss, case.blocks, optimizer, **rest)


def tokens(num: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (num, length), generator=generator())
    return {"input_ids": ids, "labels": ids.clone()}


def images(num: int, width: int) -> tuple[Tensor]:
    return (torch.randn(num, 3, width, width, generator=generator()),)


def peaks(profile: actmem.Profile) -> tuple[int, int]:
    """Return the peaks of recomputing and of saving everything."""
    modes = actmem.Full(), actmem.SaveEverything()
    full, plain = (actmem.predict(profile, mode, DEVICE).peak_bytes for mode in modes)
    return full, plain


class Act(nn.Module):
    """A block without any surprise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def stack(num_blocks: int = 4, width: int = 32, **options: Any) -> nn.Module:
    """Return a model whose activations outweigh its state even for small batches."""
    with torch.device(options.pop("device", "cpu")):
        torch.manual_seed(0)
        return nn.Sequential(*[Act(width) for _ in range(num_blocks)]).to(**options or {"dtype": torch.float32})


def rows(num: int, width: int = 32) -> tuple[Tensor]:
    return (torch.randn(num, width, generator=generator()),)
