"""A function that remembers a model remembers the copy after the model was copied."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actmem.profiling.fake_model import rebind


def by_closure(model: nn.Linear) -> Callable[..., Any]:
    return lambda x: x @ model.weight


def by_method(model: nn.Linear) -> Callable[..., Any]:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return x @ self.weight

    return MethodType(forward, model)


def by_partial(model: nn.Linear) -> Callable[..., Any]:
    return functools.partial(lambda owner, x: x @ owner.weight, model)


def by_default(model: nn.Linear) -> Callable[..., Any]:
    def forward(x: Tensor, *, owner: nn.Linear = model) -> Tensor:
        return x @ owner.weight

    return forward


def by_wrapping(model: nn.Linear) -> Callable[..., Any]:
    inner = by_closure(model)

    @functools.wraps(inner)
    def forward(x: Tensor) -> Tensor:
        return inner(x)

    return forward


@pytest.mark.parametrize("put", [by_closure, by_method, by_partial, by_default, by_wrapping])
def test_a_forward_that_remembers_the_original_runs_the_copy(put: Callable[[nn.Linear], Any]) -> None:
    model = nn.Linear(2, 2)
    forward: Any = put(model)
    model.forward = forward
    copied = copy.deepcopy(model)  # copies no function
    nn.init.zeros_(copied.weight)
    rebind(copied, {id(model): copied})
    x = torch.ones(1, 2)
    assert copied(x).tolist() == [[0.0, 0.0]]
    assert model.forward is forward, "the original is not touched"
    assert torch.equal(model(x), x @ model.weight)
    assert model.weight.any()


def test_a_function_that_remembers_no_module_stays_the_same_object() -> None:
    model = nn.Linear(2, 2)
    forward = functools.partial(torch.mul, other=2)
    model.forward = forward  # type: ignore[assignment]
    rebind(model, {id(nn.Linear(1, 1)): model})
    assert model.forward is forward


def test_a_function_that_remembers_itself_ends() -> None:
    model = nn.Linear(2, 2)

    def forward(x: Tensor, depth: int = 1) -> Tensor:
        return forward(x, depth - 1) if depth else x @ model.weight

    model.forward = forward  # type: ignore[assignment]
    other = nn.Linear(2, 2)
    rebind(model, {id(model): other})
    assert model(torch.ones(1, 2)).shape == (1, 2)
