"""The instructions that random programs are made of.

Each takes the pool of a running program and a source of choices, and returns the tensors that it adds to the pool.
Choices depend on shapes, dtypes and flags only, never on numbers, so that two runs of a program do the same.
"""

# ruff: noqa: PLW0108 - every choice is a lambda, so that only the one that is drawn computes anything

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.property import writes
from tests.property.pool import COLS, ROWS, Pool

Step = Callable[[Pool, Random], Any]


def _tamed(t: Tensor) -> Tensor:
    return t.tanh()


# ------------------------------------------------------------------ views


def _view(p: Pool, r: Random) -> Any:
    t = p.real(r)
    return [
        r.choice(
            [
                lambda: t.reshape(-1),
                lambda: t.transpose(0, -1) if t.dim() else t,
                lambda: t.narrow(0, 0, max(1, t.size(0) // 2)) if t.dim() else t,
                lambda: t[..., ::2] if t.dim() else t,
                lambda: t.unsqueeze(r.randrange(t.dim() + 1)),
                lambda: t.select(0, t.size(0) - 1) if t.dim() else t,
                lambda: t.unsqueeze(0).expand(2, *t.shape),
                lambda: t[1:] if t.dim() and t.size(0) > 1 else t,
                lambda: t.diagonal() if t.dim() >= 2 else t,
                lambda: t.unfold(0, 2, 1) if t.dim() and t.size(0) > 1 else t,
                lambda: t.view_as(t),
                lambda: t.squeeze(),
                lambda: t.permute(*reversed(range(t.dim()))) if t.dim() else t,
                lambda: t.movedim(0, -1) if t.dim() else t,
            ]
        )()
    ]


def _matrix_view(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    return r.choice(
        [
            lambda: [t.view(2, 2, COLS)],
            lambda: [t.view(COLS, ROWS)] if t.is_contiguous() else [t.reshape(COLS, ROWS)],
            lambda: list(t.chunk(2)),
            lambda: list(t.split([1, ROWS - 1])),
            lambda: list(t.unbind(1))[:2],
            lambda: [t.as_strided((3, 3), (1, 2), t.storage_offset())] if t.is_contiguous() else [t],
            # Copied at once: plain autograd itself reads what is written over a saved view that it does not know of.
            lambda: [c + 0.0 for c in torch.unsafe_chunk(t, 2)],
            lambda: [c + 0.0 for c in torch.unsafe_split(t, 2)],
        ]
    )()


def _dtype_view(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    bits = t.detach().view(torch.int32)
    half = t.detach().contiguous().view(torch.int16)
    return [bits, (bits & 3).to(torch.float32) + t, half.remainder(5).float()]


# ------------------------------------------------------------------ arithmetic


def _unary(p: Pool, r: Random) -> Any:
    t = p.real(r)
    name = r.choice(
        [
            "tanh",
            "sigmoid",
            "sin",
            "relu",
            "abs",
            "square",
            "neg",
            "exp",
            "softplus",
            "gelu",
            "silu",
            "erf",
            "rsqrt",
            "log1p",
        ]
    )
    if name in ("exp", "rsqrt", "log1p"):
        t = t.tanh() + 1.5 if name != "exp" else t.tanh()
    if name in ("softplus", "gelu", "silu"):
        return [getattr(F, name)(t)]
    return [getattr(torch, name)(t)]


def _binary(p: Pool, r: Random) -> Any:
    a = p.real(r)
    b = p.like(r, a)
    op = r.choice(
        [torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2, lambda x, y: x / (y.abs() + 1.0), torch.lerp]
    )
    return [_tamed(torch.lerp(a, b, 0.3)) if op is torch.lerp else _tamed(op(a, b))]


def _parameter(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    k = p.block
    return [
        r.choice(
            [
                lambda: F.linear(t, k.weight, k.bias),
                lambda: t @ k.weight,
                lambda: torch.addmm(k.bias, t, k.weight.t()),
                lambda: t * k.gain,
            ]
        )()
    ]


def _matmul(p: Pool, r: Random) -> Any:
    a, b = p.matrix(r), p.matrix(r)
    k = p.block
    return r.choice(
        [
            lambda: [_tamed(a @ b.t())],
            lambda: [_tamed(torch.bmm(a.reshape(2, 2, COLS), b.reshape(2, COLS, 2)))],
            lambda: [F.conv1d(a.reshape(1, ROWS, COLS), k.weight[:, :ROWS].reshape(COLS, ROWS, 1), k.bias)],
            lambda: [F.conv1d(a.reshape(2, 2, COLS), b.reshape(4, 2, 3)[:2], padding=1)],
            lambda: [torch.einsum("ij,kj->ik", a, k.weight)],
            lambda: [torch.outer(a[0], b[1])],
            lambda: [torch.mv(a, b[0])],
            lambda: [_tamed(torch.baddbmm(a.reshape(2, 2, 6)[..., :2], a.reshape(2, 2, 6), b.reshape(2, 6, 2)))],
        ]
    )()


def _attention(p: Pool, r: Random) -> Any:
    q, k, v = (p.matrix(r).reshape(1, 2, ROWS, 3) for _ in range(3))
    return [F.scaled_dot_product_attention(q, k, v, is_causal=r.random() < 0.5)]


def _attention_dropout(p: Pool, r: Random) -> Any:
    q, k, v = (p.matrix(r).reshape(1, 2, ROWS, 3) for _ in range(3))
    return [F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)]


def _reduction(p: Pool, r: Random) -> Any:
    t = p.real(r)
    return r.choice(
        [
            lambda: [t.sum()],
            lambda: [t.mean(0)] if t.dim() else [t.mean()],
            lambda: [t.sum(-1, keepdim=True)] if t.dim() else [t.sum()],
            lambda: [t.softmax(-1)] if t.dim() else [t * 2],
            lambda: [F.log_softmax(t, 0)] if t.dim() else [t * 2],
            lambda: [t.logsumexp(-1)] if t.dim() else [t * 3],
            lambda: [t.norm()],
            lambda: [t.amax(-1)] if t.dim() else [t],
            lambda: [t.cumsum(0)] if t.dim() else [t],
            lambda: [t.tanh().cumprod(-1)] if t.dim() else [t],
            lambda: [t.flip(0)] if t.dim() else [t],
            lambda: [t.roll(1)],
        ]
    )()


def _several(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    k = p.block
    return r.choice(
        [
            lambda: [F.layer_norm(t, (COLS,), k.bias, k.gain[0])],
            lambda: list(torch.var_mean(t, 1)),
            lambda: list(t.max(1)),
            lambda: list(t.min(0)),
            lambda: list(torch.aminmax(t, dim=1)),
            lambda: [F.group_norm(t.reshape(2, 2, COLS), 2)],
            lambda: [F.max_pool1d(t.reshape(1, ROWS, COLS), 2)],
            lambda: list(torch.frexp(t.detach())),
            lambda: list(t.cummax(0)),
        ]
    )()


def _routing(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    return r.choice(
        [lambda: list(t.topk(2)), lambda: list(t.sort(dim=0)), lambda: [t.argsort(1)], lambda: list(t.kthvalue(2))]
    )()


def _batch_norm(p: Pool, r: Random) -> Any:
    k = p.block
    return [F.batch_norm(p.matrix(r), k.mean, k.variance, k.bias, None, training=True)]


# ------------------------------------------------------------------ integers and booleans


def _integer(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    return r.choice(
        [
            lambda: [t.argmax(1), t.argmin(0)],
            lambda: [t > t.mean(), t.isnan()],
            lambda: [torch.where(t > p.like(r, t), t, t * 0.5)],
            lambda: [t.gather(1, t.argmax(1, keepdim=True).expand(-1, 3))],
            lambda: [t.index_select(0, t.argmax(0) % ROWS)],
            lambda: [t[[0, 2, 2]], t[:, [1, 1]]],
            lambda: [t[t[:, 0] > 0]],
            lambda: [t.take(torch.remainder(t.argmax(1), 3))],
            lambda: [(t * 10).long().clamp(0, 3), (t > 0).cumsum(0)],
            lambda: [F.embedding(t.argmax(1) % ROWS, p.block.gain)],
            lambda: [t.masked_select(t > 10.0).sum() + t],
            lambda: (
                [torch.searchsorted(t.detach().sort(1)[0].contiguous(), t.detach().contiguous()).float()]
                if not p.strict
                else [t.round() + t]
            ),
        ]
    )()


def _scatter(p: Pool, r: Random) -> Any:
    t, u = p.matrix(r), p.matrix(r)
    index = t.detach().argmax(1, keepdim=True)
    return r.choice(
        [
            lambda: [t.scatter(1, index, u)],
            lambda: [t.scatter_add(1, index, u)],
            lambda: [t.index_add(0, index[:, 0] % ROWS, u)],
            lambda: [t.masked_fill(t > 0.5, 0.25)],
            lambda: [t.index_fill(1, index[:, 0], 0.5)],
            lambda: [t.index_put((index[:, 0] % ROWS,), u)] if not p.strict else [t],
            lambda: [F.one_hot(index[:, 0], COLS).float() * u] if not p.strict else [u],
            lambda: [t.index_copy(0, torch.arange(ROWS), u)],
            lambda: [torch.cat([t, u]), torch.stack([t, u, t], 1)],
            lambda: [F.pad(t, (1, 0)), t.tril(), t.repeat(1, 2)],
        ]
    )()


# ------------------------------------------------------------------ random


def _random(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    g = p.generator
    k = p.block
    return r.choice(
        [
            lambda: [F.dropout(t, 0.4, True)],
            lambda: [t * torch.rand_like(t)],
            lambda: [t + torch.randn(ROWS, COLS, generator=g)],
            lambda: [F.dropout1d(t.reshape(2, 2, COLS), 0.5, True)],
            lambda: [F.alpha_dropout(t, 0.3, True)],
            lambda: [F.feature_alpha_dropout(t.reshape(2, 2, COLS), 0.3, True)],
            lambda: [F.rrelu(t, training=True)],
            lambda: [t * torch.bernoulli(t.detach().sigmoid(), generator=g)],
            lambda: [t * torch.randint(0, 3, (ROWS, COLS)), torch.randperm(ROWS)],
            lambda: [t * (t.detach() * 0).bernoulli_(0.5)],
            lambda: [t.sigmoid() * (t.detach() + 0).normal_(0.0, 1.0, generator=g)],
            lambda: [F.gumbel_softmax(t, hard=False)],
            lambda: [t * (k.cache + 0).uniform_(-1, 1)],
            lambda: [F.dropout(t + 1, 0.4, True, inplace=True)],
            lambda: [torch.normal(t.detach(), 1.0) * t],
            lambda: [torch.multinomial(t.detach().softmax(-1), 2)],
            lambda: [(n := torch.randn(ROWS, COLS), (t + n).exp().tanh(), n.mul_(0.5))[1]],
        ]
    )()


# ------------------------------------------------------------------ dtypes


def _dtype(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    return r.choice(
        [
            lambda: [t.double() * 1.5],
            lambda: [(t.double() + 1).sigmoid().float()],
            lambda: [t.bfloat16() * t.bfloat16()],
            lambda: [(t.bfloat16() @ p.block.weight.bfloat16()).float()],
            lambda: [t.half().float()],
            lambda: [t.to(torch.float64).var()],
        ]
    )()


def _complex(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    z = torch.view_as_complex(t.reshape(ROWS, 3, 2).contiguous())
    return r.choice(
        [
            lambda: [z, z.conj()],
            lambda: [(z.conj() @ z.t()).real],
            lambda: [z.conj().imag.sin()],
            lambda: [(z * z.conj()).abs()],
            lambda: [torch.view_as_real(z * 2)[..., 0], z.imag],
            lambda: [torch.polar(t.abs() + 0.1, t).real],
            lambda: [torch.vdot(z[0], z[1]).abs() * t],
            lambda: [torch.fft.rfft(t).abs()],
            lambda: [(z.conj() + 1).conj().imag, z.mT.conj().resolve_conj().real],
            lambda: [_TwiceRead.apply(z.conj()).real],
        ]
    )()


def _complex_pool(p: Pool, r: Random) -> Any:
    z = p.some(r, lambda t: t.is_complex())
    if not z.is_complex():
        z = torch.complex(z, z + 1)
    return r.choice(
        [
            lambda: [z.real.sin()],
            lambda: [z.imag * z.imag],
            lambda: [(z.conj() * z).real],
            lambda: [(z @ z.mH).real],
            lambda: [z.abs()],
        ]
    )()


# ------------------------------------------------------------------ autograd


class _TwiceRead(torch.autograd.Function):
    """Read what it saved twice, as some implementations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x, _), (_, y) = ctx.saved_tensors, ctx.saved_tensors
        return grads[0] * 2 * (x.cos() + 0 * y).conj()


class _Dirty(torch.autograd.Function):
    """Write into its input and say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(0.5)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 0.5 + 0.0 * x


def _function(p: Pool, r: Random) -> Any:
    return [_TwiceRead.apply(p.real(r))]


def _dirty(p: Pool, r: Random) -> Any:
    return [_Dirty.apply(p.target(r))]


def _detached(p: Pool, r: Random) -> Any:
    t, u = p.matrix(r), p.matrix(r)
    with torch.no_grad():
        scale = r.choice(
            [lambda: t.abs() + 0.5, lambda: (t @ p.block.weight).tanh(), lambda: t.tanh() + p.block.cache]
        )()
        if not p.strict:
            scale = scale + p.block.gain.detach()
    return [u * scale, t.detach().cos() * u]


def _dead(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    unused = (t.sin() @ p.block.weight).exp()
    del unused
    return []


def _input_writes(p: Pool, r: Random) -> Any:
    """Write into what belongs to others: arguments, buffers, parameters."""
    k = p.block
    u = p.matrix(r).detach()
    with torch.no_grad():
        r.choice(
            [
                lambda: k.cache.mul_(0.5).add_(u),
                lambda: k.cache[1:3].copy_(u[:2]),
                lambda: k.cache.copy_(u),
                lambda: k.mean.lerp_(u[0], 0.1),
                lambda: p.tensors[1].detach().mul_(0.9),
                lambda: k.spare.mul_(0.9),
            ]
        )()
    return [k.cache * p.matrix(r), k.spare * p.matrix(r)]


def _cache(p: Pool, r: Random) -> Any:
    return [(p.block.cache + p.matrix(r)).exp().tanh(), p.matrix(r) * p.block.cache]


def _scalar(p: Pool, r: Random) -> Any:
    t = p.matrix(r)
    return [t * t.detach().mean().item(), t / max(1, len(t.detach().nonzero()))]


STRICT: dict[str, Step] = {
    "view": _view,
    "matrix_view": _matrix_view,
    "unary": _unary,
    "binary": _binary,
    "parameter": _parameter,
    "matmul": _matmul,
    "attention": _attention,
    "reduction": _reduction,
    "several": _several,
    "integer": _integer,
    "scatter": _scatter,
    "inplace": writes.inplace,
    "inplace_slice": writes.inplace_slice,
    "random": _random,
    "dtype": _dtype,
    "complex": _complex,
    "function": _function,
    "detached": _detached,
    "build": writes.build,
}
"""Everything that these compute can be replayed."""

ALL: dict[str, Step] = STRICT | {
    "dtype_view": _dtype_view,
    "attention_dropout": _attention_dropout,
    "routing": _routing,
    "batch_norm": _batch_norm,
    "foreach": writes.foreach,
    "constant_writes": writes.constant_writes,
    "overwrite": writes.overwrite,
    "out": writes.out,
    "unfilled": writes.unfilled,
    "complex_pool": _complex_pool,
    "dirty": _dirty,
    "dead": _dead,
    "input_writes": _input_writes,
    "cache": _cache,
    "scalar": _scalar,
}
