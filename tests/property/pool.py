"""What a running random program can reach."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, COLS = 4, 6


class Pool:
    """The tensors that a running program can reach."""

    def __init__(self, block: Any, tensors: list[Tensor], generator: torch.Generator, *, strict: bool) -> None:
        self.block = block
        self.tensors = tensors
        self.generator = generator
        self.strict = strict

    def some(self, r: Random, want: Callable[[Tensor], bool]) -> Tensor:
        """Return a tensor of the pool that fits, late ones more often; a new one if there is none."""
        fit = [t for t in self.tensors if want(t)]
        if not fit:
            return fitted(self.tensors[0] if self.tensors[0].is_floating_point() else self.tensors[0].abs())
        return fit[max(r.randrange(len(fit)), r.randrange(len(fit)))]

    def real(self, r: Random) -> Tensor:
        """Return any float32 tensor with elements."""
        return self.some(r, lambda t: t.dtype is torch.float32 and t.numel() > 0)

    def matrix(self, r: Random) -> Tensor:
        """Return a float32 tensor of the usual shape."""
        return self.some(r, lambda t: t.dtype is torch.float32 and t.shape == (ROWS, COLS))

    def like(self, r: Random, other: Tensor) -> Tensor:
        """Return a tensor of the same shape and dtype, perhaps the same one."""
        return self.some(r, lambda t: t.dtype is other.dtype and t.shape == other.shape) if r.random() < 0.9 else other

    def target(self, r: Random) -> Tensor:
        """Return a matrix that may be written: mostly a new one, sometimes one that others know."""
        if self.strict or r.random() < 0.7:
            fresh = r.choice([lambda t: t + 0.5, torch.clone, lambda t: t - self.like(r, t)])(self.matrix(r))
            self.tensors.append(fresh)
            return fresh
        return self.some(
            r, lambda t: t.dtype is torch.float32 and t.shape == (ROWS, COLS) and not (t.is_leaf and t.requires_grad)
        )


def fitted(t: Tensor) -> Tensor:
    """Return the tensor as float32 of the usual shape, whatever it is."""
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    t = t.to(torch.float32).reshape(-1)
    want = ROWS * COLS
    if t.numel() == 0:
        t = F.pad(t, (0, 1))
    return t.repeat(-(-want // t.numel()))[:want].reshape(ROWS, COLS)
