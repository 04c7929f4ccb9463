"""How many bytes a budget is on a device."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.devices import Device
from actmem.errors import ModeError
from actmem.units import parse_budget

__all__ = ["Allowance", "allowance"]


@dataclass(frozen=True)
class Allowance:
    """How many bytes a plan may use."""

    asked_bytes: int
    """The budget as requested."""
    headroom: float
    """The fraction of it that stays free."""

    @property
    def budget_bytes(self) -> int:
        """What is left."""
        return int(self.asked_bytes * (1 - self.headroom))


def allowance(budget: str | int | float, known: Device, headroom: float | None = None) -> Allowance:
    """Resolve a budget on a device.

    >>> from actmem.devices import device
    >>> allowance("72GiB", device("h100-80gb"))
    Allowance(asked_bytes=77309411328, headroom=0.0)

    Raises:
        ModeError: the budget or the headroom is not permitted.
    """
    headroom = 0.0 if headroom is None else headroom
    if not 0 <= headroom < 1:
        raise ModeError(f"headroom = {headroom!r} is not permitted. Expected a number from 0 to below 1, such as 0.05.")
    return Allowance(parse_budget(budget, device_bytes=known.memory_bytes), headroom)
