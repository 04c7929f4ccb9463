"""Whose speed and whose memory are meant."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from actmem.devices import THIS_MACHINE, Device, device
from actmem.measuring.machine import measure_machine
from actmem.profiles import Profile

__all__ = ["dtypes_of", "is_accelerator", "resolved"]


def resolved(which: Device | str | None, dtypes: Iterable[str] = ()) -> Device:
    """Return the device that is meant: this machine if none is named, measured in these dtypes."""
    if isinstance(which, Device):
        return which
    if which is None or which == THIS_MACHINE:
        return measure_machine(dtypes=frozenset(dtypes))
    return device(which)


def dtypes_of(profile: Profile) -> frozenset[str]:
    """Return what the products of a step are computed in."""
    return frozenset(c.dtype for c in profile.costs if c.flops)


def is_accelerator(which: Device) -> bool:
    """Tell whether an allocator with a cache of its own stands between tensors and the memory."""
    return which.key != THIS_MACHINE or torch.accelerator.is_available()
