"""What the predicted peak is made of."""

from __future__ import annotations

from actmem.amounts import size
from actmem.cli.schema import Part
from actmem.plan import Plan
from actmem.planner.categories import NAMES
from actmem.planner.simulating import Simulated
from actmem.planner.walking import Ground, walk
from actmem.profiles import Profile

__all__ = ["parts_of", "parts_text"]


def parts_of(profile: Profile, plan: Plan) -> tuple[tuple[Part, ...], Simulated]:
    """Divide the predicted peak of a step under a plan. The parts add up to it.

    Returns:
        The parts, and the simulated step.

    >>> from actmem.plan import Rule
    >>> parts_of(Profile(), Plan([Rule("save")], [], "", "SaveEverything()"))[0]
    ()
    """
    moments, simulated = walk(Ground(profile), plan)
    if moments.peak < 0:
        return (), simulated
    found = moments.constant_bytes | {c: series[moments.peak] for c, series in moments.by_category.items()}
    return tuple(Part(category=c, num_bytes=found[c]) for c in NAMES), simulated


def parts_text(parts: tuple[Part, ...]) -> str:
    """Write the parts on one line, those of no bytes left out.

    >>> parts_text((Part(category="saved", num_bytes=2048), Part(category="buffers", num_bytes=0)))
    'saved activations 2.0 KiB'
    """
    return ", ".join(f"{NAMES[part.category]} {size(part.num_bytes)}" for part in parts if part.num_bytes)
