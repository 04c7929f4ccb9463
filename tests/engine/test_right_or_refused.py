"""Programs that once went wrong: each is right, or refused with an error that names the cause."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    AddFirst,
    Program,
    assert_same_bits,
    batch,
    compare,
    outcome,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


# -------------------------------------------------------------------- declared functions


@actmem.replayable
def nested(parts: dict[str, Any], *, extra: list[dict[str, Tensor]]) -> Tensor:
    return parts["a"] * parts["b"][0] + extra[0]["z"]


def nested_and_mutated(block: Program, h: Tensor) -> Tensor:
    with torch.no_grad():
        a, z = (h.detach() + 1).sin(), h.detach() * 2
        k = nested({"a": a, "b": (h @ block.v,)}, extra=[{"z": z}])
        a.mul_(3)
        z.add_(1)
    return (h * k + a + z).exp()


@actmem.replayable
def drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator)


def own_generator(block: Program, h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    first, second = drawn(h.detach(), generator), drawn(h.detach(), generator)
    return (h * first).exp() + (h * second @ block.v).sin()


# -------------------------------------------------------------------- what is in force, what is written


def default_dtype(block: Program, h: Tensor) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        k = torch.arange(8) / 3 * 1.0
    finally:
        torch.set_default_dtype(before)
    return (h * k.to(h.dtype) @ block.v).exp() + (h.double() * k).sin().float()


def precision_of_a_backend(block: Program, h: Tensor) -> Tensor:
    settings: Any = torch.backends.mkldnn.matmul
    settings.fp32_precision = "tf32"
    try:
        y = h @ block.v
    finally:
        settings.fp32_precision = "none"
    return (y.sin() * y).exp()


def doubled(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sin()


@both
def test_a_recorded_value_written_by_a_compiled_function(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing inductor warns of torch's own deprecations
        function = torch.compile(doubled)
        function(torch.ones(6, 8))

    def body(block: Program, h: Tensor) -> Tensor:
        k = (h @ block.v).sin() * 1
        y = function(k.detach())
        return (k * h).exp() + y

    compare(lambda: stack(body), mode, num_steps=3)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.eye(8) * 0.5)
        self.register_buffer("scale", torch.linspace(0, 1, 48).reshape(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            k = torch.ops.aten._unsafe_view(self.scale, (6, 8)) * 2
            self.scale.mul_(1.01)
            after = self.scale * 3
        return ((x + k).sin() * (x + after).exp()) @ self.v


with torch.inference_mode():
    FROZEN = nn.Parameter(torch.linspace(0, 1, 48).reshape(6, 8), requires_grad=False)


def frozen_in_inference_mode(block: Program, h: Tensor) -> Tensor:
    return ((h + FROZEN).sin() @ block.v).exp()


# -------------------------------------------------------------------- a wrapper that cannot be taken apart


class Wrapper(Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, strides=inner.stride(), requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return Wrapper(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.inner if isinstance(grad, Wrapper) else grad


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.inner.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Wrapper(grad)


def wrapped(block: Program, h: Tensor) -> Tensor:
    w = Wrap.apply(h @ block.v)
    y = (w[:, :4] * w[:, 4:]).exp()
    return Unwrap.apply(torch.cat([y, y.sin()], 1))


PROGRAMS = {
    "nested arguments of a declared function, mutated since": nested_and_mutated,
    "a declared function with a generator of its own": own_generator,
    "another default dtype inside the block": default_dtype,
    "the precision of a backend set inside the block": precision_of_a_backend,
    "a parameter made in inference mode": frozen_in_inference_mode,
    "a wrapper subclass that cannot be flattened": wrapped,
}


@both
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, mode: Any) -> None:
    compare(lambda: stack(PROGRAMS[name]), mode, num_steps=3)


@both
def test_a_buffer_met_first_through_an_undeclared_view(mode: Any) -> None:
    compare(lambda: nn.Sequential(Buffered(), Buffered()), mode, num_steps=3)


class SplitUnsafely(nn.Module):
    """Autograd saves views that share no version counter with what is then overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.unsafe_split(x, 2)
        y = (a * b).tanh() * self.w
        x.view(-1)[:8].tanh_()
        return y


