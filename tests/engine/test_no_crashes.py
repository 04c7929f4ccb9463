"""Programs on which a naive tape crashes: each is right here, or refused by name."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    Program,
    assert_same_bits,
    batch,
    compare,
    modes_unchanged,
    never,
    outcome,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)

# -------------------------------------------------------------------- functorch


def inner_gradients(block: Program, h: Tensor) -> Tensor:
    def loss(weight: Tensor, row: Tensor) -> Tensor:
        return (row @ weight).sin().sum()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(block.v, h).sum(1) + h


@both
def test_functorch_grad_inside_a_block_is_refused_by_name_and_the_next_step_works(mode: Any) -> None:
    model = stack(inner_gradients)
    simple_step(model, batch())  # plain training works
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        checkpoint(model, batch(), use_reentrant=False)
    with (
        actmem.apply(model, mode),
        modes_unchanged(),
        pytest.raises(actmem.UnsupportedError, match=r"torch\.func\.grad runs inside 0.*torch\.autograd\.grad instead"),
    ):
        model(batch())
    compare(lambda: stack(lambda block, h: (h @ block.v).sin()), mode)


@both
def test_functorch_grad_around_a_block_is_refused_by_name(mode: Any) -> None:
    model = stack(lambda block, h: (h @ block.v).sin())
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    torch.func.grad(loss)(parameters, batch().detach())
    with (
        actmem.apply(model, mode),
        modes_unchanged(),
        pytest.raises(actmem.UnsupportedError, match=r"torch\.func\.grad runs around 0"),
    ):
        torch.func.grad(loss)(parameters, batch().detach())
    torch.func.grad(loss)(parameters, batch().detach())


@both
@pytest.mark.parametrize("transform", ["vjp", "jacrev", "hessian", "grad of vmap"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, in its forward AD
def test_the_other_reverse_transforms_of_functorch_are_refused_too(transform: str, mode: Any) -> None:
    model = stack(lambda block, h: (h @ block.v).sin())
    transforms: dict[str, Any] = {
        "vjp": lambda x: torch.func.vjp(model, x),
        "jacrev": torch.func.jacrev(lambda x: model(x).sum()),
        "hessian": torch.func.hessian(lambda x: model(x).sum()),
        "grad of vmap": torch.func.grad(lambda x: torch.func.vmap(model)(x).sum()),
    }
    transforms[transform](batch(2).detach())
    with actmem.apply(model, mode), modes_unchanged(), pytest.raises(actmem.UnsupportedError, match="functorch"):
        transforms[transform](batch(2).detach())


# -------------------------------------------------------------------- tensors without strided storage


def sparse(block: Program, h: Tensor) -> Tensor:
    mask = (torch.arange(36).reshape(6, 6) % 3 == 0).float().to_sparse()
    return torch.sparse.mm(mask, (h @ block.v) * 2).sin()


def sparse_values(block: Program, h: Tensor) -> Tensor:
    index = torch.stack([torch.arange(6), torch.arange(6).flip(0)])
    matrix = torch.sparse_coo_tensor(index, (h @ block.v)[:, 0].exp(), (6, 6), check_invariants=False)
    return torch.sparse.mm(matrix, h.cos()).sin()


def quantised(block: Program, h: Tensor) -> Tensor:
    q = torch.quantize_per_tensor((h @ block.v).detach(), 0.05, 0, torch.qint8)
    return (q.dequantize() * h).sin() * (h + 1)


@both
@pytest.mark.parametrize("body", [sparse, sparse_values, quantised])
@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning", "ignore:.*[Qq]uanti.*")  # torch's own
def test_sparse_and_quantised_tensors_are_held_as_objects(body: Any, mode: Any) -> None:
    compare(lambda: stack(body), mode)


# -------------------------------------------------------------------- higher-order operators


def flex(block: Program, h: Tensor) -> Tensor:
    q = (h @ block.v).detach().view(1, 1, 6, 8)  # torch has no backward of this operator on a CPU
    return (flex_attention(q, q * 2, q + 1).view(6, 8) * h).sin()


def cond(block: Program, h: Tensor) -> Tensor:
    value = torch.cond((h.sum() > 0).detach(), lambda t: t.sin() * 2, lambda t: t.cos() * 3, (h @ block.v,))
    return (value + 1).sin()


@both
@pytest.mark.parametrize("body", [flex, cond])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_higher_order_operators_are_opaque(body: Any, mode: Any) -> None:
    torch._dynamo.reset()
    report = compare(lambda: stack(body), mode)
    if body is flex:
        assert any("higher-order" in why for why in never(report).values())


# -------------------------------------------------------------------- errors and threads


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@both
def test_an_exception_in_forward_leaves_no_mode_behind(error: type[BaseException], mode: Any) -> None:
    failing = True

    def body(block: Program, h: Tensor) -> Tensor:
        out = (h @ block.v).sin()
        if failing:
            raise error("stop")
        return out + 1

    model, plain = stack(body), stack(body)
    with actmem.apply(model, mode) as applied:
        with modes_unchanged(), pytest.raises(error):
            model(batch())
        failing = False
        assert_same_bits(outcome(plain, batch(), simple_step), outcome(model, batch(), simple_step))
        applied.check_replay()
        assert_same_bits(outcome(plain, batch(), simple_step), outcome(model, batch(), simple_step))
        assert applied.report().num_replayed > 0


def test_two_threads_may_run_backward_on_one_tape() -> None:
    def body(block: Program, h: Tensor) -> Any:
        shared = h
        for _ in range(20):
            shared = (shared * 1.01).sin()
        return tuple((shared * (n + 1)).cos() @ block.v for n in range(4))

    def gradients(model: nn.Module, threads: bool) -> list[Tensor]:
        x = batch()
        outs = model(x)
        found: list[Any] = [None] * len(outs)

        def run(n: int) -> None:
            (found[n],) = torch.autograd.grad(total(outs[n]), x, retain_graph=True)

        if not threads:
            for n in range(len(outs)):
                run(n)
            return found
        barrier = threading.Barrier(len(outs))
        workers = [threading.Thread(target=lambda n=n: (barrier.wait(), run(n))) for n in range(len(outs))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return found

    model = stack(body, num_blocks=1)
    plain = gradients(model, threads=False)
    with actmem.apply(model, RECOMPUTE, blocks="0") as applied:
        for attempt in range(30):
            found = gradients(model, threads=True)
            assert all(b is not None and torch.equal(a, b) for a, b in zip(plain, found, strict=True)), attempt
        assert applied.report().num_replayed > 0
