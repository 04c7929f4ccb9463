"""The models of the benchmarks, and the ways to train them that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem.demo import LlamaLike, Size
from benchmarks.torch_forms import checkpoint_fully, checkpoint_selectively

SELECTIVE = actmem.Selective(save=["attention", actmem.every_second("matmul")])

Form = Callable[[nn.Module], object]

FORMS: dict[str, Form] = {
    "plain": lambda _: None,
    "torch full": checkpoint_fully,
    "torch selective": checkpoint_selectively,
    "actmem full": lambda model: actmem.apply(model, actmem.Full()),
    "actmem selective": lambda model: actmem.apply(model, SELECTIVE),
    "actmem save everything": lambda model: actmem.apply(model, actmem.SaveEverything()),
}
"""Each changes a model. torch's and actmem's selective forms have the same save set."""


def llama(size: Size, form: str) -> LlamaLike:
    """Build the Llama-like model in train mode, under one of `FORMS`."""
    model = LlamaLike(size)
    FORMS[form](model)
    return model


def train_step(model: nn.Module, batch: tuple[Tensor, ...], *, accumulate: bool = False) -> Tensor:
    """Run forward and backward, from no gradients or on top of those that are there; return the loss."""
    torch.manual_seed(0)
    if not accumulate:
        model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.detach()


# ---------------------------------------------------------------- frozen, quantised weights


class Dequantised(torch.autograd.Function):
    """Multiply by a weight that is stored in 8 bits. Numpy writes the full weight, unseen, once in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: float) -> Tensor:
        """Return x @ W."""
        ctx.packed, ctx.scale = packed, scale
        return x @ dequantise(packed, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Make the weight again, and return the gradient of x."""
        return grads[0] @ dequantise(ctx.packed, ctx.scale).t(), None, None


def dequantise(packed: Tensor, scale: float) -> Tensor:
    """Fill an uninitialised tensor by a kernel that torch does not see."""
    weight = torch.empty(packed.shape)
    weight.numpy()[:] = packed.numpy() * scale
    return weight


class QuantisedLayer(nn.Module):
    """A residual layer of frozen 8-bit weights, and a small trainable adapter."""

    def __init__(self, dim: int, num_weights: int) -> None:
        super().__init__()
        self.scale = 1 / 64 / dim**0.5
        self.num_weights = num_weights
        for i in range(num_weights):
            self.register_buffer(f"packed{i}", torch.randint(-127, 128, (dim, dim), dtype=torch.int8))
        self.down = nn.Linear(dim, 8, bias=False)
        self.up = nn.Linear(8, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the weights one after the other, then the adapter."""
        h = x
        for i in range(self.num_weights):
            h = nn.functional.gelu(Dequantised.apply(h, self.get_buffer(f"packed{i}"), self.scale))
        return x + h + self.up(self.down(x))


class Quantised(nn.Module):
    """A stack of `QuantisedLayer`s. Called with a batch it returns a scalar."""

    def __init__(self, dim: int, num_layers: int, num_weights: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(dim, dim, bias=False)
            self.layers = nn.ModuleList([QuantisedLayer(dim, num_weights) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def quantised(dim: int, num_layers: int, num_weights: int, form: str) -> Quantised:
    """Build the quantised model in train mode, under one of `FORMS`."""
    model = Quantised(dim, num_layers, num_weights)
    FORMS[form](model)
    return model