def test_the_result_of_an_unsafe_split_is_right_where_plain_autograd_is_not() -> None:
    model = nn.Sequential(SplitUnsafely())
    leaf = batch(4, 6).detach().double().requires_grad_()

    def gradient() -> Tensor:
        return torch.autograd.grad(model(leaf * 1.0).sum(), leaf)[0]

    a, b = leaf.detach().split(2)
    slope = 1 - (a * b).tanh().square()
    true = torch.cat([slope * b, slope * a])
    assert (gradient() - true).abs().max() > 1e-2
    with actmem.apply(model, RECOMPUTE, blocks="0"):
        for _ in range(3):
            torch.testing.assert_close(gradient(), true)


# -------------------------------------------------------------------- refusals


def add_first() -> nn.Module:
    return nn.Sequential(AddFirst(), AddFirst())


def test_an_input_that_outer_hooks_pass_through_and_that_has_changed_since_is_refused() -> None:
    model, h = add_first(), batch() * 1
    with actmem.apply(model, RECOMPUTE), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = total(model(h))
    h.mul_(3)
    with pytest.raises(actmem.VersionError, match="changed in place"):
        loss.backward()


def test_an_input_whose_memory_is_gone_is_refused() -> None:
    model, h = add_first(), batch() * 1
    with actmem.apply(model, RECOMPUTE):
        loss = total(model(h))
    h.untyped_storage().resize_(0)
    with pytest.raises(actmem.FreedStorageError, match="has no memory"):
        loss.backward()


# -------------------------------------------------------------------- the smallest cut


class Gram(nn.Module):
    """Autograd saves products that are smaller than the opaque value they are computed from, if the batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        opaque = torch.empty(x.shape[0], 16)
        numpy.sin(x.detach().numpy(), out=opaque.numpy())
        first, second = opaque.t() @ opaque, opaque.t() @ (opaque * 2)
        return x + ((first * self.a) + (second * self.b)).sum() * 1e-3


def grams() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Gram() for _ in range(4)])


def rows(count: int) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count)).requires_grad_()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_block_that_is_cut(use_reentrant: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        h = x
        for block in model:  # type: ignore[attr-defined]
            h = checkpoint(block, h, use_reentrant=use_reentrant)
        loss = total(h)
        loss.backward()
        return loss.detach()

    plain, managed = grams(), grams()
    with actmem.apply(managed, RECOMPUTE) as applied:
        # The cut that the first forward finds must not be used when the checkpoint runs the block again.
        for _ in range(3):
            assert_same_bits(outcome(plain, rows(20), step), outcome(managed, rows(20), step))
        applied.check_replay(2)
        for _ in range(2):
            assert_same_bits(outcome(plain, rows(20), simple_step), outcome(managed, rows(20), simple_step))
        assert any("fewest bytes" in row.why for kind in applied.report().kinds for row in kind.rows)


def test_a_cut_for_a_small_batch_is_not_used_for_a_large_one() -> None:
    plain, managed = grams(), grams()
    with actmem.apply(managed, RECOMPUTE):
        for _ in range(2):
            simple_step(managed, rows(20))
        large = rows(5000)
        peaks = [actmem.measure(lambda m=m: simple_step(m, large)).step_bytes for m in (plain, managed)]
    assert peaks[1] <= peaks[0]


# -------------------------------------------------------------------- no bytes at all


@both
def test_a_step_on_fake_tensors(mode: Any) -> None:
    with FakeTensorMode():
        model = stack(lambda block, h: F.dropout((h @ block.v).sin().exp(), 0.1) * h)
        with actmem.apply(model, mode) as applied:
            for _ in range(2):
                model(torch.randn(6, 8, requires_grad=True)).sum().backward()
            assert applied.report().num_replayed > 0
    assert all(p.grad is not None for p in model.parameters())
