"""Buffers of `torch.empty` that are read before they are full: nobody can make them again, so they are owed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.cases import MODES, Program, compare, stack

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def filled(h: Tensor, room: int = 10) -> Tensor:
    """Return the filled part of a larger buffer, as a cache or a padded batch has it."""
    buffer = torch.empty(room, h.size(1))
    buffer[: h.size(0)] = h
    return buffer[: h.size(0)]


def foreach(block: Program, h: Tensor) -> Tensor:
    a, b = h @ block.v, h + 1
    torch._foreach_mul_([a, b], [filled(h.detach()), filled(h.detach())])
    return (a.exp() * b.sin()).tanh()


def out(block: Program, h: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.mul(filled(h), 2.0, out=torch.empty(6, 8)).tanh()
    return (h @ block.v * made).exp()


def filled_later(block: Program, h: Tensor) -> Tensor:
    buffer = torch.empty(10, 8)
    buffer[:6] = h.detach()
    y = (h @ block.v).add_(buffer[:6]).sin()
    buffer[6:] = h[:4].detach()
    return (y * buffer[4:]).exp()


UNFILLED: dict[str, Any] = {
    "added in place": lambda block, h: (h @ block.v).add_(filled(h.detach())).exp().tanh(),
    "copied": lambda _, h: (torch.zeros(6, 8).copy_(filled(h)) * h).exp(),
    "foreach": foreach,
    "out=": out,
    "list": lambda block, h: torch.cat([filled(h), h @ block.v]).exp()[3:9],
    "keyword": lambda block, h: torch.addmm(filled(h), h, block.v, beta=0.5).exp().tanh(),
    "random, its mean": lambda _, h: (torch.normal(filled(h.detach()), 1.0).tanh() * h).exp(),
    "random, its shape": lambda _, h: (torch.bernoulli(torch.empty_like(h), 0.5) * h).exp(),
    "vmap of dropout": lambda block, h: torch.func.vmap(
        lambda row: F.dropout(row @ block.v, 0.4), randomness="different"
    )(h).sin(),
    "full later": filled_later,
}


@both
@pytest.mark.parametrize("name", UNFILLED)
def test_a_buffer_that_is_read_before_it_is_full_may_feed_any_operator(name: str, mode: Any) -> None:
    compare(lambda: stack(UNFILLED[name]), mode, num_steps=3)
