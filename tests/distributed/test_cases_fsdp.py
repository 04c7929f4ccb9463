"""Sharded and replicated training on two real ranks: bitwise what the same ranks give without actmem."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import actmem
from tests.engine.cases import MODES, Operators, replayed

NUM_RANKS = 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.mix = nn.LayerNorm(8), Mlp(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return x + torch.tanh(self.mix((x * 2).sin()))


def build(num_blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)])


def batch(rank: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 + rank))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    def local(t: Any) -> Tensor:
        return t.to_local() if hasattr(t, "to_local") else t

    return {n: None if p.grad is None else local(p.grad).clone() for n, p in model.named_parameters()}


def train(
    model: nn.Module, rank: int, num_steps: int = 2, before: Callable[[int], Any] = lambda _: nullcontext()
) -> list[Any]:
    found: list[Any] = []
    for n in range(num_steps):
        with before(n):
            loss = model(batch(rank) * (n + 1)).square().sum()
            loss.backward()
        found.append((loss.detach(), gradients(model)))
        if n % 2:
            model.zero_grad()
    return found


def assert_same(plain: list[Any], managed: list[Any]) -> None:
    for (loss, grads), (other_loss, other_grads) in zip(plain, managed, strict=True):
        assert torch.equal(loss, other_loss)
        assert grads.keys() == other_grads.keys()
        assert any(g is not None and g.any() for g in grads.values())
        for name, grad in grads.items():
            other = other_grads[name]
            assert (grad is None and other is None) or torch.equal(grad, other), name


# -------------------------------------------------------------------- FSDP


def shard(model: nn.Module, nested: bool, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model:
        if nested:
            fully_shard(block.mlp, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded(rank: int, *, nested: bool, first: bool, **options: Any) -> None:
    plain = train(shard(build(), nested, **options), rank)
    for mode in MODES.values():
        model = build()
        if first:  # before the model is sharded, or after
            applied = actmem.apply(model, mode)
            model = shard(model, nested, **options)
        else:
            model = shard(model, nested, **options)
            applied = actmem.apply(model, mode)
        assert_same(plain, train(model, rank))
        assert replayed(applied.report())["aten.tanh.default"] == 2
        applied.remove()
        assert_same(plain, train(shard(build(), nested, **options), rank))


def fsdp_blocks(rank: int) -> None:
    sharded(rank, nested=False, first=False)


def fsdp_blocks_applied_first(rank: int) -> None:
    sharded(rank, nested=False, first=True)


def fsdp_unit_nested_in_a_block(rank: int) -> None:
    sharded(rank, nested=True, first=False)


def fsdp_unit_nested_in_a_block_applied_first(rank: int) -> None:
    sharded(rank, nested=True, first=True)


def fsdp_with_bfloat16(rank: int) -> None:
    sharded(rank, nested=True, first=False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


# -------------------------------------------------------------------- collectives inside a block


class Reduced(torch.autograd.Function):
    """Sum over the ranks in place, as tensor parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return (Reduced.apply(self.down(h)) + 1).cos() + x


def all_reduce_in_a_function(rank: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(rank)
        return nn.Sequential(Parallel(), Parallel())

    plain = train(build(), rank)
    for mode in MODES.values():
        model = build()
        with actmem.apply(model, mode) as applied:
            operators = Operators()
            with operators:
                assert_same(plain, train(model, rank))
            assert operators.others["c10d.allreduce_.default"] == 2 * 2
            assert not any("c10d" in name for name in operators.replayed)
            assert replayed(applied.report())["aten.tanh.default"] == 2


# -------------------------------------------------------------------- DDP


def replicated(
    rank: int, *, before: Any = lambda model, n: nullcontext(), unused: bool = False, **options: Any
) -> None:
    def made() -> nn.Module:
        model = build()
        if unused:
            model[1].spare = nn.Linear(8, 8)
        return model

    plain_model = DistributedDataParallel(made(), **options)
    plain = train(plain_model, rank, 4, lambda n: before(plain_model, n))
    for mode in MODES.values():
        model = made()
        applied = actmem.apply(model, mode)
        wrapped = DistributedDataParallel(model, **options)
        assert_same(plain, train(wrapped, rank, 4, lambda n, wrapped=wrapped: before(wrapped, n)))
        assert replayed(applied.report())["aten.tanh.default"] == 2


def ddp(rank: int) -> None:
    replicated(rank)


def ddp_find_unused_parameters(rank: int) -> None:
    replicated(rank, find_unused_parameters=True, unused=True)


def ddp_static_graph(rank: int) -> None:
    replicated(rank, static_graph=True)


def ddp_bucket_view(rank: int) -> None:
    replicated(rank, gradient_as_bucket_view=True)


def ddp_no_sync(rank: int) -> None:
    replicated(rank, before=lambda model, n: model.no_sync() if n % 2 == 0 else nullcontext())


# -------------------------------------------------------------------- running them

CASES = {
    f.__name__: f
    for f in (
        *(
            fsdp_blocks,
            fsdp_blocks_applied_first,
            fsdp_unit_nested_in_a_block,
            fsdp_unit_nested_in_a_block_applied_first,
        ),
        *(fsdp_with_bfloat16, all_reduce_in_a_function),
        *(ddp, ddp_find_unused_parameters, ddp_static_graph, ddp_bucket_view, ddp_no_sync),
    )
}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        store = dist.FileStore(f"{folder}/{name}.store", NUM_RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=20))
        try:
            case(rank)
            text = ""
        except Exception:  # noqa: BLE001  # whatever it is, the test of this case shows it
            text = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(text)
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run every case on two ranks, each in a group of its own, and return what each rank reports."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, args=(str(folder),), nprocs=NUM_RANKS)
    return {name: [(folder / f"{name}.{rank}").read_text() for rank in range(NUM_RANKS)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, outcomes: dict[str, list[str]]) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])
