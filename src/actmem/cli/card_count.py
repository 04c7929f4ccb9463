"""`actmem ranks`: how many cards a job needs, and the best layouts for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import actmem
from actmem.cli.commands import Ranks
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import check_model, load
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, ratio_text, seconds_text, table
from actmem.cli.shared import ModelShown, chosen_device, described, measured
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.layout import Layout
from actmem.profiling import shapes_of
from actmem.structure import find_blocks
from actmem.units import parse_budget, size

__all__ = ["RanksShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class OptionShown(Document):
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
    tokens_per_second: float
    """On each card."""


@dataclass(frozen=True, kw_only=True)
class RanksShown(Document):
    """Output of `actmem ranks`."""

    command: Literal["ranks"] = "ranks"
    model: ModelShown
    device: Device
    tokens_per_step: int
    budget_bytes: int
    """What each card may use."""
    num_cards: int
    """The smallest number for which a layout was found, or the number that was asked for."""
    options: tuple[OptionShown, ...]
    """Layouts for so many cards, the fastest first."""
    num_considered: int
    """Layouts that can be built, over all numbers of cards that were tried."""
    num_ruled_out: int
    """Of these, those whose parameters, gradients and optimizer state alone do not fit."""
    num_profiled: int
    refused: tuple[int, ...]
    """Smaller numbers of cards for which layouts were profiled, and none fits."""


def run(asked: Ranks, screen: Screen) -> tuple[RanksShown, int]:
    """Search for the smallest number of cards."""
    mistakes = Mistakes()
    chosen = None
    with mistakes.noted():
        chosen = chosen_device(asked.device)
    with mistakes.noted():
        parse_budget(asked.budget, device_bytes=chosen.memory_bytes if chosen else 2**40)
    check_model(asked, mistakes)
    mistakes.raise_all()
    with screen.progress("building the model"):
        loaded = load(asked)
        device = measured(chosen, loaded.model)
    batch: Any = loaded.batch
    if not isinstance(batch, dict) or "input_ids" not in batch or loaded.loss is not None:
        raise ModeError(f"actmem ranks is for language models that compute their loss, and {asked.model} is not one.")
    example = cast("dict[str, Any]", batch)
    length = int(example["input_ids"].shape[1])
    num_sequences, left = divmod(asked.tokens_per_step, length)
    if left or num_sequences < 1:
        raise ModeError(
            f"--tokens-per-step {asked.tokens_per_step} is not a multiple of the {length} tokens of a sequence. "
            f"Nearest: --tokens-per-step {max(1, round(asked.tokens_per_step / length)) * length}."
        )
    with screen.progress("profiling layouts") as told:
        found = actmem.ranks(
            loaded.model,
            example,
            num_sequences=num_sequences,
            device=device,
            budget=asked.budget,
            cards=asked.cards,
            optimizer=None if asked.optimizer == "none" else asked.optimizer,
            layouts=asked.layouts,
            most=asked.most,
            progress=lambda count: told(count, None),
        )
    blocks = [block.path for block in find_blocks(loaded.model, None, None)]
    options = tuple(
        project(OptionShown, o, tokens_per_second=asked.tokens_per_step / o.step_seconds / found.num_cards)
        for o in found.options
    )
    shown = project(
        RanksShown,
        found,
        model=described(loaded, blocks, shapes_of(example)),
        device=device,
        tokens_per_step=asked.tokens_per_step,
        options=options,
    )
    return shown, 0


def show(shown: RanksShown, screen: Screen) -> None:
    """Print the number of cards and a table of layouts."""
    out = screen.out
    out.print(
        f"[bold]{shown.num_cards} x {shown.device.name}[/]: {shown.model.name}, {shown.tokens_per_step} tokens a step"
    )
    made = table(
        f"layouts within {size(shown.budget_bytes)} a card",
        "layout",
        "peak",
        "step",
        "links busy",
        "recomputation",
        "tokens/s a card",
    )
    for x in shown.options:
        made.add_row(
            repr(x.layout),
            size(x.peak_bytes),
            seconds_text(x.step_seconds),
            seconds_text(x.communication_seconds),
            ratio_text(x.step_time_ratio),
            f"{x.tokens_per_second:,.0f}",
        )
    out.print(made)
    out.print(
        f"{shown.num_considered} layouts were considered: {shown.num_ruled_out} were ruled out by their parameters, "
        f"gradients and optimizer state, {shown.num_profiled} were profiled.",
        markup=False,
    )
    if shown.refused:
        out.print(f"No layout that was profiled fits {' or '.join(map(str, shown.refused))} cards.", markup=False)
