"""`actmem measure` and `actmem verify`: run real steps, and report their cost or compare their bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch

import actmem
from actmem.cli.commands import Measure, Verify
from actmem.cli.failures import ANSWER_IS_NO, Mistakes
from actmem.cli.loaded_model import Loaded, check_model, load, runs_on
from actmem.cli.mode_names import FORMS, the_mode
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, flops_text, seconds_text, table
from actmem.cli.shared import ModelShown, described
from actmem.errors import ModeError, SelfCheckError, UnsupportedError
from actmem.modes import Mode, SaveEverything
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.profiling import loss_of
from actmem.simulation import follow, plan_of
from actmem.units import size

__all__ = ["MeasureShown", "VerifyShown", "profiled", "run", "run_verify", "show", "show_verify", "training_step"]

_NUM_TIMED = 3


@dataclass(frozen=True, kw_only=True)
class StepShown(Document):
    """One measured step."""

    peak_bytes: int
    """The peak as torch's allocator counts it."""
    tensor_bytes: int
    """The peak of tensors alone, without kernel workspaces and generator states."""
    predicted_bytes: int
    """The predicted peak of tensors."""
    saved_bytes: int
    """Bytes that the forward pass leaves for the backward pass."""
    by_category: dict[str, int]
    """`peak_bytes` by category."""
    peak_at: str
    forward_flops: int
    backward_flops: int
    replayed_flops: int
    num_replayed: int
    """Operators that were replayed."""
    seconds: float
    """Time of a whole step: the median of several unobserved ones."""


@dataclass(frozen=True, kw_only=True)
class MeasureShown(Document):
    """Output of `actmem measure`."""

    command: Literal["measure"] = "measure"
    model: ModelShown
    on: str
    """The device that the steps ran on."""
    mode: str | None
    plain: StepShown
    under_mode: StepShown | None


@dataclass(frozen=True, kw_only=True)
class VerifyShown(Document):
    """Output of `actmem verify`."""

    command: Literal["verify"] = "verify"
    model: ModelShown
    on: str
    """The device that the steps ran on."""
    mode: str
    equal: bool
    difference: str | None
    """The first thing that the mode changes."""
    irreproducible: tuple[str, ...]
    """What differs between two plain runs."""
    notes: tuple[str, ...]
    saved_bytes: int
    num_replayed: int


def profiled(loaded: Loaded, blocks: str | None, optimizer: str | None) -> Profile:
    """Profile on fake tensors, or with a real step if the control flow needs values: the model runs here anyway."""
    options: dict[str, Any] = {"loss": loaded.loss, "blocks": blocks, "optimizer": optimizer}
    try:
        return actmem.profile(loaded.model, loaded.batch, **options)
    except UnsupportedError:
        return actmem.profile(loaded.model, loaded.batch, fake=False, **options)


def _wanted(asked: Measure | Verify, mistakes: Mistakes) -> tuple[Mode | Plan | None, str]:
    """Return the mode and the device to run on; record mistakes in them and in the model."""
    mode, place = None, "cpu"
    with mistakes.noted():
        mode = the_mode(asked.mode, asked.plan)
    with mistakes.noted():
        place = runs_on(asked.on)
    check_model(asked, mistakes)
    return mode, place


def run(asked: Measure, screen: Screen) -> tuple[MeasureShown, int]:
    """Train a few steps, plain and under a mode, and measure them."""
    mistakes = Mistakes()
    mode, place = _wanted(asked, mistakes)
    mistakes.raise_all()
    with screen.progress("building the model"):
        loaded = load(asked, place=place)
        optimizer = None if asked.optimizer == "none" else asked.optimizer
        profile = profiled(loaded, asked.blocks, optimizer)
    with screen.progress("training plain"):
        plain = _measured(loaded, asked, None, profile)
    managed = None
    if mode is not None:
        with screen.progress("training under the mode"):
            managed = _measured(loaded, asked, mode, profile)
    shown = MeasureShown(
        model=described(loaded, profile.blocks, profile.shapes),
        on=place,
        mode=_named(mode),
        plain=plain,
        under_mode=managed,
    )
    return shown, 0


def _named(mode: Mode | Plan | None) -> str | None:
    return mode.mode if isinstance(mode, Plan) else None if mode is None else repr(mode)


def _measured(loaded: Loaded, asked: Measure, mode: Mode | Plan | None, profile: Profile) -> StepShown:
    model = loaded.model
    step, optimizer = training_step(loaded, asked.optimizer)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(actmem.apply(model, mode, blocks=asked.blocks))
        model.zero_grad()
        for _ in range(2):  # the first observes and creates optimizer state; the second knows the minimum cuts
            step()
        found = actmem.measure(step, model=model, optimizer=optimizer)
        seconds = median(_seconds(step) for _ in range(_NUM_TIMED))
    return project(
        StepShown,
        found,
        predicted_bytes=follow(profile, plan_of(profile, SaveEverything() if mode is None else mode)).tensor_bytes,
        peak_at=str(found.peak_op or "the start"),
        num_replayed=found.num_replayed_ops,
        seconds=seconds,
    )


