"""What a step takes on a device, in seconds, from its operators."""

from __future__ import annotations

from actmem.devices import Device
from actmem.profiles import Profile

__all__ = ["cost_seconds", "step_seconds"]


def cost_seconds(profile: Profile, device: Device) -> list[float]:
    """Return the seconds of each of the profile's costs, on a device by its roofline."""
    return [
        0.0 if not c.flops and not c.moved_bytes else device.seconds(c.flops, c.moved_bytes, c.dtype)
        for c in profile.costs
    ]


def step_seconds(profile: Profile, seconds: list[float]) -> float:
    """Return what forward and backward take with everything saved."""
    costs: list[int] = [e[1] if e[0] == "op" else e[3] for e in profile.log if e[0] in ("op", "call")]
    return sum(seconds[cost] for cost in costs)
