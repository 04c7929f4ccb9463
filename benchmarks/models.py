"""The models of the benchmarks, and the ways to train them that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import actmem
from actmem.cli.demo import LlamaLike, Size
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
    """Run forward and backward, from no gradients or on top of existing ones; return the loss."""
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
        """Dequantise the weight again, and return the gradient of x."""
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


# ---------------------------------------------------------------- images


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, and a skip connection."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of half the size if there are more channels, else of the same."""
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(h)) + self.around(x))


class ResNetLike(nn.Module):
    """A residual network with seeded weights. Called with images and classes it returns the loss."""

    def __init__(self, width: int, num_stages: int = 3, num_blocks: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            widths = [width << stage for stage in range(num_stages) for _ in range(num_blocks)]
            pairs = zip([width, *widths], widths, strict=False)
            self.blocks = nn.ModuleList([ResidualBlock(before, after) for before, after in pairs])
            self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the cross-entropy."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), classes)


def _twice(channels_in: int, channels: int) -> nn.Sequential:
    first, second = nn.Conv2d(channels_in, channels, 3, 1, 1), nn.Conv2d(channels, channels, 3, 1, 1)
    return nn.Sequential(first, nn.GroupNorm(4, channels), nn.SiLU(), second, nn.GroupNorm(4, channels), nn.SiLU())


class Down(nn.Module):
    """Two convolutions, and half the size."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.both = _twice(channels_in, channels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smaller map, and the map for the skip connection."""
        across = self.both(x)
        return functional.avg_pool2d(across, 2), across


class Up(nn.Module):
    """Double the size, then two convolutions over the upsampled map and the skip connection."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.larger = nn.ConvTranspose2d(channels_in, channels, 2, 2)
        self.both = _twice(2 * channels, channels)

    def forward(self, x: Tensor, across: Tensor) -> Tensor:
        """Return a map of the size of the skip connection."""
        return self.both(torch.cat([self.larger(x), across], 1))


class UNetLike(nn.Module):
    """A U-Net with seeded weights. Called with images and targets it returns the loss."""

    def __init__(self, width: int, depth: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            widths = [width << level for level in range(depth)]
            self.down = nn.ModuleList([Down(a, b) for a, b in zip([3, *widths], widths, strict=False)])
            self.middle = _twice(widths[-1], 2 * widths[-1])
            self.up = nn.ModuleList([Up(2 * w, w) for w in reversed(widths)])
            self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean square error."""
        x, across = images, []
        for block in self.down:
            x, kept = block(x)
            across.append(kept)
        x = self.middle(x)
        for block in self.up:
            x = block(x, across.pop())
        return functional.mse_loss(self.head(x), targets)
