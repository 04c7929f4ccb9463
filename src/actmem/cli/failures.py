"""Error messages and exit codes of the command line.

NOTE [ Exit codes ]
    0    success, and the answer is yes
    1    the answer is no: a step differs, a problem was found, a budget cannot be met, a message is not recognised
    2    the command was wrong: an argument, a name, a file
    3    the model could not be built or run
    130  interrupted
"""

from __future__ import annotations

import contextlib
import importlib
import re
import traceback
from collections.abc import Generator
from pathlib import Path

from actmem.diagnosis import explain
from actmem.errors import ActmemError, BudgetError, DeviceError, ModeError, StructureError

__all__ = [
    "ANSWER_IS_NO",
    "INTERRUPTED",
    "MODEL_FAILED",
    "WRONG_COMMAND",
    "Mistakes",
    "exit_code",
    "shown_message",
    "users_part",
]

ANSWER_IS_NO, WRONG_COMMAND, MODEL_FAILED, INTERRUPTED = 1, 2, 3, 130

_OPTIONS = (
    "budget",
    "device",
    "offload",
    "shard",
    "microbatches",
    "optimizer",
    "sequence",
    "batch",
    "blocks",
    "headroom",
    "allocator",
    "multiple",
    "most",
)
_ARGUMENT = re.compile(rf"\b({'|'.join(_OPTIONS)})=(?:'([^']*)'|\"([^\"]*)\"|(\w+(?:\.\w+)*))")
_ALLOW = re.compile(r"\ballow=\[([^\]]*)\]")
_PACKAGE = str(Path(__file__).parents[1])


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error. See NOTE [ Exit codes ].

    >>> exit_code(ModeError("x")), exit_code(BudgetError("x")), exit_code(RuntimeError("x"))
    (2, 1, 3)
    """
    if isinstance(error, BudgetError):
        return ANSWER_IS_NO
    return WRONG_COMMAND if isinstance(error, (ModeError, DeviceError, StructureError)) else MODEL_FAILED


class Mistakes:
    """Collects the mistakes of one command line, so that all of them are reported at once.

    >>> mistakes = Mistakes()
    >>> for text in ("no such device", "no such model"):
    ...     with mistakes.noted():
    ...         raise ModeError(text)
    >>> mistakes.raise_all()
    Traceback (most recent call last):
    actmem.errors.ModeError: this command has 2 mistakes:
    1. no such device
    2. no such model
    """

    def __init__(self) -> None:
        self._found: list[ActmemError] = []

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        """Record an error that means a wrong command and continue after the `with` block. Other errors propagate."""
        try:
            yield
        except ActmemError as error:
            if exit_code(error) != WRONG_COMMAND:
                raise
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise the recorded errors, if any: a single one unchanged, several as one numbered list."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            listed = "\n".join(f"{n}. {error}" for n, error in enumerate(self._found, start=1))
            raise ModeError(f"this command has {len(self._found)} mistakes:\n{listed}")


def shown_message(error: BaseException) -> str:
    """Rewrite an error message for the command line, with Python arguments as options.

    >>> shown_message(ModeError("Name the device too, as in device='h100-80gb', or shard=8."))
    'Name the device too, as in --device h100-80gb, or --shard 8.'
    >>> shown_message(ModeError("What would help: allow=['split', 'offload']: 20 GiB."))
    'What would help: --allow split,offload: 20 GiB.'
    """
    text = str(error) or type(error).__name__
    if not isinstance(error, ActmemError):
        return text
    text = text.replace("offload='host' or 'disk'", "offload='host' or offload='disk'")
    if "Pass loss=" in text:
        text += " On the command line: let package.module:function return (model, batch, loss)."
    text = _ALLOW.sub(lambda m: f"--allow {','.join(re.findall(r'[a-z_]+', m[1]))}", text)
    return _ARGUMENT.sub(lambda m: f"--{m[1]} {m[2] or m[3] or m[4]}", text)


def users_part(error: BaseException) -> str:
    """Format the traceback of an error without the frames of actmem, torch, the import system and decorators.

    >>> print(users_part(ValueError("wrong")))
    ValueError: wrong
    None of your code was running: please report this, with the output of --traceback.
    """
    import torch

    library = str(Path(importlib.__file__).parent), contextlib.__file__
    ours = _PACKAGE, str(Path(torch.__file__).parent), *library, "<frozen "
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    head = ["Traceback (most recent call last, your part):\n", *traceback.format_list(frames)]
    what = "".join(traceback.format_exception_only(error)).rstrip()
    if not frames:
        if isinstance(error, TypeError) and "argument" in str(error):
            return (
                f"{what}\nYour function, or your model's forward, takes other arguments. A function is called with "
                "batch and sequence if its signature has them; the batch is a dict for model(**batch) or a tuple for "
                "model(*batch)."
            )
        if getattr(error, "__notes__", None):
            return what
        known = explain(error).best
        if known is not None:
            return f"{what}\n{known.what} {known.fix}"
        return f"{what}\nNone of your code was running: please report this, with the output of --traceback."
    return "".join(head) + f"{what}\nThe model could not be built or run; --traceback shows every frame."
