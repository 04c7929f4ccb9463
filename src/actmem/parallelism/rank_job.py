"""One rank's part of a job: a model, parallelized by torch's own functions as a layout says, and its training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from actmem.distributedcompat import fewer_microbatches
from actmem.errors import ModeError
from actmem.layout import Layout
from actmem.modes import check_optimizer
from actmem.parallelism.model_parts import Parts
from actmem.parallelism.stage_modules import Cut, Stage, cuts_on_rank, stage_of
from actmem.parallelism.tensor_plans import divide_tensors
from actmem.profiling import loss_of

__all__ = ["RankJob", "build_job"]

Batch = dict[str, Any] | tuple[Any, ...]
_DP = ("dp_replicate", "dp_shard")
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
    mesh = _mesh(layout)
    if layout.pp > 1:
        if cuts is None:
            cuts = cuts_on_rank(parts, layout, mesh["pp"].get_local_rank())
        return _pipeline(parts, example, layout, mesh, cuts, place, optimizer, together, shortens_first=shortens_first)
    model = place(parts.model)
    if layout.tp > 1:
        known: Any = model
        assert parts.body is not None
        divide_tensors(
            known.get_submodule(parts.body),
            known.lm_head,
            mesh["tp"],
            sequence=layout.sequence_parallel,
            built_in=parts.is_built_in,
        )
    _shard(model, [model.get_submodule(path) for path in blocks], layout, mesh)
    trained = _optimizer(model, optimizer, together)
    is_short = shortens_first

    def step() -> None:
        nonlocal is_short
        count, is_short = min(layout.microbatches, _FEW) if is_short else layout.microbatches, False
        for _ in range(count):
            out: Any = model(**example) if isinstance(example, dict) else model(*example)
            value = loss_of(out, loss)
            (value if layout.microbatches == 1 else value / layout.microbatches).backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
            del out, value
        _finish(trained)

    return RankJob(model, trained, step)


def _mesh(layout: Layout) -> DeviceMesh:
    """Make the mesh of a layout: its dimensions that have several ranks, and always that of FSDP2."""
    names = [n for n in ("pp", *_DP, "tp") if getattr(layout, n) > 1 or n == "dp_shard"]
    sizes = tuple(getattr(layout, name) for name in names)
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names))


def _shard(model: nn.Module, layers: Sequence[nn.Module], layout: Layout, mesh: DeviceMesh) -> None:
    """Apply FSDP2 to each layer, and to the model for what is left."""
    if layout.dp_shard * layout.dp_replicate == 1:
        return
    over = mesh[_DP] if layout.dp_replicate > 1 else mesh["dp_shard"]
    # After its own forward the outermost unit stays gathered, as is torch's default: its backward follows at once.
    for layer in layers:
        fully_shard(layer, mesh=over, reshard_after_forward=layout.reshard_after_forward)
    fully_shard(model, mesh=over, reshard_after_forward=None if layout.reshard_after_forward else False)


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
    mesh: DeviceMesh,
    cuts: Sequence[Cut],
    place: Callable[[nn.Module], nn.Module],
    optimizer: str | None,
    together: bool | None,
    *,
    shortens_first: bool,
) -> RankJob:
    """Build the stages of this rank, and the schedule that runs them."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    ids, labels = _tokens(example)
    rows, length = ids.shape
    indices = [cut.index for cut in cuts]
    stages: list[Any] = []
    modules: list[nn.Module] = []
    for index, cut in zip(indices, cuts, strict=True):
        module = cast("Stage", place(stage_of(parts, cut, length)))
        if layout.tp > 1:
            divide_tensors(
                module.model,
                module.lm_head,
                mesh["tp"],
                sequence=layout.sequence_parallel,
                built_in=parts.is_built_in,
            )
        layers = cast("Any", module.model).layers
        _shard(module, list(layers), layout, mesh)
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
                group=mesh["pp"].get_group(),
            )
        )
    kind: Any = get_schedule_class(layout.schedule)
    run = kind(stages if layout.virtual > 1 else stages[0], layout.microbatches, loss_fn=parts.loss)
    model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    trained = _optimizer(model, optimizer, together)
    is_last = layout.num_stages - 1 in indices
    whole = tuple(tokens.repeat(layout.microbatches, 1) for tokens in (ids, labels))

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
            run_one(*whole)

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
            "a pipeline needs a batch of tokens: {'input_ids': ..., 'labels': ...}, which its first and its last stage "
            "take. For other batches, build the stages yourself: actmem.profile_rank(build, world=N)."
        )
    return example["input_ids"], example["labels"]
