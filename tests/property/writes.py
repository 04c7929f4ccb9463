"""The instructions of random programs that write: in place, through views, into lists, with out=, piece by piece."""

# ruff: noqa: PLW0108 - every choice is a lambda, so that only the one that is drawn computes anything

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.property.pool import COLS, ROWS, Pool, fitted


def inplace(p: Pool, r: Random) -> Any:
    t = p.target(r)
    u = p.like(r, t)
    r.choice(
        [
            lambda: t.mul_(0.7),
            lambda: t.add_(u, alpha=0.3),
            lambda: t.mul_(u),
            lambda: t.relu_(),
            lambda: t.tanh_(),
            lambda: t.sigmoid_(),
            lambda: t.clamp_(-0.5, 0.5),
            lambda: t.sub_(0.25),
            lambda: t.masked_fill_(u > 0, 0.125),
            lambda: t.index_add_(0, torch.tensor([0, 2]), u[:2]),
            lambda: t.addmm_(u, p.block.weight),
            lambda: t.lerp_(u, 0.5),
            lambda: t.t_().mul_(0.5).t_(),
            lambda: F.leaky_relu_(t),
            lambda: t.clamp_(max=1.0).exp_(),
        ]
    )()
    return [t] if r.random() < 0.3 else []


def inplace_slice(p: Pool, r: Random) -> Any:
    t = p.target(r)
    u = p.matrix(r)

    def through_unsafe() -> None:
        # On a tensor that nobody saved: plain autograd does not notice this write.
        a, b = torch.unsafe_chunk(t * 1.0, 2)
        a.mul_(0.5)
        p.tensors.extend([a, b * 2])

    r.choice(
        [
            lambda: t[1:3].mul_(0.5),
            lambda: t[:, 0].copy_(u[:, 1]),
            lambda: t[0].add_(u[1]),
            lambda: t.__setitem__((slice(None), slice(2, 4)), u[:, :2]),
            lambda: t.__setitem__(2, u[0] * 2),
            lambda: t.diagonal().mul_(3.0),
            lambda: t.view(-1)[::3].tanh_(),
            lambda: t.select(1, 3).exp_(),
            lambda: t.__setitem__(u[:, 0] > 0, 0.5) if not p.strict else t[1].mul_(2),
            through_unsafe,
        ]
    )()
    return [t] if r.random() < 0.3 else []


def unfilled(p: Pool, r: Random) -> Any:
    """Read a buffer that is filled in part, or not at all, by an operator that writes, draws or takes a list."""
    t, u = p.matrix(r), p.matrix(r)
    kind = r.choice([torch.empty, t.new_empty])

    def filled(rows: int = ROWS) -> Tensor:
        buffer = kind(2 * ROWS, COLS)
        buffer[:rows] = t[:rows].detach() if r.random() < 0.5 else t[:rows]
        return buffer[:rows]

    def and_later_the_rest(read: Any) -> Tensor:
        buffer = kind(2 * ROWS, COLS)
        buffer[:ROWS] = t.detach()
        made = read(buffer[:ROWS].detach())
        buffer[ROWS:] = u.detach()
        return made * buffer[2 : 2 + ROWS]

    def of_both(a: Tensor, b: Tensor) -> Tensor:
        torch._foreach_mul_([a, b], [filled().detach(), u.detach()])
        return a.sin() * b

    def out() -> Tensor:
        with torch.no_grad():
            return torch.mul(filled(), 2.0, out=kind(ROWS, COLS)).tanh()

    made = r.choice(
        [
            lambda: (u + 0).add_(filled()),
            lambda: (u + 1).mul_(filled().detach()).sin(),
            lambda: torch.zeros(ROWS, COLS).copy_(filled()) * u,
            lambda: torch.zeros(ROWS, COLS).addcmul_(filled(), u),
            lambda: (u * 1)[1:3].copy_(filled(2)).exp().tanh().repeat(2, 1),
            lambda: torch.bernoulli(torch.empty_like(t), 0.5) * u,
            lambda: torch.bernoulli(torch.empty(()).expand(ROWS, COLS), 0.5).div_(0.5) * u,
            lambda: torch.func.vmap(lambda row: F.dropout(row, 0.4, True), randomness="different")(t).sin(),
            lambda: torch.normal(filled().detach(), 1.0).tanh() * u,
            lambda: torch.bernoulli(filled().detach().sigmoid().mul_(0.5)) * u,
            lambda: of_both(t + 0, t + 1),
            lambda: torch.cat([filled(2), u])[:ROWS].sin(),
            lambda: torch.stack([filled(), u], 1).exp().tanh().sum(1),
            lambda: out() * u,
            lambda: and_later_the_rest(lambda b: (u + 0).add_(b).sin()),
            lambda: and_later_the_rest(lambda b: torch.cat([b, u])[:ROWS].tanh()),
        ]
    )()
    return [made, made.exp().tanh()]


