"""One rank's part of a job: a model, parallelized by torch's own functions as a layout says, and its training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from actmem.catalogue import IGNORED, following_tokens
from actmem.distributedcompat import fewer_microbatches
from actmem.errors import ModeError
from actmem.layout import Layout
from actmem.modes import check_optimizer
from actmem.parallelism.context_ring import place_on_ring, sequence_part
from actmem.parallelism.expert_exchange import SpreadExperts, spread_experts
from actmem.parallelism.model_parts import Parts
from actmem.parallelism.rank_meshes import Meshes, meshes_of
from actmem.parallelism.stage_modules import Cut, Stage, cuts_on_rank, stage_of
from actmem.parallelism.tensor_plans import divide_tensors
from actmem.profiling import loss_of

__all__ = ["RankJob", "build_job"]

Batch = dict[str, Any] | tuple[Any, ...]
_FEW = 2
"""Microbatches of a shortened step: with fewer, gradients are not added up."""


@dataclass(frozen=True)
class RankJob:
    """What one rank trains."""

    model: nn.Module
    """The model, or the stages of a pipeline that are on this rank."""
    optimizer: torch.optim.Optimizer | None
    step: Callable[[], object]
    """One whole training step."""


def build_job(
    parts: Parts,
    example: Batch,
    layout: Layout,
    *,
    optimizer: str | None = "adamw",
    together: bool | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    blocks: Sequence[str] = (),
    cuts: Sequence[Cut] | None = None,
    place: Callable[[nn.Module], nn.Module] = copy.deepcopy,
    shortens_first: bool = False,
) -> RankJob:
    """Build this rank's part of a job. The default process group must have as many ranks as the layout.

    Args:
        parts: the model, which is left as it is.
        example: the batch of one rank and one microbatch.
        layout: how the job is spread over its ranks.
        optimizer: which optimizer, as for `profile`.
        together: whether it works on all parameters at once (`foreach`); None leaves it to torch.
        loss: a function of the output, as for `profile`.
        blocks: paths of the model's blocks.
        cuts: the stages on this rank, if they are not those that the layout gives it.
        place: makes the copy of a part of the model that is trained.
        shortens_first: let the first step have two microbatches at most. It leaves the same behind as a whole one:
            the optimizer's state, and buffers to receive all microbatches.
    """
    check_optimizer(optimizer, names_only="each rank makes its own")
    meshes = meshes_of(layout)
    length = 0
    if meshes.cp is not None:
        if loss is not None:
            raise ModeError(
                "cp computes the loss of a language model over parts of a sequence, not that of a function. Omit loss."
            )
        length = _tokens(example)[0].shape[1]
        example, parts = _own_part(example, parts, meshes.cp)
    if meshes.pp is not None:
        if cuts is None:
            cuts = cuts_on_rank(parts, layout, meshes.pp.get_local_rank())
        options = (optimizer, together, length)
        return _pipeline(parts, example, layout, meshes, cuts, place, *options, shortens_first=shortens_first)
    model = place(parts.model)
    known: Any = model
    body = model if parts.body is None else model.get_submodule(parts.body)
    _divide(body, getattr(known, "lm_head", None), parts, layout, meshes, length)
    _shard(model, [model.get_submodule(path) for path in blocks], layout, meshes)
    trained = _optimizer(model, optimizer, together)
    is_short = shortens_first

    def step() -> None:
        nonlocal is_short
        count, is_short = min(layout.microbatches, _FEW) if is_short else layout.microbatches, False
        for _ in range(count):
            if layout.cp > 1:
                ids, labels = _tokens(example)
                out: Any = model(ids)
                value = parts.loss(out.logits, labels)
            else:
                out = model(**example) if isinstance(example, dict) else model(*example)
                value = loss_of(out, loss)
            (value if layout.microbatches == 1 else value / layout.microbatches).backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
            del out, value
        _finish(trained)

    return RankJob(model, trained, step)


def _own_part(example: Batch, parts: Parts, mesh: DeviceMesh) -> tuple[Batch, Parts]:
    """Return this rank's part of a batch, with the tokens that follow as labels, and a model with a loss for them."""
    ids, labels = _tokens(example)
    following = following_tokens(labels)
    num_labels = int((following != IGNORED).sum())
    index, size = mesh.get_local_rank(), mesh.size()
    part = {"input_ids": sequence_part(ids, index, size), "labels": sequence_part(following, index, size)}
    # FSDP2 takes the mean over these ranks, each of which has a part of the sum.
    return part, replace(parts, labels_of_mean=num_labels / size)


def _divide(body: nn.Module, head: nn.Module | None, parts: Parts, layout: Layout, meshes: Meshes, length: int) -> None:
    """Divide matrices, experts and positions over the ranks that share them."""
    if meshes.cp is not None:
        place_on_ring(body, length, meshes.cp.get_group())
    if meshes.tp is not None:
        divide_tensors(body, head, meshes.tp, sequence=layout.sequence_parallel, built_in=parts.is_built_in)
    if meshes.ep is not None:
        spread_experts(body, meshes.ep)


