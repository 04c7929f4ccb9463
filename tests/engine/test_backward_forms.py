"""Every way of running backward, and of not running it: the tape follows, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    Program,
    assert_same_bits,
    batch,
    compare,
    modes_unchanged,
    outcome,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def body(block: Program, h: Tensor) -> Tensor:
    return (h @ block.v).sin() * h.exp()


def build() -> nn.Module:
    return stack(body)


# -------------------------------------------------------------------- forms of backward


def backward_twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def some_inputs(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    first = model[1].v
    first.grad, x.grad = torch.autograd.grad(loss, [first, x])
    return loss.detach()


def double_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return loss.detach()


def split_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    x.grad = torch.autograd.grad(loss, x, retain_graph=True)[0]
    parameters = list(model.parameters())
    for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = grad
    return loss.detach()


def per_layer_split(model: nn.Module, x: Tensor) -> Tensor:
    """Run backward as zero-bubble pipelines do: first what the previous stage waits for, then the weights."""
    middle = model[0](x)
    cut = middle.detach().requires_grad_()
    loss = total(model[1](cut))
    (upstream,) = torch.autograd.grad(loss, cut, retain_graph=True)
    middle.backward(upstream)
    weights = list(model[1].parameters())
    for p, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        p.grad = grad
    return loss.detach()


def accumulated(model: nn.Module, x: Tensor) -> Tensor:
    losses = []
    for part in x.chunk(3):
        loss = total(model(part))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def forwards_first(model: nn.Module, x: Tensor) -> Tensor:
    losses = [total(model(part)) for part in x.chunk(3)]
    for loss in losses:
        loss.backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


def inference_in_between(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    with torch.inference_mode():
        model(x)
    with torch.no_grad():
        model(x * 2)
    model.eval()
    model(x)
    model.train()
    loss.backward()
    return loss.detach()


FORMS = {
    f.__name__: f
    for f in (
        *(backward_twice, some_inputs, double_backward, split_backward, per_layer_split, accumulated, forwards_first),
        inference_in_between,
    )
}


@both
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_backward(name: str, mode: Any) -> None:
    compare(build, mode, step=FORMS[name], replays=["aten.tanh"])


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x * 2)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first = ctx.saved_tensors[0]
        again, doubled = ctx.saved_tensors
        assert torch.equal(first, again)
        return grad * (doubled / 2).cos() + 0 * first


@both
def test_a_function_may_read_its_saved_tensors_twice(mode: Any) -> None:
    compare(lambda: stack(lambda block, h: ReadsTwice.apply(h @ block.v).exp()), mode)


# -------------------------------------------------------------------- what goes in and comes out


@dataclass
class Result:
    hidden: Tensor
    extras: dict[str, Any]


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.kind = kind

    def forward(self, x: Any, *, options: dict[str, Any]) -> Any:
        if not isinstance(x, Tensor):
            x = x.hidden if isinstance(x, Result) else x["hidden"] if isinstance(x, dict) else x[0]
        bias, scales = options["bias"], options["nested"]["scales"]
        hidden = ((x @ self.w) * scales[0] + bias).sin() * scales[1].exp()
        if self.kind == "tuple":
            return hidden, (hidden.cos(), None)
        if self.kind == "dict":
            return {"hidden": hidden, "more": [hidden.cos()], "name": "x"}
        return Result(hidden, {"cos": hidden.cos()})


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Structured(kind) for _ in range(2)])
        self.bias = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Any) -> Any:
        scales = [self.bias * 2, (self.bias + 1).tanh()]
        for layer in self.layers:
            x = layer(x, options={"bias": self.bias, "nested": {"scales": scales}})
        return x


@both
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_blocks_that_return_structures_and_take_nested_arguments(kind: str, mode: Any) -> None:
    compare(lambda: Chain(kind), mode, replays=["aten.add", "aten.sin"])


# -------------------------------------------------------------------- errors


class Fails(torch.autograd.Function):
    failing = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if Fails.failing:
            raise ValueError("in the middle of backward")
        return grad


@both
def test_an_exception_in_backward_is_followed_by_a_good_step(mode: Any) -> None:
    def failing_body(block: Program, h: Tensor) -> Tensor:
        return Fails.apply((h @ block.v).sin()) * h.exp()

    def failing_step(model: nn.Module, x: Tensor) -> Tensor:
        loss = total(model(x))
        Fails.failing = True
        try:
            with modes_unchanged(), pytest.raises(ValueError, match="in the middle"):
                loss.backward()
        finally:
            Fails.failing = False
        model.zero_grad()
        x.grad = None
        return simple_step(model, x)

    compare(lambda: stack(failing_body), mode, step=failing_step, num_steps=3)


# -------------------------------------------------------------------- threads


def test_two_models_in_two_threads_at_once() -> None:
    expected = outcome(build(), batch(), simple_step)
    del expected["generator"]  # one for all threads
    failures: list[str] = []
    barrier = threading.Barrier(2)

    def train(mode: Any, model: nn.Module, x: Tensor) -> None:
        with actmem.apply(model, mode) as applied:
            barrier.wait()
            for _ in range(15):
                found = outcome(model, x, simple_step)
                del found["generator"]
                try:
                    assert_same_bits(expected, found)
                except AssertionError as error:
                    failures.append(str(error))
            if applied.report().num_replayed == 0:
                failures.append("nothing was replayed")

    # Built here: both seed the one generator that all threads share.
    threads = [threading.Thread(target=train, args=(mode, build(), batch())) for mode in MODES.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -------------------------------------------------------------------- nothing stays behind


def live_tensor_bytes() -> int:
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def steady(steps: int, mode: Any, step: Any) -> tuple[int, int]:
    """Train with the garbage collector off, and return the live bytes after step 2 and after the last one."""
    model, x = build(), batch()
    gc.collect()
    gc.disable()
    try:
        with actmem.apply(model, mode) as applied:
            for n in range(steps):
                step(model, x)
                model.zero_grad(set_to_none=False)
                if n == 1:
                    early = live_tensor_bytes()
            late = live_tensor_bytes()
            assert applied.report().plain_bytes > 0
    finally:
        gc.enable()
    return early, late


def dropped(model: nn.Module, x: Tensor) -> None:
    simple_step(model, x)
    model(x)


def interrupted(model: nn.Module, x: Tensor) -> None:
    simple_step(model, x)

    def stop(*_: Any) -> None:
        raise ValueError("stop")

    handle = model[1].register_forward_hook(stop)
    try:
        model(x)
    except ValueError:
        pass
    finally:
        handle.remove()


@both
@pytest.mark.parametrize("step", [simple_step, dropped, interrupted, double_backward])
def test_memory_does_not_grow_with_the_garbage_collector_off(step: Any, mode: Any) -> None:
    early, late = steady(20, mode, step)
    assert early == late


@pytest.mark.slow
@both
@pytest.mark.parametrize("step", [simple_step, dropped, interrupted])
def test_memory_does_not_grow_in_200_steps(step: Any, mode: Any) -> None:
    early, late = steady(200, mode, step)
    assert early == late


# -------------------------------------------------------------------- copies of an applied model


def test_a_deepcopy_of_an_applied_model_is_plain_and_runs_its_own_weights() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    kinds = [type(m) for m in model.modules()]
    with actmem.apply(model, RECOMPUTE) as applied:
        simple_step(model, batch())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(m) for m in twin.modules()] == kinds
            assert not any("actmem" in name for m in twin.modules() for name in (*vars(m), *dir(type(m))))
            assert twin.state_dict().keys() == model.state_dict().keys()
            with torch.no_grad():
                for p in twin.parameters():
                    p.zero_()
            assert not twin(batch()).any()
            assert model(batch()).any()
            with actmem.apply(twin, RECOMPUTE):
                simple_step(twin, batch())
        simple_step(model, batch())
        assert applied.report().num_replayed > 0
    assert [type(m) for m in model.modules()] == kinds


# -------------------------------------------------------------------- no cost when not training


def test_no_mode_is_entered_in_eval_or_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from actmem.engine.tape import Tape

    entered: list[int] = []
    enter = Tape.__enter__
    monkeypatch.setattr(Tape, "__enter__", lambda self: (entered.append(1), enter(self))[1])
    model = build()
    with actmem.apply(model, RECOMPUTE):
        with torch.no_grad():
            model(batch())
        with torch.inference_mode():
            model(batch())
        model.eval()
        model(batch())
        model.train()
        assert not entered
        model(batch())
        assert len(entered) == 2
        for p in model.parameters():
            p.requires_grad_(False)
        model(batch().detach())
        assert len(entered) == 2
    model(batch())
    assert len(entered) == 2


class FusedAccumulation(torch.autograd.Function):
    """Add the weight's gradient into a buffer that hangs on the weight, as Megatron's fused linear layer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, weight[0])
        return x @ weight.t() + weight[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, weight, row = ctx.saved_tensors
        again = ctx.saved_tensors
        assert again[1] is weight and isinstance(weight, nn.Parameter) and not isinstance(row, nn.Parameter)
        weight.main_grad.add_(grads[0].t() @ x)
        return grads[0] @ weight + 0 * row, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8) * 0.5)
        self.w.main_grad = torch.zeros(8, 8)
        self.frozen = nn.Parameter(torch.eye(8) * 0.25, requires_grad=False)
        self.frozen.main_grad = torch.zeros(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return FusedAccumulation.apply(FusedAccumulation.apply(x.tanh(), self.w).sin(), self.frozen)


@both
def test_a_function_finds_on_a_saved_parameter_what_the_program_put_on_it(mode: Any) -> None:
    def main_grads(mode: Any) -> list[Tensor]:
        model = nn.Sequential(Fused(), Fused())
        if mode is not None:
            actmem.apply(model, mode, blocks="*")
        for _ in range(2):
            total(model(batch())).backward()
        return [p.main_grad for p in model.parameters()]

    plain, managed = main_grads(None), main_grads(mode)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(plain, managed, strict=True))
