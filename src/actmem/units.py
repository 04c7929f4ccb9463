"""Parse and format amounts of memory, without torch."""

import math
import re
from decimal import Decimal

from actmem.errors import ModeError

__all__ = ["UNITS", "parse_budget", "size"]

UNITS = {
    "B": 1,
    **{name: 1000**power for power, name in enumerate(("KB", "MB", "GB", "TB"), start=1)},
    **{name: 1024**power for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
}
"""Bytes per unit: `GB` is decimal, `GiB` is binary."""

_UNIT_OF = {name.lower(): num_bytes for name, num_bytes in UNITS.items()} | {
    name[0].lower(): num_bytes for name, num_bytes in UNITS.items() if name.endswith("iB")
}
"""A single letter is binary, as in `ls -h`, `docker run --memory` and Slurm: `G` is `GiB`."""
_LEAST_BYTES = 4096
"""A bare number below this must be missing its unit: no training fits in less than a page of memory."""
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]+|%)?", re.ASCII | re.IGNORECASE)
_EXPECTED = (
    f"Expected a string with a unit ({', '.join(UNITS)}; K, M, G and T are KiB to TiB), such as '20GiB'; a percentage "
    f"of the device's memory, such as '90%'; an int of at least {_LEAST_BYTES} bytes; or a float above 0 and up to "
    "1.0, as a fraction of the device's memory."
)


def size(num_bytes: int) -> str:
    """Format a number of bytes.

    >>> size(512), size(3 * 2**20), size(5 * 2**30)
    ('512 B', '3.0 MiB', '5.00 GiB')
    """
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"


def parse_budget(budget: str | int | float, *, device_bytes: int | None) -> int:
    """Return how many bytes a budget allows, rounded down.

    A string may also be a bare number, as on a command line: `"0.9"` is read as 0.9, `"21474836480"` as an int. `G`
    alone is `GiB`. An int too small to be a number of bytes, such as 72, must be missing its unit and is refused.

    >>> parse_budget("20GiB", device_bytes=None), parse_budget("20 GB", device_bytes=None)
    (21474836480, 20000000000)
    >>> parse_budget(0.9, device_bytes=80_000_000_000), parse_budget("90%", device_bytes=80_000_000_000)
    (72000000000, 72000000000)

    Args:
        budget: An amount with a unit, an int of bytes, a percentage, or a fraction of `device_bytes`.
        device_bytes: The memory of the device. If it is None, a fraction is refused.

    Raises:
        ModeError: if the budget is none of these, is not above 0, or is a fraction of an unknown amount of memory.
    """
    amount = _number_of(budget)
    if not math.isfinite(amount):
        raise _refused(budget, "is not an amount of memory")
    if amount <= 0:
        raise _refused(budget, "leaves no memory at all" if amount == 0 else "is negative")
    if isinstance(amount, int):
        if amount < _LEAST_BYTES and str(budget).strip().isdecimal():
            raise ModeError(f"{amount} bytes? Write budget='{amount}GiB', or budget='{amount}B' if you mean bytes.")
        return amount
    if amount > 1:
        raise _refused(budget, "is a fraction above 1, and no device has more than all of its memory")
    if device_bytes is None:
        raise ModeError(
            f"budget = {budget!r} is a fraction, but the device's memory is not known. Name the device too, as in "
            "device='h100-80gb', or write the amount, as in budget='20GiB'."
        )
    num_bytes = int(Decimal(str(amount)) * device_bytes)
    if num_bytes == 0:
        raise _refused(budget, f"is less than one byte of the {device_bytes} that the device has")
    return num_bytes


def _number_of(budget: object) -> int | float:
    """Return a number of bytes as an int, or a fraction as a float."""
    if isinstance(budget, str):
        return _number_in(budget)
    if isinstance(budget, (int, float)) and not isinstance(budget, bool):
        return budget
    raise _refused(budget, "is not an amount of memory")


def _number_in(text: str) -> int | float:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise _refused(text, "is not an amount of memory")
    number, unit = match.groups()
    if unit == "%":
        return float(Decimal(number) / 100)
    if unit is None:
        return float(number) if "." in number else int(number)
    if unit.lower() not in _UNIT_OF:
        raise _refused(text, f"has an unknown unit, {unit!r}")
    num_bytes = int(Decimal(number) * _UNIT_OF[unit.lower()])
    if num_bytes == 0 and Decimal(number) > 0:
        raise _refused(text, "is less than one byte")
    return num_bytes


def _refused(budget: object, why: str) -> ModeError:
    shown = repr(budget) if len(repr(budget)) <= 80 else repr(budget)[:77] + "..."
    return ModeError(f"budget = {shown} {why}. {_EXPECTED} Write budget='20GiB', or budget=0.9 for 90 %.")
