"""`actmem largest`: the longest sequence or the largest batch that fits a budget."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from typing import Any, Literal

import actmem
from actmem.cli.commands import Largest, Planning
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import Batch, load
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, ratio_text
from actmem.cli.shared import (
    ModelShown,
    check_planning,
    described,
    document_of,
    measured,
    measures_of,
    options_of,
)
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.planner import Growth, check_sizes
from actmem.units import size

__all__ = ["LargestShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class Gain(Document):
    """The largest size with some measures."""

    allow: tuple[str, ...]
    size: int
    peak_bytes: int
    step_time_ratio: float


@dataclass(frozen=True, kw_only=True)
class LargestShown(Document):
    """Output of `actmem largest`."""

    command: Literal["largest"] = "largest"
    model: ModelShown
    device: Device
    vary: Literal["sequence", "batch"]
    size: int
    refused: int | None
    """The smallest size that was tried and does not fit."""
    budget_bytes: int
    peak_bytes: int
    step_time_ratio: float
    plan: dict[str, Any]
    """The plan file."""
    gains: tuple[Gain, ...]
    """With `--allow`: the largest size without any of the measures, and with one more of them each time."""
    fit_command: str
    """The command that writes this plan, with every option that was given."""


def run(asked: Largest, screen: Screen) -> tuple[LargestShown, int]:
    """Search for the largest size that fits, without measures and with one more of them each time."""
    mistakes = Mistakes()
    chosen = check_planning(asked, mistakes)
    with mistakes.noted():
        given = asked.sequence if asked.vary == "sequence" else asked.batch
        if given is not None:
            raise ModeError(
                f"--{asked.vary} {given} cannot be combined with --vary {asked.vary}, which searches for it. Omit it."
            )
    with mistakes.noted():
        check_sizes(asked.vary, asked.multiple, asked.most)
    mistakes.raise_all()
    loaded = load(asked)
    device = measured(chosen, loaded.model)

    def make_batch(n: int) -> Batch:
        return loaded.make_batch(*((n, asked.batch) if asked.vary == "sequence" else (asked.sequence, n)))

    with screen.progress(f"trying {asked.vary} sizes") as told:
        num_tried = 0

        def tried(_: int, __: bool) -> None:
            nonlocal num_tried
            num_tried += 1
            told(num_tried, None)

        growth = Growth(
            loaded.model,
            make_batch,
            asked.vary,
            multiple=asked.multiple,
            most=asked.most,
            progress=tried,
            budget=asked.budget,
            device=device,
            loss=loaded.loss,
            offload=asked.offload,
            headroom=asked.headroom,
            allocator=asked.allocator,
            **options_of(asked),
        )
        measures = measures_of(asked)
        found = growth.find()
        gains = [_gain((), found)]
        for allow in (measures[: n + 1] for n in range(len(measures))):
            found = growth.find(allow, found.size)
            gains.append(_gain(allow, found))
    predicted = found.plan.predicted
    assert predicted is not None
    shown = project(
        LargestShown,
        predicted,
        model=described(loaded, found.plan.blocks, predicted.shapes),
        device=device,
        vary=asked.vary,
        size=found.size,
        refused=found.refused,
        plan=document_of(found.plan),
        gains=tuple(gains) if measures else (),
        fit_command=_fit_command(asked, found.size),
    )
    return shown, 0


def _gain(allow: tuple[str, ...], found: actmem.Largest) -> Gain:
    told = found.plan.predicted
    assert told is not None
    return Gain(allow=allow, size=found.size, peak_bytes=told.peak_bytes, step_time_ratio=told.step_time_ratio)


def _fit_command(asked: Largest, size_found: int) -> str:
    """Return the `actmem fit` command for the size found, with every option that was given."""
    words = ["actmem", "fit", asked.model]
    for each in fields(Planning):
        value = size_found if each.name == asked.vary else getattr(asked, each.name)
        if each.name not in ("model", "json", "traceback") and value != each.default:
            words += [f"--{each.name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--out", "plan.json"])


def show(shown: LargestShown, screen: Screen) -> None:
    """Print the size found and the command that plans for it."""
    refused = "nothing larger was tried" if shown.refused is None else f"{shown.refused} does not fit"
    screen.out.print(f"[bold]{shown.vary} {shown.size}[/] fits; {refused}")
    screen.out.print(
        f"{shown.model.name} on {shown.device.name}: predicted peak {size(shown.peak_bytes)} of "
        f"{size(shown.budget_bytes)}, step {ratio_text(shown.step_time_ratio)} of saving everything",
        markup=False,
    )
    for gain in shown.gains:
        allowed = ", ".join(gain.allow) or "nothing"
        times = f"{gain.size / shown.gains[0].size:.2f}x, step {ratio_text(gain.step_time_ratio)}"
        screen.out.print(f"  {gain.size:>9} with {allowed} allowed ({times})", markup=False)
    screen.copied("its plan: ", shown.fit_command)