def _shard(model: nn.Module, layers: Sequence[nn.Module], layout: Layout, meshes: Meshes) -> None:
    """Apply FSDP2 to the experts of each layer if they are spread, to each layer, and to the model for what is left."""
    if meshes.shard is None:
        return
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, SpreadExperts):
                assert meshes.experts is not None
                _shard_experts(module, layout, meshes.experts)
        fully_shard(layer, mesh=meshes.shard, reshard_after_forward=layout.reshard_after_forward)
    # After its own forward the outermost unit stays gathered, as is torch's default: its backward follows at once.
    fully_shard(model, mesh=meshes.shard, reshard_after_forward=None if layout.reshard_after_forward else False)


def _shard_experts(module: SpreadExperts, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard this rank's experts over the ranks that have the same ones, as torchtitan does."""
    over = mesh.size(mesh.ndim - 1)
    by_columns = over > len(module.down_proj) and all(p.shape[1] % over == 0 for p in module.parameters())
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=layout.reshard_after_forward,
        shard_placement_fn=(lambda _: Shard(1)) if by_columns else None,
    )
    # They see the tokens of all ranks that the experts are spread over, whose gradients count like those of others.
    sharded: Any = module
    sharded.set_gradient_divide_factor(float(layout.dp_replicate * layout.dp_shard * layout.cp))
    # Where they are divided over one rank, torch divides the gradients itself, and would do so again after the sum.
    sharded.set_force_sum_reduction_for_comms(over > 1)


def _optimizer(model: nn.Module, name: str | None, together: bool | None) -> torch.optim.Optimizer | None:
    trained = [p for p in model.parameters() if p.requires_grad]
    match name:
        case None:
            return None
        case "adamw":
            return torch.optim.AdamW(trained, foreach=together)
        case "adamw_fused":
            return torch.optim.AdamW(trained, fused=True)
        case "adam":
            return torch.optim.Adam(trained, foreach=together)
        case _:
            return torch.optim.SGD(trained, foreach=together)


def _finish(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        optimizer.zero_grad()


def _pipeline(
    parts: Parts,
    example: Batch,
    layout: Layout,
    meshes: Meshes,
    cuts: Sequence[Cut],
    place: Callable[[nn.Module], nn.Module],
    optimizer: str | None,
    together: bool | None,
    whole: int,
    *,
    shortens_first: bool,
) -> RankJob:
    """Build the stages of this rank, and the schedule that runs them."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert meshes.pp is not None
    ids, labels = _tokens(example)
    rows, length = ids.shape
    indices = [cut.index for cut in cuts]
    stages: list[Any] = []
    modules: list[nn.Module] = []
    for index, cut in zip(indices, cuts, strict=True):
        module = cast("Stage", place(stage_of(parts, cut, length)))
        _divide(module.model, module.lm_head, parts, layout, meshes, whole)
        layers = cast("Any", module.model).layers
        _shard(module, list(layers), layout, meshes)
        modules.append(module)
        hidden, logits = _between(parts, layout, rows, length)
        stages.append(
            PipelineStage(
                module,
                index,
                layout.num_stages,
                torch.device("cpu"),
                input_args=(torch.empty(ids.shape, dtype=ids.dtype, device="meta") if index == 0 else hidden,),
                output_args=(logits if index == layout.num_stages - 1 else hidden,),
                group=meshes.pp.get_group(),
            )
        )
    kind: Any = get_schedule_class(layout.schedule)
    run = kind(stages if layout.virtual > 1 else stages[0], layout.microbatches, loss_fn=parts.loss)
    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    trained = _optimizer(model, optimizer, together)
    is_last = layout.num_stages - 1 in indices
    batches = tuple(tokens.repeat(layout.microbatches, 1) for tokens in (ids, labels))

    def run_one(given: Tensor, wanted: Tensor) -> None:
        tokens = (given,) if 0 in indices else ()
        run.step(*tokens, **({"target": wanted, "losses": []} if is_last else {}), return_outputs=False)
        _finish(trained)

    is_short = shortens_first and layout.virtual == 1 and layout.microbatches > _FEW

    def step() -> None:
        nonlocal is_short
        if is_short:
            is_short = False
            with fewer_microbatches(run, _FEW, (ids,) * (0 in indices), labels if is_last else None):
                run_one(*(tokens.repeat(_FEW, 1) for tokens in (ids, labels)))
        else:
            run_one(*batches)

    return RankJob(model, trained, step)


def _between(parts: Parts, layout: Layout, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return what stages send to each other, and what the last one returns, on the meta device."""
    head: nn.Linear = cast("Any", parts.model).lm_head
    positions = length // layout.tp if layout.sequence_parallel else length
    sizes = ((rows, positions, head.in_features), (rows, length, head.out_features))
    hidden, logits = (torch.empty(s, dtype=head.weight.dtype, device="meta", requires_grad=True) for s in sizes)
    return hidden, logits


def _tokens(example: Batch) -> tuple[Tensor, Tensor]:
    if not isinstance(example, dict) or not {"input_ids", "labels"} <= example.keys():
        raise ModeError(
            "a pipeline, and a ring of ranks, needs a batch of tokens: {'input_ids': ..., 'labels': ...}. For other "
            "batches, build the job yourself: actmem.profile_rank(build, world=N)."
        )
    return example["input_ids"], example["labels"]
