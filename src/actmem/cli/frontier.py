"""`actmem frontier`: memory against time, without and with what may be offloaded and computed in pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import actmem
from actmem import planner
from actmem.cli.commands import Frontier
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import load
from actmem.cli.schema import Document
from actmem.cli.screen import Screen, flops_text, ratio_text, table
from actmem.cli.shared import ModelShown, check_stepping, described, measured, options_of
from actmem.cli.tuning_options import asked_split
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.profiles import Profile
from actmem.settings import Split
from actmem.simulation import cost_seconds, on_card, step_seconds
from actmem.units import size

__all__ = ["FrontierShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Document):
    """A plan or a mode: what it takes, and how long."""

    name: str
    """The curve that it is on, or the name of the mode."""
    peak_bytes: int
    """Bytes of tensors."""
    step_seconds: float
    """Forward and backward."""
    step_time_ratio: float
    """Relative to saving everything, with nothing in pieces."""
    replayed_flops: int
    is_best: bool
    """Whether nothing else here takes less memory and is as fast."""


@dataclass(frozen=True, kw_only=True)
class FrontierShown(Document):
    """Output of `actmem frontier`."""

    command: Literal["frontier"] = "frontier"
    model: ModelShown
    device: Device
    curves: tuple[str, ...]
    """What was permitted on each curve: nothing more, offloading, pieces of tokens, both."""
    points: tuple[FrontierPoint, ...]
    """The best plans at several budgets, on all curves, from the smallest peak on."""
    modes: tuple[FrontierPoint, ...]
    """The named modes, with nothing in pieces."""


def run(asked: Frontier, screen: Screen) -> tuple[FrontierShown, int]:
    """Find the best plans on each curve."""
    mistakes = Mistakes()
    chosen = check_stepping(asked, mistakes)
    with mistakes.noted():
        if asked.points < 2:
            raise ModeError(f"--points {asked.points} is not permitted. Expected at least 2.")
    mistakes.raise_all()
    with screen.progress("building the model"):
        loaded = load(asked)
        device = measured(chosen, loaded.model)
    curves: list[_Curve] = []
    split = asked_split(asked)
    for pieces in (None,) if split is None else (None, split):
        with screen.progress("profiling one step"):
            options: dict[str, Any] = {**options_of(asked), "split": pieces}
            profile = actmem.profile(loaded.model, loaded.batch, loss=loaded.loss, device=device, **options)
        profile = on_card(profile, device)
        seconds = step_seconds(profile, cost_seconds(profile, device))
        for offload in (None,) if asked.offload is None else (None, asked.offload):
            name = _name(offload, pieces)
            with screen.progress(f"searching for plans: {name}") as told:
                found = planner.frontier(profile, device, num_points=asked.points, offload=offload, progress=told)
            curves.append(_Curve(name, seconds, found, profile))
    plain = curves[0]
    points = [_point(x, curve.name, curve.seconds, plain.seconds) for curve in curves for x in curve.found.points]
    shown = FrontierShown(
        model=described(loaded, plain.profile.blocks, plain.profile.shapes),
        device=device,
        curves=tuple(curve.name for curve in curves),
        points=tuple(_marked(points)),
        modes=tuple(_point(x, x.name, plain.seconds, plain.seconds) for x in plain.found.modes),
    )
    return shown, 0


class _Curve(NamedTuple):
    name: str
    seconds: float
    """Of a step that saves everything."""
    found: planner.Frontier
    profile: Profile


def _name(offload: str | None, pieces: Split | None) -> str:
    more = [] if offload is None else [f"offload to {offload}"]
    more += [] if pieces is None else [repr(pieces)]
    return " and ".join(more) or "save or recompute"


def _point(x: planner.Point, name: str, seconds: float, plain_seconds: float) -> FrontierPoint:
    taken = x.step_time_ratio * seconds
    return FrontierPoint(
        name=name,
        peak_bytes=x.peak_bytes,
        step_seconds=taken,
        step_time_ratio=taken / plain_seconds,
        replayed_flops=x.replayed_flops,
        is_best=False,
    )


def _marked(points: list[FrontierPoint]) -> list[FrontierPoint]:
    """Return the points by peak, with those marked that no other is better than."""
    fastest = float("inf")
    marked: list[FrontierPoint] = []
    for x in sorted(points, key=lambda x: (x.peak_bytes, x.step_seconds)):
        is_best = x.step_seconds < fastest
        fastest = min(fastest, x.step_seconds)
        marked.append(replace(x, is_best=is_best))
    return marked


def show(shown: FrontierShown, screen: Screen) -> None:
    """Print the curves as one table."""
    model = shown.model
    screen.out.print(model.name, style="bold", markup=False)
    screen.out.print(
        f"{model.num_parameters:,} parameters, {model.num_blocks} blocks, {', '.join(model.shapes)}", markup=False
    )
    screen.out.print(f"{shown.device.name}\n", markup=False)
    for title, points in (("memory against time: the best plans", shown.points), ("the named modes", shown.modes)):
        made = table(title, "by", "peak", "step time", "replayed", "best")
        for x in points:
            best = "yes" if x.is_best else ""
            made.add_row(x.name, size(x.peak_bytes), ratio_text(x.step_time_ratio), flops_text(x.replayed_flops), best)
        screen.out.print(made)
