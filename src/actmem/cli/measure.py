"""`actmem measure` and `actmem verify`: real steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

import actmem
from actmem.amounts import size
from actmem.cli.commands import Measure, Verify
from actmem.cli.failing import ANSWER_IS_NO, Mistakes
from actmem.cli.loading import Loaded, check_model, load, runs_on
from actmem.cli.naming import FORMS, the_mode
from actmem.cli.schema import Measured, MeasureShown, VerifyShown
from actmem.cli.screen import Screen, flops_text, seconds_text, table
from actmem.cli.shared import described
from actmem.errors import ModeError, SelfCheckError, UnsupportedError
from actmem.modes import Mode, SaveEverything
from actmem.plan import Plan
from actmem.planner.following import follow
from actmem.planner.predicting import plan_of
from actmem.profiles import Profile
from actmem.profiling.stepping import loss_of

__all__ = ["run", "run_verify", "show", "show_verify"]

_NUM_TIMED = 3


def _profiled(loaded: Loaded, blocks: str | None, optimizer: str | None) -> Profile:
    """Profile on fake tensors, or for real where the model looks at numbers: it is run here in any case."""
    options: dict[str, Any] = {"loss": loaded.loss, "blocks": blocks, "optimizer": optimizer}
    try:
        return actmem.profile(loaded.model, loaded.batch, **options)
    except UnsupportedError:
        return actmem.profile(loaded.model, loaded.batch, fake=False, **options)


def _wanted(asked: Measure | Verify, mistakes: Mistakes) -> tuple[Mode | Plan | None, str]:
    """Return the mode and the device to run on, and note what is wrong with them and with the model."""
    mode, place = None, "cpu"
    with mistakes.noted():
        mode = the_mode(asked.mode, asked.plan)
    with mistakes.noted():
        place = runs_on(asked.on)
    check_model(asked, mistakes)
    return mode, place


def run(asked: Measure, screen: Screen) -> tuple[MeasureShown, int]:
    """Train a few steps, plain and under a mode, and count."""
    mistakes = Mistakes()
    mode, place = _wanted(asked, mistakes)
    mistakes.raise_all()
    with screen.progress("building the model"):
        loaded = load(asked, place=place)
        optimizer = None if asked.optimizer == "none" else asked.optimizer
        profile = _profiled(loaded, asked.blocks, optimizer)
    with screen.progress("training plain"):
        plain = _measured(loaded, asked, None, profile)
    managed = None
    if mode is not None:
        with screen.progress("training under the mode"):
            managed = _measured(loaded, asked, mode, profile)
    shown = MeasureShown(
        model=described(loaded.name, loaded.source, loaded.model, profile),
        on=place,
        mode=_named(mode),
        plain=plain,
        under_mode=managed,
    )
    return shown, 0


def _named(mode: Mode | Plan | None) -> str | None:
    return mode.mode if isinstance(mode, Plan) else None if mode is None else repr(mode)


def _measured(loaded: Loaded, asked: Measure, mode: Mode | Plan | None, profile: Profile) -> Measured:
    model, batch = loaded.model, loaded.batch
    optimizer = _optimizer(asked.optimizer, list(model.parameters()))

    def step() -> None:
        out: Any = model(**batch) if isinstance(batch, dict) else model(*batch)
        value = loss_of(out, loaded.loss)
        value.backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        if optimizer is not None:
            optimizer.step()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        model.zero_grad()

    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(actmem.apply(model, mode, blocks=asked.blocks))
        model.zero_grad()
        for _ in range(
            2
        ):  # the first step observes, and makes the optimizer's state; the second knows the smallest cuts
            step()
        found = actmem.measure(step, model=model, optimizer=optimizer)
        seconds = median(_seconds(step) for _ in range(_NUM_TIMED))
    return Measured(
        peak_bytes=found.peak_bytes,
        predicted_bytes=follow(profile, plan_of(profile, SaveEverything() if mode is None else mode)).peak_bytes,
        saved_bytes=found.saved_bytes,
        by_category=found.by_category,
        peak_at=str(found.peak_op or "the start"),
        forward_flops=found.forward_flops,
        backward_flops=found.backward_flops,
        replayed_flops=found.replayed_flops,
        num_replayed=found.num_replayed_ops,
        seconds=seconds,
    )


def _optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return kinds[name]([p for p in parameters if p.requires_grad], lr=1e-4)


def _seconds(step: Callable[[], None]) -> float:
    started = perf_counter()
    step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter() - started


def show(shown: MeasureShown, screen: Screen) -> None:
    """Print the outcome as a table."""
    columns = {"plain": shown.plain} | ({} if shown.under_mode is None else {"under the mode": shown.under_mode})
    made = table(f"one step of {shown.model.name} on {shown.on}", "", *columns)
    rows: list[tuple[str, list[str]]] = [
        ("measured peak", [size(m.peak_bytes) for m in columns.values()]),
        *(
            (f"  {category.replace('_', ' ')}", [size(m.by_category[category]) for m in columns.values()])
            for category in shown.plain.by_category
        ),
        ("predicted peak", [size(m.predicted_bytes) for m in columns.values()]),
        ("saved for backward", [size(m.saved_bytes) for m in columns.values()]),
        ("forward", [flops_text(m.forward_flops) for m in columns.values()]),
        ("backward", [flops_text(m.backward_flops) for m in columns.values()]),
        ("replayed", [f"{flops_text(m.replayed_flops)}, {m.num_replayed} operators" for m in columns.values()]),
        ("time of a step", [seconds_text(m.seconds) for m in columns.values()]),
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
    """Compare one step under a mode with a plain one."""
    mistakes = Mistakes()
    if asked.mode is None and asked.plan is None:
        with mistakes.noted():
            raise ModeError(
                f"nothing was named to verify. Write --mode with one of {', '.join(FORMS)}, or --plan FILE."
            )
    mode, place = _wanted(asked, mistakes)
    mistakes.raise_all()
    assert mode is not None
    with screen.progress("building the model"):
        loaded = load(asked, place=place)
        profile = _profiled(loaded, asked.blocks, "adamw")
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
        model=described(loaded.name, loaded.source, loaded.model, profile),
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
        screen.out.print("[green]equal[/] to the bit: loss, gradients, buffers, names and the random state of a step")
        screen.out.print(f"{name}: {did}", markup=False)
    elif shown.difference is None:
        screen.out.print("[yellow]cannot be compared[/]: plain training itself is not reproducible")
        screen.out.print(f"{name}: nothing else differs", markup=False)
    else:
        screen.out.print("[red]differs[/] from a plain step")
        screen.out.print(f"{name}: {shown.difference}", markup=False)
    for note in shown.notes:
        screen.out.print(f"note: {note}", markup=False)
