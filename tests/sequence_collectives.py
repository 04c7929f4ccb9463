"""The two collectives of sequence parallel, as autograd Functions over the default group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collective
from torch import Tensor


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return collective.wait_tensor(collective.all_gather_single(x, 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return collective.wait_tensor(collective.reduce_scatter_single(grads[0], "sum", 0, dist.group.WORLD))


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return collective.wait_tensor(collective.reduce_scatter_single(x, "sum", 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return collective.wait_tensor(collective.all_gather_single(grads[0], 0, dist.group.WORLD))
