"""Blocks and calls that may be traced once for many are told from those that may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import actmem
from actmem.profiling.equal_blocks import identity, signature


class Block(nn.Module):
    def __init__(self, index: int = 0, *, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.index, self.causal, self.dropout = index, causal, dropout
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(2))


def test_an_index_may_differ_because_only_a_run_tells_whether_it_matters() -> None:
    assert identity(Block(0), "block") == identity(Block(7), "block")


def frozen() -> Block:
    block = Block()
    block.linear.bias.requires_grad_(False)
    return block


def other_class() -> Block:
    block = Block()
    block.linear = nn.utils.skip_init(nn.Bilinear, 4, 1, 4)  # type: ignore[assignment]
    return block


def other_buffer() -> Block:
    block = Block()
    block.mask = torch.zeros(3)
    return block


@pytest.mark.parametrize(
    "make", [lambda: Block(causal=False), lambda: Block(dropout=0.1), frozen, other_class, other_buffer]
)
def test_flags_numbers_classes_buffers_and_trained_parameters_may_not_differ(make: Callable[[], Block]) -> None:
    assert identity(make(), "block") != identity(Block(), "block")


def test_calls_are_alike_whatever_their_numbers() -> None:
    assert signature((torch.zeros(2, 3),), {"scale": 2.0}) == signature((torch.ones(2, 3),), {"scale": 2.0})


X, Y = torch.zeros(3, 3), torch.ones(3, 3)


@pytest.mark.parametrize(
    ("args", "others"),
    [
        ((X, X), (X, Y)),  # one storage, or two
        ((X,), (X.t(),)),
        ((X,), (X.double(),)),
        ((X,), (X.clone().requires_grad_(),)),
        ((X, 1), (X, 2)),
        ((X,), ([X],)),
    ],
    ids=["shared storage", "strides", "dtype", "gradient", "plain value", "nesting"],
)
def test_calls_differ_by_geometry_sharing_gradients_and_plain_values(args: Any, others: Any) -> None:
    assert signature(args, {}) != signature(others, {})


def test_a_call_with_an_object_cannot_be_compared() -> None:
    assert signature((X, object()), {}) is None


@pytest.mark.parametrize("mode", [actmem.Full(), actmem.SaveEverything()])
def test_a_last_block_that_gets_an_expanded_gradient_is_not_taken_for_the_others(mode: actmem.Full) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    x = torch.randn(512, 8)
    profile = actmem.profile(model, (x,), loss=torch.sum, optimizer=None)

    def step() -> None:
        out = model(x)
        out.sum().backward()  # its gradient is one number for all elements

    with actmem.apply(model, mode):
        for _ in range(3):
            model.zero_grad()
            measured = actmem.measure(step, model=model).tensor_bytes
    assert actmem.predict(profile, mode, "h100-80gb").tensor_bytes == measured
