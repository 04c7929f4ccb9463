"""Declaring a function pure, so that it is replayed as one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import actmem
from actmem import Full
from tests.engine.cases import Program, batch, compare, never, replayed, simple_step, stack


def doubled(x: Tensor, factor: float = 2.0) -> Tensor:
    """Multiply where torch does not see it."""
    out = torch.empty_like(x)
    out.numpy()[...] = x.numpy() * factor
    return out


def through(fn: Any) -> Any:
    return lambda block, h: (h @ block.v).sin() * fn(h.detach())


# -------------------------------------------------------------------- functions


def test_a_declared_function_is_replayed_and_an_undeclared_one_is_held() -> None:
    plain = compare(lambda: stack(through(doubled)), Full())
    assert plain.opaque_bytes == {".": 2 * 6 * 8 * 4} and set(never(plain)) == {"aten.empty_like.default"}
    declared = compare(lambda: stack(through(actmem.replayable(doubled))), Full(), replays=["replayable"])
    assert declared.opaque_bytes == {} and declared.never_replayed_bytes == 0
    assert replayed(declared)["replayable.doubled"] == 2


def test_a_declared_function_outside_a_block_just_runs() -> None:
    fn = actmem.replayable(doubled)
    assert fn.__name__ == "doubled" and fn.__doc__ == doubled.__doc__
    assert torch.equal(fn(torch.ones(2), factor=3.0), torch.full((2,), 3.0))


def test_keyword_arguments_nested_lists_and_several_results() -> None:
    @actmem.replayable
    def mixed(parts: list[Any], *, scale: dict[str, Tensor], power: int) -> dict[str, Any]:
        a, (b, n) = parts
        first, second = torch.empty_like(a), torch.empty_like(b)
        first.numpy()[...] = a.numpy() * n + scale["by"].numpy()
        second.numpy()[...] = b.numpy() ** power
        return {"first": first, "rest": [second]}

    def body(block: Program, h: Tensor) -> Tensor:
        x = h.detach()
        out = mixed([x, (x + 1, 3)], scale={"by": x * 2}, power=2)
        return (h @ block.v).sin() * out["first"] + h * out["rest"][0]

    report = compare(lambda: stack(body), Full(), num_steps=3)
    assert report.never_replayed_bytes == 0 and any(op.startswith("replayable.") for op in replayed(report))


def test_tensor_lists_and_tensor_keywords() -> None:
    @actmem.replayable
    def added(parts: list[Tensor], *, to: Tensor) -> Tensor:
        out = torch.empty_like(to)
        out.numpy()[...] = to.numpy() + sum(p.numpy() for p in parts)
        return out

    def body(block: Program, h: Tensor) -> Tensor:
        x = h.detach()
        return (h @ block.v).sin() * added([x * 2, x.exp()], to=x + 1)

    report = compare(lambda: stack(body), Full(), num_steps=3)
    assert report.never_replayed_bytes == 0


def test_random_numbers_inside_are_drawn_again() -> None:
    @actmem.replayable
    def noisy(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        out = torch.empty_like(x)
        out.numpy()[...] = x.numpy() * noise.numpy()
        return out

    report = compare(lambda: stack(through(noisy)), Full(), num_steps=3)
    assert report.never_replayed_bytes == 0 and any("noisy" in op for op in replayed(report))


def test_a_declared_function_may_call_another() -> None:
    inner = actmem.replayable(doubled)
    outer = actmem.replayable(lambda x: doubled(inner(x)))
    report = compare(lambda: stack(through(outer)), Full())
    assert report.never_replayed_bytes == 0 and not any(op == "replayable.doubled" for op in replayed(report))


# -------------------------------------------------------------------- autograd Functions


def with_context() -> Any:
    class Squared(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            inner = doubled(x.detach(), factor)  # an intermediate that only backward needs
            ctx.save_for_backward(x, inner)
            ctx.factor = factor
            ctx.set_materialize_grads(False)
            return doubled((inner * inner).detach(), 1.0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            _, inner = ctx.saved_tensors
            return grad * inner * (2 * ctx.factor), None

    return Squared


def with_setup_context() -> Any:
    class Squared(Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Any:
            inner = doubled(x.detach(), factor)
            return doubled((inner * inner).detach(), 1.0), inner

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output[1])
            ctx.mark_non_differentiable(output[1])
            ctx.factor = inputs[1]

        @staticmethod
        def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
            (inner,) = ctx.saved_tensors
            return grad * inner * (2 * ctx.factor), None

    return Squared


KINDS = {"ctx": with_context, "setup_context": with_setup_context}


def applying(kind: Any) -> Any:
    def body(block: Program, h: Tensor) -> Tensor:
        out = kind.apply(h @ block.v, 1.5)
        return (out if isinstance(out, Tensor) else out[0]).sin()

    return body


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_declared_autograd_function_is_replayed_with_what_it_saves(make: Any) -> None:
    plain = compare(lambda: stack(applying(make())), Full(), num_steps=3)
    assert sum(plain.opaque_bytes.values()) > 0
    kind = make()
    assert actmem.replayable(kind) is kind  # changed in place
    report = compare(lambda: stack(applying(kind)), Full(), num_steps=3)
    assert report.opaque_bytes == {} and report.never_replayed_bytes == 0
    assert any(op.startswith("replayable.") for op in replayed(report))
    assert report.held_bytes == 2 * 6 * 8 * 4 < plain.held_bytes  # the inputs of both blocks: no intermediate is held


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_declaring_twice_changes_nothing(make: Any) -> None:
    kind = actmem.replayable(make())
    forward = kind.forward
    assert actmem.replayable(kind) is kind and kind.forward is forward


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_declared_autograd_function_outside_a_block_is_as_before(make: Any) -> None:
    def run(kind: Any) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        out = kind.apply(x, 1.5)
        out = out if isinstance(out, Tensor) else out[0]
        out.sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    for a, b in zip(run(make()), run(actmem.replayable(make())), strict=True):
        assert torch.equal(a, b)


class InPlace(Function):
    """Writes into its input, and says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2), x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        return grad * 2 + other


