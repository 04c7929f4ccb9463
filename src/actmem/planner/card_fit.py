"""From a budget on a card to a plan: judged by the simulated allocator, not by the bytes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from actmem.allocator import AllocatorSettings, environment_note
from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import FitRecord, Plan
from actmem.planner.arrangement import arrangements
from actmem.planner.named_modes import named_steps
from actmem.planner.search_phases import NEAR
from actmem.planner.written_plan import write_plan
from actmem.profiles import Profile
from actmem.simulation import (
    Prediction,
    card_memory,
    cost_seconds,
    decisions,
    estimates,
    follow,
    groups_of,
    outside_torch,
    prediction,
    unknowns,
)
from actmem.units import size

__all__ = ["allowed_text", "check_allocator", "fit_card"]


def check_allocator(allocator: str | AllocatorSettings, known: Device) -> AllocatorSettings:
    """Read the allocator's settings.

    >>> from actmem.devices import device
    >>> check_allocator("expandable_segments:True", device("h100-80gb")).expandable_segments
    True

    Raises:
        ModeError: they cannot be read, are not simulated, or the device has no caching allocator.
    """
    settings = AllocatorSettings.of(allocator)
    if settings != AllocatorSettings() and not known.has_caching_allocator:
        raise ModeError(
            f"allocator = {allocator!r} is for a card, and torch's caching allocator does not serve {known.name}. "
            "Leave it out, or name a card: device='h100-80gb'."
        )
    return settings


def fit_card(
    find: Callable[[int], Plan],
    profiles: Sequence[Profile],
    budget_bytes: int,
    known: Device,
    settings: AllocatorSettings,
    *,
    words: bool = True,
) -> Plan:
    """Find the plan for a card: what torch reserves there, and what lies outside torch, is within the budget.

    The planner knows the bytes of tensors. What the allocator makes of them is simulated for the plan that it finds,
    and for others that are as fast: the one that reserves least is taken. If that is too much, the planner has to find
    one with so many bytes less. So the search is repeated two or three times. The bound is that of the first, whose
    tensors could fill all of the budget: no plan that fits is faster.

    Args:
        find: returns the plan for so many bytes of tensors, or raises a BudgetError.
        profiles: one for each batch, as they are on the card.
        budget_bytes: what the process may take of the card.
        known: the card.
        settings: of its caching allocator.
        words: whether a refusal says what would help, which takes further searches.
    """
    outside_bytes = max(outside_torch(known, groups_of(p)) for p in profiles)
    limit_bytes = budget_bytes - outside_bytes
    target_bytes = limit_bytes - 2 * (known.blas_workspace_bytes or 0)
    if target_bytes <= 0:
        raise BudgetError(
            f"a budget of {size(budget_bytes)} leaves nothing for tensors on {known.name}: {size(outside_bytes)} "
            f"lie outside torch, and cuBLAS has two workspaces of {size(known.blas_workspace_bytes or 0)}. Allow more: "
            f"budget={2 * (budget_bytes - target_bytes)}. Or count tensors alone, as on a CPU: "
            f"device=actmem.device({known.key!r}).tensors_only()."
        )
    card = _Card(cache(find), profiles, limit_bytes, known, settings)
    try:
        plan, reserved_bytes = card.fitting(target_bytes)
    except BudgetError as error:
        if not card.judged or settings.expandable_segments or not words:
            raise  # the tensors alone do not fit, however they are laid out; or nothing lays them out better
        better = replace(settings, expandable_segments=True)
        try:
            replace(card, settings=better, judged=[]).fitting(target_bytes)
        except BudgetError:
            raise error from None
        helps = (
            "What would help: expandable segments, in which less memory is unusable. With them a plan fits: "
            f"allocator={better.text!r} here, and PYTORCH_CUDA_ALLOC_CONF={better.text} when it trains."
        )
        raise error.with_lines([helps]) from None
    assert plan.predicted is not None
    first = card.judged[0].predicted
    bound = plan.predicted.bound if first is None else first.bound
    note = environment_note(settings)
    predicted = replace(
        plan.predicted,
        budget_bytes=budget_bytes,
        bound=bound,
        gap=plan.predicted.step_time_ratio - bound,
        reserved_bytes=reserved_bytes,
        outside_bytes=outside_bytes,
        allocator=settings.text,
        curve=card.curve(plan),
        assumptions=tuple(dict.fromkeys(text for p in profiles for text in (*unknowns(p), *estimates(p)))),
        notes=() if note is None else (note,),
    )
    return replace(plan, mode=f"fit(budget={budget_bytes})", predicted=predicted)


@dataclass(frozen=True)
class _Card:
    """What may be reserved of a card, and what judges a plan for it."""

    find: Callable[[int], Plan]
    profiles: Sequence[Profile]
    limit_bytes: int
    known: Device
    settings: AllocatorSettings
    judged: list[Plan] = field(default_factory=list[Plan])
    """What was found, and judged."""

    def reserved(self, plan: Plan) -> int:
        """Return what torch reserves under a plan, in the batch that takes most."""
        return max(card_memory(p, plan, self.known, settings=self.settings)[0].reserved_bytes for p in self.profiles)

    def curve(self, plan: Plan) -> tuple[int, ...]:
        """Return what is allocated over a step; nothing of a sharded one, of which only sums are known."""
        chief, _ = self._chief(plan)
        if chief.shard > 1:
            return ()
        return card_memory(chief, plan, self.known, settings=self.settings)[0].curve

    def fitting(self, target_bytes: int) -> tuple[Plan, int]:
        """Return a plan that fits, and what it reserves. Raise the planner's BudgetError if there is none."""
        while True:
            try:
                plan = self.find(target_bytes)
            except BudgetError:
                found = self._by_name(self.judged[0]) if self.judged else None
                if found is None:
                    raise
                return found
            plan, reserved_bytes = min(((p, self.reserved(p)) for p in self._of_equal_time(plan)), key=lambda p: p[1])
            self.judged.append(plan)
            if reserved_bytes <= self.limit_bytes:
                return plan, reserved_bytes
            target_bytes -= reserved_bytes - self.limit_bytes

    def _of_equal_time(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan, and others that are as fast: what differs is which of equal layers gets which decisions."""
        yield plan
        if not plan.exact or plan.offload is not None:  # how long copies are waited for depends on the order
            return
        chief, told = self._chief(plan)
        seconds = cost_seconds(chief, self.known)
        held = [
            sum(layer.values[v].num_bytes for v in values)
            for layer, values in zip(chief.layers, follow(chief, plan).held, strict=True)
        ]
        for keeps in arrangements(chief.layers, decisions(chief, plan), held):
            other, simulated = write_plan(chief, keeps, told.peak_bytes, plan.mode, None)
            said = prediction(chief, simulated, seconds)
            if said.step_time_ratio <= told.step_time_ratio + NEAR:
                yield replace(other, predicted=_told(told, said))

    def _chief(self, plan: Plan) -> tuple[Profile, FitRecord]:
        told = plan.predicted
        assert told is not None
        return next(p for p in self.profiles if p.shapes == told.shapes), told

    def _by_name(self, first: Plan) -> tuple[Plan, int] | None:
        """Return the fastest named mode that fits. It may fragment less than a plan with as many bytes of tensors."""
        chief, told = self._chief(first)
        seconds = cost_seconds(chief, self.known)
        fitting: list[tuple[float, Plan, int]] = []
        for plan, simulated in named_steps(chief):
            reserved_bytes = self.reserved(plan)
            if reserved_bytes <= self.limit_bytes:
                said = prediction(chief, simulated, seconds)
                fitting.append((said.step_time_ratio, replace(plan, predicted=_told(told, said)), reserved_bytes))
        return None if not fitting else min(fitting, key=lambda each: each[0])[1:]


def _told(told: FitRecord, said: Prediction) -> FitRecord:
    """Return what is recorded of a plan in the place of another for the same budget."""
    return replace(
        told,
        peak_bytes=said.live_bytes,
        peak_at=f"{said.peak_op}{f' in {said.peak_block}' if said.peak_block else ''}",
        step_time_ratio=said.step_time_ratio,
        replayed_flops=said.replayed_flops,
        gap=said.step_time_ratio - told.bound,
    )


def allowed_text(num_bytes: int) -> str:
    """Return a budget as an argument.

    >>> allowed_text(2**30)
    'budget=1073741824 (1.00 GiB)'
    """
    return f"budget={num_bytes} ({size(num_bytes)})"
