"""Logits and MLPs in pieces of tokens on two ranks, under FSDP2, and beside MLPs that are divided over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import actmem
from tests.distributed.ranks import NUM_RANKS, gradients, run

CLASSES = 128
SPLIT = actmem.Split(loss=8, parts={"mlp": 4})


def model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=CLASSES)).double().train()


def ids(rank: int) -> Tensor:
    return torch.randint(0, CLASSES, (2, 32), generator=torch.Generator().manual_seed(rank))


def sharded_by_fsdp2(rank: int) -> None:
    _sharded(rank, outside=False)


def sharded_by_fsdp2_with_a_loss_of_ones_own(rank: int) -> None:
    _sharded(rank, outside=True)


def _sharded(rank: int, *, outside: bool) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))

    def trained(split: actmem.Split | None) -> tuple[Tensor, dict[str, Tensor | None], Any]:
        built = model()
        applied = actmem.apply(built, actmem.Full(), split=split)
        for layer in built.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(built, mesh=mesh)
        if outside:
            logits = built(input_ids=ids(rank)).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids(rank).flatten())
        else:
            loss = built(input_ids=ids(rank), labels=ids(rank)).loss
        loss.backward()
        return loss.detach(), gradients(built), applied.report().notes

    plain_loss, plain, _ = trained(None)
    loss, found, notes = trained(SPLIT)
    assert "lm_head: logits in 8 chunks of tokens, for cross_entropy." in notes, notes
    assert "model.layers.0.mlp and 1 more: forward and backward in 4 pieces of tokens." in notes, notes
    assert not any("whole tensor" in note for note in notes), notes
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8)


def mlps_divided_over_ranks_run_as_a_whole_with_a_note(rank: int) -> None:
    from torch.distributed.tensor.parallel import RowwiseParallel

    mesh = init_device_mesh("cpu", (NUM_RANKS,))

    def trained(split: actmem.Split | None) -> tuple[dict[str, Tensor | None], Any]:
        built: nn.Module = model()
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for layer in built.model.layers:  # pyright: ignore[reportAttributeAccessIssue, reportGeneralTypeIssues]
            parallelize_module(layer.mlp, mesh, plan)
        with actmem.apply(built, actmem.Full(), split=split) as applied:
            built(input_ids=ids(0), labels=ids(0)).loss.backward()
            return gradients(built), applied.report().notes

    plain, _ = trained(None)
    found, notes = trained(actmem.Split(parts={"mlp": 4}))
    assert any("did not run in pieces" in note and "hooks" in note for note in notes), notes
    for name, gradient in plain.items():
        assert torch.equal(found[name], gradient), name  # pyright: ignore[reportArgumentType]


CASES = (
    sharded_by_fsdp2,
    sharded_by_fsdp2_with_a_loss_of_ones_own,
    mlps_divided_over_ranks_run_as_a_whole_with_a_note,
)


def test_two_ranks_split_alike(tmp_path: Path) -> None:
    outcomes = run(CASES, tmp_path)
    assert outcomes == {case.__name__: ["", ""] for case in CASES}, "\n".join(
        t for each in outcomes.values() for t in each
    )
