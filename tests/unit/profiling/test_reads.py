"""Another block stands for the one that ran only if it holds the same wherever that one looked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actmem.profiling.reads import Reads, noted


class Block(nn.Module):
    def __init__(self, unread: Any = None, read: Any = None) -> None:
        super().__init__()
        self.unread, self.read, self.calls = unread, read, [0]
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.read is not None else x


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return x


def run(block: nn.Module) -> Reads:
    with noted(reads := Reads(block)):
        block(torch.ones(1, 4))
    reads.close()
    return reads


def test_what_was_never_read_may_differ() -> None:
    first = Block(unread=1, read=5)
    assert run(first).hold_for(first, Block(unread=2, read=5))


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


@pytest.mark.parametrize(
    ("mine", "same", "other"),
    [
        (5, 5, 6),
        ([1, (2, "a")], [1, (2, "a")], [1, (2, "b")]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        (scaled(2.0), scaled(2.0), scaled(3.0)),
        (partial(torch.mul, other=2), partial(torch.mul, other=2), partial(torch.mul, other=3)),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 3])),
    ],
    ids=["number", "list", "dict", "closure", "partial", "tensor"],
)
def test_what_was_read_must_be_the_same(mine: Any, same: Any, other: Any) -> None:
    first = Block(read=mine)
    reads = run(first)
    assert reads.hold_for(first, Block(read=same))
    assert not reads.hold_for(first, Block(read=other))


def test_a_change_after_the_run_is_seen() -> None:
    first = Block(read=[1])
    reads = run(first)
    assert reads.hold_for(first, Block(read=[1]))
    first.read.append(2)
    assert not reads.hold_for(first, Block(read=[1]))


def test_a_block_that_changes_what_it_reads_says_so() -> None:
    assert run(Counting()).changed
    assert not run(Block(read=1)).changed


def test_a_copy_must_still_hold_the_plain_values_of_its_original() -> None:
    reads = run(Block(read=1))
    assert reads.unchanged(Block(read=1), Block(read=1))
    assert not reads.unchanged(Block(read=2), Block(read=1))


def test_torch_modules_are_as_before_even_if_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), noted(Reads(Block())):
        1 / 0  # noqa: B018 - to fail inside
    assert "__getattribute__" not in vars(nn.Module)