@pytest.mark.parametrize("result", [0, 1], ids=["the written one", "the new one"])
def test_a_function_that_marks_its_input_dirty_is_refused(result: int) -> None:
    actmem.replayable(InPlace)
    model = stack(lambda block, h: InPlace.apply((h @ block.v).clone())[result].sin(), num_blocks=1)
    with actmem.apply(model, Full(), blocks="0"), pytest.raises(TypeError, match=r"ctx.mark_dirty.* is not pure"):
        simple_step(model, batch())


def test_a_class_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not the class Linear"):
        actmem.replayable(nn.Linear)


# -------------------------------------------------------------------- wrong declarations


def test_a_function_that_depends_on_a_counter_is_caught_by_the_self_check() -> None:
    calls = [0]

    @actmem.replayable
    def counting(x: Tensor) -> Tensor:
        calls[0] += 1
        return doubled(x, float(calls[0]))

    model = stack(through(counting), num_blocks=1)
    with actmem.apply(model, Full(), blocks="0"), pytest.raises(actmem.SelfCheckError):
        simple_step(model, batch())


def test_a_function_that_changes_its_input_is_caught_by_the_self_check() -> None:
    @actmem.replayable
    def changing(x: Tensor) -> Tensor:
        x.numpy()[...] += 1
        return doubled(x)

    def body(block: Program, h: Tensor) -> Tensor:
        y = h.detach() * 3
        out = changing(y)
        return (h @ block.v).sin() * out + h * y

    model = stack(body, num_blocks=1)
    with actmem.apply(model, Full(), blocks="0"), pytest.raises(actmem.SelfCheckError):
        simple_step(model, batch())


def test_a_function_that_changes_its_input_through_torch_is_caught() -> None:
    @actmem.replayable
    def changing(x: Tensor) -> Tensor:
        return doubled(x.add_(1))

    def body(block: Program, h: Tensor) -> Tensor:
        y = h.detach() * 3
        out = changing(y)
        return (h @ block.v).sin() * out + h * y

    model = stack(body, num_blocks=1)
    with actmem.apply(model, Full(), blocks="0"), pytest.raises(actmem.SelfCheckError):
        simple_step(model, batch())
