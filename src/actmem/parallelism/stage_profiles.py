"""Profile every stage of a job, each once: the work does not grow with the number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from actmem.expert_loads import ExpertCounts, Routing
from actmem.layout import Layout
from actmem.parallelism.flight_copies import (
    MOST_TURNS,
    TRACED,
    NotPeriodicError,
    with_kept_output,
    with_more_in_flight,
    with_more_losses,
    with_more_turns,
)
from actmem.parallelism.layout_profile import profile_layout
from actmem.parallelism.model_parts import find_parts
from actmem.parallelism.rank_job import Batch
from actmem.parallelism.stage_modules import Cut, cuts_on_rank
from actmem.profiles import Place, Profile
from actmem.structure import find_blocks, layer_type

__all__ = ["StageProfile", "profile_stages"]


@dataclass(frozen=True)
class StageProfile:
    """What the ranks at one place of a pipeline do."""

    pp: int
    """Which place."""
    rank: int
    """A rank that is there: the first, or the one that receives the most tokens if experts are spread over ranks."""
    profile: Profile
    num_profiled: int
    """How many microbatches of a step the profile has. More of them would not change the peak."""
    microbatches: int
    """How many a step has."""

    @property
    def repeats(self) -> float:
        """How often what the profile does is done in a step."""
        return self.microbatches / self.num_profiled


def profile_stages(
    model: nn.Module,
    example: Batch,
    layout: Layout,
    *,
    optimizer: str | None = "adamw",
    together: bool | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    routing: Routing = "balanced",
    progress: Callable[[float], None] | None = None,
) -> tuple[StageProfile, ...]:
    """Profile one rank for each place of a pipeline; a single one if there is no pipeline.

    Under 1F1B, stages that differ only in the number of microbatches in flight are profiled once. See
    NOTE [ Equal microbatches ].

    Args:
        model: as for `profile_layout`.
        example: as for `profile_layout`.
        layout: how the job is spread over its ranks.
        optimizer: as for `profile_layout`.
        together: as for `profile_layout`.
        loss: as for `profile_layout`.
        routing: as for `profile_layout`.
        progress: called with the fraction that is done.

    >>> from actmem.catalogue import build, example, tiny
    >>> config = tiny("llama-3.1-8b")
    >>> stages = profile_stages(build(config), example(config, sequence=16), Layout(pp=2, microbatches=64))
    >>> [(stage.rank, stage.num_profiled) for stage in stages]
    [(0, 4), (1, 3)]
    """
    options: dict[str, Any] = {"optimizer": optimizer, "together": together, "loss": loss, "routing": routing}
    known: dict[Any, Profile] = {}
    found: list[StageProfile] = []
    for pp in range(layout.pp):
        first = layout.rank_of(pp=pp)
        seen, count = _on_rank(model, example, layout, first, known, options)
        loads = seen.expert_loads
        if loads is not None and loads.hottest != first:
            seen, count = _on_rank(model, example, layout, loads.hottest, known, options)
        rank = first if loads is None else loads.hottest
        found.append(StageProfile(pp, rank, seen, count, layout.microbatches))
        if progress is not None:
            progress((pp + 1) / layout.pp)
    return tuple(found)


def _on_rank(
    model: nn.Module,
    example: Batch,
    layout: Layout,
    rank: int,
    known: dict[Any, Profile],
    options: dict[str, Any],
) -> tuple[Profile, int]:
    """Return the profile of a rank, and how many microbatches it has."""
    if layout.schedule != "1F1B":
        return profile_layout(model, example, layout, rank=rank, **options), layout.microbatches
    pp = layout.rank_coordinates(rank).pp
    return _in_flight(model, example, layout, pp, rank - layout.rank_of(pp=pp), known, options)


def _in_flight(
    model: nn.Module,
    example: Batch,
    layout: Layout,
    pp: int,
    offset: int,
    known: dict[Any, Profile],
    options: dict[str, Any],
) -> tuple[Profile, int]:
    """Return the profile of a stage of 1F1B, and how many microbatches it has. `offset`: which of the stage's ranks."""
    routing = options["routing"]
    by_layer = isinstance(routing, ExpertCounts) and len(routing.table) > 1
    num = min(layout.microbatches, layout.pp - pp)
    all_turns = layout.microbatches - num
    turns = min(all_turns, MOST_TURNS if num != MOST_TURNS + 1 else num)
    for traced in (min(num, TRACED), num):
        cut, layers = _cut(model, layout, pp, traced)
        key = cut if by_layer else replace(cut, begin=0), layers, turns, offset
        if key not in known:
            short = replace(layout, pp=cut.num_stages, microbatches=traced + turns)
            rank = short.rank_of(pp=cut.index) + offset
            known[key] = profile_layout(model, example, short, rank=rank, cut=cut, **options)
        seen = known[key]
        if seen.expert_loads is not None:
            more = layout.rank_of(pp=pp) + offset - seen.expert_loads.rank
            seen = replace(seen, expert_loads=seen.expert_loads.shifted(more))
        try:
            longer = with_more_in_flight(seen, cut.num_layers, num - traced)
        except NotPeriodicError:
            continue
        if turns < num - 1 <= all_turns:
            longer = with_kept_output(longer, throughout=all_turns >= num)
        if pp == layout.pp - 1 and turns < all_turns:
            longer = with_more_losses(longer, all_turns - turns)
        tokens_bytes = example["input_ids"].nbytes if isinstance(example, dict) else 0
        found = _with_buffers(longer, seen, traced + turns, layout.microbatches, tokens_bytes)
        assert seen.place is not None
        pipeline = tuple(layout.rank_of(pp=n) for n in range(layout.pp))
        groups = (layout.pp, *seen.place.groups[1:])  # the first is that of a shorter pipeline
        return replace(
            found,
            actions=with_more_turns(found.actions, pp, layout.microbatches),
            place=Place(layout.world, pipeline[pp], pipeline, layout.num_stages, groups),
        ), num + turns
    raise AssertionError("a profile that is not extended is as it was")


