"""`actmem doctor`: what is known to go wrong, in a model and in the settings of its training."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from actmem.cli.commands import Doctor, Loading
from actmem.cli.failing import ANSWER_IS_NO
from actmem.cli.loading import load, runs_on
from actmem.cli.naming import read_mode
from actmem.cli.schema import ConfigShown, DoctorShown, Finding
from actmem.cli.screen import Screen, field
from actmem.compat.configs import read_config
from actmem.diagnosis import doctor
from actmem.errors import ModeError

__all__ = ["run", "show"]


def run(asked: Doctor, screen: Screen) -> tuple[DoctorShown, int]:
    """Make the checks that can be made with what was given."""
    files = {"trainer_args": asked.trainer_args, "accelerate": asked.accelerate, "deepspeed": asked.deepspeed}
    given: dict[str, Any] = {name: path for name, path in files.items() if path is not None}
    config = None
    if asked.config is not None:
        config = read_config(asked.config)
        given |= {"axolotl": asked.config} if config.system == "axolotl" else {}
    model = example = None
    if asked.model is not None:
        with screen.progress("building the model"):
            wanted = Loading(asked.model, sequence=asked.sequence, batch=asked.batch, dtype=asked.dtype)
            loaded = load(wanted, place=runs_on(None) if asked.run else "meta", untouched=True)
            model, example = loaded.model, loaded.batch if asked.run else None
            given |= {"loss": loaded.loss} if asked.run and loaded.loss is not None else {}
    elif not (given or config) or asked.run:
        raise ModeError(
            "nothing was named to look at. Write actmem doctor --model MODEL, or give settings: --config FILE, "
            "--trainer-args FILE, --accelerate FILE or --deepspeed FILE; --run needs a model."
        )
    if asked.blocks is not None:
        given["blocks"] = asked.blocks
    if asked.mode is not None:
        given["mode"] = read_mode(asked.mode)
    with screen.progress("looking"):
        found = doctor(model, example, **given)
    shown = DoctorShown(
        config=None
        if config is None
        else ConfigShown(system=config.system, said=dict(config.said), becomes=config.line, notes=config.notes),
        ok=found.ok,
        findings=tuple(
            Finding(check=f.check, severity=f.severity, found=f.found, why=f.why, change=f.change, actmem=f.actmem)
            for f in found.findings
        ),
        passed=found.passed,
        skipped={skipped.check: skipped.reason for skipped in found.skipped},
    )
    return shown, 0 if found.ok else ANSWER_IS_NO


_COLOURS = {"problem": "bold red", "warning": "yellow", "note": "cyan"}


def show(shown: DoctorShown, screen: Screen) -> None:
    """Print the findings, worst first."""
    out = screen.out
    if shown.config is not None:
        _show_config(shown.config, screen)
    for finding in sorted(shown.findings, key=lambda f: list(_COLOURS).index(f.severity)):
        head = Text(f"{finding.severity}: ", style=_COLOURS[finding.severity])
        out.print(
            head.append(Text(f"{finding.found} ", style="default")).append(Text(f"({finding.check})", style="dim"))
        )
        for name, text in (("why", finding.why), ("change", finding.change), ("actmem", finding.actmem)):
            out.print(field(name, text))
    count = f"{len(shown.passed)} checks found nothing, {len(shown.skipped)} could not be made"
    out.print(f"{count}{':' if shown.skipped else ''}", markup=False)
    for check, reason in shown.skipped.items():
        out.print(field("", f"{check}: {reason}"))


def _show_config(config: ConfigShown, screen: Screen) -> None:
    out = screen.out
    out.print(f"a configuration of {config.system}", markup=False)
    for name, value in config.said.items():
        out.print(field("says", f"{name} = {value!r}"))
    if not config.said:
        out.print(field("says", "nothing about activations"))
    out.print(field("here", config.becomes or "nothing is applied: plain training"))
    for note in config.notes:
        out.print(field("note", note))
    out.print()
