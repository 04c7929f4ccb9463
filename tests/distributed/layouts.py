"""Parallel training jobs, as a user's code would build them: each returns a model, its optimizer and one step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.dispatch import DropLess, GatheredCounts, Routed, WithCapacity, forced
from tests.distributed.ring import Ring, ring_of_operators

WIDTH, HEAD, VOCABULARY = 64, 16, 100
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Job:
    """One rank's part of a training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, kernel: Kernel = causal) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(self.kernel(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """One expert per rank: tokens travel to it and back, in equal parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.expert, self.group, self.num_ranks = Mlp(), group, group.size()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        parts = [rows.shape[0] // self.num_ranks] * self.num_ranks
        there = all_to_all_single_autograd(rows, parts, parts, self.group)
        back = all_to_all_single_autograd(self.expert(there), parts, parts, self.group)
        return back.view_as(x)


class Block(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = Mlp, dropout: float = 0.0, kernel: Kernel = causal) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(kernel), mlp()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.attn_norm(x)))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, num_blocks: int = 3, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(**options) for _ in range(num_blocks)])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits: Any, ids: Tensor) -> Tensor:
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def trained(
    model: nn.Module,
    *,
    num_parts: int = 1,
    clip: bool = False,
    context: dist.ProcessGroup | None = None,
    finish: Callable[[], None] = lambda: None,
) -> Job:
    """Return a job that trains on two sequences, one after the other if there are two parts.

    Args:
        model: the model.
        num_parts: in how many microbatches.
        clip: clip gradients.
        context: the ranks that the sequences are spread over.
        finish: what is done with gradients.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(2 * 32).reshape(2, 32) % VOCABULARY
    if context is not None:
        ids = ids.chunk(context.size(), 1)[context.rank()]

    def step() -> None:
        for part in ids.chunk(num_parts):
            (loss_of(model(part), part) / num_parts).backward()
        finish()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Job(model, optimizer, step)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options)


def shard(model: nn.Module, mesh: DeviceMesh, *, nested: bool = False, **options: Any) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        if nested:
            fully_shard(layer.get_submodule("mlp"), mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def block_plan(out: Any, *, sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {
        **{f"self_attn.{name}": ColwiseParallel() for name in "qkv"},
        "self_attn.o": RowwiseParallel(output_layouts=out, use_local_output=not sequence),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=out, use_local_output=not sequence),
    }
    if sequence:
        gathers: Any = PrepareModuleInput(input_layouts=(out,), desired_input_layouts=(Replicate(),))
        plan |= {"attn_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan |= {"self_attn": gathers, "mlp": gathers}
    return plan


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    out: Any = Shard(1) if sequence else Replicate()
    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh, block_plan(out, sequence=sequence))
    outside: dict[str, Any] = {"head": ColwiseParallel(input_layouts=out, output_layouts=Replicate())}
    if sequence:
        outside["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=out, use_local_output=False)
        outside["norm"] = SequenceParallel()
    parallelize_module(model, mesh, outside)
    return model


# -------------------------------------------------------------------- jobs of two ranks


def fsdp() -> Job:
    return trained(shard(decoder(), init_device_mesh("cpu", (2,))), clip=True)


def fsdp_that_stays_gathered() -> Job:
    return trained(shard(decoder(), init_device_mesh("cpu", (2,)), reshard_after_forward=False))


def fsdp_in_half_precision() -> Job:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(shard(decoder(), init_device_mesh("cpu", (2,)), mp_policy=policy))


def fsdp_in_nested_units() -> Job:
    return trained(shard(decoder(), init_device_mesh("cpu", (2,)), nested=True), num_parts=2)


def fsdp_with_dropout() -> Job:
    return trained(shard(decoder(dropout=0.1), init_device_mesh("cpu", (2,))))


def tensors() -> Job:
    return trained(tensor_parallel(decoder(), init_device_mesh("cpu", (2,)), sequence=False))


def sequences() -> Job:
    return trained(tensor_parallel(decoder(), init_device_mesh("cpu", (2,)), sequence=True))


def experts() -> Job:
    mesh = init_device_mesh("cpu", (2,))
    return trained(decoder(mlp=lambda: Experts(mesh.get_group())))


def routed(how: type[Routed], kind: str) -> Job:
    """Return a job with four experts on all ranks, two for each token. Which ones is forced: see `dispatch.forced`."""
    group = init_device_mesh("cpu", (dist.get_world_size(),)).get_group()
    layers = itertools.count()
    model = decoder(mlp=lambda: how(forced(kind, group.rank(), next(layers), 2 * 32), WIDTH, group, Mlp))
    return trained(model)


def routed_by_chance() -> Job:
    return routed(DropLess, "chance")


def routed_to_the_first() -> Job:
    return routed(DropLess, "first")


def routed_to_the_last() -> Job:
    return routed(DropLess, "last")


def routed_with_gathered_counts() -> Job:
    return routed(GatheredCounts, "chance")


def routed_with_capacity() -> Job:
    return routed(WithCapacity, "chance")


def ring() -> Job:
    """Context parallel, with parameters sharded over the same ranks."""
    mesh = init_device_mesh("cpu", (2,))
    group = mesh.get_group()
    model = decoder(kernel=lambda q, k, v: Ring.apply(q, k, v, group))
    return trained(shard(model, mesh), context=group)


def operator_ring() -> Job:
    """Context parallel by operators that autograd knows, with whole parameters on each rank."""
    group = init_device_mesh("cpu", (2,)).get_group()
    model = decoder(kernel=lambda q, k, v: ring_of_operators(q, k, v, group))

    def finish() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)

    return trained(model, context=group, finish=finish)


# -------------------------------------------------------------------- jobs of four ranks


def hybrid() -> Job:
    return trained(shard(decoder(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))


def fsdp_and_tensors() -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    return trained(shard(tensor_parallel(decoder(), mesh["tensor"], sequence=True), mesh["shard"]))


def fsdp_and_experts() -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    model = decoder(mlp=lambda: Experts(mesh["expert"].get_group()))
    return trained(shard(model, mesh["shard"]))


def fsdp_and_ring() -> Job:
    """Two rings of two ranks; parameters are sharded over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "context"))
    group = mesh["context"].get_group()
    model = decoder(kernel=lambda q, k, v: Ring.apply(q, k, v, group))
    return trained(shard(model, mesh["shard", "context"]._flatten("both")), context=group)


