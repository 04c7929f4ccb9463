"""After a step that was only run to look at it, the model and the generators are as they were."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from actmem.profiling.restored_state import Restored, generator_states, inputs_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.calls, self.seen, self.cache = 0, [1], {"k": [torch.zeros(2)]}
        self.numbers = itertools.count()
        self.plain = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["new"] = [x]
        self.cache["k"][0].add_(1)
        self.plain.add_(next(self.numbers) + 1)
        self.left_behind = x
        return self.norm(self.linear(x)) * torch.rand(()) * random.random() * float(numpy.random.rand())


def step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def test_gradients_buffers_attributes_and_generators_come_back() -> None:
    model = Model()
    x = torch.ones(4, 3, requires_grad=True)
    step(model, torch.ones(4, 3))
    gradient = model.linear.weight.grad
    seen, cached, state = model.seen, model.cache["k"], {n: b.clone() for n, b in model.named_buffers()}
    before = generator_states(model)
    with Restored(model, (x,)):
        model.linear.weight.grad = None
        step(model, x)
        assert x.grad is not None
        assert model.calls == 2
    assert x.grad is None
    assert model.linear.weight.grad is gradient
    assert all(torch.equal(b, state[n]) for n, b in model.named_buffers())
    assert model.calls == 1
    assert model.seen is seen
    assert seen == [1, 1]
    assert model.cache["k"] is cached
    assert [t.tolist() for t in cached] == [[1.0, 1.0]]
    assert model.plain.tolist() == [1.0, 1.0]
    assert next(model.numbers) == 1
    after = generator_states(model)
    assert torch.equal(before["cpu"], after["cpu"])
    assert before["Python"] == after["Python"]
    assert numpy.array_equal(before["numpy"][1], after["numpy"][1])


def test_what_a_first_step_leaves_behind_is_removed() -> None:
    model = Model()
    with Restored(model, ()):
        step(model, torch.ones(4, 3))
    assert not hasattr(model, "left_behind")
    assert set(model.cache) == {"k"}


def test_a_buffer_that_was_replaced_is_the_same_object_again() -> None:
    model = Model()
    mean: Any = model.norm.running_mean
    with Restored(model, ()):
        model.norm.running_mean = torch.full((3,), 7.0)
    assert model.norm.running_mean is mean
    assert mean.tolist() == [0.0] * 3


def test_a_step_that_fails_is_undone_too() -> None:
    model = Model()
    with pytest.raises(RuntimeError), Restored(model, ()):
        model(torch.ones(4, 5))
    assert model.calls == 0
    assert model.seen == [1]


def test_inputs_are_the_leaves_that_get_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    assert inputs_of({"x": x, "y": torch.ones(2), "z": x * 2, "n": 3}) == {"input x": x}