def _cut(model: nn.Module, layout: Layout, pp: int, traced: int) -> tuple[Cut, tuple[Any, ...]]:
    """Return the stage of a shorter pipeline that does the same with so many microbatches in flight, and its layers."""
    parts = find_parts(model)
    whole = cuts_on_rank(parts, layout, pp)[0]
    end = whole.begin + whole.num_layers
    layers = tuple((b.kind, layer_type(b.module)) for b in find_blocks(model, None, None)[whole.begin : end])
    if pp == layout.pp - 1:
        return replace(whole, index=1, num_stages=2), layers
    if pp == 0:
        return replace(whole, index=0, num_stages=traced), layers
    return replace(whole, index=1, num_stages=traced + 1), layers


def _with_buffers(longer: Profile, traced: Profile, num_traced: int, microbatches: int, tokens_bytes: int) -> Profile:
    """Add what there is from the start for the microbatches that the profile lacks.

    A stage has one or two buffers for each, to receive into; the first and the last have the tokens of all of them.
    """
    there = Counter(num_bytes for _, num_bytes, role in longer.stock if role == "batch")
    number = 1 + max((*longer.storages, *(n for n, _, _ in longer.stock)), default=0)
    changed: dict[int, int] = {}
    for num_bytes, count in Counter(num_bytes for _, num_bytes, role in traced.stock if role == "batch").items():
        for _ in range(count // num_traced * microbatches - there[num_bytes]):
            changed[number + len(changed)] = num_bytes
    stock = [*longer.stock, *((n, num_bytes, "batch") for n, num_bytes in changed.items())]
    for at, (n, num_bytes, role) in enumerate(stock):
        if role == "batch" and num_bytes == num_traced * tokens_bytes:
            stock[at] = n, microbatches * tokens_bytes, role
            changed[n] = microbatches * tokens_bytes
    return replace(longer, stock=tuple(stock), storages={**longer.storages, **changed})