# -------------------------------------------------------------------- pipelines


class Stage(nn.Module):
    """Some blocks of the decoder, with its embedding or its head where it begins or ends."""

    def __init__(self, whole: Decoder, index: int, num_stages: int) -> None:
        super().__init__()
        num_blocks = len(whole.layers) // num_stages
        self.embed = whole.embed if index == 0 else None
        self.layers = whole.layers[index * num_blocks : (index + 1) * num_blocks]
        last = index == num_stages - 1
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline(schedule: Any, num_here: int = 1, *, order: str = "loop") -> Job:
    """Return a job whose stages are spread over all ranks, a number of them here."""
    return piped(schedule, num_here, dist.get_world_size(), dist.get_rank(), None, order=order)


def piped(
    schedule: Any,
    num_here: int,
    num_ranks: int,
    rank: int,
    group: Any,
    *,
    order: str = "loop",
    finish: Callable[[nn.Module], nn.Module] = lambda stage: stage,
) -> Job:
    """Return a job of some stages of a pipeline, that trains on four microbatches."""
    num_stages, num_parts, rows = num_here * num_ranks, 4, 2
    whole = decoder(num_blocks=2 * num_stages)
    indices = [rank + n * num_ranks for n in range(num_here)]
    if order == "v":
        indices = [rank, num_stages - 1 - rank]
    hidden = torch.empty(rows, 32, WIDTH, device="meta", requires_grad=True)
    tokens = torch.empty(rows, 32, dtype=torch.int64, device="meta")
    logits = torch.empty(rows, 32, VOCABULARY, device="meta", requires_grad=True)
    ids = torch.arange(num_parts * rows * 32).reshape(num_parts * rows, 32) % VOCABULARY
    modules = nn.ModuleList([finish(Stage(whole, index, num_stages)) for index in indices])
    stages = [
        PipelineStage(
            module,
            index,
            num_stages,
            torch.device("cpu"),
            input_args=(tokens if index == 0 else hidden,),
            output_args=(logits if index == num_stages - 1 else hidden,),
            group=group,
        )
        for index, module in zip(indices, modules, strict=True)
    ]
    run = schedule(stages[0] if num_here == 1 else stages, num_parts, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(modules.parameters())

    def step() -> None:
        given = (ids,) if 0 in indices else ()
        wanted = {"target": ids, "losses": []} if num_stages - 1 in indices else {}
        run.step(*given, **wanted)
        optimizer.step()
        optimizer.zero_grad()

    return Job(modules, optimizer, step)


def pipeline_1f1b() -> Job:
    return pipeline(Schedule1F1B)


def pipeline_gpipe() -> Job:
    return pipeline(ScheduleGPipe)


def pipeline_interleaved() -> Job:
    return pipeline(ScheduleInterleaved1F1B, 2)


def pipeline_looped() -> Job:
    return pipeline(ScheduleLoopedBFS, 2)


def pipeline_interleaved_zero_bubble() -> Job:
    return pipeline(ScheduleInterleavedZeroBubble, 2)


def pipeline_zero_bubble_in_a_v() -> Job:
    return pipeline(ScheduleZBVZeroBubble, 2, order="v")


def pipeline_dual_in_a_v() -> Job:
    return pipeline(ScheduleDualPipeV, 2, order="v")


def pipeline_of_shards() -> Job:
    """Two stages, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    return piped(Schedule1F1B, 1, 2, mesh["stage"].get_local_rank(), mesh["stage"].get_group(), finish=sharding(mesh))


def pipeline_of_shards_and_tensors() -> Job:
    """Two stages, each sharded over two times two ranks, of which two divide the matrices."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "shard", "tensor"))
    shards = sharding(mesh)

    def finish(stage: nn.Module) -> nn.Module:
        for layer in stage.get_submodule("layers").children():
            parallelize_module(layer, mesh["tensor"], block_plan(Replicate(), sequence=False))
        return shards(stage)

    return piped(Schedule1F1B, 1, 2, mesh["stage"].get_local_rank(), mesh["stage"].get_group(), finish=finish)


def sharding(mesh: DeviceMesh) -> Callable[[nn.Module], nn.Module]:
    def finish(stage: nn.Module) -> nn.Module:
        return shard(stage, mesh["shard"], reshard_after_forward=False)

    return finish


PIPELINES = (
    *(pipeline_1f1b, pipeline_gpipe, pipeline_interleaved, pipeline_looped),
    *(pipeline_interleaved_zero_bubble, pipeline_zero_bubble_in_a_v, pipeline_dual_in_a_v),
)
TWO = (
    *(fsdp, fsdp_that_stays_gathered, fsdp_in_half_precision, fsdp_in_nested_units, fsdp_with_dropout),
    *(tensors, sequences, experts, ring, operator_ring),
)
ROUTED = (routed_by_chance, routed_to_the_first, routed_to_the_last, routed_with_gathered_counts)
FOUR = (hybrid, fsdp_and_tensors, fsdp_and_experts, fsdp_and_ring, pipeline_of_shards)
EIGHT = (pipeline_of_shards_and_tensors,)
