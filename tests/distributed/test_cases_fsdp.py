"""Sharded and replicated training on two real ranks: bitwise what the same ranks give without actmem."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
from tests.distributed.ranks import NUM_RANKS, Outcomes, assert_same, run
from tests.distributed.ranks import train as train_on
from tests.engine.cases import MODES, Operators, replayed


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


def train(
    model: nn.Module, rank: int, num_steps: int = 2, before: Callable[[int], Any] = lambda _: nullcontext()
) -> list[Any]:
    return train_on(model, batch(rank), num_steps, before)


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

CASES = (
    *(fsdp_blocks, fsdp_blocks_applied_first, fsdp_unit_nested_in_a_block, fsdp_unit_nested_in_a_block_applied_first),
    *(fsdp_with_bfloat16, all_reduce_in_a_function),
    *(ddp, ddp_find_unused_parameters, ddp_static_graph, ddp_bucket_view, ddp_no_sync),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(CASES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [c.__name__ for c in CASES])
def test_two_ranks(name: str, outcomes: Outcomes) -> None:
    assert outcomes[name] == ["", ""], "\n".join(outcomes[name])
