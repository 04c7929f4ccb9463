"""Resolve the device that is meant, and say how long a step takes on it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from actmem.devices import THIS_MACHINE, Device, device
from actmem.log_entries import OperatorEntry
from actmem.measuring import measure_machine
from actmem.profiles import Profile

__all__ = ["cost_seconds", "dtypes_of", "is_accelerator", "is_measured", "resolved", "step_seconds"]


def is_measured(profile: Profile, device: Device) -> bool:
    """Return whether the operators of a profile were timed on the device: it ran for real, and here."""
    return not profile.fake and device.key == THIS_MACHINE


def cost_seconds(profile: Profile, device: Device) -> list[float]:
    """Return the seconds of each of the profile's costs: as measured, or by the device's roofline."""
    if is_measured(profile, device):
        return [c.seconds or 0.0 for c in profile.costs]
    return [
        0.0 if not c.flops and not c.moved_bytes else device.seconds(c.flops, c.moved_bytes, c.dtype)
        for c in profile.costs
    ]


def step_seconds(profile: Profile, seconds: list[float]) -> float:
    """Return the seconds of forward and backward with everything saved."""
    return sum(seconds[entry.cost] for entry in profile.log if isinstance(entry, OperatorEntry))


def resolved(which: Device | str | None, dtypes: Iterable[str] = ()) -> Device:
    """Return the named device, or this machine, measured in these dtypes, if none is named."""
    if isinstance(which, Device):
        return which
    if which is None or which == THIS_MACHINE:
        return measure_machine(dtypes=frozenset(dtypes))
    return device(which)


def dtypes_of(profile: Profile) -> frozenset[str]:
    """Return the dtypes in which the matrix products of a step are computed."""
    return frozenset(c.dtype for c in profile.costs if c.flops)


def is_accelerator(which: Device) -> bool:
    """Return whether a caching allocator sits between tensors and memory."""
    return which.key != THIS_MACHINE or torch.accelerator.is_available()
