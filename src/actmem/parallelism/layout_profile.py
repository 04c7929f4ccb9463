"""Profile one rank of a job whose parallel model actmem builds itself, as a layout says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmem.errors import ModeError
from actmem.expert_loads import Routing
from actmem.layout import Layout
from actmem.parallelism.expert_counts import counts_of_stages
from actmem.parallelism.model_parts import check_parts, find_parts
from actmem.parallelism.rank_job import Batch, build_job
from actmem.parallelism.stage_modules import Cut, cuts_on_rank, paths_on_rank
from actmem.profiles import Profile
from actmem.profiling import fake_part, profile_rank
from actmem.settings import Split
from actmem.structure import find_blocks

__all__ = ["profile_layout"]


def profile_layout(
    model: nn.Module,
    example: Batch,
    layout: Layout,
    *,
    rank: int = 0,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: str | None = "adamw",
    together: bool | None = None,
    blocks: str | Sequence[str] | None = None,
    routing: Routing = "balanced",
    cut: Cut | None = None,
    split: Split | None = None,
) -> Profile:
    """Find out what one rank of a parallel job does in a training step, from the model and a layout.

    The parallel model is built with torch's own functions (`fully_shard`, `parallelize_module`, `PipelineStage` and a
    schedule), on tensors without bytes. Any model can be sharded. Tensors and layers can be divided in the decoders of
    the catalogue and in those of transformers that have the same parts as Llama.

    Args:
        model: the model that one process would train; on the meta device too. It is left as it is.
        example: a batch of one rank, and of one microbatch: for a pipeline with `input_ids` and `labels`.
        layout: how the job is spread over its ranks.
        rank: which rank. Those that differ only in `dp_replicate`, `dp_shard` or `tp` do the same, and the first of
            each has the largest part where sizes are uneven: one of each stage is enough, `layout.rank_of(pp=n)`. With
            experts, the profile names the rank that receives the most tokens: `expert_loads.hottest`.
        loss: a function of the output, as for `profile`; not for a pipeline.
        optimizer: the optimizer, as for `profile`.
        together: whether its step works on all parameters at once, as torch's do on an accelerator by default.
        blocks: where the blocks are, as for `apply`; not for a pipeline.
        routing: what to assume of routers, as for `profile_rank`. Counts by layer are those of the whole model.
        cut: the stage on this rank, if it is not the one that the layout gives it.
        split: what the step computes in pieces of tokens, as for `apply`; not for a pipeline.

    Returns:
        The profile, for `predict`, `frontier` and `fit`. The blocks of a pipeline are those of its stage.

    Raises:
        ModeError: the layout is not possible for this model. The message has the nearest that is.

    >>> from actmem.catalogue import build, example, tiny
    >>> config = tiny("llama-3.1-8b")
    >>> model, batch = build(config), example(config, sequence=16)
    >>> whole = sum(p.nbytes for p in model.parameters())
    >>> found = profile_layout(model, batch, Layout(dp_shard=8, tp=2))
    >>> whole // found.parameters_bytes  # the norms are not divided by tp
    15
    """
    if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        raise ModeError(f"layout = {layout!r} is not a layout. Write actmem.Layout(dp_shard=8).")
    parts = find_parts(model)
    check_parts(parts, layout, _length(example))
    if layout.pp > 1:
        if split is not None:
            raise ModeError(
                f"split = {split!r} cannot be combined with a pipeline ({layout!r}) yet: only its last stage has a "
                "head. Omit it, or write pp=1."
            )
        cuts = (cut,) if cut is not None else cuts_on_rank(parts, layout, layout.rank_coordinates(rank).pp)
        paths = paths_on_rank(cuts)
    else:
        cuts, paths = None, tuple(block.path for block in find_blocks(model, blocks, None))

    routing = counts_of_stages(parts, cuts, routing)

    def build() -> tuple[nn.Module, Callable[[], object]]:
        job = build_job(
            parts,
            _placed(example),
            layout,
            optimizer=optimizer,
            together=together,
            loss=loss,
            blocks=paths,
            cuts=cuts,
            place=fake_part,
            shortens_first=routing == "balanced",  # others are learned from a whole step
        )
        return job.model, job.step

    with warnings.catch_warnings():
        # FSDP2 warns of in-place writes to what it returns, if that is a view. Nothing here writes to it.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
        return profile_rank(build, world=layout.world, rank=rank, blocks=paths, routing=routing, split=split)


def _length(example: Batch) -> int | None:
    """Return how many tokens a sequence of the batch has."""
    ids = example.get("input_ids") if isinstance(example, dict) else None
    return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() > 1 else None


def _placed(example: Any) -> Any:
    """Make a batch of the same shapes on the CPU, where integers are real."""
    if isinstance(example, Tensor):
        made = torch.zeros if not example.is_floating_point() else torch.empty
        return made(example.shape, dtype=example.dtype).requires_grad_(example.requires_grad)
    if isinstance(example, dict):
        return {key: _placed(value) for key, value in example.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(example, (list, tuple)):
        return type(example)(_placed(value) for value in example)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return example
