"""Files of plans: read as JSON or TOML, written as JSON, with errors that say what is wrong."""

import json
import os
import tomllib
from pathlib import Path

from actmem.errors import PlanError

__all__ = ["WRITE_AGAIN", "parsed", "read_text", "write_text"]

WRITE_AGAIN = "Write the plan again with plan.save(...)."


def write_text(path: str | os.PathLike[str], text: str, variable: str = "plan") -> None:
    """Write the text of a plan to a `.json` file, replacing an existing one.

    Args:
        path: the file.
        text: what it is to hold.
        variable: what a user would call the plan, for messages.

    Raises:
        PlanError: if the name does not end in `.json`, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise PlanError(
            f"cannot save a plan as {str(path)!r}: a plan is written as JSON. "
            f"Write {variable}.save({str(path.with_suffix('.json'))!r})."
        )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"cannot write the plan file {str(path)!r}: {error.strerror}. Name a file in a directory that exists."
        ) from error


def read_text(path: str | os.PathLike[str], made_by: str) -> tuple[str, str]:
    """Return the text of a plan file, and the suffix of its name.

    Raises:
        PlanError: if there is no such file, or it is not text. `made_by` is the line that writes one.
    """
    path = Path(path)
    if path.suffix not in _READERS:
        raise PlanError(f"cannot tell the format of {str(path)!r} from its name. Expected a .json or .toml file.")
    try:
        return path.read_text(encoding="utf-8"), path.suffix
    except FileNotFoundError as error:
        raise PlanError(f"there is no plan file {str(path)!r}. Check the path, or write one with {made_by}.") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{str(path)!r} is not a text file: byte {error.start} is not UTF-8. {WRITE_AGAIN}") from error
    except OSError as error:
        raise PlanError(f"cannot read the plan file {str(path)!r}: {error.strerror}.") from error


def parsed(text: str, *, source: str, suffix: str) -> object:
    """Return what the text of a file holds.

    >>> parsed('{"version": 1}', source="the plan text", suffix=".json")
    {'version': 1}

    Raises:
        PlanError: if it cannot be read in that format.
    """
    try:
        return _READERS[suffix](text)
    except _DuplicateKeyError as error:
        raise PlanError(f"{source} has the key {error.args[0]!r} twice in one place. Keep one of them.") from None
    except RecursionError:
        raise PlanError(f"{source} is nested too deeply to be a plan. {WRITE_AGAIN}") from None
    except ValueError as error:  # the base class of both readers' errors
        where = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise PlanError(
            f"{source} cannot be read as {suffix[1:].upper()}: {where}. It may be cut off. {WRITE_AGAIN}"
        ) from error


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return table


def _read_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique)


def _read_toml(text: str) -> object:
    return tomllib.loads(text)


_READERS = {".json": _read_json, ".toml": _read_toml}
