"""Run one command line: parse it, run the command, print the result or the error, return the exit code."""

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
from typing import Any, get_args, get_type_hints

import tyro

import actmem
from actmem.cli.commands import COMMANDS, Command, Demo, Schema
from actmem.cli.failures import INTERRUPTED, MODEL_FAILED, WRONG_COMMAND, exit_code, shown_message, users_part
from actmem.cli.schema import Document, Failed, schema_of, to_json
from actmem.cli.screen import Screen
from actmem.errors import ActmemError, ModeError
from actmem.ops import did_you_mean

__all__ = ["DOCUMENTED", "document_of", "main", "parsed"]

_DESCRIPTION = """Decide for every activation that training holds on to: save it, recompute it, or offload it.

Start with: actmem fit llama-3.1-8b --sequence 8192 --device h100-80gb --optimizer adamw_fused --budget 72GiB

Exit codes:
- 0 success, and the answer is yes
- 1 the answer is no: a step differs, a problem was found, a budget cannot be met
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
    "frontier": ("frontier", "run", "show"),
    "ranks": ("card_count", "run", "show"),
    "export": ("export", "run", "show"),
    "doctor": ("doctor", "run", "show"),
    "explain": ("explain", "run", "show"),
    "snapshot": ("snapshot", "run", "show"),
    "record": ("record", "run", "show"),
    "devices": ("device_table", "run", "show"),
    "native": ("native_core", "run", "show"),
    "demo": ("demo", "run", ""),
}
"""For each command: its module, the function that runs it and the function that prints the result. Modules are imported
on demand, because most need torch."""

DOCUMENTED = (*_RUNNERS, "error")
"""The names that `actmem schema` takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. See NOTE [ Exit codes ] in failures.py.

    >>> main(["schema", "nonsense"])
    2

    Args:
        argv: the words after `actmem`. Default: those of the process.
    """
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
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
        said = f"the model's code ended the process: exit({stop.code!r})"
        screen.note(f"error: {said}")
        if asked.json:
            _print_failure("SystemExit", said, MODEL_FAILED)
        return MODEL_FAILED
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  # any failure becomes a message and an exit code
        _say(error, screen, whole=whole)
        if asked.json:
            _print_failure(type(error).__name__, shown_message(error), exit_code(error))
        return exit_code(error)


def _versions() -> str:
    """Return the versions that a bug report should name, without importing torch."""
    return f"actmem {actmem.__version__}, torch {metadata.version('torch')}, Python {platform.python_version()}"


def parsed(words: list[str]) -> Command:
    """Parse a command line. A wrong one raises SystemExit after a message on stderr.

    >>> parsed(["devices", "h100-80gb"]).name
    'h100-80gb'
    """
    if words[:1] == ["largest"] and any(word == "--step" or word.startswith("--step=") for word in words):
        sys.stderr.write("error: actmem largest does not know --step. Did you mean --multiple?\n")
        raise SystemExit(WRONG_COMMAND)
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="actmem",
        description=_DESCRIPTION,
        args=words,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
    )


def _run(asked: Command, screen: Screen) -> int:
    if isinstance(asked, Schema):
        if asked.command not in DOCUMENTED:
            hint = did_you_mean(asked.command, DOCUMENTED)
            raise ModeError(f"there is no schema for {asked.command!r}. Permitted: {', '.join(DOCUMENTED)}.{hint}")
        sys.stdout.write(json.dumps(schema_of(document_of(asked.command)), indent=2) + "\n")
        return 0
    name = next(name for name, kind in COMMANDS.items() if kind is type(asked))
    if isinstance(asked, Demo):  # torch logs once that a profiler does not know the size of earlier tensors
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    module, run = _imported(name)
    if isinstance(asked, Demo) and not asked.json:
        return module.for_readers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # stdout is for the result, not for user prints
        if hasattr(asked, "fake"):
            complaints = importlib.import_module("actmem.profiling")
            stack.enter_context(complaints.called_as(f"actmem {name} ... --no-fake"))
        shown, code = run(asked, screen)
    if asked.json:
        _print_json(shown)
    else:
        getattr(module, _RUNNERS[name][2])(shown, screen)
    return code


def _imported(command: str) -> tuple[Any, Callable[[Any, Screen], tuple[Document, int]]]:
    """Import the module of a command; return it and the function that runs the command."""
    module_name, runner, _ = _RUNNERS[command]
    module = importlib.import_module(f"actmem.cli.{module_name}")
    return module, getattr(module, runner)


def document_of(command: str) -> type[Document]:
    """Return the document class of a command: the type that its `run` function is declared to return.

    >>> document_of("devices").__name__, document_of("error").__name__
    ('DevicesShown', 'Failed')
    """
    if command == "error":
        return Failed
    return get_args(get_type_hints(_imported(command)[1])["return"])[0]


def _print_failure(kind: str, message: str, code: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it; the exit code still says so
        _print_json(Failed(error=kind, message=message, exit_code=code))
        sys.stdout.flush()


def _print_json(shown: Document) -> None:
    sys.stdout.write(to_json(shown) + "\n")


def _say(error: Exception, screen: Screen, *, whole: bool) -> None:
    """Print the message of a user's mistake, or the user's part of the traceback if the user's code failed."""
    if whole:
        screen.notes.print("".join(traceback.format_exception(error)).rstrip(), markup=False)
    elif isinstance(error, ActmemError):
        screen.notes.print("[bold red]error:[/] ", end="")
        screen.notes.print(shown_message(error), markup=False)
    else:
        screen.notes.print("[bold red]error:[/] ", end="")
        screen.notes.print(users_part(error), markup=False)
