"""Check what a configuration file says, value by value: whatever is not known is refused and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from actmem.errors import ModeError
from actmem.ops import did_you_mean

__all__ = ["checked", "flag", "known_keys", "number", "one_of", "section", "texts"]


def section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table inside a file; empty where it is left out, or only switched on.

    Raises:
        ModeError: it is not a table.
    """
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return {}
    if not isinstance(value, Mapping):
        raise ModeError(f"{name} = {value!r} is not a table of settings by name.")
    return cast("Mapping[str, Any]", value)


def known_keys(name: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a table with a key that is not known."""
    for key in table:
        checked(f"a key of {name}", key, known)


def checked(what: str, value: object, known: Sequence[object]) -> None:
    """Refuse a value that is not among the known ones. True is not 1 here."""
    if not any(value is k or (isinstance(k, str) and value == k) for k in known):
        names = [k for k in known if isinstance(k, str)]
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        permitted = ", ".join(str(k).lower() if isinstance(k, bool) else str(k) for k in known if k is not None)
        raise ModeError(f"{what}: {value!r} is not known. Permitted: {permitted}.{hint}")


def one_of(name: str, given: Mapping[str, Any], known: Sequence[object]) -> Any:
    """Return a value out of a few."""
    checked(name, given.get(name), known)
    return given.get(name)


def flag(name: str, given: Mapping[str, Any], *, default: bool) -> bool:
    """Return a value that is true or false."""
    value = given.get(name, default)
    if type(value) is not bool:
        raise ModeError(f"{name} = {value!r} is not permitted. Write true or false.")
    return value


def number(name: str, given: Mapping[str, Any], *, default: int) -> int:
    """Return an int of 1 or more."""
    value = given.get(name, default)
    if type(value) is not int or value < 1:
        raise ModeError(f"{name} = {value!r} is not permitted. Expected a whole number of 1 or more.")
    return value


def texts(name: str, value: object) -> list[str]:
    """Return a list of texts."""
    items = cast("list[object]", value) if isinstance(value, list | tuple) else None
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise ModeError(f"{name} = {value!r} is not a list of names.")
    return cast("list[str]", list(items))
