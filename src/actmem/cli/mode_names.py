"""Parse a mode from the command line, such as `selective:attention,matmul`. Without torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actmem.errors import ModeError
from actmem.modes import Full, Mode, OffloadActivations, SaveEverything, Selective, Targets, every_second
from actmem.ops import did_you_mean
from actmem.plan import Plan

__all__ = ["FORMS", "read_mode", "the_mode"]

FORMS = (
    "save-everything",
    "full",
    "full:every=2",
    "full:layers=-4:",
    "selective:attention,matmul",
    "selective:attention,every_second(matmul)",
    "targets:norm,mlp",
    "offload:host",
    "offload:disk",
)
"""An example of each form, for error messages."""

_EVERY_SECOND = re.compile(r"every_second\((.+)\)")
_NUMBERS = ("every", "first", "min_bytes")


def read_mode(text: str) -> Mode:
    """Parse a mode: its name, then optionally `:` and a comma-separated list of names and options.

    >>> read_mode("selective:attention,every_second(matmul),min_bytes=1024")
    Selective(save=['attention', every_second('matmul')], min_bytes=1024)
    >>> read_mode("full:every=2")
    Full(every=2)

    Raises:
        ModeError: there is no such mode, or it does not accept what follows the colon.
    """
    name, _, rest = text.strip().partition(":")
    name = name.lower().replace("_", "-")
    made = _MAKERS.get(name)
    if made is None:
        raise ModeError(
            f"mode {name!r} is not known. Permitted: {', '.join(FORMS)}.{did_you_mean(name, _MAKERS)} For a plan file, "
            "write --plan FILE."
        )
    names = [part.strip() for part in rest.split(",") if part.strip()]
    options: dict[str, Any] = {}
    for part in [p for p in names if re.match(r"\w+=", p)]:
        names.remove(part)
        key, _, value = part.partition("=")
        options[key] = int(value) if key in _NUMBERS and value.isdecimal() else value
    forms = " or ".join(repr(form) for form in FORMS if form.startswith(name))
    if name in ("selective", "targets") and not names:
        raise ModeError(f"mode {text!r} names nothing. Write it as in {forms}.")
    try:
        return made(names, options)
    except TypeError:
        raise ModeError(f"mode {name!r} does not take {rest!r}. Write it as in {forms}.") from None


def the_mode(mode: str | None, plan: Path | None) -> Mode | Plan | None:
    """Return the mode or plan that --mode or --plan names; None if neither is given.

    >>> the_mode("full", None)
    Full()

    Raises:
        ModeError: both are given.
    """
    if mode is not None and plan is not None:
        raise ModeError(f"--mode {mode} cannot be combined with --plan {plan}: both say what to do. Omit one of them.")
    if plan is not None:
        return Plan.load(plan)
    return None if mode is None else read_mode(mode)


def _nothing_named(kind: Callable[..., Mode]) -> Callable[[list[str], dict[str, Any]], Mode]:
    def made(names: list[str], options: dict[str, Any]) -> Mode:
        return kind(*names, **options)  # a name is one argument too many

    return made


def _selective(names: list[str], options: dict[str, Any]) -> Mode:
    found = [_EVERY_SECOND.fullmatch(name) for name in names]
    return Selective(
        save=[name if m is None else every_second(m[1]) for name, m in zip(names, found, strict=True)], **options
    )


def _offload(names: list[str], options: dict[str, Any]) -> Mode:
    if len(names) != 1:
        raise TypeError  # as for any missing or surplus argument
    to: Any = names[0]
    return OffloadActivations(to=to, **options)


_MAKERS: dict[str, Callable[[list[str], dict[str, Any]], Mode]] = {
    "save-everything": _nothing_named(SaveEverything),
    "full": _nothing_named(Full),
    "selective": _selective,
    "targets": lambda names, options: Targets(names, **options),
    "offload": _offload,
}
