"""What else a naive tape gets silently wrong: unseen writes, conj and neg bits, flags, nondeterministic operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    AddFirst,
    Program,
    assert_same_bits,
    batch,
    compare,
    never,
    outcome,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)

# -------------------------------------------------------------------- A11, A12, A15: writers that nothing can see


def numpy_into_zeros(block: Program, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out.detach().numpy()[...] += h.detach().numpy() * 2
    return (out + h @ block.v).sin() * out


def numpy_into_empty(block: Program, h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    out.detach().numpy()[...] = h.detach().numpy() * 2
    return (out + h @ block.v).sin() * out


def numpy_into_clone(block: Program, h: Tensor) -> Tensor:
    out = h.detach().clone()
    out.numpy()[...] *= 2
    return ((out + 1) * (h @ block.v)).sin()


@both
@pytest.mark.parametrize("body", [numpy_into_zeros, numpy_into_empty])
def test_what_an_unseen_kernel_wrote_into_a_new_tensor_is_never_replayed(body: Any, mode: Any) -> None:
    compare(lambda: stack(body), mode)


@both
def test_an_unseen_kernel_that_writes_into_a_copy_is_detected_by_the_self_check(mode: Any) -> None:
    model = stack(numpy_into_clone)
    with actmem.apply(model, mode), pytest.raises(actmem.SelfCheckError, match="kernel that torch cannot see"):
        outcome(model, batch(), simple_step)


@both
def test_a_kernel_that_runs_on_later_steps_only_is_detected_by_a_check_on_demand(mode: Any) -> None:
    calls: list[int] = []

    def body(block: Program, h: Tensor) -> Tensor:
        calls.append(1)
        return numpy_into_clone(block, h) if len(calls) > 1 else (h @ block.v).sin()

    model = stack(body, num_blocks=1)
    with actmem.apply(model, mode, blocks="0") as applied:
        outcome(model, batch(), simple_step)
        applied.check_replay()
        with pytest.raises(actmem.SelfCheckError):
            outcome(model, batch(), simple_step)


def data_written(model: nn.Module, x: Tensor) -> Tensor:
    x = x * 1
    loss = total(model(x))
    x.data.mul_(3)
    loss.backward()
    return loss.detach()


@both
def test_a_write_through_data_bumps_no_version_and_is_detected_by_the_self_check(mode: Any) -> None:
    model = nn.Sequential(AddFirst())
    with actmem.apply(model, mode, blocks="0"), pytest.raises(actmem.SelfCheckError):
        outcome(model, batch(), data_written)


class Scribble(torch.autograd.Function):
    """Use a saved tensor as the buffer of its backward, as kernels do to save memory."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        buffer = h.detach().numpy()
        buffer[...] = torch.exp(h).numpy()
        return torch.from_numpy(buffer) * grad


def scribbled(block: Program, h: Tensor) -> Tensor:
    product = h @ block.v
    return (product + 1).sin() + (product * 2).cos() + Scribble.apply(product)


@both
def test_a_function_may_write_into_what_it_saved_while_another_replay_reads_it(mode: Any) -> None:
    compare(lambda: stack(scribbled), mode, replays=["aten.add", "aten.mul"])


# -------------------------------------------------------------------- A13, A14: how bits are read

COMPLEX = {
    "conj matmul": lambda z: z.conj() @ z.T,
    "imag of conj": lambda z: torch.outer(z.conj().imag.flatten()[:6], z.real.flatten()[:6]),
    "vdot": lambda z: torch.vdot(z.conj()[0], z[1]).expand(6, 6) * 1,
    "adjoint": lambda z: (z @ z.mH).sin(),
    "neg view": lambda z: (z.conj().imag * 2).sin() @ z.real.T,
}


@both
@pytest.mark.parametrize("name", COMPLEX)
def test_conjugate_and_negated_views_are_read_as_such(name: str, mode: Any) -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        z = torch.complex(h.sin(), (h @ block.v).cos())
        return torch.view_as_real(COMPLEX[name](z) * (1 + 0j)).flatten(1).abs().sum(1, keepdim=True) * h

    compare(lambda: stack(body), mode, replays=["aten.complex"])


class Picture(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.conv = nn.Conv2d(16, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return self.conv(x).sin()
        with torch.backends.mkldnn.flags(enabled=False):
            return self.conv(x).sin()


def picture() -> Tensor:
    return torch.randn(3, 16, 9, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch.backends.mkldnn.flags sets all it has
@pytest.mark.parametrize("inside", [True, False], ids=["inside the block", "around the forward"])
def test_flags_that_change_the_bits_of_a_convolution_are_those_of_the_forward_pass(inside: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=inside):
            out = model(x)
        with torch.backends.mkldnn.flags(enabled=True):
            loss = total(out)
            loss.backward()
            assert torch.backends.mkldnn.enabled
        return loss.detach()

    conv, x = Picture(inside).conv, picture()
    with torch.backends.mkldnn.flags(enabled=False):
        without = conv(x)
    assert not torch.equal(conv(x), without)  # otherwise this test could not fail
    compare(
        lambda: nn.Sequential(Picture(inside)),
        RECOMPUTE,
        x=picture,
        step=step,
        blocks="0",
        replays=["aten.convolution"],
    )


# -------------------------------------------------------------------- A16: operators that do not repeat themselves


def scattered(op: str) -> Any:
    def body(block: Program, h: Tensor) -> Tensor:
        index = torch.arange(h.numel()) % 5
        zeros = torch.zeros(5) + h.mean()
        flat = (h @ block.v).flatten()
        if op == "index_put":
            out = zeros.index_put((index,), flat, accumulate=True)
        elif op == "index_put without accumulation":
            out = zeros.index_put((index[:5],), flat[:5])
        else:
            out = getattr(zeros, op)(0, index, flat)
        return h * out.exp().sum().tanh() + (out * 2).sin().sum()

    return body


@both
@pytest.mark.parametrize("op", ["index_put", "index_put without accumulation", "index_add", "scatter_add"])
def test_accumulating_index_put_is_held_and_the_others_are_replayed(op: str, mode: Any) -> None:
    report = compare(lambda: stack(scattered(op)), mode)
    held = [name for name, why in never(report).items() if "two runs on the same input may differ" in why]
    assert held == (["aten.index_put.default"] if op == "index_put" else [])


def test_the_self_check_never_blames_an_accumulation_that_differs_from_run_to_run() -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        n = 400_000
        index = torch.arange(n) % 1000
        out = torch.zeros(1000).index_put((index,), (h @ block.v).sum() * torch.linspace(-1, 1, n), accumulate=True)
        return h * (out + 1).sin().sum()

    model = stack(body, num_blocks=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with actmem.apply(model, RECOMPUTE, blocks="0") as applied:
            for _ in range(3):
                applied.check_replay()
                outcome(model, batch(), simple_step)
            assert applied.report().num_replayed > 0
    finally:
        torch.set_num_threads(threads)


def test_assert_same_bits_sees_a_single_bit() -> None:
    a = torch.ones(3)
    b = a.clone()
    b.view(torch.int32)[1] += 1
    with pytest.raises(AssertionError, match="off by"):
        assert_same_bits({"a": a}, {"a": b})
