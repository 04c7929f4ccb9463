"""Cases of pipeline parallel: a split backward, interleaved stages, microbatches of different length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import Schedule1F1B

import actmem
from tests.distributed.models import HEAD, WIDTH, Counted, stack, tokens
from tests.distributed.ranks import MODES, NUM_RANKS, assert_same, gradients
from tests.engine.cases import Operators

NUM_MICROBATCHES = 4


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target, reduction="sum")


# -------------------------------------------------------------------- schedules of torch


def run_schedule(
    stages: list[tuple[int, nn.Module]], num_stages: int, kind: Any, counts: AbstractContextManager[Any]
) -> list[Any]:
    """Train two steps with one of torch's schedules, the second with `counts` entered. Return losses and gradients."""
    made = [PipelineStage(module, index, num_stages, torch.device("cpu")) for index, module in stages]
    single = kind is Schedule1F1B
    schedule = kind(made[0] if single else made, n_microbatches=NUM_MICROBATCHES, loss_fn=loss)
    first, last = (any(index == end for index, _ in stages) for end in (0, num_stages - 1))
    found: list[Any] = []
    for n in range(2):
        x, target = tokens(n, num_rows=2 * NUM_MICROBATCHES), tokens(n + 7, num_rows=2 * NUM_MICROBATCHES)
        losses: list[Tensor] = []
        given = [x] if first else []
        wanted: dict[str, Any] = {"target": target, "losses": losses} if last else {}
        with counts if n else nullcontext():
            schedule.step(*given, **wanted, return_outputs=False)
        every = {f"{i}.{name}": g for i, module in stages for name, g in gradients(module).items()}
        found.append((torch.stack(losses).detach() if losses else torch.zeros(()), every))
        for _, module in stages:
            module.zero_grad()
    return found


def check_schedule(kind: Any, indices: tuple[int, ...], num_stages: int) -> None:
    """Assert that a schedule gives the same bits with each stage applied, and enters each block once a microbatch."""

    def build() -> list[tuple[int, nn.Module]]:
        return [(index, stack(seed=index, kind=Counted)) for index in indices]

    def calls(stages: list[tuple[int, nn.Module]]) -> list[int]:
        return [block.num_calls for _, module in stages for block in module]

    stages = build()
    plain = run_schedule(stages, num_stages, kind, nullcontext())
    plain_calls = calls(stages)
    for name in ("Full", "Selective"):
        stages = build()
        for _, module in stages:
            actmem.apply(module, MODES[name])
        counts = Operators()
        assert_same(plain, run_schedule(stages, num_stages, kind, counts))
        # Torch enters each stage once more, before the first step, to learn its shapes.
        assert calls(stages) == plain_calls == [2 * NUM_MICROBATCHES + 1] * len(plain_calls)
        # Once for each microbatch and block, although backward goes through the graph in two parts.
        assert counts.replayed["aten.silu.default"] == NUM_MICROBATCHES * len(plain_calls)


def zero_bubble_pipeline_enters_blocks_once(rank: int) -> None:
    check_schedule(ScheduleInterleavedZeroBubble, (rank, rank + 2), 4)


def v_shaped_zero_bubble_pipeline_enters_blocks_once(rank: int) -> None:
    check_schedule(ScheduleZBVZeroBubble, (rank, 3 - rank), 4)


def pipeline_of_one_forward_one_backward_enters_blocks_once(rank: int) -> None:
    check_schedule(Schedule1F1B, (rank,), 2)


# -------------------------------------------------------------------- microbatches of different length

LENGTHS = (6, 9, 4, 9, 12, 6)


def one_forward_one_backward(rank: int, stage: nn.Module) -> list[Any]:
    """Train one step of a pipeline of two ranks, with a microbatch of each length. Return the losses and gradients.

    torch's schedules want all microbatches of a step to be of one shape.
    """
    waiting: list[tuple[Tensor, Tensor]] = []
    sent: list[tuple[Tensor, Any]] = []
    losses: list[Tensor] = []

    def forward(n: int) -> None:
        shape = (2, LENGTHS[n], WIDTH)
        if rank == 0:
            x = tokens(n, length=LENGTHS[n])
            out = stage(x)
            sent.append((out, dist.isend(out.detach(), 1)))
        else:
            x = torch.empty(shape)
            dist.recv(x, 0)
            x.requires_grad_()
            out = loss(stage(x), tokens(n + 7, length=LENGTHS[n]))
            losses.append(out.detach())
        waiting.append((x, out))

    def backward() -> None:
        x, out = waiting.pop(0)
        if rank == 0:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            out.backward()
            assert x.grad is not None
            sent.append((x.grad, dist.isend(x.grad, 0)))

    warm = NUM_RANKS - 1 - rank
    for n in range(warm):
        forward(n)
    for n in range(warm, len(LENGTHS)):
        forward(n)
        backward()
    for _ in range(warm):
        backward()
    for _, work in sent:
        work.wait()
    found = [(torch.stack(losses) if losses else torch.zeros(()), gradients(stage))]
    stage.zero_grad()
    return found


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * HEAD**-0.5
    return scores.softmax(-1) @ v


def compiled_kernel() -> tuple[Callable[..., Tensor], Any]:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(plain_attention, backend=counter), counter


def microbatches_of_different_length_with_compiled_attention(rank: int) -> None:
    kernel, counter = compiled_kernel()
    stage = stack(seed=rank, kernel=kernel, kind=Counted)
    plain = [*one_forward_one_backward(rank, stage), *one_forward_one_backward(rank, stage)]
    assert counter.frame_count == 2  # the first length, then one graph for any
    for mode in (*MODES.values(),):
        kernel, counter = compiled_kernel()
        stage = stack(seed=rank, kernel=kernel, kind=Counted)
        applied = actmem.apply(stage, mode)
        assert_same(plain, [*one_forward_one_backward(rank, stage), *one_forward_one_backward(rank, stage)])
        assert counter.frame_count == 2
        assert [block.num_calls for block in stage] == [2 * len(LENGTHS)] * 2
        assert applied.report().num_replayed > 0


def microbatches_of_different_length_with_compiled_blocks(rank: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    def compile_blocks(stage: nn.Module) -> Any:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        for block in stage:
            block.compile(backend=counter)
        return counter

    stage = stack(seed=rank)
    plain_counter = compile_blocks(stage)
    plain = [*one_forward_one_backward(rank, stage), *one_forward_one_backward(rank, stage)]
    for mode in MODES.values():
        stage = stack(seed=rank)
        applied = actmem.apply(stage, mode)
        counter = compile_blocks(stage)
        assert_same(plain, [*one_forward_one_backward(rank, stage), *one_forward_one_backward(rank, stage)])
        assert counter.frame_count == plain_counter.frame_count > 0
        assert applied.report().compiled


DEFAULT = (zero_bubble_pipeline_enters_blocks_once,)
SLOW = (
    microbatches_of_different_length_with_compiled_attention,
    microbatches_of_different_length_with_compiled_blocks,
    v_shaped_zero_bubble_pipeline_enters_blocks_once,
    pipeline_of_one_forward_one_backward_enters_blocks_once,
)
