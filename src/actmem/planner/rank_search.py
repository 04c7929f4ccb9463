"""How many cards a job needs, and how to spread it over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.layout import Layout
from actmem.log_entries import OperatorEntry
from actmem.parallelism import StageProfile, find_parts, profile_stages
from actmem.planner.budget_allowance import Allowance, allowance
from actmem.planner.rank_candidates import Candidate, Work, candidates
from actmem.planner.stage_fit import fit_stages
from actmem.simulation import (
    cost_seconds,
    is_accelerator,
    link_seconds,
    on_card,
    predict,
    resolved,
    step_seconds,
)
from actmem.units import size

__all__ = ["RankOption", "Ranks", "ranks"]

_TURNS = 2
"""Microbatches that are profiled without a pipeline: from the second on, gradients are there from the start."""


@dataclass(frozen=True)
class RankOption:
    """A layout that fits, with a plan for each of its stages."""

    layout: Layout
    peak_bytes: int
    """What its neediest rank takes."""
    step_seconds: float
    """Predicted time of a step, with communication and recomputation."""
    communication_seconds: float
    """How long the links of a rank are busy in a step; most of it while the rank computes."""
    step_time_ratio: float
    """Time of the slowest rank's operators, relative to saving everything."""


@dataclass(frozen=True)
class Ranks:
    """The answer of `actmem.ranks`.

    >>> found = Ranks(8, (RankOption(Layout(dp_shard=8), 2**34, 1.5, 0.1, 1.0),), 2**36, 12, 3, 4, (4,))
    >>> print(found)
    8 cards are enough: Layout(dp_shard=8)
    16.0 GiB on each, 1.500 s a step
    12 layouts were considered: 3 were ruled out by their parameters, gradients and optimizer state, 4 were profiled
    no layout that was profiled fits 4 cards
    """

    num_cards: int
    """The smallest number of cards for which a layout was found, or the number that was asked for."""
    options: tuple[RankOption, ...]
    """Layouts for so many cards, the fastest first."""
    budget_bytes: int
    num_considered: int
    """Layouts that can be built for the model, over all numbers of cards that were tried."""
    num_ruled_out: int
    """Of these, those whose parameters, gradients and optimizer state alone do not fit."""
    num_profiled: int
    refused: tuple[int, ...]
    """Smaller numbers of cards for which layouts were profiled, and none fits. Others were ruled out entirely."""

    def __str__(self) -> str:
        best = self.options[0]
        lines = [
            f"{self.num_cards} cards are enough: {best.layout!r}",
            f"{size(best.peak_bytes)} on each, {best.step_seconds:.3f} s a step",
        ]
        lines.append(
            f"{self.num_considered} layouts were considered: {self.num_ruled_out} were ruled out by their parameters, "
            f"gradients and optimizer state, {self.num_profiled} were profiled"
        )
        if self.refused:
            lines.append(f"no layout that was profiled fits {' or '.join(map(str, self.refused))} cards")
        return "\n".join(lines)


