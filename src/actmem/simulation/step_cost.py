"""Resolve the device that is meant, and say how long a step takes on it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from actmem.devices import THIS_MACHINE, Device, device
from actmem.log_entries import OperatorEntry
from actmem.measuring import measure_machine
from actmem.profiles import Cost, Profile

__all__ = [
    "cost_seconds",
    "dtypes_of",
    "is_accelerator",
    "is_measured",
    "link_seconds",
    "may_communicate",
    "resolved",
    "step_seconds",
]


def is_measured(profile: Profile, device: Device) -> bool:
    """Return whether the operators of a profile were timed on the device: it ran for real, and here."""
    return not profile.fake and device.key == THIS_MACHINE


def cost_seconds(profile: Profile, device: Device) -> list[float]:
    """Return the seconds of each of the profile's costs: as measured, or by the device's roofline."""
    if is_measured(profile, device):
        return [c.seconds or 0.0 for c in profile.costs]
    return [_seconds(cost, device) for cost in profile.costs]


def _seconds(cost: Cost, device: Device) -> float:
    if not cost.flops and not cost.moved_bytes:
        return 0.0
    here = device.seconds(cost.flops, cost.moved_bytes, cost.dtype)
    return max(here, link_seconds(cost.link_bytes, cost.reach, device)) if cost.op.startswith(_WAITED_FOR) else here


_WAITED_FOR = "_c10d_functional."
"""Collectives whose result the next operator reads, as in tensor parallel. FSDP2 gathers ahead of its use."""


def link_seconds(num_bytes: int, reach: int, device: Device) -> float:
    """Return how long bytes take over a device's link to others; 0 if it is not known what joins them.

    >>> from actmem.devices import device
    >>> link_seconds(36_000_000, 8, device("h100-80gb")), link_seconds(36_000_000, 8, device("rtx4090-24gb"))
    (0.0001, 0.0)
    """
    return num_bytes / device.peer_rate(reach) if num_bytes and device.fabric is not None else 0.0


def may_communicate(profile: Profile, device: Device) -> bool:
    """Return whether a plan may weigh running collectives again: the step has some, and their link's speed is known."""
    return device.fabric is not None and any(call.again_refs for layer in profile.layers for call in layer.calls)


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
