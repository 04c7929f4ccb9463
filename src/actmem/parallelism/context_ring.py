"""Context parallel: each rank has some positions of the sequence, and keys and values travel around a ring of ranks.

NOTE [ Head and tail ]
Causal attention gives later positions more to do. So that every rank has the same to do, the sequence is cut into twice
as many pieces as there are ranks, and rank r has piece r and, from the end, piece r again, as in torch's own
`context_parallel`. Of the keys of an earlier rank, all positions here see the first piece and none the second; of those
of a later rank, the second piece here sees both and the first none. So after the first round, in which each rank
attends to its own positions, every round has half the work, and no masks.

torch's `context_parallel` itself cannot be run on a CPU: DTensor has no rule for the attention kernel there. This ring
does with the CPU's flash kernel what torch does with the card's: results of rounds are joined in float32 by their
log-sum-exps, and in the backward pass the gradients of keys and values travel with them, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue import Attention, Decoder, LatentAttention

__all__ = ["Ring", "place_on_ring", "sequence_part"]

_SEQUENCE = 2
"""The dimension of positions in (batch, heads, positions, width)."""


def spans_of(length: int, index: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return which positions of a sequence a rank has. See NOTE [ Head and tail ].

    >>> spans_of(16, 1, 4)
    ((2, 4), (12, 14))
    """
    piece = length // (2 * size)
    return tuple((n * piece, (n + 1) * piece) for n in (index, 2 * size - 1 - index))


def sequence_part(tokens: Tensor, index: int, size: int) -> Tensor:
    """Return the part of (batch, positions) that a rank has."""
    return torch.cat([tokens[:, begin:end] for begin, end in spans_of(tokens.shape[1], index, size)], dim=1)


def place_on_ring(body: nn.Module, length: int, group: dist.ProcessGroup) -> None:
    """Tell a decoder which positions it has, and let its attention reach those of the other ranks.

    Args:
        body: a decoder of the catalogue, or a stage of one.
        length: tokens of the whole sequence.
        group: the ranks of the ring.
    """
    cast("Decoder", body).spans = spans_of(length, group.rank(), group.size())
    for module in body.modules():
        if isinstance(module, Attention | LatentAttention):
            module.attend = Ring(group)


@dataclass(frozen=True)
class Ring:
    """Causal attention over the positions of all ranks of a group."""

    group: dist.ProcessGroup

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
        """Attend from the positions of this rank to all earlier ones, wherever they are."""
        assert mask is None
        kernel: Any = _RingAttention
        return kernel.apply(q, k, v, scale, self.group)

    def __deepcopy__(self, memo: object) -> Ring:
        return self


def _rounds(group: dist.ProcessGroup) -> list[str]:
    """Return what attends in each round: all here to its "own" or to the "first" piece there, or the "second" here."""
    size, rank = group.size(), group.rank()
    return ["own", *("first" if n <= rank else "second" for n in range(1, size))]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, group: dist.ProcessGroup) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        rounds = _rounds(group)
        here = k, v
        out, norm = _attended(q, k, v, scale, causal=True)
        out = out.float()
        travelling = _Travelling([k, v], group)
        for n, kind in enumerate(rounds[1:], 1):
            k, v = travelling.arrived()
            if n < len(rounds) - 1:
                travelling = _Travelling([k, v], group)
            if kind == "first":
                more, more_norm = _attended(q, _first(k), _first(v), scale, causal=False)
                out, norm = _joined(out, norm, more, more_norm)
            else:
                more, more_norm = _attended(_second(q), k, v, scale, causal=False)
                late, late_norm = _joined(_second(out), _second(norm), more, more_norm)
                out, norm = (torch.cat((_first(a), b), _SEQUENCE) for a, b in ((out, late), (norm, late_norm)))
            del more, more_norm
        out = out.to(q.dtype)
        ctx.save_for_backward(q, *here, out, norm)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        q, k, v, out, norm = ctx.saved_tensors
        grad = grad.contiguous()
        of_q = torch.zeros_like(q, dtype=torch.float32)
        of_k, of_v = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        for n, kind in enumerate(_rounds(ctx.group)):
            if n:
                k, v, of_k, of_v = _Travelling([k, v, of_k, of_v], ctx.group).arrived()
            if kind == "second":
                parts = [_second(t) for t in (grad, q, out, norm)]
                more = _gradients(parts[0], parts[1], k, v, parts[2], parts[3], ctx.scale, causal=False)
                of_q = torch.cat((_first(of_q), _second(of_q) + more[0]), _SEQUENCE)
                of_k, of_v = of_k + more[1], of_v + more[2]
            elif kind == "first":
                more = _gradients(grad, q, _first(k), _first(v), out, norm, ctx.scale, causal=False)
                of_q = of_q + more[0]
                of_k, of_v = (
                    torch.cat((_first(a) + b, _second(a)), _SEQUENCE) for a, b in ((of_k, more[1]), (of_v, more[2]))
                )
            else:
                more = _gradients(grad, q, k, v, out, norm, ctx.scale, causal=True)
                of_q, of_k, of_v = of_q + more[0], of_k + more[1], of_v + more[2]
            del more
        # One step further, and the gradients are back at the rank whose keys and values they belong to.
        of_k, of_v = _Travelling([of_k, of_v], ctx.group).arrived()
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


class _Travelling:
    """Tensors on their way to the next rank of the ring, while those of the one before arrive."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        following, before = (rank + 1) % size, (rank - 1) % size
        self._arriving = [torch.empty_like(t) for t in tensors]
        sends = [dist.P2POp(dist.isend, t, group=group, group_peer=following) for t in tensors]
        receives = [dist.P2POp(dist.irecv, t, group=group, group_peer=before) for t in self._arriving]
        # Even ranks send first, so that two that face each other do not wait for each other.
        self._works = dist.batch_isend_irecv(sends + receives if rank % 2 == 0 else receives + sends)

    def arrived(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._arriving


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return results, and the logarithms of the sums that they were divided by, as (batch, heads, positions, 1)."""
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, norm = kernel(q, k, v, 0.0, causal, scale=scale)
    return out, norm.unsqueeze(-1)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, norm: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, norm.squeeze(-1), 0.0, causal, scale=scale)


def _joined(out: Tensor, norm: Tensor, more: Tensor, more_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Join results over two sets of keys, the first of them in float32."""
    out = out - torch.sigmoid(more_norm - norm) * (out - more)
    return out, norm - functional.logsigmoid(norm - more_norm)


def _first(tensor: Tensor) -> Tensor:
    return tensor.narrow(_SEQUENCE, 0, tensor.shape[_SEQUENCE] // 2)


def _second(tensor: Tensor) -> Tensor:
    half = tensor.shape[_SEQUENCE] // 2
    return tensor.narrow(_SEQUENCE, half, half)
