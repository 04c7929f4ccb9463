"""`actmem record`: one training step on a CUDA device, recorded with its plan and its prediction."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import actmem
from actmem.allocator import read_snapshot, reenact
from actmem.cli.commands import Record
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import check_model, load
from actmem.cli.measure import profiled, training_step
from actmem.cli.mode_names import the_mode
from actmem.cli.schema import Document
from actmem.cli.screen import Screen
from actmem.cli.shared import ModelShown, described
from actmem.errors import ModeError
from actmem.modes import Mode, SaveEverything
from actmem.plan import Plan
from actmem.simulation import plan_of
from actmem.step_recorder import check_card, record
from actmem.units import size

__all__ = ["RecordShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class RecordShown(Document):
    """Output of `actmem record`."""

    command: Literal["record"] = "record"
    model: ModelShown
    mode: str
    predicted_bytes: int
    """The peak that was predicted for the step."""
    recorded_bytes: int
    """The recorded peak: allocated bytes."""
    recorded_reserved_bytes: int
    """The recorded peak: reserved bytes."""
    written: str
    """The file."""


def run(asked: Record, screen: Screen) -> tuple[RecordShown, int]:
    """Train two steps and record the third."""
    mistakes = Mistakes()
    mode: Mode | Plan = SaveEverything()
    with mistakes.noted():
        mode = the_mode(asked.mode, asked.plan) or mode
    with mistakes.noted():
        if not str(asked.out).endswith(".pickle.xz"):
            raise ModeError(f"--out {asked.out} must end in .pickle.xz.")
    check_model(asked, mistakes)
    mistakes.raise_all()
    check_card()
    with screen.progress("building the model"):
        loaded = load(asked, place="cuda")
        profile = profiled(loaded, asked.blocks, None if asked.optimizer == "none" else asked.optimizer)
    plan = plan_of(profile, mode)
    predicted = actmem.predict(profile, plan)
    step, _ = training_step(loaded, asked.optimizer)
    with screen.progress("training"), contextlib.ExitStack() as stack:
        stack.enter_context(actmem.apply(loaded.model, mode, blocks=asked.blocks))
        for _ in range(2):
            step()
        with record(asked.out, plan=plan, prediction=predicted):
            step()
    snapshot = read_snapshot(asked.out)
    found = [reenact(snapshot, device, num_largest=0) for device in snapshot.devices]
    shown = RecordShown(
        model=described(loaded, profile.blocks, profile.shapes),
        mode=plan.mode,
        predicted_bytes=predicted.peak_bytes,
        recorded_bytes=max(each.peak_allocated_bytes for each in found),
        recorded_reserved_bytes=max(each.peak_reserved_bytes for each in found),
        written=str(asked.out),
    )
    return shown, 0


def show(shown: RecordShown, screen: Screen) -> None:
    """Print the peaks, and what to do with the file."""
    screen.out.print(f"one step of {shown.model.name} under {shown.mode}", markup=False)
    screen.out.print(f"predicted peak   {size(shown.predicted_bytes)}")
    screen.out.print(
        f"recorded peak    {size(shown.recorded_bytes)} allocated, {size(shown.recorded_reserved_bytes)} reserved"
    )
    screen.copied("look into it:    ", f"actmem snapshot {shown.written}")
