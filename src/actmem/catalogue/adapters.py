"""Fine-tuning as people do it: low-rank adapters on the projections of a model that is otherwise frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actmem.catalogue.narrow_weights import Quantisation, QuantisedLinear
from actmem.errors import ModeError

__all__ = ["AdaptedLinear", "adapt"]

_APART = ("lm_head", "classifier", "score", "router")
"""Linear layers that have no adapter: heads and routers. A layer named `gate` in a mixture of experts is a router."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer and a product of two narrow matrices that is added to it, as PEFT computes it.

    The adapter is in float32 where the layer is in half precision, which is PEFT's default.
    """

    def __init__(self, plain: nn.Linear, rank: int, quantisation: Quantisation | None, scaling: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scaling = plain.in_features, plain.out_features, scaling
        given = plain.weight
        self.base_layer: nn.Module = plain if quantisation is None else QuantisedLinear(plain, quantisation)
        dtype = torch.promote_types(given.dtype, torch.float32)
        self.lora_A = nn.Linear(plain.in_features, rank, bias=False, device=given.device, dtype=dtype)
        self.lora_B = nn.Linear(rank, plain.out_features, bias=False, device=given.device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the adapter gives to what the layer gives."""
        out: Tensor = self.base_layer(x)
        return (out + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling).to(out.dtype)


def adapt(model: nn.Module, rank: int, *, quantisation: Quantisation | None = None, scaling: float = 2.0) -> nn.Module:
    """Freeze a model, and put an adapter on every linear layer but heads and routers. In place.

    Experts whose weights are one tensor have no adapters, and stay in their dtype.

    Args:
        model: any module; it may be on the meta device.
        rank: the width of the adapters.
        quantisation: in how many bits the adapted layers are stored: "nf4", "int8", or None as they are.
        scaling: the adapters' factor.

    Raises:
        ModeError: the rank is not permitted, or there is no layer to adapt.

    >>> model = adapt(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), 4, quantisation="nf4")
    >>> [name for name, p in model.named_parameters() if p.requires_grad][:2]
    ['0.lora_A.weight', '0.lora_B.weight']
    """
    if rank < 1:
        raise ModeError(f"rank = {rank!r} is not permitted. Expected a whole number of at least 1.")
    model.requires_grad_(False)
    found: list[tuple[nn.Module, str, nn.Linear]] = []
    for module in list(model.modules()):
        for name, child in module.named_children():
            apart = name in _APART or (name == "gate" and hasattr(module, "experts"))
            if isinstance(child, nn.Linear) and not apart:
                found.append((module, name, child))
    if not found:
        raise ModeError(f"{type(model).__name__} has no linear layers, so there is nothing to put adapters on.")
    for module, name, plain in found:
        setattr(module, name, AdaptedLinear(plain, rank, quantisation, scaling))
    return model
