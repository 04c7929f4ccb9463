"""A change of a model that changes what a step takes is noticed and named; a wrapper is not such a change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import actmem
from actmem.structure import condition, condition_digest, difference


def build() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)])


def with_relu(model: nn.Sequential) -> nn.Module:
    model[0][1] = nn.ReLU()  # type: ignore[index]
    return model


CHANGES: dict[str, tuple[Callable[[nn.Sequential], nn.Module], str]] = {
    "dtype": (lambda m: m.bfloat16(), "its parameters are bfloat16 instead of float32"),
    "frozen": (lambda m: m.requires_grad_(False), "0 parameters are trained instead of 40"),
    "module": (with_relu, "it has ReLU in place of GELU"),
    "one more": (lambda m: m.append(nn.Tanh()), "it has Tanh in place of nothing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(name: str) -> None:
    change, said = CHANGES[name]
    before = condition(build())
    after = condition(change(build()))
    assert before is not None
    assert after is not None
    assert before != after
    assert difference(before, after) == said


def test_nothing_is_said_of_a_step_of_training_a_copy_a_wrapper_or_a_mode() -> None:
    model = build()
    before = condition(model)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert condition(model) == condition(copy.deepcopy(model)) == condition(nn.DataParallel(model)) == before
    with actmem.apply(model, actmem.Full()):
        assert condition(model) == before


def test_a_digest_is_of_modules_and_of_what_is_trained_not_of_dtypes() -> None:
    digest = condition_digest(build())
    assert condition_digest(build().double()) == digest
    assert condition_digest(build().requires_grad_(False)) != digest
    assert condition_digest(with_relu(build())) != digest
