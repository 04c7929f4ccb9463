"""From the words of a command line to an exit code: parse, run, print, and say what went wrong."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import tyro

import actmem
from actmem.cli.commands import COMMANDS, Command, Demo, Schema
from actmem.cli.failing import INTERRUPTED, MODEL_FAILED, WRONG_COMMAND, exit_code, shown_message, users_part
from actmem.cli.schema import SCHEMAS, Document, Failed, schema_of
from actmem.cli.screen import Screen
from actmem.errors import ActmemError, ModeError
from actmem.ops import did_you_mean

__all__ = ["main", "parsed"]

_DESCRIPTION = """Decide for every activation that training holds on to: save it, recompute it, or offload it.

Begin with: actmem fit llama-3.1-8b --sequence 8192 --device h100-80gb --budget 72GiB

Exit codes:
- 0 it worked, and the answer is yes
- 1 the answer is no: a step differs, a problem was found, a budget cannot be kept
- 2 the command was wrong
- 3 the model could not be built or run
- 130 interrupted

`actmem --version` prints the versions of actmem, torch and Python."""

_RUNNERS: dict[str, tuple[str, str, str]] = {
    "fit": ("fit", "run", "show"),
    "show": ("show", "run", "show"),
    "measure": ("measure", "run", "show"),
    "verify": ("measure", "run_verify", "show_verify"),
    "largest": ("largest", "run", "show"),
    "doctor": ("doctor", "run", "show"),
    "explain": ("explain", "run", "show"),
    "devices": ("devices", "run", "show"),
    "demo": ("demo", "run", ""),
}
"""For each command its module, what runs it and what prints the outcome. They are imported when they are needed: most
need torch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. See NOTE [ Exit codes ] in failing.py.

    >>> main(["schema", "nonsense"])
    2

    Args:
        argv: the words after `actmem`. None: those that the process was started with.
    """
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(words: list[str]) -> int:
    if words == ["--version"]:
        sys.stdout.write(_versions() + "\n")
        return 0
    screen = Screen()
    wants_json = "--json" in words
    try:
        asked = parsed(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else WRONG_COMMAND
        if code and wants_json:
            _print_failure("UsageError", "the command line was not understood", code)
        return code
    whole = asked.traceback or os.environ.get("ACTMEM_TRACEBACK", "") not in ("", "0")
    try:
        return _run(asked, screen)
    except KeyboardInterrupt:
        screen.note("interrupted")
        if asked.json:
            _print_failure("KeyboardInterrupt", "interrupted", INTERRUPTED)
        return INTERRUPTED
    except SystemExit as stop:
        said = f"the code of the model ended the process: exit({stop.code!r})"
        screen.note(f"error: {said}")
        if asked.json:
            _print_failure("SystemExit", said, MODEL_FAILED)
        return MODEL_FAILED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever it is, a user gets a message and an exit code
        _say(error, screen, whole=whole)
        if asked.json:
            _print_failure(type(error).__name__, shown_message(error), exit_code(error))
        return exit_code(error)


def _versions() -> str:
    """Name what a report of a problem should name, without importing torch."""
    return f"actmem {actmem.__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}"


def parsed(words: list[str]) -> Command:
    """Read the words of a command line. Wrong ones end in SystemExit, after a message on stderr.

    >>> parsed(["devices", "h100-80gb"]).name
    'h100-80gb'
    """
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="actmem",
        description=_DESCRIPTION,
        args=words,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
    )


def _run(asked: Command, screen: Screen) -> int:
    if isinstance(asked, Schema):
        if asked.command not in SCHEMAS:
            hint = did_you_mean(asked.command, SCHEMAS)
            raise ModeError(f"there is no schema of {asked.command!r}. Permitted: {', '.join(SCHEMAS)}.{hint}")
        sys.stdout.write(json.dumps(schema_of(asked.command), indent=2) + "\n")
        return 0
    name = next(name for name, kind in COMMANDS.items() if kind is type(asked))
    module_name, runner, printer = _RUNNERS[name]
    module = importlib.import_module(f"actmem.cli.{module_name}")
    if isinstance(asked, Demo) and not asked.json:
        return module.for_readers()
    run: Callable[[Any, Screen], tuple[Document, int]] = getattr(module, runner)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # what a user's own code prints is no outcome
        if hasattr(asked, "fake"):
            complaints = importlib.import_module("actmem.profiling.complaints")
            stack.enter_context(complaints.called_as(f"actmem {name} ... --no-fake"))
        shown, code = run(asked, screen)
    if asked.json:
        _print_json(shown)
    else:
        getattr(module, printer)(shown, screen)
    return code


def _print_failure(kind: str, message: str, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it, and the exit code still tells
        _print_json(Failed(error=kind, message=message, exit_code=code))
        sys.stdout.flush()


def _print_json(shown: Document) -> None:
    sys.stdout.write(shown.model_dump_json(indent=2) + "\n")


def _say(error: Exception, screen: Screen, *, whole: bool) -> None:
    """Print a message for a user's mistake, the user's part of the traceback for an error in the user's code."""
    if whole:
        screen.notes.print("".join(traceback.format_exception(error)).rstrip(), markup=False)
    elif isinstance(error, ActmemError):
        screen.notes.print("[bold red]error:[/] ", end="")
        screen.notes.print(shown_message(error), markup=False)
    else:
        screen.notes.print("[bold red]error:[/] ", end="")
        screen.notes.print(users_part(error), markup=False)
