from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, ModeError, SaveEverything
from tests.zoo import ZOO


class Wrong(torch.autograd.Function):
    """Be the identity, with a gradient that can be made wrong."""

    off = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + Wrong.off


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.tanh(Wrong.apply(self.lin(x)))


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def spoil_the_second_step(model: nn.Module, spoil: Any) -> None:
    """Have the second of two steps differ: `verify` runs the plain one first."""
    count = 0

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += 1
        if count % 2 == 0:
            spoil()

    model.register_forward_pre_hook(hook)


def result(model: nn.Module, mode: Any = None, batch: Any = None) -> actmem.Verification:
    batch = (torch.ones(2, 4),) if batch is None else batch
    return actmem.verify(model, batch, mode or Full(), loss=torch.sum)


def test_equal_steps_are_ok_and_true_and_carry_the_report() -> None:
    outcome = result(stack())
    assert outcome.ok and outcome and outcome.difference is None
    assert outcome.report.num_replayed > 0


def test_a_loss_that_differs_is_named_with_both_values() -> None:
    model = stack()
    spoil_the_second_step(model, lambda: model[1].lin.bias.data.add_(1))
    outcome = result(model)
    assert not outcome.ok and not outcome
    assert outcome.difference is not None and outcome.difference.startswith("loss: ")


def test_the_first_gradient_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    spoil_the_second_step(model, lambda: monkeypatch.setattr(Wrong, "off", 1e-3))
    difference = result(model).difference
    assert difference is not None and difference.startswith("gradient of 0.lin.weight, largest difference 0.0")


def test_a_buffer_that_differs_is_named() -> None:
    model = stack()
    spoil_the_second_step(model, lambda: model[0].num_calls.add_(1))
    assert result(model).difference == "buffer of 0.num_calls, largest difference 1.0"


def test_a_gradient_of_an_input_that_differs_is_named() -> None:
    model = stack()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = torch.ones(2, 4, requires_grad=True)
    original = Wrong.off
    try:
        spoil_the_second_step(model, lambda: setattr(Wrong, "off", 1e-3))
        difference = result(model, batch=(x,)).difference
    finally:
        Wrong.off = original
    assert difference is not None and difference.startswith("input of input 0")
    assert x.grad is None


def test_a_change_of_the_module_tree_is_noticed() -> None:
    model = stack()
    spoil_the_second_step(model, lambda: model[1].add_module("extra", nn.Identity()))
    assert result(model).difference == "the module tree after remove()"


def test_random_numbers_that_were_drawn_twice_are_noticed() -> None:
    model = stack()
    spoil_the_second_step(model, lambda: torch.rand(1))
    assert result(model).difference == "the state of the random generator after the step"


def test_the_model_the_batch_and_the_generator_are_restored() -> None:
    case = ZOO["resnet"]
    model = case.build()
    batch = tuple(t.requires_grad_() for t in case.batch(model))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    assert actmem.verify(model, batch, Full(), loss=case.loss).ok
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is g and bool((g == 7).all()) for p, g in zip(model.parameters(), gradients, strict=True))
    assert batch[0].grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_step_that_fails_restores_the_model_too() -> None:
    model = stack()
    original = [type(m) for m in model.modules()]

    def fail() -> None:
        raise ValueError("second step")

    spoil_the_second_step(model, fail)
    with pytest.raises(ValueError, match="second step"):
        result(model)
    assert [type(m) for m in model.modules()] == original
    assert all(parameter.grad is None for parameter in model.parameters())
    assert float(model[0].num_calls) == 0


def test_nan_equals_nan() -> None:
    model = stack()
    model[0].lin.weight.data.fill_(float("nan"))
    assert result(model).ok


def test_an_output_without_a_loss_is_refused_with_the_argument_to_pass() -> None:
    with pytest.raises(ModeError, match="Pass loss="):
        actmem.verify(stack(), (torch.ones(2, 4),), Full())


def test_a_scalar_output_is_the_loss() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).sum()

    assert actmem.verify(Scalar(), {"x": torch.ones(2, 4)}, Full()).ok


def test_blocks_are_those_asked_for() -> None:
    model = stack()
    outcome = actmem.verify(model, (torch.ones(2, 4),), Full(), loss=torch.sum, blocks="1")
    assert outcome.ok and outcome.report.plan.blocks == ("1",)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_steps_inside_one_autocast_do_not_share_the_casts_of_weights(name: str) -> None:
    case = ZOO[name]
    model = case.build()
    batch = case.batch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        alone = actmem.verify(model, batch, Full())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome = actmem.verify(model, batch, Full())
    assert alone.ok
    assert outcome.ok, outcome.difference
    assert outcome.report.held_bytes == alone.report.held_bytes


def test_saving_everything_is_equal_and_replays_nothing() -> None:
    outcome = result(stack(), SaveEverything())
    assert outcome.ok and outcome.report.num_replayed == 0
