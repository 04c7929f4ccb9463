"""A profile has written down every operator of a step: its work, and what is alive after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem

ROWS, WIDTH, BLOCKS = 8, 16, 3


def build() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])


def loss(out: Tensor) -> Tensor:
    return out.square().sum()


@pytest.mark.parametrize("fake", [True, False])
def test_the_work_of_a_replay_is_that_of_the_operators_it_runs(fake: bool) -> None:
    profile = actmem.profile(build(), (torch.ones(ROWS, WIDTH),), loss=loss, fake=fake)
    product = 2 * ROWS * WIDTH * WIDTH
    assert actmem.predict(profile, actmem.Full(), "h100-80gb").replayed_flops == BLOCKS * product
    assert actmem.predict(profile, actmem.Full(every=2), "h100-80gb").replayed_flops == 2 * product
    assert actmem.predict(profile, actmem.SaveEverything(), "h100-80gb").replayed_flops == 0


@pytest.mark.parametrize("fake", [True, False])
def test_the_peak_is_the_measured_one(fake: bool) -> None:
    model, x = build(), torch.ones(ROWS, WIDTH)
    profile = actmem.profile(model, (x,), loss=loss, fake=fake, optimizer=None)

    def step() -> None:
        out = model(x)
        loss(out).backward()

    measured = actmem.measure(step, model=model)
    assert actmem.predict(profile, actmem.SaveEverything(), "h100-80gb").tensor_bytes == measured.tensor_bytes


def written_list(x: Tensor) -> Tensor:
    """Write to views by an operator on a list."""
    y = x * 2
    a, b = y[:3], y[3:]
    torch._foreach_tanh_([a, b])
    return torch.cat([a.sin(), b])


def view_of_what_was_written(x: Tensor) -> Tensor:
    """Read a view for the first time where gradients are off, after its base was written."""
    z = torch.view_as_complex((x * 2).view(ROWS, -1, 2)) * 1
    parts = torch.view_as_real(z)
    z.mul_(2)
    with torch.no_grad():
        scale = parts.abs() + 1
    return (parts * scale).view(ROWS, WIDTH)


def view_that_is_needed_later(x: Tensor) -> Tensor:
    """Do the same, and make the step of another operator before that of the view is needed."""
    base = x * 2
    view = base[:]
    base.mul_(2)
    with torch.no_grad():
        scale = view.abs() + 1
    return x.sin() * view * scale


class Body(nn.Module):
    """A block with a weight and any body."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(WIDTH, WIDTH), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


def steps(out: Tensor) -> list[str]:
    """Return the backward steps that lead to a tensor, in the order in which they were made."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [n for n, _ in node.next_functions]
    return [node.name() for node in sorted(found, key=lambda n: n._sequence_nr())]


@pytest.mark.parametrize("body", [written_list, view_of_what_was_written, view_that_is_needed_later])
def test_a_profile_leaves_the_history_of_every_tensor_as_it_is(body: Callable[[Tensor], Tensor]) -> None:
    model, x, seen = nn.Sequential(Body(body), Body(body)), torch.ones(ROWS, WIDTH), []

    def noting(out: Tensor) -> Tensor:
        seen.append(steps(out))
        return loss(out)

    plain = steps(model(x))
    actmem.profile(model, (x,), loss=noting, fake=False, blocks="*", optimizer=None)
    assert seen and all(found == plain for found in seen)


def test_a_profiled_training_step_differentiates_through_a_write_to_a_list_of_views() -> None:
    model, x = nn.Sequential(Body(written_list), Body(written_list)), torch.ones(ROWS, WIDTH)
    plain = steps(model(x))

    def step() -> None:
        out = model(x)
        assert steps(out) == plain
        loss(out).backward()

    actmem.profile(model, step=step, fake=False, blocks="*")


def test_a_fake_step_differentiates_through_a_write_to_a_list_of_views() -> None:
    model, x, seen = nn.Sequential(Body(written_list), Body(written_list)), torch.ones(ROWS, WIDTH), []

    def noting(out: Tensor) -> Tensor:
        seen.append(steps(out).count("torch::autograd::CopySlices"))
        return loss(out)

    actmem.profile(model, (x,), loss=noting, blocks="*", optimizer=None)
    assert seen == [4]