def training_step(loaded: Loaded, optimizer_name: str) -> tuple[Callable[[], None], torch.optim.Optimizer | None]:
    """Return a function that trains one step, and the optimizer that it uses."""
    model, batch = loaded.model, loaded.batch
    optimizer = _optimizer(optimizer_name, list(model.parameters()))

    def step() -> None:
        out: Any = model(**batch) if isinstance(batch, dict) else model(*batch)
        value = loss_of(out, loaded.loss)
        value.backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        if optimizer is not None:
            optimizer.step()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        model.zero_grad()

    return step, optimizer


def _optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adamw_fused": partial(torch.optim.AdamW, fused=True),
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    return kinds[name]([p for p in parameters if p.requires_grad], lr=1e-4)


def _seconds(step: Callable[[], None]) -> float:
    started = perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter() - started


def show(shown: MeasureShown, screen: Screen) -> None:
    """Print the measurements as a table."""
    columns = {"plain": shown.plain} | ({} if shown.under_mode is None else {"under the mode": shown.under_mode})
    made = table(f"one step of {shown.model.name} on {shown.on}", "", *columns)
    rows: list[tuple[str, list[str]]] = [
        ("measured peak", [size(m.peak_bytes) for m in columns.values()]),
        *(
            (f"  {category.replace('_', ' ')}", [size(m.by_category[category]) for m in columns.values()])
            for category in shown.plain.by_category
        ),
        ("peak of tensors", [size(m.tensor_bytes) for m in columns.values()]),
        ("predicted peak", [size(m.predicted_bytes) for m in columns.values()]),
        ("saved for backward", [size(m.saved_bytes) for m in columns.values()]),
        ("forward", [flops_text(m.forward_flops) for m in columns.values()]),
        ("backward", [flops_text(m.backward_flops) for m in columns.values()]),
        ("replayed", [f"{flops_text(m.replayed_flops)}, {m.num_replayed} operators" for m in columns.values()]),
        ("time per step", [seconds_text(m.seconds) for m in columns.values()]),
    ]
    for name, cells in rows:
        made.add_row(name, *cells)
    screen.out.print(made)
    if shown.mode is not None:
        screen.out.print(f"the mode: {shown.mode}", markup=False)
    for name, m in columns.items():
        screen.out.print(f"peak, {name}: at {m.peak_at}", markup=False)


# --- verify -----------------------------------------------------------------------------------------------------------


def run_verify(asked: Verify, screen: Screen) -> tuple[VerifyShown, int]:
    """Compare one step under a mode with a plain one, bit for bit."""
    mistakes = Mistakes()
    if asked.mode is None and asked.plan is None:
        with mistakes.noted():
            raise ModeError(f"there is nothing to verify. Write --mode with one of {', '.join(FORMS)}, or --plan FILE.")
    mode, place = _wanted(asked, mistakes)
    mistakes.raise_all()
    assert mode is not None
    with screen.progress("building the model"):
        loaded = load(asked, place=place)
        profile = profiled(loaded, asked.blocks, "adamw")
    saved_bytes, num_replayed = 0, 0
    irreproducible: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    with screen.progress("running three steps"):
        try:
            found = actmem.verify(
                loaded.model, loaded.batch, mode, loss=loaded.loss, blocks=asked.blocks, seed=asked.seed
            )
            difference, irreproducible, notes = found.difference, found.irreproducible, found.notes
            saved_bytes, num_replayed = found.report.saved_bytes, found.report.num_replayed
        except SelfCheckError as error:
            difference = str(error)
    shown = VerifyShown(
        model=described(loaded, profile.blocks, profile.shapes),
        on=place,
        mode=str(_named(mode)),
        equal=difference is None and not irreproducible,
        difference=difference,
        irreproducible=irreproducible,
        notes=notes,
        saved_bytes=saved_bytes,
        num_replayed=num_replayed,
    )
    return shown, 0 if shown.equal else ANSWER_IS_NO


def show_verify(shown: VerifyShown, screen: Screen) -> None:
    """Print the verdict."""
    did = f"{size(shown.saved_bytes)} saved, {shown.num_replayed} operators replayed"
    name = f"{shown.model.name} on {shown.on}, {shown.mode}"
    if shown.equal:
        screen.out.print("[green]equal[/] bit for bit: loss, gradients, buffers, names and random state after one step")
        screen.out.print(f"{name}: {did}", markup=False)
    elif shown.difference is None:
        screen.out.print("[yellow]cannot be compared[/]: plain training is not reproducible itself")
        screen.out.print(f"{name}: nothing else differs", markup=False)
    else:
        screen.out.print("[red]differs[/] from a plain step")
        screen.out.print(f"{name}: {shown.difference}", markup=False)
    for note in shown.notes:
        screen.out.print(f"note: {note}", markup=False)
