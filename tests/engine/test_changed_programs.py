"""A block that ran the same program for many steps, and then does something else: noticed at once, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import actmem
from actmem.applying.applied_block import applied_runner
from actmem.engine import follower

NUM_EQUAL_STEPS = 100
HALF = actmem.Selective(save=[actmem.every_second("matmul")])


class Layer(nn.Module):
    """A small residual layer with switches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("scratch", torch.ones(8))
        self.scale: Any = 2.0
        self.branch = self.detached = False
        self.act: Callable[[Tensor], Tensor] = functional.silu
        self.meddle: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)) * self.scale
        if self.branch:
            h = h.sin()
        if self.meddle is not None:
            self.meddle(h)
        weight = self.down.weight.detach() if self.detached else self.down.weight
        return x + functional.linear(self.act(h), weight, self.down.bias) * self.scratch


class Model(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _set(name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: [setattr(layer, name, value) for layer in model.layers] and None


def _hook(model: Model) -> None:
    model.layers[1].up.register_forward_hook(lambda _, __, out: out * 1.5)


def _gradient_hook(model: Model) -> None:
    model.layers[1].up.register_forward_hook(lambda _, __, out: out.register_hook(lambda g: g * 0.5) and None)


def _swap(model: Model) -> None:
    for layer in model.layers:
        layer.norm = nn.LayerNorm(8)


def _replaced(model: Model) -> None:
    fresh = torch.linspace(-1, 1, 128).view(16, 8)
    model.layers[0].up.weight = nn.Parameter(fresh)


def _frozen(model: Model) -> None:
    for layer in model.layers:
        layer.down.weight.requires_grad_(False)


def _tied(model: Model) -> None:
    model.layers[2].up.weight = model.layers[1].up.weight
    model.layers[1].norm.weight = nn.Parameter(model.layers[1].scratch)


def _double(model: Model) -> None:
    model.double()


def _unseen(h: Tensor) -> None:
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # what a compiled function or a kernel of its own does
        h.mul_(3.0)


CHANGES: dict[str, Callable[[Model], None]] = {
    "another branch": _set("branch", True),
    "another scalar": _set("scale", 3.0),
    "the same number, of another type": _set("scale", 2),
    "a scalar becomes a tensor": _set("scale", torch.tensor(2.0)),
    "another function": _set("act", functional.gelu),
    "a parameter is read without its gradient": _set("detached", True),
    "a forward hook": _hook,
    "a hook on a gradient": _gradient_hook,
    "a module is swapped": _swap,
    "a parameter is replaced": _replaced,
    "parameters are frozen": _frozen,
    "parameters are tied": _tied,
    "another dtype": _double,
    "unseen code writes": _set("meddle", _unseen),
    "a view is written": _set("meddle", lambda h: h[:, :4].detach().mul_(2.0)),
}


def step(model: Model, x: Tensor, *, cast: bool = False) -> list[Tensor | None]:
    """Run one step, and return everything that must not differ."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = model(x)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=1e-3)
    return [
        loss.detach(),
        x.grad,
        *(p.grad for p in model.parameters()),
        *(p.detach().clone() for p in model.parameters()),
    ]


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each call that followed a program whether it did so to the end."""
    found: list[bool] = []
    close = follower.Follower.close

    def closed(tape: Any) -> None:
        close(tape)
        found.append(tape.followed)

    monkeypatch.setattr(follower.Follower, "close", closed)
    return found


@pytest.mark.parametrize("mode", [actmem.Full(), HALF], ids=["full", "selective"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_a_hundred_equal_steps_is_noticed_at_once(
    change: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Model()
    ours = copy.deepcopy(plain)
    actmem.apply(ours, mode)
    followed = counted(monkeypatch)
    x = torch.randn(4, 8)
    for _ in range(NUM_EQUAL_STEPS):
        assert same(step(ours, x), step(plain, x))
    assert len(followed) == 3 * (NUM_EQUAL_STEPS - 3) and all(followed)  # observed, recorded, learnt, followed
    CHANGES[change](plain)
    CHANGES[change](ours)
    if change == "another dtype":
        x = x.double()
    followed.clear()
    for _ in range(6):
        try:
            expected = step(plain, x)
        except RuntimeError:  # plain autograd refuses it: something that it saved was written
            with pytest.raises((RuntimeError, actmem.VersionError)):
                step(ours, x)
            return
        assert same(step(ours, x), expected)
    assert followed[:3] != [True] * 3 or change in ("a hook on a gradient", "a parameter is replaced")


def test_other_shapes_and_autocast_are_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Model()
    ours = copy.deepcopy(plain)
    actmem.apply(ours, actmem.Full())
    followed = counted(monkeypatch)
    for rows, cast in [(4, False)] * 6 + [(5, False), (4, False), (4, True), (4, True), (4, False), (1, False)]:
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        assert same(step(ours, x, cast=cast), step(plain, x, cast=cast))
    assert True in followed and False in followed


def test_flags_that_change_the_bits_of_a_product_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Model()
    actmem.apply(ours, actmem.Full())
    followed = counted(monkeypatch)
    x = torch.randn(4, 8)
    for _ in range(5):
        step(ours, x)
    assert followed[-3:] == [True] * 3
    torch.use_deterministic_algorithms(True)
    try:
        step(ours, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert followed[-3:] == [False] * 3


def test_handles_that_die_unopened_release_what_only_they_need() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x).tanh().sin(), self.right(x).tanh().sin()

    plain = nn.ModuleList(Two() for _ in range(2))
    ours = copy.deepcopy(plain)
    actmem.apply(ours, actmem.Full(), blocks="*")
    x = torch.randn(4, 8)
    for i in range(12):
        for model in (plain, ours):
            model.zero_grad()
            outs = [t for block in model for t in block(x)]
            chosen = outs[i % 4 :: 3] if i > 5 else outs
            del outs
            torch.stack([t.sum() for t in chosen]).sum().backward()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert same([a.grad], [b.grad])


def test_equal_layers_share_one_program() -> None:
    model = Model()
    applied = actmem.apply(model, actmem.Full())
    for _ in range(4):
        step(model, torch.randn(4, 8))
    runners: list[Any] = [applied_runner(layer) for layer in model.layers]
    assert len({id(r._rehearsal._program) for r in runners}) == 1
    applied.remove()
