"""Programs on which a naive tape frees no memory: what is held stays close to what torch's checkpoint holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from tests.engine.cases import MODES, RECOMPUTE, Checkpointed, Program, batch, compare, stack, total

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
KIB = 1024


def measured(model: nn.Module, x: Tensor) -> actmem.Measurement:
    """Measure one training step that follows a first one."""

    def step() -> None:
        total(model(x)).backward()
        model.zero_grad()

    step()
    x.grad = None
    found = actmem.measure(step, model=model)
    x.grad = None
    return found


def three_ways(build: Any, x: Tensor, mode: Any) -> tuple[actmem.Measurement, actmem.Measurement, actmem.Measurement]:
    """Measure the model plain, with each block under torch's checkpoint, and under `mode`."""
    plain = measured(build(), x)
    inner = build()
    by_checkpoint = measured(nn.Sequential(*[Checkpointed(block) for block in inner]), x)
    managed = build()
    with actmem.apply(managed, mode, blocks="*"):
        ours = measured(managed, x)
    return plain, by_checkpoint, ours


# -------------------------------------------------------------------- opaque kernels


class Quantised(nn.Module):
    """A frozen 8-bit weight, dequantised to 32 bits by a kernel that torch cannot see, and a small trainable factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(-127, 127, (width, width), dtype=torch.int8))
        self.a = nn.Parameter(torch.randn(width, 4) / width**0.5)
        self.b = nn.Parameter(torch.randn(4, width))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.empty(self.packed.shape)
        weight.numpy()[...] = self.packed.numpy() * (1.0 / 1024)
        return OpaqueWeight.apply(x, self.packed, weight).add(x @ self.a @ self.b)


class OpaqueWeight(torch.autograd.Function):
    """Multiply by the weight, and dequantise it again in backward, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (packed,) = ctx.saved_tensors
        return grad @ torch.from_numpy(packed.numpy() * (1.0 / 1024)).float().T, None, None


class QuantisedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = Quantised(width), Quantised(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


def quantised_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[QuantisedBlock(256) for _ in range(4)])


@both
def test_a_weight_that_an_opaque_kernel_dequantised_is_not_held(mode: Any) -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain, _, ours = three_ways(quantised_model, x, mode)
    num_inputs_bytes = 4 * 32 * 256 * 4
    assert ours.saved_bytes <= plain.saved_bytes + num_inputs_bytes
    assert ours.saved_bytes < 256 * 256 * 4 * 4  # not even half of the eight dequantised weights
    assert ours.num_replayed_ops > 0
    compare(quantised_model, mode, x=lambda: x.detach().clone().requires_grad_(), blocks="*")


class OpaqueGelu(torch.autograd.Function):
    """An activation function whose forward and backward are kernels that torch cannot see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        out.numpy()[...] = torch.sin(x).numpy()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x)


def opaque_activation(block: Program, h: Tensor) -> Tensor:
    return h + OpaqueGelu.apply(OpaqueGelu.apply(F.layer_norm(h, h.shape[-1:])) @ block.v * 2)


@both
def test_opaque_activations_never_cost_more_than_plain_training(mode: Any) -> None:
    def build() -> nn.Module:
        return stack(opaque_activation, num_blocks=4, width=64)

    x = batch(128, 64)
    plain, _, ours = three_ways(build, x, mode)
    assert ours.saved_bytes <= plain.saved_bytes
    assert ours.saved_bytes <= 0.75 * plain.saved_bytes or mode is not RECOMPUTE
    compare(build, mode, x=lambda: batch(128, 64))


class DeclaredSine(torch.autograd.Function):
    """Like `OpaqueGelu`, but declared pure below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OpaqueGelu.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return OpaqueGelu.backward(ctx, grad)


def declared_activation(block: Program, h: Tensor) -> Tensor:
    return h + DeclaredSine.apply(DeclaredSine.apply(F.layer_norm(h, h.shape[-1:])) @ block.v * 2)


def test_opaque_activations_that_were_declared_pure_hold_no_more_than_checkpoint() -> None:
    actmem.replayable(DeclaredSine)

    def build() -> nn.Module:
        return stack(declared_activation, num_blocks=4, width=64)

    plain, by_checkpoint, ours = three_ways(build, batch(128, 64), RECOMPUTE)
    assert ours.saved_bytes <= by_checkpoint.saved_bytes < plain.saved_bytes / 3
    assert ours.step_bytes <= by_checkpoint.step_bytes
    compare(build, RECOMPUTE, x=lambda: batch(128, 64))


