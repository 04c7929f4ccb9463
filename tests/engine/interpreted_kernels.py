"""Real Triton kernels, run by Triton's interpreter. `test_triton.py` starts this file in a process of its own.

The interpreter is chosen by the environment when Triton is imported, for the whole process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import actmem
from actmem import Full
from actmem.engine.kernel_launches import written_by_launch
from tests.engine.cases import batch as a_batch
from tests.engine.cases import compare, never, replayed, simple_step, stack

triton: Any = pytest.importorskip("triton", reason="triton is not installed")
tl: Any = pytest.importorskip("triton.language")

WIDTH = 8
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
needs_liger = pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel is not installed")


@triton.jit
def gate_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x * tl.sigmoid(x), mask=at < n)


@triton.jit
def norm_kernel(x_ptr, out_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0)
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=0) / width + 1e-6)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * width + at, x * scale, mask=at < width)


@triton.jit
def doubled_at(address, mask):
    tl.store(address, tl.load(address, mask=mask) * 2, mask=mask)


@triton.jit
def double_in_place_kernel(x_ptr, unused_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = x_ptr + at
    doubled_at(address, at < n)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def heuristic_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 3, mask=at < n)


@triton.jit
def counting_kernel(x_ptr, count_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.atomic_add(count_ptr, tl.sum((x > 0).to(tl.float32), axis=0))


class Gate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        gate_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return grad * (sigmoid + x * sigmoid * (1 - sigmoid))


class Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1)
        norm_kernel[(x.shape[0],)](x, out, scale, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        ctx.save_for_backward(out, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out, scale = ctx.saved_tensors
        return (grad - out * (grad * out).mean(-1, keepdim=True)) * scale


class Heuristic(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        heuristic_kernel[(1,)](x, out, x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class InPlace(Function):
    """Writes into its argument without telling autograd, as rotary embeddings of several libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        double_in_place_kernel[(triton.cdiv(x.numel(), 16),)](x, x, x.numel(), BLOCK=16)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def through(kind: Any) -> Callable[[], nn.Module]:
    return lambda: stack(lambda block, h: kind.apply(h @ block.v).sin() * h, num_blocks=3)


@pytest.mark.parametrize("kind", [Gate, Norm, Heuristic])
def test_a_triton_kernel_is_held_by_default_and_run_again_on_request(kind: Any) -> None:
    held = compare(through(kind), Full(), num_steps=3)
    assert held.opaque_bytes and all(op.startswith("aten.") for op in never(held))
    again = compare(through(kind), Full(), num_steps=3, opaque="replay")
    assert again.never_replayed_bytes == 0 and f"replayable.{kind.__name__}" in replayed(again)
    # What torch's checkpoint holds: the input of each block.
    assert again.held_bytes == 3 * a_batch().nbytes < held.held_bytes


@pytest.mark.parametrize("opaque", ["hold", "replay"])
def test_a_kernel_that_overwrites_its_argument_leaves_gradients_right(opaque: str) -> None:
    def build() -> nn.Module:
        def body(block: Any, h: Tensor) -> Tensor:
            y = (h @ block.v).sin()  # autograd saves the matrix product, and the sine is what the kernel overwrites
            return InPlace.apply(y).cos() * h

        return stack(body, num_blocks=3)

    report = compare(build, Full(), num_steps=3, opaque=opaque)
    assert "triton.double_in_place_kernel" in never(report)


def test_what_others_read_before_a_kernel_overwrites_it_is_kept() -> None:
    def build() -> nn.Module:
        def body(block: Any, h: Tensor) -> Tensor:
            y = h.detach() * 3
            before = y.cos()
            double_in_place_kernel[(3,)](y, y, y.numel(), BLOCK=16)
            return (h @ block.v).sin() * before + h * y

        return stack(body, num_blocks=3)

    compare(build, Full(), num_steps=3)


def test_what_a_kernel_writes_is_read_in_its_source() -> None:
    found = {
        k.__name__ if hasattr(k, "__name__") else "heuristic_kernel": written_by_launch(k)
        for k in (gate_kernel, norm_kernel, double_in_place_kernel, heuristic_kernel, counting_kernel)
    }
    pointers = {name: {p for p in names if p.endswith("_ptr")} for name, names in found.items()}
    assert pointers == {
        "gate_kernel": {"out_ptr"},
        "norm_kernel": {"out_ptr", "scale_ptr"},
        "double_in_place_kernel": {"x_ptr"},
        "heuristic_kernel": {"out_ptr"},
        "counting_kernel": {"count_ptr"},
    }


def test_a_launch_on_tensors_without_bytes_is_left_out() -> None:
    model = through(Gate)()
    with actmem.apply(model, Full()):  # from here on, launches are seen
        simple_step(model, a_batch())
    profile = actmem.profile(model, (a_batch(),), loss=lambda out: out.sum())
    assert actmem.predict(profile, Full()).peak_bytes > 0


@needs_liger
def test_ligers_own_kernels_are_declared_when_liger_is_imported() -> None:
    from liger_kernel.ops import rms_norm, rope, swiglu

    @triton.jit
    def rsqrt(x):
        return 1 / tl.sqrt(x)

    rms_norm.rsqrt = rsqrt  # the interpreter has no libdevice

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))
            self.qk, self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(4))

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            h = rms_norm.LigerRMSNormFunction.apply(x, self.weight, 1e-6, 0.0, "llama", False)
            q = self.qk(h).view(2, 4, 2, 8).transpose(1, 2)
            k = self.qk(h + 1).view(2, 4, 2, 8).transpose(1, 2)
            q, k = rope.LigerRopeFunction.apply(q, k, cos, sin)
            a = nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(2, 4, 16)
            return x + self.down(swiglu.LigerSiLUMulFunction.apply(self.gate(a), self.up(a)))

    def build() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(Layer() for _ in range(3))

    cos, sin = (torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))

    def gradients(layers: nn.ModuleList) -> list[Tensor]:
        layers.zero_grad()
        h = x.clone().requires_grad_()
        out = h
        for layer in layers:
            out = layer(out, cos, sin)
        out.square().sum().backward()
        found = [h.grad, *(p.grad for p in layers.parameters())]
        assert all(g is not None for g in found)
        return [g.clone() for g in found if g is not None]

    expected = gradients(build())
    model = nn.Sequential(*build())
    with actmem.apply(model, Full(), blocks="*") as applied:
        for _ in range(3):
            assert all(map(torch.equal, expected, gradients(nn.ModuleList(model))))
        report = applied.report()
    assert report.never_replayed_bytes == 0
    assert report.held_bytes == 3 * x.nbytes + cos.nbytes + sin.nbytes  # what torch's checkpoint holds: the arguments
    text = " ".join(str(report).split())
    names = "LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction"
    assert f"because liger_kernel is known to launch deterministic kernels: {names}." in text
