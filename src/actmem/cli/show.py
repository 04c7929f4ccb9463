"""`actmem show`: what a mode or plan does with each activation of each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

import actmem
from actmem.cli.commands import Show
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import check_model, load
from actmem.cli.mode_names import FORMS, the_mode
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, flops_text, ratio_text, seconds_text, table
from actmem.cli.shared import ModelShown, Part, chosen_device, described, measured, parts_of, parts_text
from actmem.decisions import Decision, Reason
from actmem.errors import ModeError
from actmem.plan import FitRecord, Plan
from actmem.profiles import Layer, Profile
from actmem.simulation import Simulated, cost_seconds, decisions, on_card, plan_of, prediction
from actmem.units import size

__all__ = ["ShowShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class Row(Document):
    """One operator of a block, and what happens to its result."""

    op: str
    module: str
    """Path inside the block; "" is the block itself."""
    num_bytes: int
    """Bytes of its results."""
    dtype: str
    """The dtype it computes in."""
    decision: Literal["save", "recompute", "offload", "input"]
    """What the rules decide; `input` for an argument of the block."""
    outcome: Literal["held", "offloaded", "replayed", "not needed"]
    """What then happens; `not needed` if backward needs neither the result nor anything computed from it."""
    held_bytes: int
    flops: int
    seconds: float | None
    """On the device, if one was named."""
    why: str | None
    """Why it cannot be replayed, if it cannot."""


@dataclass(frozen=True, kw_only=True)
class Group(Document):
    """Layers that run the same operators under the same decisions."""

    layers: tuple[str, ...]
    held_bytes: int
    """Bytes that each layer holds until its backward."""
    replayed_flops: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class ShowShown(Document):
    """Output of `actmem show`."""

    command: Literal["show"] = "show"
    model: ModelShown
    mode: str
    device: str | None
    peak_bytes: int
    peak_at: str
    parts: tuple[Part, ...]
    """What the peak consists of. The sum is `peak_bytes`."""
    saved_bytes: int
    """Bytes alive when the backward pass begins, beyond those alive between steps."""
    replayed_flops: int
    num_replayed: int
    sent_bytes: int
    """Bytes that are offloaded."""
    step_time_ratio: float | None
    """Step time relative to saving everything, on the device, if one was named."""
    planned_for: str | None
    """The card that the plan was made for, if it was, and what PYTORCH_CUDA_ALLOC_CONF was assumed to be there."""
    groups: tuple[Group, ...]


def run(asked: Show, screen: Screen) -> tuple[ShowShown, int]:
    """Profile one step and report what happens to each activation under the mode."""
    mistakes = Mistakes()
    mode = chosen = None
    with mistakes.noted():
        mode = the_mode(asked.mode, asked.plan)
        if mode is None:
            raise ModeError(f"there is nothing to show. Write --mode with one of {', '.join(FORMS)}, or --plan FILE.")
    with mistakes.noted():
        chosen = None if asked.device is None else chosen_device(asked.device)
    check_model(asked, mistakes)
    mistakes.raise_all()
    assert mode is not None
    with screen.progress("profiling one step"):
        loaded = load(asked)
        device = None if asked.device is None else measured(chosen, loaded.model)
        optimizer = None if asked.optimizer == "none" else asked.optimizer
        profile = actmem.profile(
            loaded.model,
            loaded.batch,
            loss=loaded.loss,
            blocks=asked.blocks,
            optimizer=optimizer,
            fake=asked.fake,
            device=device,
        )
        profile = profile if device is None else on_card(profile, device)
        plan = plan_of(profile, mode)
        parts, simulated = parts_of(profile, plan)
    seconds = None if device is None else cost_seconds(profile, device)
    found = prediction(profile, simulated, seconds or [0.0] * len(profile.costs))
    shown = project(
        ShowShown,
        found,
        model=described(loaded, profile.blocks, profile.shapes),
        mode=plan.mode if asked.plan is None else f"FromPlan({str(asked.plan)!r})",
        device=None if device is None else device.name,
        peak_at=f"{found.peak_op}{f' in {found.peak_block}' if found.peak_block else ''}",
        parts=parts,
        step_time_ratio=None if device is None else found.step_time_ratio,
        planned_for=_planned_for(plan.predicted),
        groups=_groups(profile, plan, simulated, seconds, asked.min_bytes),
    )
    return shown, 0


def _planned_for(told: FitRecord | None) -> str | None:
    if told is None or told.reserved_bytes is None:
        return None
    return f"{told.device}, allocator: {told.allocator or 'the defaults'}"


def _groups(
    profile: Profile, plan: Plan, simulated: Simulated, seconds: list[float] | None, min_bytes: int
) -> tuple[Group, ...]:
    """Group layers that run the same operators under the same decisions."""
    keeps = decisions(profile, plan)
    known: dict[Any, tuple[Row, ...]] = {}
    same: dict[tuple[Row, ...], list[str]] = {}
    for nth, layer in enumerate(profile.layers):
        key = layer.kind, tuple(keeps[nth]), simulated.held[nth], simulated.away[nth], simulated.replayed[nth]
        if key not in known:
            known[key] = tuple(_rows(profile, nth, keeps[nth], simulated, seconds))
        same.setdefault(known[key], []).append(layer.path)
    return tuple(
        Group(
            layers=tuple(layers),
            held_bytes=sum(row.held_bytes for row in rows),
            replayed_flops=sum(row.flops for row in rows if row.outcome == "replayed"),
            rows=tuple(row for row in rows if row.num_bytes >= min_bytes),
        )
        for rows, layers in same.items()
    )


def _rows(
    profile: Profile, nth: int, keep: Sequence[Decision], simulated: Simulated, seconds: list[float] | None
) -> list[Row]:
    layer, held = profile.layers[nth], set(simulated.held[nth])
    replayed, away = set(simulated.replayed[nth]), set(simulated.away[nth])
    rows = [
        _given(value.num_bytes, sent=v in away)
        for v, value in enumerate(layer.values)
        if value.kind == "input" and v in held
    ]
    for index, call in enumerate(layer.calls):
        if not call.makes:  # a view
            continue
        made = [layer.values[v].num_bytes for v in call.makes]
        kept = [v for v in call.makes if v in held]
        cost = profile.costs[call.cost]
        gone = [v for v in kept if v in away]
        rows.append(
            Row(
                op=call.op,
                module=call.module,
                num_bytes=sum(made),
                dtype=cost.dtype,
                decision=keep[index].value,
                outcome="offloaded" if gone else "held" if kept else "replayed" if index in replayed else "not needed",
                held_bytes=sum(layer.values[v].num_bytes for v in kept if v not in away),
                flops=cost.flops,
                seconds=None if seconds is None else seconds[call.cost],
                why=_why(layer, call.makes),
            )
        )
    return rows


def _given(num_bytes: int, *, sent: bool) -> Row:
    return Row(
        op="input",
        module="",
        num_bytes=num_bytes,
        dtype="",
        decision="input",
        outcome="offloaded" if sent else "held",
        held_bytes=0 if sent else num_bytes,
        flops=0,
        seconds=None,
        why=None,
    )


def _why(layer: Layer, values: Sequence[int]) -> Reason | None:
    return next((layer.values[v].why for v in values if layer.values[v].why), None)


# --- for people -------------------------------------------------------------------------------------------------------

_COLOURS = {"held": "green", "replayed": "yellow", "offloaded": "cyan", "not needed": "dim"}


def show(shown: ShowShown, screen: Screen) -> None:
    """Print one table per group of equal layers, then the totals."""
    out = screen.out
    out.print(f"{shown.model.name} under {shown.mode}\n", markup=False)
    for group in shown.groups:
        out.print(_table(group, timed=shown.device is not None))
    ratio = "" if shown.step_time_ratio is None else f", step {ratio_text(shown.step_time_ratio)} of saving everything"
    sent = f", offloads {size(shown.sent_bytes)}" if shown.sent_bytes else ""
    if shown.planned_for is not None:
        out.print(f"planned for     {shown.planned_for}", markup=False)
    out.print(
        f"predicted peak  {size(shown.peak_bytes)}, at {shown.peak_at}\n"
        f"  consists of   {parts_text(shown.parts)}\n"
        f"a step          saves {size(shown.saved_bytes)} for backward, replays {shown.num_replayed} operators "
        f"({flops_text(shown.replayed_flops)}){sent}{ratio}",
        markup=False,
    )


def _table(group: Group, *, timed: bool) -> object:
    first, last, num = group.layers[0], group.layers[-1], len(group.layers)
    which = first if num == 1 else f"{num} equal layers, {first} ... {last}"
    each = "" if num == 1 else "each "
    title = f"{which}: {each}holds {size(group.held_bytes)}, replays {flops_text(group.replayed_flops)}"
    made = table(
        title, "operator", "module", "decision", "outcome", "bytes", "cost", num_texts=4, copied=("operator", "module")
    )
    for row in group.rows:
        cost = seconds_text(row.seconds) if timed and row.seconds is not None else flops_text(row.flops)
        made.add_row(
            row.op.removeprefix("aten.").removesuffix(".default"),
            row.module or "-",
            row.decision if row.why is None else f"{row.decision} ({row.why})",
            Text(row.outcome, style=_COLOURS[row.outcome]),
            size(row.num_bytes),
            cost,
        )
    return made
