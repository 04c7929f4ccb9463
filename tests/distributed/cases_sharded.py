"""Cases of FSDP2 and DDP round models with attention and experts, `apply` first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import actmem
from tests.distributed.models import Moe, stack, tokens
from tests.distributed.ranks import MODES, NUM_RANKS, assert_same, check_modes, train

MOE_MODES = {**MODES, "Targets": actmem.Targets(["routed_experts"])}
GATHER, SCATTER = "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"


def shard(model: nn.Module, *, experts: bool = False, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model:
        if experts:
            fully_shard(block.mlp.experts, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_gathers_once_round_dense_blocks(rank: int) -> None:
    issued = check_modes(stack, tokens(rank), finish=shard)
    assert issued[GATHER] == 3 * 2 * 2  # steps, blocks, forward and backward
    assert issued[SCATTER] == 3 * 2


def fsdp_gathers_once_round_experts_sharded_inside_the_block(rank: int) -> None:
    issued = check_modes(
        lambda: stack(mlp=Moe), tokens(rank), modes=MOE_MODES, finish=lambda model: shard(model, experts=True)
    )
    assert issued[GATHER] == 3 * 4 * 2  # steps, units, forward and backward
    assert issued[SCATTER] == 3 * 4


def fsdp_with_experts_kept_gathered(rank: int) -> None:
    check_modes(
        lambda: stack(mlp=Moe),
        tokens(rank),
        modes=MOE_MODES,
        finish=lambda model: shard(model, experts=True, reshard_after_forward=False),
    )


def fsdp_in_bfloat16_round_experts(rank: int) -> None:
    check_modes(
        lambda: stack(mlp=Moe),
        tokens(rank),
        modes=MOE_MODES,
        finish=lambda model: shard(model, experts=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    )


def ddp_reduces_once_round_experts(rank: int) -> None:
    issued = check_modes(lambda: stack(mlp=Moe), tokens(rank), modes=MOE_MODES, finish=DistributedDataParallel)
    assert issued["c10d.allreduce_.default"] == 3


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model:
        block.compile(backend="aot_eager")
    return model


def compiled_blocks_under_fsdp(rank: int, *, first: bool) -> None:
    torch.compiler.reset()
    plain = train(shard(compile_blocks(stack())), tokens(rank), 3)
    for mode in MODES.values():
        torch.compiler.reset()
        model = stack()
        if first:
            applied = actmem.apply(model, mode)
            compile_blocks(model)
        else:
            compile_blocks(model)
            applied = actmem.apply(model, mode)
        assert_same(plain, train(shard(model), tokens(rank), 3))
        assert applied.report().compiled
        assert not applied.report().kinds  # nothing ran in eager


def fsdp_round_blocks_compiled_after_apply(rank: int) -> None:
    compiled_blocks_under_fsdp(rank, first=True)


def fsdp_round_blocks_compiled_before_apply(rank: int) -> None:
    compiled_blocks_under_fsdp(rank, first=False)


DEFAULT = (fsdp_gathers_once_round_dense_blocks, fsdp_gathers_once_round_experts_sharded_inside_the_block)
SLOW = (
    fsdp_round_blocks_compiled_after_apply,
    fsdp_round_blocks_compiled_before_apply,
    fsdp_with_experts_kept_gathered,
    fsdp_in_bfloat16_round_experts,
    ddp_reduces_once_round_experts,
)
