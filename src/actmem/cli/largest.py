"""`actmem largest`: the longest sequence, or the largest batch, that fits."""

from __future__ import annotations

import shlex
from dataclasses import fields

import actmem
from actmem.amounts import size
from actmem.cli.commands import Largest, Planning
from actmem.cli.devices import device_shown
from actmem.cli.failing import Mistakes
from actmem.cli.loading import Batch, load
from actmem.cli.schema import LargestShown
from actmem.cli.screen import Screen, ratio_text
from actmem.cli.shared import check_planning, described, document_of, measured, options_of
from actmem.errors import ModeError
from actmem.planner.largest import check_sizes

__all__ = ["run", "show"]


def run(asked: Largest, screen: Screen) -> tuple[LargestShown, int]:
    """Look for the largest size, by doubling and halving."""
    mistakes = Mistakes()
    chosen = check_planning(asked, mistakes)
    with mistakes.noted():
        given = asked.sequence if asked.vary == "sequence" else asked.batch
        if given is not None:
            raise ModeError(
                f"--{asked.vary} {given} cannot be combined with --vary {asked.vary}, which looks for it. Leave it out."
            )
    with mistakes.noted():
        check_sizes(asked.vary, asked.step, asked.most)
    mistakes.raise_all()
    loaded = load(asked)
    device = measured(chosen, loaded.model)

    def make_batch(n: int) -> Batch:
        return loaded.make_batch(*((n, asked.batch) if asked.vary == "sequence" else (asked.sequence, n)))

    with screen.progress(f"trying sizes of the {asked.vary}") as told:
        num_tried = 0

        def tried(_: int, __: bool) -> None:
            nonlocal num_tried
            num_tried += 1
            told(num_tried, None)

        found = actmem.largest(
            loaded.model,
            make_batch,
            budget=asked.budget,
            device=device,
            vary=asked.vary,
            loss=loaded.loss,
            step=asked.step,
            most=asked.most,
            progress=tried,
            offload=asked.offload,
            headroom=asked.headroom,
            **options_of(asked),
        )
    p = found.plan.predicted
    assert p is not None
    profile = actmem.profile(loaded.model, make_batch(found.size), loss=loaded.loss, **options_of(asked))
    shown = LargestShown(
        model=described(loaded.name, loaded.source, loaded.model, profile),
        device=device_shown(device),
        vary=asked.vary,
        size=found.size,
        refused=found.refused,
        budget_bytes=p.budget_bytes,
        peak_bytes=p.peak_bytes,
        step_time_ratio=p.step_time_ratio,
        plan=document_of(found.plan),
        fit_command=_fit_command(asked, found.size),
    )
    return shown, 0


def _fit_command(asked: Largest, size_found: int) -> str:
    """Write the command that plans for the size, with every option that was given."""
    words = ["actmem", "fit", asked.model]
    for each in fields(Planning):
        value = size_found if each.name == asked.vary else getattr(asked, each.name)
        if each.name not in ("model", "json", "traceback") and value != each.default:
            words += [f"--{each.name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--out", "plan.json"])


def show(shown: LargestShown, screen: Screen) -> None:
    """Print the outcome."""
    refused = "nothing larger was tried" if shown.refused is None else f"{shown.refused} does not fit"
    screen.out.print(f"[bold]{shown.vary} {shown.size}[/] fits; {refused}")
    screen.out.print(
        f"{shown.model.name} on {shown.device.name}: predicted peak {size(shown.peak_bytes)} of "
        f"{size(shown.budget_bytes)}, step {ratio_text(shown.step_time_ratio)} of saving everything",
        markup=False,
    )
    screen.copied("its plan: ", shown.fit_command)