def foreach(p: Pool, r: Random) -> Any:
    t, u = p.target(r), p.target(r)
    v = p.matrix(r)
    r.choice(
        [
            lambda: torch._foreach_mul_([t, u], 0.5),
            lambda: torch._foreach_add_([t, u], [v, v]),
            lambda: torch._foreach_mul_([t[:2], t[2:]], 0.5),
            lambda: torch._foreach_tanh_([t, u]),
        ]
    )()
    return list(torch._foreach_mul([v, v], 2.0))[:1]


def constant_writes(p: Pool, r: Random) -> Any:
    t = p.target(r)
    r.choice(
        [
            lambda: t[0].zero_(),
            lambda: t[:, 1].fill_(0.5),
            lambda: t.__setitem__((0, 0), 1.5),
            lambda: t.fill_diagonal_(2.0),
        ]
    )()
    return [t] if r.random() < 0.3 else []


def overwrite(p: Pool, r: Random) -> Any:
    t, u = p.target(r), p.matrix(r)
    r.choice([lambda: t.copy_(u), lambda: t.zero_(), lambda: t.fill_(0.75).mul_(u), lambda: t.copy_(u[0])])()
    return [t.sin()]


def out(p: Pool, r: Random) -> Any:
    t, u = p.matrix(r).detach(), p.matrix(r).detach()
    with torch.no_grad():
        made = r.choice(
            [
                lambda: torch.mul(t, u, out=torch.empty_like(t)),
                lambda: torch.add(t, 1.0, out=torch.empty(0)),
                lambda: torch.sigmoid(t, out=torch.zeros(ROWS, 2 * COLS)[:, :COLS]),
                lambda: torch.mm(t, u.t(), out=t.new_empty(ROWS, ROWS)),
                lambda: torch.mul(fresh := t + 1, u, out=fresh),
                lambda: torch.max(t, 1, out=(torch.empty(0), torch.empty(0, dtype=torch.long)))[0],
                lambda: torch.cat([t, u], out=torch.empty(2 * ROWS, COLS)),
            ]
        )()
    return [made, made.sin() * 0.5 + fitted(p.matrix(r)).sum()]


def build(p: Pool, r: Random) -> Any:
    t, u = p.matrix(r), p.matrix(r)

    def pieces(kind: Any, first: Tensor, second: Tensor) -> Tensor:
        buffer = kind(ROWS, COLS)
        buffer[:, :2] = first[:, :2]
        buffer[:, 2:] = second[:, 2:]
        return buffer

    def through_bits() -> Tensor:
        buffer = torch.zeros(ROWS, COLS)
        empty = t.new_empty(ROWS, COLS)
        empty.copy_(buffer)
        empty.view(torch.int16)[:, :COLS].copy_(u.detach().contiguous().view(torch.int16)[:, :COLS])
        return empty

    def rows(kind: Any) -> Tensor:
        buffer = kind(ROWS, COLS)
        for i in range(ROWS):
            buffer[i] = (t if i % 2 else u)[i]
        return buffer

    if p.strict:
        made = r.choice(
            [lambda: pieces(t.new_empty, t, u), lambda: rows(t.new_empty), lambda: pieces(t.new_empty, t, t.tanh())]
        )()
    else:
        made = r.choice(
            [
                lambda: pieces(t.new_empty, t, u),
                lambda: pieces(t.new_zeros, t, u),
                lambda: pieces(torch.empty, t.sort(0)[0], u),
                lambda: pieces(torch.empty, t, u.sort(1)[0]),
                lambda: rows(torch.zeros),
                lambda: rows(torch.empty),
                lambda: torch.zeros(ROWS, COLS) + t,
                lambda: torch.full_like(t, 0.5) * t,
                through_bits,
            ]
        )()
    return [made, made.exp().tanh()]
