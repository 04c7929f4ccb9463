import itertools
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, ModeError, SaveEverything
from actmem.profiling.restored_state import Restored, generator_states, set_generator_states
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


def spoil_the_managed_step(model: nn.Module, spoil: Any) -> None:
    """Have the step under the mode differ: `verify` runs the plain one twice before."""
    count = 0

    def hook(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:
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
    spoil_the_managed_step(model, lambda: model[1].lin.bias.data.add_(1))
    outcome = result(model)
    assert not outcome.ok and not outcome
    assert outcome.difference is not None and outcome.difference.startswith("loss: ")


def test_the_first_gradient_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    spoil_the_managed_step(model, lambda: monkeypatch.setattr(Wrong, "off", 1e-3))
    difference = result(model).difference
    assert difference is not None and difference.startswith("gradient of 0.lin.weight, largest difference 0.0")


def test_a_buffer_that_differs_is_named() -> None:
    model = stack()
    spoil_the_managed_step(model, lambda: model[0].num_calls.add_(1))
    assert result(model).difference == "buffer of 0.num_calls, largest difference 1.0"


def test_a_gradient_of_an_input_that_differs_is_named() -> None:
    model = stack()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = torch.ones(2, 4, requires_grad=True)
    original = Wrong.off
    try:
        spoil_the_managed_step(model, lambda: setattr(Wrong, "off", 1e-3))
        difference = result(model, batch=(x,)).difference
    finally:
        Wrong.off = original
    assert difference is not None and difference.startswith("input of input 0")
    assert x.grad is None


def test_a_change_of_the_module_tree_is_noticed() -> None:
    model = stack()
    spoil_the_managed_step(model, lambda: model[1].add_module("extra", nn.Identity()))
    assert result(model).difference == "the module tree after remove()"


def test_random_numbers_that_were_drawn_twice_are_noticed() -> None:
    model = stack()
    spoil_the_managed_step(model, lambda: torch.rand(1))
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

    spoil_the_managed_step(model, fail)
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


# -------------------------------------------------------------------- state in Python, and plain against plain


class Remembering(Block):
    """Computes from what it did before, in every way that Python has to remember."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.numbers = 0, itertools.count()
        self.cache: list[Tensor] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.by_name = {"calls": 0}
        self.seen: set[int] = set()
        self.inside = SimpleNamespace(calls=[0])
        self.scratch = torch.zeros(4)
        self.own = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.cache.append(x.detach())
        self.recent.append(self.count)
        self.by_name["calls"] += 1
        self.seen.add(self.count)
        self.inside.calls[0] += 1
        with torch.no_grad():
            self.scratch.add_(1)
        self.late = True  # an attribute that was not there before
        remembered = self.count + len(self.cache) + sum(self.recent) + self.by_name["calls"] + len(self.seen)
        remembered += self.inside.calls[0] + next(self.numbers)
        return super().forward(x) * (remembered + self.own.random()) + self.scratch.clone()


def test_what_a_block_remembers_in_python_is_not_a_difference_of_the_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Remembering(), Remembering())
    kept = model[0].cache, model[0].inside, model[0].scratch
    names = list(vars(model[0]))
    outcome = result(model)
    assert outcome.ok and outcome.irreproducible == () and outcome.notes == (), str(outcome)
    block = model[0]
    assert (block.count, block.cache, list(block.recent), block.by_name) == (0, [], [], {"calls": 0})
    assert (block.seen, block.inside.calls, next(block.numbers)) == (set(), [0], 0)
    assert bool((block.scratch == 0).all()) and list(vars(block)) == names
    assert all(a is b for a, b in zip(kept, (block.cache, block.inside, block.scratch), strict=True))


def test_plain_training_that_is_not_reproducible_is_named_and_is_no_difference_of_the_mode() -> None:
    model, calls = stack(), itertools.count(1)
    model[1].register_forward_hook(lambda module, args, out: out * next(calls))
    outcome = result(model)
    assert outcome.ok and "loss" in outcome.irreproducible
    assert "gradient of 0.lin.weight" in outcome.irreproducible
    assert "two plain runs" in str(outcome) and "loss: " in str(outcome)


def test_a_difference_of_the_mode_is_found_beside_what_is_not_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = stack(), itertools.count(1)
    model.register_forward_pre_hook(lambda module, args: model[0].num_calls.add_(next(calls)) and None)
    spoil_the_managed_step(model, lambda: monkeypatch.setattr(Wrong, "off", 1e-3))
    outcome = result(model)
    assert outcome.irreproducible == ("buffer of 0.num_calls",)
    assert outcome.difference is not None and outcome.difference.startswith("gradient of 0.lin.weight")


def test_several_forwards_come_before_one_backward_and_several_batches_accumulate() -> None:
    x, y = torch.ones(2, 4, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    model = stack()
    assert result(model, batch=(x,)).ok
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append("forward"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    outcome = actmem.verify(model, [(x,), (y,)], Full(), loss=torch.sum, forwards=2)
    assert outcome.ok, str(outcome)
    assert seen == (["forward"] * 2 + ["backward"] * 2) * 2 * 3
    assert x.grad is None


def test_a_loss_that_differs_in_a_later_forward_is_named_by_batch_and_forward() -> None:
    model, calls = stack(), itertools.count(1)

    def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * (2 if next(calls) == 12 else 1)  # four forwards in a run: the last of the third run

    model.register_forward_hook(spoil)
    batches = [(torch.ones(2, 4),), (torch.ones(3, 4),)]
    difference = actmem.verify(model, batches, Full(), loss=torch.sum, forwards=2).difference
    assert difference is not None and difference.startswith("loss of batch 1, forward 1: ")


@pytest.mark.parametrize("forwards", [0, 1.5, True])
def test_a_number_of_forwards_that_is_none_is_refused(forwards: Any) -> None:
    with pytest.raises(ModeError, match="forwards = "):
        actmem.verify(stack(), (torch.ones(2, 4),), Full(), loss=torch.sum, forwards=forwards)


def test_an_empty_list_of_batches_is_refused() -> None:
    with pytest.raises(ModeError, match=r"batch = \[\] is empty"):
        actmem.verify(stack(), [], Full(), loss=torch.sum)


def test_in_eval_mode_it_says_that_the_blocks_do_nothing() -> None:
    outcome = result(stack().eval())
    assert outcome.ok and len(outcome.notes) == 1
    assert "eval mode" in outcome.notes[0] and "model.train()" in outcome.notes[0]
    assert result(stack()).notes == ()


def test_random_numbers_of_python_that_were_drawn_twice_are_noticed() -> None:
    model = stack()
    spoil_the_managed_step(model, random.random)
    before = random.getstate()
    assert result(model).difference == "the state of the random generator of Python after the step"
    assert random.getstate() == before


def test_the_generator_of_every_device_of_a_model_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device that is not here: its module answers in its place."""
    states = {torch.device("cuda:1"): torch.tensor([1])}
    module = SimpleNamespace(
        get_rng_state=lambda device: states[torch.device(device)].clone(),
        set_rng_state=lambda state, device: states.update({torch.device(device): state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    model = stack()
    monkeypatch.setattr(model, "buffers", lambda: iter([SimpleNamespace(device=torch.device("cuda:1"))]))
    found = generator_states(model)
    assert "cuda:1" in found and int(found["cuda:1"]) == 1
    states[torch.device("cuda:1")] = torch.tensor([2])
    set_generator_states(found)
    assert int(states[torch.device("cuda:1")]) == 1


def test_a_module_that_points_to_its_trainer_or_to_a_logger_leaves_them_alone() -> None:
    import logging

    model = stack()
    model[0].log = logging.getLogger("actmem.tests.pointed_to")
    model[0].optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Restored(model, ()):
        logging.getLogger("actmem.tests.made_meanwhile")
    assert "actmem.tests.made_meanwhile" in logging.Logger.manager.loggerDict