@actmem.replayable
def dequantised(packed: Tensor) -> Tensor:
    weight = torch.empty(packed.shape)
    weight.numpy()[...] = packed.numpy() * (1.0 / 1024)
    return weight


class DeclaredQuantised(Quantised):
    def forward(self, x: Tensor) -> Tensor:
        return OpaqueWeight.apply(x, self.packed, dequantised(self.packed)).add(x @ self.a @ self.b)


def test_a_dequantisation_that_was_declared_pure_is_replayed_and_holds_no_more_than_checkpoint() -> None:
    def build() -> nn.Module:
        model = quantised_model()
        for block in model:
            block.up.__class__ = block.down.__class__ = DeclaredQuantised
        return model

    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain, by_checkpoint, ours = three_ways(build, x, RECOMPUTE)
    assert ours.saved_bytes <= by_checkpoint.saved_bytes < plain.saved_bytes / 2
    compare(build, RECOMPUTE, x=lambda: x.detach().clone().requires_grad_(), blocks="*")


# -------------------------------------------------------------------- dropout and masks


def eager_attention(block: Program, h: Tensor) -> Tensor:
    q, k, v = (t.view(-1, 64, 4, h.shape[-1] // 4).transpose(1, 2) for t in (h, h @ block.v, h * 2))
    scores = q @ k.transpose(-1, -2) / 4
    mask = torch.full((64, 64), float("-inf")).triu(1)
    weights = F.dropout((scores + mask).softmax(-1), 0.1, training=True)
    return h + (weights @ v).transpose(1, 2).reshape(h.shape)


def test_eager_attention_with_dropout_holds_and_peaks_as_checkpoint_does() -> None:
    def build() -> nn.Module:
        return stack(eager_attention, num_blocks=4, width=32)

    x = batch(256, 32)
    plain, by_checkpoint, ours = three_ways(build, x, RECOMPUTE)
    assert ours.saved_bytes <= by_checkpoint.saved_bytes + 64 * KIB  # generator states, 5 KiB each
    assert ours.peak_bytes <= 1.02 * by_checkpoint.peak_bytes + 64 * KIB
    assert ours.saved_bytes < 0.25 * plain.saved_bytes
    compare(build, RECOMPUTE, x=lambda: batch(256, 32), replays=["aten._softmax"])


# -------------------------------------------------------------------- parameters whose data is exchanged


class Gathered(nn.Module):
    """A weight that exists only during the forward and backward pass of its module, as in ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.full = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
        self.w = nn.Parameter(torch.empty(0))
        self.alive: list[weakref.ref[Any]] = []

    def gather(self, *_: Any) -> None:
        self.w.data = self.full.clone()
        self.alive.append(weakref.ref(self.w.untyped_storage()))

    def release(self, *_: Any) -> None:
        self.w.data = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() @ self.w + 1).cos()


def gathered_model() -> nn.Module:
    model = nn.Sequential(Gathered(), Gathered())
    for module in model:
        module.register_forward_pre_hook(lambda m, _: m.gather())
        module.register_forward_hook(lambda m, *_: m.release())
        module.register_full_backward_pre_hook(lambda m, _: m.gather())
    return model


@both
def test_a_weight_whose_data_is_swapped_out_after_the_block_is_not_kept_alive(mode: Any) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = total(model(x))
        gc.collect()
        assert [r() for m in model for r in m.alive] == [None, None]
        loss.backward()
        for m in model:
            m.alive.clear()
            m.release()
        found = loss.detach() + sum(m.w.grad.sum() for m in model)
        for m in model:
            m.w.grad = None
        return found

    compare(gathered_model, mode, x=lambda: batch(8, 64), step=step, blocks="*", replays=["aten.sin"])


def test_a_weight_that_was_freed_and_not_gathered_again_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    with actmem.apply(model, RECOMPUTE):
        loss = total(model(batch()))
        model[1][0].weight.data.untyped_storage().resize_(0)
        with pytest.raises(actmem.FreedStorageError, match="FSDP"):
            loss.backward()


# -------------------------------------------------------------------- outer hooks


@both
def test_outer_hooks_are_called_for_what_the_tape_keeps(mode: Any) -> None:
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.detach().clone()

    def unpack(t: Tensor) -> Tensor:
        unpacked.append(t)
        return t

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = model(x)
        loss = total(out)
        loss.backward()
        return loss.detach()

    model = stack(lambda block, h: (h @ block.v).sin())
    step(model, batch())
    num_plain = len(packed)
    packed.clear()
    unpacked.clear()
    with actmem.apply(model, mode):
        step(model, batch())
    activations = [t for t in packed if t.numel() == 48]
    assert len(activations) == (2 if mode is RECOMPUTE else 6)  # each block's input; and both products
    assert 0 < len(packed) < num_plain + 2
    assert unpacked
    compare(lambda: stack(lambda block, h: (h @ block.v).sin()), mode, step=step)


VIEWS: dict[str, Any] = {
    "slices of the input": lambda block, x: (x[2:] @ block.w).sin() * x[:-2].exp(),
    "slices of a kept product": lambda block, x: (x @ block.w)[:, 4:].sin() * (x @ block.w)[:, :4].exp(),
    "two views of one product": lambda block, x: sum_of_views(x @ block.w),
    "other dtype": lambda block, x: ((x + 1).detach().view(torch.int32).view(torch.float32) * (x @ block.w)).sin(),
}


def sum_of_views(product: Tensor) -> Tensor:
    return product[:, 4:].sin() * product[:, :4].exp() + product.t().cos().sum()


class Viewing(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return VIEWS[self.name](self, x)


@both
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_outer_hooks_that_copy_may_see_views(name: str, strided: bool, mode: Any) -> None:
    def pack(t: Tensor) -> Tensor:
        return t.detach().clone()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model((x * 2).t().contiguous().t()[1:] if strided else x)
        loss = total(out)
        loss.backward()
        return loss.detach()

    compare(lambda: nn.Sequential(Viewing(name)), mode, step=step, blocks="0")


@both
def test_save_on_cpu_around_an_applied_model(mode: Any) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out = model(x)
        loss = total(out)
        loss.backward()
        return loss.detach()

    compare(lambda: stack(lambda block, h: (h @ block.v).sin().exp()), mode, step=step)


def test_a_checkpoint_around_an_applied_block_still_drops_the_block() -> None:
    def build() -> nn.Module:
        return stack(lambda block, h: (h @ block.v).sin().exp().cos(), num_blocks=4, width=64)

    x = batch(128, 64)
    plain, by_checkpoint, _ = three_ways(build, x, RECOMPUTE)
    inner = build()
    outer = nn.Sequential(*[Checkpointed(block) for block in inner])
    with actmem.apply(inner, RECOMPUTE):
        ours = measured(outer, x)
    assert ours.saved_bytes <= by_checkpoint.saved_bytes + 4 * KIB < plain.saved_bytes


# -------------------------------------------------------------------- copies of what is overwritten


class Cache(nn.Module):
    """A buffer that every call writes a part of, like a static key-value cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(64, 64) / 8)
        self.register_buffer("cache", torch.zeros(512, 64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache[: x.shape[0]].copy_((x @ self.w).detach())
        return (x @ self.w).sin() + self.cache.sum(0)


def test_a_buffer_that_is_overwritten_is_copied_only_if_its_old_version_is_needed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Cache(), Cache())

    x = batch(16, 64)
    plain, _, ours = three_ways(build, x, RECOMPUTE)
    assert ours.saved_bytes <= plain.saved_bytes
    assert ours.step_bytes < plain.step_bytes + 512 * 64 * 4
    compare(build, RECOMPUTE, x=lambda: batch(16, 64), replays=["aten.mm"])


@both
def test_max_norm_renormalises_an_embedding_that_is_also_the_output_weight(mode: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(10, 8, max_norm=1.0)

        def forward(self, x: Tensor) -> Tensor:
            looked_up = self.table(torch.arange(6) % 4)
            return ((x + looked_up) @ self.table.weight.T).sin()[:, :8]

    compare(lambda: nn.Sequential(Tied(), Tied()), mode, blocks="*", num_steps=1)


def test_the_invariant_holds_on_every_program_here() -> None:
    inputs = batch(128, 64)
    for body in (opaque_activation, lambda block, h: (h @ block.v).relu() * h.sigmoid()):
        plain, _, ours = three_ways(lambda body=body: stack(body, num_blocks=3, width=64), inputs, RECOMPUTE)
        assert ours.saved_bytes <= plain.saved_bytes + 3 * inputs.nbytes
