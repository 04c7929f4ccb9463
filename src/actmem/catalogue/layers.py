"""The small parts that several models of the catalogue share: projections, norms, rotary positions."""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue.model_configs import Activation

__all__ = ["Embedding", "Factory", "GatedMLP", "Linear", "RMSNorm", "Rotary", "gated", "rotary_table", "rotate"]

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of all positions, half a head wide."""


class Factory(TypedDict):
    """The device and the dtype to create parameters with."""

    device: torch.device
    dtype: torch.dtype


class Linear(nn.Linear):
    """A projection whose weights are drawn once the whole model is built, and never on the meta device."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """An embedding whose table is drawn once the whole model is built, and never on the meta device."""

    def reset_parameters(self) -> None:
        """Leave the table as it is."""


class RMSNorm(nn.Module):
    """RMSNorm, computed in float32 as the models of transformers do."""

    def __init__(self, size: int, eps: float, factory: Factory, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **factory))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus_one:
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return self.weight * normed.type_as(x)


class GatedMLP(nn.Module):
    """A gated feed-forward layer, either dense or for the shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation, factory: Factory) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False, **factory)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False, **factory)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Project up, gate, project down."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.activation))


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Apply the activation to the gate, and multiply by the up-projection."""
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    if activation == "silu":
        return functional.silu(gate) * up
    gate = gate.clamp(max=_LIMIT)
    return gate * torch.sigmoid(gate * _SLOPE) * (up.clamp(-_LIMIT, _LIMIT) + 1)


# gpt-oss: the clamp of its SwiGLU, and the slope of the sigmoid.
_LIMIT, _SLOPE = 7.0, 1.702


def rotary_table(spans: Sequence[tuple[int, int]], head_dim: int, theta: float, *, like: Tensor) -> Rotary:
    """Compute the rotations of the positions in some spans, on the device and in the dtype of `like`."""
    steps = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    pieces = [torch.arange(begin, end, device=like.device, dtype=torch.float32) for begin, end in spans]
    positions = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    angles = torch.outer(positions, 1.0 / theta**steps)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate heads (batch, heads, positions, width) by their positions, first half against second."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
