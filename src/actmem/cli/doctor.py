"""`actmem doctor`: known mistakes in a model and in its training settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from actmem.cli.commands import Doctor, Loading
from actmem.cli.failures import ANSWER_IS_NO
from actmem.cli.loaded_model import load, runs_on
from actmem.cli.mode_names import read_mode
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, field
from actmem.compat.configs import read_config
from actmem.diagnosis import Finding, Skipped, doctor
from actmem.errors import ModeError

__all__ = ["DoctorShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class ConfigShown(Document):
    """The actmem equivalent of another system's configuration."""

    system: str
    """The system that the file was recognised as."""
    said: Mapping[str, Any]
    """Its settings about activations, by their own names."""
    becomes: str | None
    """The call that does the same here; null if nothing is to be applied."""
    notes: tuple[str, ...]
    """Differences from that system, and settings that do not concern actmem."""


@dataclass(frozen=True, kw_only=True)
class DoctorShown(Document):
    """Output of `actmem doctor`."""

    command: Literal["doctor"] = "doctor"
    config: ConfigShown | None = None
    """With --config: the actmem equivalent of the file."""
    ok: bool
    """Whether no problem was found. There may be warnings and notes."""
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    """Checks that found nothing."""
    skipped: tuple[Skipped, ...]
    """Checks that could not be run, and why."""


def run(asked: Doctor, screen: Screen) -> tuple[DoctorShown, int]:
    """Run every check that the given model and files allow."""
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
            "there is nothing to check. Write actmem doctor --model MODEL, or give settings: --config FILE, "
            "--trainer-args FILE, --accelerate FILE or --deepspeed FILE; --run needs a model."
        )
    if asked.blocks is not None:
        given["blocks"] = asked.blocks
    if asked.mode is not None:
        given["mode"] = read_mode(asked.mode)
    with screen.progress("running the checks"):
        found = doctor(model, example, **given)
    becomes = None if config is None else project(ConfigShown, config, becomes=config.line)
    return project(DoctorShown, found, config=becomes), 0 if found.ok else ANSWER_IS_NO


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
    count = f"{len(shown.passed)} checks found nothing, {len(shown.skipped)} could not be run"
    out.print(f"{count}{':' if shown.skipped else ''}", markup=False)
    for skipped in shown.skipped:
        out.print(field("", f"{skipped.check}: {skipped.reason}"))


def _show_config(config: ConfigShown, screen: Screen) -> None:
    out = screen.out
    out.print(f"a configuration of {config.system}", markup=False)
    for name, value in config.said.items():
        out.print(field("says", f"{name} = {value!r}"))
    if not config.said:
        out.print(field("says", "nothing about activations"))
    out.print(field("actmem", config.becomes or "apply nothing: plain training"))
    for note in config.notes:
        out.print(field("note", note))
    out.print()
