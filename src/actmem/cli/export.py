"""`actmem export`: a plan as the nearest settings of another system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

import actmem
from actmem.cli.commands import Export
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import check_model, load
from actmem.cli.mode_names import FORMS, the_mode
from actmem.cli.schema import Document
from actmem.cli.screen import Screen, ratio_text
from actmem.cli.shared import ModelShown, chosen_device, described, measured
from actmem.compat.exports import export_plan
from actmem.errors import ModeError
from actmem.simulation import Prediction
from actmem.units import size

__all__ = ["ExportShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class Taken(Document):
    """What a step takes."""

    peak_bytes: int
    reserved_bytes: int | None
    """On a card: the most that torch's caching allocator takes from the driver."""
    num_replayed: int
    """Operators that are recomputed."""
    step_time_ratio: float
    """Step time relative to saving everything."""


@dataclass(frozen=True, kw_only=True)
class ExportShown(Document):
    """Output of `actmem export`."""

    command: Literal["export"] = "export"
    model: ModelShown
    mode: str
    device: str
    system: str
    settings: dict[str, Any]
    """By name, in sections as the system has them; by flag for Megatron."""
    text: str
    """The same as the system reads it."""
    file: str | None
    """The file that was written."""
    predicted: Taken
    """Under the settings of the other system."""
    planned: Taken
    """Under the plan."""
    lost: tuple[str, ...]
    """What the plan says and the settings do not."""
    notes: tuple[str, ...]


def run(asked: Export, screen: Screen) -> tuple[ExportShown, int]:
    """Profile one step, and predict it under every setting of the other system."""
    mistakes = Mistakes()
    mode = chosen = None
    with mistakes.noted():
        mode = the_mode(asked.mode, asked.plan)
        if mode is None:
            raise ModeError(f"there is nothing to export. Write --plan FILE, or --mode with one of {', '.join(FORMS)}.")
    with mistakes.noted():
        chosen = chosen_device(asked.device)
    check_model(asked, mistakes)
    mistakes.raise_all()
    assert mode is not None
    with screen.progress("profiling one step"):
        loaded = load(asked)
        device = measured(chosen, loaded.model)
        profile = actmem.profile(
            loaded.model,
            loaded.batch,
            loss=loaded.loss,
            blocks=asked.blocks,
            optimizer=None if asked.optimizer == "none" else asked.optimizer,
            optimizer_dtype=None if asked.optimizer_dtype is None else getattr(torch, asked.optimizer_dtype),
            microbatches=asked.microbatches,
            shard=asked.shard,
        )
    with screen.progress(f"predicting the settings of {asked.to}"):
        exported = export_plan(profile, mode, asked.to, device)
    if asked.out is not None:
        exported.save(asked.out)
    shown = ExportShown(
        model=described(loaded, profile.blocks, profile.shapes),
        mode=repr(mode) if asked.plan is None else f"FromPlan({str(asked.plan)!r})",
        device=device.name,
        system=exported.system,
        settings=dict(exported.settings),
        text=exported.text,
        file=None if asked.out is None else str(asked.out),
        predicted=_taken(exported.predicted),
        planned=_taken(exported.planned),
        lost=exported.lost,
        notes=exported.notes,
    )
    return shown, 0


def _taken(found: Prediction) -> Taken:
    return Taken(
        peak_bytes=found.peak_bytes,
        reserved_bytes=found.reserved_bytes,
        num_replayed=found.num_replayed,
        step_time_ratio=found.step_time_ratio,
    )


def show(shown: ExportShown, screen: Screen) -> None:
    """Print the settings, what both take, and what is lost."""
    lines = [
        f"{shown.model.name} under {shown.mode}, for {shown.system}\n",
        shown.text or "nothing to write: plain training\n",
        f"there     {_text(shown.predicted)}",
        f"the plan  {_text(shown.planned)}",
        *(f"lost      {sentence}" for sentence in shown.lost),
        *(f"note      {note}" for note in shown.notes),
    ]
    if shown.file is not None:
        lines.append(f"written to {shown.file}")
    screen.out.print("\n".join(lines), markup=False)


def _text(taken: Taken) -> str:
    reserved = "" if taken.reserved_bytes is None else f", {size(taken.reserved_bytes)} reserved"
    return f"{size(taken.peak_bytes)}{reserved}, step {ratio_text(taken.step_time_ratio)} of saving everything"
