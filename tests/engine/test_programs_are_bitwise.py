"""Ordinary and unusual programs: bitwise as in plain training, with everything recomputed and with matmuls saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    SAVE_MATMUL,
    Program,
    batch,
    compare,
    never,
    replayed,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


# -------------------------------------------------------------------- custom Functions


class Attributes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.power, ctx.x = power, x
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.power * ctx.x ** (ctx.power - 1), None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2).sin_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return 2 * grad * (1 - y * y).clamp(min=0).sqrt()


class Several(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x, order)
        return x.gather(-1, order), order

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, order = ctx.saved_tensors
        again, _ = ctx.saved_tensors  # read twice
        return torch.zeros_like(x).scatter(-1, order, grad) * (again == x)


# -------------------------------------------------------------------- the programs


def rrelu(block: Program, h: Tensor) -> Tensor:
    return F.rrelu(h @ block.v, training=True).sin()


def own_generator(block: Program, h: Tensor) -> Tensor:
    g = generator()
    noise = torch.randn(h.shape, generator=g)
    h = (h @ block.v + noise).sin()
    return h * torch.rand(h.shape, generator=g) + torch.empty_like(h).normal_(generator=g)


def out_variant(block: Program, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.empty(6, 8)
        torch.mul(h, 3, out=scale)
        scale.add_(1)
    return (scale * (h @ block.v)).sin()


def storage_games(block: Program, h: Tensor) -> Tensor:
    with torch.no_grad():
        a = (h + 1).clone()
        b = torch.empty(0)
        b.set_(a)
        a.mul_(2)
        c = torch.empty(1).resize_(6, 8).copy_(b)
        d = torch.zeros(6, 8)
        d.data = c.sin()
    return (h @ block.v * b).sin() * d + (h * c).cos()


def jagged(block: Program, h: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged((h @ block.v).sin(), torch.tensor([0, 2, 6]))
    return (nested * 2).cos().values() + h


def forward_ad(block: Program, h: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual((h @ block.v).detach(), torch.ones_like(h))
        tangent = torch.autograd.forward_ad.unpack_dual((dual * 2).sin()).tangent
    return (tangent * h).sin()


def saved_on_cpu(block: Program, h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return (h @ block.v).sin().exp()


def mutation_allowed(block: Program, h: Tensor) -> Tensor:
    product = h @ block.v
    out = product.sin()
    product.mul_(2)
    return out + product


def inference_part(block: Program, h: Tensor) -> Tensor:
    with torch.inference_mode():
        constant = torch.arange(48.0).reshape(6, 8) * 2
    return (h @ block.v + constant.clone() / 100).sin()


def promoted(block: Program, h: Tensor) -> Tensor:
    h = (h @ block.v).double() * torch.tensor(2, dtype=torch.int32) + 1
    return (h.half().float() * torch.tensor(0.5, dtype=torch.float64)).sin() + h.float()


def views(block: Program, h: Tensor) -> Tensor:
    product = (h @ block.v).t().contiguous().t()
    bits = product.detach().view(torch.int32) & 0x7F000000
    return (product.unfold(1, 4, 2).sum(-1).repeat(1, 3)[:, :8] * bits.view(torch.float32)).sin().flip(0)


PROGRAMS: dict[str, Any] = {
    "Function with attributes": lambda b, h: Attributes.apply(h @ b.v + 2, 3).sin(),
    "Function that writes its input": lambda b, h: Dirty.apply((h @ b.v) * 1).cos(),
    "Function with several results": lambda b, h: Several.apply(h @ b.v)[0].sin(),
    "own generator": own_generator,
    "dropout": lambda b, h: F.dropout(h @ b.v, 0.4).sin(),
    "dropout in place": lambda b, h: F.dropout((h @ b.v).sin() * 1, 0.4, inplace=True).cos(),
    "dropout1d": lambda b, h: F.dropout1d((h @ b.v).view(2, 3, 8), 0.4).sin().view(6, 8),
    "dropout2d": lambda b, h: F.dropout2d((h @ b.v).view(2, 3, 4, 2), 0.4).sin().view(6, 8),
    "gumbel": lambda b, h: F.gumbel_softmax(h @ b.v, tau=0.7).sin() + F.gumbel_softmax(h, hard=True),
    "gamma": lambda b, h: torch.distributions.Gamma((h @ b.v).exp(), 1.0).rsample().sin(),
    "dirichlet": lambda b, h: torch.distributions.Dirichlet((h @ b.v).exp()).rsample().sin(),
    "poisson": lambda b, h: (torch.poisson((h @ b.v).exp().detach()) * h).sin(),
    "bernoulli and multinomial": lambda b, h: (
        (h * torch.bernoulli(h.sigmoid()) + torch.multinomial(h.exp(), 8)).sin() @ b.v
    ),
    "rrelu": rrelu,
    "scaled dot product, causal": lambda b, h: F.scaled_dot_product_attention(
        *((h @ b.v).view(1, 2, 3, 8), h.view(1, 2, 3, 8), h.sin().view(1, 2, 3, 8)), is_causal=True
    ).reshape(6, 8),
    "scaled dot product, mask": lambda b, h: F.scaled_dot_product_attention(
        *((h @ b.v).view(1, 2, 3, 8), h.view(1, 2, 3, 8), h.sin().view(1, 2, 3, 8)), attn_mask=torch.eye(3)
    ).reshape(6, 8),
    "scaled dot product, dropout": lambda b, h: F.scaled_dot_product_attention(
        *((h @ b.v).view(1, 2, 3, 8), h.view(1, 2, 3, 8), h.sin().view(1, 2, 3, 8)), dropout_p=0.3
    ).reshape(6, 8),
    "out=": out_variant,
    "set_, resize_, .data=": storage_games,
    "jagged nested tensor": jagged,
    "vmap": lambda b, h: torch.func.vmap(lambda row: (row @ b.v).sin().cumsum(0))(h).cos(),
    "forward AD": forward_ad,
    "save_on_cpu inside": saved_on_cpu,
    "checkpoint inside": lambda b, h: checkpoint(lambda t: (t @ b.v).sin().exp(), h, use_reentrant=False).cos(),
    "reentrant checkpoint inside": lambda b, h: checkpoint(
        lambda t: (t @ b.v).sin().exp(), h, use_reentrant=True
    ).cos(),
    "inference tensors": inference_part,
    "scalar promotion": promoted,
    "strides and dtype views": views,
    "in-place chain": lambda b, h: (h @ b.v).mul_(2).add_(h).sin_().clone().relu_() + h,
    "index and scatter": lambda b, h: (
        (h @ b.v)[[0, 2, 4, 4, 1, 3]].masked_fill(h > 0, 0.5).scatter(1, torch.zeros(6, 1, dtype=torch.long), 2.0).sin()
    ),
    "linear algebra": lambda b, h: torch.linalg.solve(b.v @ b.v.T + torch.eye(8), h.T).T.sin() + b.v.det(),
    "pieces into an empty tensor": lambda b, h: torch.stack([h @ b.v, h.sin()]).prod(0).cos(),
    "complex": lambda b, h: torch.fft.irfft(torch.fft.rfft(h @ b.v) * 1j, n=8).sin(),
}


@both
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*", "ignore:.*nested tensors.*:UserWarning")
def test_programs(name: str, mode: Any) -> None:
    compare(lambda: stack(PROGRAMS[name]), mode)


# -------------------------------------------------------------------- modules


def with_part(make: Any, run: Any) -> Any:
    return lambda: stack(lambda block, h: run(block.parts["part"], h), parts=lambda: {"part": make()})


MODULES: dict[str, Any] = {
    "multi-head attention": with_part(
        lambda: nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True),
        lambda m, h: m(h.view(2, 3, 8), h.view(2, 3, 8), h.view(2, 3, 8))[0].reshape(6, 8),
    ),
    "encoder layer": with_part(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True),
        lambda m, h: m(h.view(2, 3, 8)).reshape(6, 8),
    ),
    "spectral norm": with_part(lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), lambda m, h: m(h).sin()),
    "spectral norm, old": with_part(lambda: spectral_norm(nn.Linear(8, 8)), lambda m, h: m(h).sin()),
    "weight norm": with_part(lambda: parametrizations.weight_norm(nn.Linear(8, 8)), lambda m, h: m(h).sin()),
    "weight norm, old": with_part(lambda: weight_norm(nn.Linear(8, 8)), lambda m, h: m(h).sin()),
    "orthogonal": with_part(lambda: parametrizations.orthogonal(nn.Linear(8, 8)), lambda m, h: m(h).sin()),
    "batch norm": with_part(lambda: nn.BatchNorm1d(8), lambda m, h: m(h * 2).sin()),
    "instance norm": with_part(
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda m, h: m((h * 2).view(2, 3, 8)).sin().reshape(6, 8),
    ),
    "group norm": with_part(lambda: nn.GroupNorm(2, 8), lambda m, h: m(h * 2).sin()),
    "embedding with max norm": with_part(
        lambda: nn.Embedding(6, 8, max_norm=1.0), lambda m, h: (h + m(torch.arange(6))).sin() * 2
    ),
    "embedding bag": with_part(
        lambda: nn.EmbeddingBag(6, 8), lambda m, h: (h + m(torch.arange(12).view(6, 2) % 6)).sin() * 2
    ),
    "convolution and pooling": with_part(
        lambda: nn.Conv1d(3, 3, 3, padding=1),
        lambda m, h: F.max_pool1d(m(h.view(2, 3, 8)).relu_(), 2).repeat(1, 1, 2).reshape(6, 8),
    ),
    "functional_call": with_part(
        lambda: nn.Linear(8, 8),
        lambda m, h: torch.func.functional_call(m, {"weight": m.weight * 2, "bias": m.bias + 1}, (h,)).sin(),
    ),
}


@both
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_modules(name: str, mode: Any) -> None:
    compare(MODULES[name], mode)


@both
def test_ctc_loss_is_held(mode: Any) -> None:
    def body(block: Program, h: Tensor) -> Tensor:
        logits = (h @ block.v).view(6, 1, 8).log_softmax(-1)
        loss = F.ctc_loss(logits, torch.tensor([[1, 2, 2]]), torch.tensor([6]), torch.tensor([3]))
        return (loss * 2).sin() * h.cos()

    compare(lambda: stack(body), mode)


@both
def test_least_squares_is_held(mode: Any) -> None:
    model = stack(lambda block, h: (torch.linalg.lstsq(block.v @ block.v, h.T).solution.T * 2).sin())
    with actmem.apply(model, mode) as applied:
        simple_step(model, batch())  # two plain steps differ, so there is nothing to compare with
        report = applied.report()
    assert report.num_replayed > 0
    assert any("two runs on the same input may differ" in why for op, why in never(report).items() if "lstsq" in op)


# -------------------------------------------------------------------- around the model


def with_mutation(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        return simple_step(model, x)


def checkpoint_around(reentrant: bool) -> Any:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = total(checkpoint(model, x, use_reentrant=reentrant))
        loss.backward()
        return loss.detach()

    return step


def plain_body(block: Program, h: Tensor) -> Tensor:
    return (h @ block.v).sin().exp().cos()


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_an_applied_model(reentrant: bool, mode: Any) -> None:
    compare(lambda: stack(plain_body), mode, step=checkpoint_around(reentrant))


@both
def test_mutation_on_saved_tensors_allowed_around_the_model(mode: Any) -> None:
    compare(lambda: stack(mutation_allowed), mode, step=with_mutation)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own
def test_a_jvp_around_an_applied_model_gives_the_plain_tangent() -> None:
    model = stack(plain_body)
    x, tangent = batch().detach(), torch.ones(6, 8)
    plain = torch.func.jvp(model, (x,), (tangent,))
    for mode in (RECOMPUTE, SAVE_MATMUL):
        with actmem.apply(model, mode):
            out = torch.func.jvp(model, (x,), (tangent,))
            assert all(torch.equal(a, b) for a, b in zip(plain, out, strict=True))


@both
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_profiler_and_tensor_hooks(mode: Any) -> None:
    seen: list[Tensor] = []

    def body(block: Program, h: Tensor) -> Tensor:
        product = h @ block.v
        product.register_hook(lambda grad: seen.append(grad) or grad * 2)
        return product.sin()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.detect_anomaly(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return simple_step(model, x)

    compare(lambda: stack(body), mode, step=step)
    assert len(seen) == 2 * 2 * 2


@both
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_scripted_function_inside_a_block(mode: Any) -> None:
    @torch.jit.script
    def scripted(t: Tensor) -> Tensor:
        return (t * 2).sin() + t.cos()

    compare(lambda: stack(lambda block, h: scripted(h @ block.v)), mode, num_steps=3)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(dtype: torch.dtype, mode: Any) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            out = model(x)
        loss = total(out)
        loss.backward()
        return loss.detach()

    report = compare(
        lambda: stack(lambda block, h: F.linear(h, block.v).sin() + F.softmax(h @ block.v, -1)), mode, step=step
    )
    assert any("sin" in op or "_to_copy" in op or "_softmax" in op for op in replayed(report))


@both
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_autograd(mode: Any) -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = total(model(x))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return loss.detach()

    torch._dynamo.reset()
    compare(lambda: stack(plain_body), mode, step=step)