def ranks(
    model: nn.Module,
    example: dict[str, Tensor],
    *,
    num_sequences: int,
    device: Device | str,
    budget: str | int | float = 0.95,
    cards: int | None = None,
    optimizer: str | None = "adamw",
    layouts: int = 3,
    most: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> Ranks:
    """Find the smallest number of cards that a job needs, and the best layouts for it.

    Numbers of cards are powers of two. For each, the layouts that can be built are listed: FSDP2, tensor with sequence
    parallel, 1F1B pipelines, and context and expert parallel where the model has them. Those whose parameters,
    gradients and optimizer state cannot fit are ruled out. The one that needs the least memory by a guess is then built
    and profiled, as for `profile_stages`, and planned for. If it fits, so are those that are fastest by a guess. A
    layout that was not profiled might fit fewer cards, or be faster: `layouts` says how many to profile.

    Args:
        model: the model that one process would train; on the meta device too.
        example: a microbatch of one rank, with `input_ids` and `labels`.
        num_sequences: sequences of a step, over all ranks and microbatches.
        device: the card.
        budget: what each rank may use, as for `fit`.
        cards: the number of cards. Default: the smallest that is enough.
        optimizer: the optimizer, as for `profile`.
        layouts: how many layouts to profile for each number of cards.
        most: the largest number of cards to try.
        progress: called with the number of layouts profiled so far.

    Raises:
        BudgetError: no layout fits.
        ModeError: an argument is not permitted.

    >>> import actmem
    >>> from actmem.catalogue import build, example, tiny
    >>> config = tiny("llama-3.1-8b")
    >>> flat = actmem.device("h100-80gb").tensors_only()
    >>> found = ranks(build(config), example(config), num_sequences=4, device=flat, budget="40MiB", layouts=1)
    >>> found.num_cards, found.options[0].layout.world
    (1, 1)
    """
    _check(num_sequences, cards, layouts, most)
    known = resolved(device)
    allowed = allowance(budget, known)
    if not {"input_ids", "labels"} <= set(example):
        raise ModeError("ranks needs a batch of tokens: {'input_ids': ..., 'labels': ...}.")
    work = Work.of(find_parts(model), example, num_sequences, optimizer)
    search = _Search(model, example, allowed, known, optimizer, progress)
    considered = ruled_out = 0
    refused: list[int] = []
    num_cards = 1 if cards is None else cards
    while num_cards <= (most if cards is None else cards):
        all_here = candidates(work, num_cards, known)
        possible = [c for c in all_here if c.least_bytes <= allowed.budget_bytes]
        considered, ruled_out = considered + len(all_here), ruled_out + len(all_here) - len(possible)
        options = search.options(possible, layouts)
        if options:
            return Ranks(
                num_cards,
                tuple(options),
                allowed.budget_bytes,
                considered,
                ruled_out,
                search.num_profiled,
                tuple(refused),
            )
        if possible:
            refused.append(num_cards)
        num_cards *= 2
    tried = f"{cards} cards" if cards is not None else f"1 to {most} cards"
    raise BudgetError(
        f"no layout fits {size(allowed.budget_bytes)} on each of {tried}, with {num_sequences} sequences in a step: "
        f"{considered} can be built, {ruled_out} were ruled out by their parameters, gradients and optimizer state, "
        f"and {search.num_profiled} were profiled. {search.nearest or 'More sequences in a step permit more ranks.'}"
    )


class _Search:
    def __init__(
        self,
        model: nn.Module,
        example: dict[str, Tensor],
        allowed: Allowance,
        device: Device,
        optimizer: str | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.num_profiled = 0
        self.nearest = ""
        """Why the last one that was profiled does not fit."""
        self._model, self._example, self._allowed, self._device = model, example, allowed, device
        self._optimizer, self._progress = optimizer, progress

    def options(self, possible: Sequence[Candidate], most: int) -> list[RankOption]:
        """Profile and plan some candidates. Return those that fit, the fastest first."""
        if not possible:
            return []
        smallest = min(possible, key=lambda c: c.guessed_bytes)
        first = self._planned(smallest.layout)
        if first is None:
            return []
        found = [first]
        others = sorted((c for c in possible if c is not smallest), key=lambda c: c.guessed_seconds)
        for candidate in others[: most - 1]:
            option = self._planned(candidate.layout)
            if option is not None:
                found.append(option)
        return sorted(found, key=lambda option: option.step_seconds)

    def _planned(self, layout: Layout) -> RankOption | None:
        is_pipeline = layout.pp > 1
        short = layout if is_pipeline else replace(layout, microbatches=min(layout.microbatches, _TURNS))
        seen = profile_stages(
            self._model,
            self._example,
            short,
            optimizer=self._optimizer,
            together=True if is_accelerator(self._device) else None,
        )
        self.num_profiled += 1
        if self._progress is not None:
            self._progress(self.num_profiled)
        stages = [replace(s, profile=on_card(s.profile, self._device)) for s in seen]
        try:
            plans = fit_stages(stages, self._allowed, self._device)
        except BudgetError as error:
            self.nearest = f"With {layout!r}, {str(error).partition('. ')[0]}."
            return None
        told = [predict(s.profile, found.plan, self._device) for s, found in zip(stages, plans, strict=True)]
        each: list[float] = []
        links: list[float] = []
        for stage, said in zip(stages, told, strict=True):
            seconds, busy = _seconds(stage, self._device)
            each.append(max(seconds * said.step_time_ratio, busy))
            links.append(busy)
        slowest = max(range(len(each)), key=lambda n: each[n])
        return RankOption(
            layout,
            max(said.live_bytes for said in told),
            sum(each) + (layout.microbatches - 1) * each[slowest],
            links[slowest] * layout.microbatches,
            told[slowest].step_time_ratio,
        )


def _seconds(stage: StageProfile, device: Device) -> tuple[float, float]:
    """Return how long a microbatch takes on a stage with everything saved, and how long its links are busy."""
    profile = stage.profile
    whole = step_seconds(profile, cost_seconds(profile, device))
    links = [link_seconds(cost.link_bytes, cost.reach, device) for cost in profile.costs]
    busy = sum(links[entry.cost] for entry in profile.log if isinstance(entry, OperatorEntry))
    return whole / stage.num_profiled, busy / stage.num_profiled


def _check(num_sequences: Any, cards: Any, layouts: Any, most: Any) -> None:
    numbers = {"num_sequences": num_sequences, "layouts": layouts, "most": most}
    for name, value in (numbers if cards is None else numbers | {"cards": cards}).items():
        if type(value) is not int or value < 1:
            raise ModeError(f"{name} = {value!r} is not permitted. Expected a whole number of at least 1.")
