"""What measures that were not allowed would bring, by prediction: each by itself, or together if none is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actmem.allocator import AllocatorSettings
from actmem.decisions import Decision
from actmem.devices import Device
from actmem.errors import BudgetError
from actmem.modes import Full
from actmem.plan import Plan
from actmem.planner.allowed_measures import Variant
from actmem.planner.budget_allowance import Allowance
from actmem.planner.profile_fit import offload_settings
from actmem.planner.solver import Keeps
from actmem.planner.written_plan import CannotSayError, write_plan
from actmem.profiles import Profile
from actmem.settings import Offload
from actmem.simulation import card_memory, follow, groups_of, is_accelerator, outside_torch
from actmem.units import size

__all__ = ["Reached", "lower_peaks", "offered", "reached"]

Added = Callable[[Variant, str], Variant | None]
"""Returns a variant with one more measure; None if the step cannot have it."""


@dataclass(frozen=True)
class Reached:
    """The smallest peak that is known to be reached."""

    peak_bytes: int
    reserved_bytes: int | None
    """What a card's caching allocator reserves then, and what lies outside torch."""
    fits: bool

    def __str__(self) -> str:
        on_card = "" if self.reserved_bytes is None else f" of tensors, {size(self.reserved_bytes)} of the card"
        return f"{size(self.peak_bytes)}{on_card}"


def reached(
    profiles: Sequence[Profile],
    variant: Variant,
    allowed: Allowance,
    known: Device,
    settings: AllocatorSettings,
    decided: Sequence[Sequence[str]] | None = None,
) -> Reached:
    """Predict the smallest peak of a few plans: every block recomputed, and what is known to be smallest otherwise.

    Args:
        profiles: the step of each example, with the measures of the variant.
        variant: the measures.
        allowed: the budget.
        known: the device.
        settings: of its caching allocator.
        decided: decisions with a small peak, to be followed to the letter.
    """
    chief, budget_bytes = profiles[0], allowed.budget_bytes
    collectives = "recompute" if chief.decides_collectives else "save"
    plans = [Plan(Full().rules(), chief.blocks, chief.fingerprint, "Full()", collectives=collectives)]
    kept: Keeps | None = None
    if decided is not None and len(profiles) == 1 and _is_for(chief, decided):
        kept = [[Decision(each) for each in layer] for layer in decided]
        plans += _written(chief, kept, budget_bytes, None)
    where = offload_settings(chief, variant.offload, known, budget_bytes)
    if where is not None:
        sent: list[Plan] = []
        if kept is not None:
            instead = [[Decision.OFFLOAD if k is Decision.SAVE else k for k in keep] for keep in kept]
            sent = _written(chief, instead, budget_bytes, where)
        everything = [[Decision.OFFLOAD] * len(layer.calls) for layer in chief.layers]
        plans += sent or _written(chief, everything, budget_bytes, where)
    peaks = [max(follow(p, plan).peak_bytes for p in profiles) for plan in plans]
    peak_bytes, plan = min(zip(peaks, plans, strict=True), key=lambda each: each[0])
    if not known.has_caching_allocator:
        numbers_bytes = 0 if is_accelerator(known) else max(p.numbers_bytes for p in profiles)
        return Reached(peak_bytes, None, peak_bytes + numbers_bytes <= budget_bytes)
    outside_bytes = max(outside_torch(known, groups_of(p)) for p in profiles)
    taken = outside_bytes + max(card_memory(p, plan, known, settings=settings)[0].reserved_bytes for p in profiles)
    return Reached(peak_bytes, taken, taken <= budget_bytes)


def _written(profile: Profile, keeps: Keeps, budget_bytes: int, where: Offload | None) -> list[Plan]:
    """Return the plan that decides so; none where rules cannot say it."""
    try:
        return [write_plan(profile, keeps, budget_bytes, "", where)[0]]
    except CannotSayError:
        return []


def _is_for(profile: Profile, decided: Sequence[Sequence[str]]) -> bool:
    """Return whether decisions are for the calls of a profile: with another measure its blocks may differ."""
    return [len(layer) for layer in decided] == [len(layer.calls) for layer in profile.layers]


def offered(
    error: BudgetError,
    base: Variant,
    allow: Sequence[str],
    names: Sequence[str],
    added: Added,
    reach: Callable[[Variant, Sequence[Sequence[str]] | None], Reached],
) -> list[str]:
    """Say what further measures would make of a budget that cannot be met: a sentence each.

    Args:
        error: the refusal.
        base: what its plan uses.
        allow: what was allowed.
        names: the further measures.
        added: adds one of them.
        reach: predicts the smallest peak with some measures, also from decisions.
    """
    if error.smallest_bytes is None:
        return []
    said: list[str] = []
    possible = {name: variant for name in names if (variant := added(base, name)) is not None}
    is_enough = False
    for name, variant in possible.items():
        found = reach(variant, error.smallest_decisions)
        if _is_less(found.peak_bytes, error.smallest_bytes):
            enough = "which fits" if found.fits else "not enough by itself"
            said.append(f"What would help: {_allowing([*allow, name])}: {found}, {enough}.")
            is_enough = is_enough or found.fits
    if is_enough or len(possible) < 2:
        return said
    together, used, least_bytes = base, list[str](), error.smallest_bytes
    for name in possible:
        more = added(together, name)
        found = None if more is None else reach(more, error.smallest_decisions)
        if more is None or found is None or not _is_less(found.peak_bytes, least_bytes):
            continue
        together, least_bytes, used = more, found.peak_bytes, [*used, name]
        if found.fits and len(used) > 1:
            return [*said, f"What would help: {_allowing([*allow, *used])}: {found}, which fits."]
    if len(used) > 1:
        said.append(f"What would help: {_allowing([*allow, *used])}: {size(least_bytes)}, still not enough.")
    return said


def lower_peaks(
    plan: Plan, base: Variant, allow: Sequence[str], names: Sequence[str], added: Added, peak: Callable[[Variant], int]
) -> str:
    """Say in a sentence to what further measures would lower the peak of a plan that fits; "" if none does.

    Args:
        plan: the plan.
        base: what it uses.
        allow: what was allowed.
        names: the further measures.
        added: adds one of them.
        peak: predicts the plan's peak with some measures.
    """
    assert plan.predicted is not None
    said: list[str] = []
    for name in names:
        variant = added(base, name)
        num_bytes = None if variant is None else peak(variant)
        if num_bytes is not None and _is_less(num_bytes, plan.predicted.peak_bytes):
            said.append(f"{_allowing([*allow, name])}: {size(num_bytes)}")
    return f"What was not allowed and would lower it: {'; '.join(said)}." if said else ""


def _allowing(names: Sequence[str]) -> str:
    return f"allow={list(names)!r}"


def _is_less(num_bytes: int, than_bytes: int) -> bool:
    return num_bytes < than_bytes and size(num_bytes) != size(than_bytes)
