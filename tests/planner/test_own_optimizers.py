"""The state and the step of any optimizer are counted: predicted is measured."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import actmem
from actmem.errors import ActmemError, ModeError, UnsupportedError
from tests.planner.steps import DEVICE, Training

DIM = 48


class Loop(Training):
    """A step as people write it: output and loss are there while the optimizer steps."""

    def step(self) -> None:
        out = self.model(*self.batch)
        loss = mean(out)
        loss.backward()
        assert self.optimizer is not None
        self.optimizer.step()


class Lion(Optimizer):
    """Sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_((momentum * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)


class Mastered(Optimizer):
    """SGD on float32 copies of the parameters, in its state or in a list of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, *, listed: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        every = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().float().clone() for p in every] if listed else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        for n, p in enumerate(every):
            if p.grad is None:
                continue
            if self.masters:
                master = self.masters[n]
            else:
                master = self.state[p].setdefault("master", p.detach().float().clone())
            master.sub_(p.grad.float() * 1e-3)
            p.copy_(master)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM, dtype=dtype), nn.GELU(), nn.Linear(2 * DIM, DIM, dtype=dtype))
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(DIM, dtype=dtype)
        self.idle = nn.Linear(DIM, DIM, dtype=dtype)  # gets no gradient

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def mean(x: Tensor) -> Tensor:
    return x.float().square().mean()


def two_groups(model: Small) -> Optimizer:
    """No momentum for vectors, and the embedding is in no group."""
    rest = [p for name, p in model.named_parameters() if not name.startswith("embed")]
    wide, narrow = ([p for p in rest if (p.dim() > 1) is is_wide] for is_wide in (True, False))
    return torch.optim.SGD([{"params": wide, "momentum": 0.9}, {"params": narrow}], lr=1e-3)


def muon(model: Small) -> Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)


def frozen(model: Small) -> Optimizer:
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def of_all(make: Any, **options: Any) -> Callable[[Small], Optimizer]:
    return lambda model: make(model.parameters(), lr=1e-3, **options)


OPTIMIZERS: dict[str, Callable[[Small], Optimizer]] = {
    "AdamW, one by one": of_all(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": of_all(torch.optim.AdamW, foreach=True),
    "AdamW, fused": of_all(torch.optim.AdamW, fused=True),
    "SGD, foreach": of_all(torch.optim.SGD, momentum=0.9, foreach=True),
    "Adafactor": of_all(torch.optim.Adafactor),
    "Muon": muon,
    "Lion": of_all(Lion),
    "master weights": of_all(Mastered),
    "master weights in a list": of_all(Mastered, listed=True),
    "two groups": two_groups,
    "frozen parts": frozen,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_takes_is_what_is_measured(name: str) -> None:
    dtype = torch.bfloat16 if "master" in name else torch.float32
    torch.manual_seed(0)
    model = Small(dtype)
    optimizer = OPTIMIZERS[name](model)
    before = copy.deepcopy(optimizer.state_dict())
    training = Loop(model, (torch.randn(8, DIM, dtype=dtype),), mean, optimizer=optimizer, blocks="layers.*")
    training.options["optimizer"] = optimizer
    profile = training.profile()
    assert optimizer.state_dict() == before and not optimizer.state  # nothing of it has changed
    predicted = actmem.predict(profile, actmem.Full(), DEVICE)
    measured = training.measured(actmem.Full())
    assert abs(predicted.tensor_bytes - measured.peak_bytes) <= 64
    state = {id(s): s.nbytes() for t in _state(optimizer) for s in [t.untyped_storage()]}
    assert profile.optimizer_bytes == sum(state.values())
    again = training.profile()  # with the state of real steps
    assert (again.optimizer_bytes, again.log[-1]) == (profile.optimizer_bytes, profile.log[-1])


def _state(optimizer: Any) -> list[Tensor]:
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)] + getattr(
        optimizer, "masters", []
    )


def test_a_factory_is_counted_as_the_optimizer_that_it_makes() -> None:
    model = Small()
    batch = (torch.randn(8, DIM),)
    made, given, named = (
        actmem.profile(model, batch, loss=mean, blocks="layers.*", optimizer=optimizer)
        for optimizer in (
            functools.partial(torch.optim.AdamW, lr=1e-3),
            torch.optim.AdamW(model.parameters()),
            "adamw",
        )
    )
    assert made.optimizer == given.optimizer == "AdamW, float32"
    assert made.log == given.log == named.log
    assert (made.optimizer_stock, made.optimizer_memory) == (given.optimizer_stock, given.optimizer_memory)
    assert sorted(made.optimizer_stock) == sorted(named.optimizer_stock)


def test_an_optimizer_of_a_model_on_the_meta_device_is_counted() -> None:
    with torch.device("meta"):
        model = Small()
    optimizer = two_groups(model)
    found = actmem.profile(model, (torch.empty(8, DIM),), loss=mean, blocks="layers.*", optimizer=optimizer)
    wide = [p for name, p in model.layers.named_parameters() if p.dim() > 1]
    assert found.optimizer_bytes == sum(p.nbytes for p in wide)
    assert not optimizer.state and all(p.is_meta for group in optimizer.param_groups for p in group["params"])


def test_a_scheduled_optimizer_is_left_as_it_was() -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    actmem.profile(model, (torch.randn(8, DIM),), loss=mean, blocks="layers.*", optimizer=optimizer)
    mean(model(torch.randn(8, DIM))).backward()
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 1e-3 / 2
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def test_a_budget_counts_the_optimizer_that_it_is_applied_with() -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    training = Loop(model, (torch.randn(256, DIM),), mean, optimizer=optimizer, blocks="layers.*")
    plain = actmem.profile(model, training.batch, loss=mean, blocks="layers.*", optimizer=optimizer)
    full = actmem.predict(plain, actmem.Full(), DEVICE).tensor_bytes
    budget = actmem.Budget(full + 100_000)
    with actmem.apply(
        model, budget, example=training.batch, loss=mean, blocks="layers.*", optimizer=optimizer
    ) as applied:
        told = applied.plan.predicted
        assert told is not None and told.optimizer == "Adafactor, float32"
        assert training.measured().peak_bytes == told.peak_bytes <= full + 100_000
        with pytest.raises(ActmemError, match="its predicted peak is"):
            model(torch.randn(4096, DIM))
    plan = applied.plan
    with (
        actmem.apply(model, plan, loss=mean),
        pytest.raises(ActmemError, match=r"apply\(\.\.\., optimizer=optimizer\)"),
    ):
        model(torch.randn(4096, DIM))


def test_what_is_no_optimizer_of_the_model_is_refused() -> None:
    model, batch = Small(), (torch.randn(8, DIM),)
    options: dict[str, Any] = {"loss": mean, "blocks": "layers.*"}
    with pytest.raises(ModeError, match="are not parameters of the model"):
        actmem.profile(model, batch, optimizer=torch.optim.SGD(Small().parameters()), **options)
    with pytest.raises(ModeError, match=r"returned a int\. Expected a torch\.optim\.Optimizer"):
        actmem.profile(model, batch, optimizer=len, **options)
    with pytest.raises(ModeError, match="could not make an optimizer of a list of parameters: TypeError"):
        actmem.profile(model, batch, optimizer=lambda: None, **options)
    with pytest.raises(ModeError, match="optimizer_dtype is for an optimizer that is named"):
        actmem.profile(
            model, batch, optimizer=torch.optim.SGD(model.parameters()), optimizer_dtype=torch.float32, **options
        )
    with pytest.raises(ModeError, match="optimizer = 3 is not an optimizer"):
        actmem.Budget("1GiB", optimizer=3)


class Looks(torch.optim.SGD):
    """Steps only if a gradient is large."""

    def step(self, closure: Any = None) -> None:
        if all(p.grad is None or p.grad.norm() > 1e9 for group in self.param_groups for p in group["params"]):
            super().step()


def test_an_optimizer_that_looks_at_numbers_is_refused_with_what_to_do() -> None:
    model = Small()
    optimizer = Looks(model.parameters(), lr=1e-3)
    with pytest.raises(UnsupportedError, match="a number in a tensor, and a fake tensor has none"):
        actmem.profile(model, (torch.randn(8, DIM),), loss=mean, blocks="layers.*", optimizer=optimizer)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
