"""Frozen weights in 4 or 8 bits, that are made wide again for each product.

NOTE [ Quantised weights ]

`nf4` is the format of QLoRA as bitsandbytes stores it: two values in a byte, one scale for each 64 values, and the
scales themselves in 8 bits, with one wide scale for each 256 of them. `int8` has one scale for each row. A product
makes the whole weight wide, in the dtype of its input, and lets it go; the backward pass makes it again. These
temporaries are operators with one result each, as they are in the libraries that have kernels for them:
`actmem::wide_scales` and `actmem::wide_nf4`. Here torch's own operators compute them, and what these take on the way is
seen by nobody but the allocator.
"""

# pyright: reportIncompatibleMethodOverride=false
# autograd Functions: forward and backward take what `apply` is given

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

__all__ = ["Quantisation", "QuantisedLinear"]

Quantisation = Literal["nf4", "int8"]
BLOCK, SCALES = 64, 256
"""How many values share a scale, and how many scales share a wide one."""

_CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The sixteen values of nf4: quantiles of a normal distribution."""


@torch.library.custom_op("actmem::wide_scales", mutates_args=())
def _wide_scales(narrow: Tensor, wide: Tensor, offset: Tensor) -> Tensor:
    return _by_block(narrow.float() / 127.0, wide, SCALES) + offset


@cast(Any, _wide_scales).register_fake
def _(narrow: Tensor, wide: Tensor, offset: Tensor) -> Tensor:
    del wide, offset
    return torch.empty_like(narrow, dtype=torch.float32)


@torch.library.custom_op("actmem::wide_nf4", mutates_args=())
def _wide_nf4(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    code = torch.tensor(_CODE, device=packed.device)
    values = code[torch.stack((packed >> 4, packed & 15), dim=-1).int()].flatten()
    return _by_block(values, scales, BLOCK)[: rows * columns].view(rows, columns).to(dtype)


@cast(Any, _wide_nf4).register_fake
def _(packed: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    del scales
    return packed.new_empty(rows, columns, dtype=dtype)


def _by_block(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of values by its scale."""
    filled = torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
    return (filled * scales[: len(filled), None]).flatten()[: len(values)]


class QuantisedLinear(nn.Module):
    """A linear layer whose frozen weight is stored in 4 or 8 bits. See NOTE [ Quantised weights ].

    >>> _ = torch.manual_seed(0)
    >>> plain = nn.Linear(64, 32)
    >>> narrow = QuantisedLinear(plain, "nf4")
    >>> sum(p.nbytes for p in narrow.parameters()) < plain.weight.nbytes / 6
    True
    >>> x = torch.randn(4, 64)
    >>> bool((narrow(x) - plain(x)).abs().max() < 0.2)
    True
    """

    def __init__(self, plain: nn.Linear, kind: Quantisation) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = plain.in_features, plain.out_features, kind
        weight = plain.weight.detach()
        if kind == "int8":
            wide, narrow = _int8(weight)
            self.weight, self.scales = _frozen(narrow), _frozen(wide)
        else:
            packed, narrow, wide, offset = _nf4(weight)
            self.weight, self.scales = _frozen(packed), _frozen(narrow)
            self.wide_scales, self.offset = _frozen(wide), _frozen(offset)
        bias = cast("nn.Parameter | None", plain.bias)
        self.bias = None if bias is None else _frozen(bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, made wide."""
        product: Any = _Product.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] # untyped
        out: Tensor = product(x, self)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a wide dtype."""
        if self.kind == "int8":
            return self.weight.to(dtype).mul_(self.scales.to(dtype)[:, None])
        scales = _wide_scales(self.scales, self.wide_scales, self.offset)
        return _wide_nf4(self.weight, scales, self.out_features, self.in_features, dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.layer, ctx.dtype, ctx.given = layer, dtype, x.dtype
        return torch.nn.functional.linear(x.to(dtype), layer.wide(dtype))

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        return (given @ ctx.layer.wide(ctx.dtype)).to(ctx.given), None


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


def _blocks(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.float().abs().amax(dim=1).clamp_min(1e-12) / 127.0
    return scales, (weight.float() / scales[:, None]).round().to(torch.int8)


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = _blocks(weight.float().flatten(), BLOCK)
    scales = values.abs().amax(dim=1)
    offset = scales.mean()
    rest = _blocks(scales - offset, SCALES)
    wide = rest.abs().amax(dim=1).clamp_min(1e-12)
    narrow = (rest / wide[:, None] * 127.0).round().to(torch.int8).flatten()[: len(scales)].clone()  # not the padding
    code = torch.tensor(_CODE, device=weight.device)
    middles = (code[1:] + code[:-1]) / 2
    found = torch.bucketize((values / scales.clamp_min(1e-12)[:, None]).contiguous(), middles).to(torch.uint8).flatten()
    return (found[::2] << 4) | found[1::2], narrow, wide, offset
