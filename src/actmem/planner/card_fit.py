"""From a budget on a card to a plan: judged by the simulated allocator, not by the bytes of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from actmem.devices import Device
from actmem.errors import BudgetError
from actmem.plan import Plan
from actmem.planner.named_modes import named_steps
from actmem.profiles import Profile
from actmem.simulation import CardMemory, card_memory, cost_seconds, outside_torch, prediction, unknowns
from actmem.units import size

__all__ = ["allowed_text", "fit_card"]


def fit_card(find: Callable[[int], Plan], profiles: Sequence[Profile], budget_bytes: int, known: Device) -> Plan:
    """Find the plan for a card: what torch reserves there, and what lies outside torch, is within the budget.

    The planner knows the bytes of tensors. What the allocator makes of them is simulated for the plan that it finds; if
    that is too much, it has to find one with so many bytes less. So the search is repeated two or three times.

    Args:
        find: returns the plan for so many bytes of tensors, or raises a BudgetError.
        profiles: one for each batch, as they are on the card.
        budget_bytes: what the process may take of the card.
        known: the card.
    """
    outside_bytes = outside_torch(known, profiles[0].shard)
    limit_bytes = budget_bytes - outside_bytes
    target_bytes = limit_bytes - 2 * (known.blas_workspace_bytes or 0)
    if target_bytes <= 0:
        raise BudgetError(
            f"a budget of {size(budget_bytes)} leaves nothing for tensors on {known.name}: {size(outside_bytes)} "
            f"lie outside torch, and cuBLAS has two workspaces of {size(known.blas_workspace_bytes or 0)}. Allow more: "
            f"budget={2 * (budget_bytes - target_bytes)}."
        )
    first: Plan | None = None
    while True:
        try:
            plan = find(target_bytes)
        except BudgetError:
            found = None if first is None else _by_name(first, profiles, limit_bytes, known)
            if found is None:
                raise
            plan, most = found
            break
        most = max((card_memory(p, plan, known)[0] for p in profiles), key=lambda memory: memory.reserved_bytes)
        if most.reserved_bytes <= limit_bytes:
            break
        first = first or plan
        target_bytes -= most.reserved_bytes - limit_bytes
    assert plan.predicted is not None
    predicted = replace(
        plan.predicted,
        budget_bytes=budget_bytes,
        reserved_bytes=most.reserved_bytes,
        outside_bytes=most.outside_bytes,
        assumptions=tuple(dict.fromkeys(text for p in profiles for text in unknowns(p))),
    )
    return replace(plan, mode=f"fit(budget={budget_bytes})", predicted=predicted)


def _by_name(
    first: Plan, profiles: Sequence[Profile], limit_bytes: int, known: Device
) -> tuple[Plan, CardMemory] | None:
    """Return the fastest named mode that fits. It may fragment less than a plan with as many bytes of tensors."""
    told = first.predicted
    assert told is not None
    chief = next(p for p in profiles if p.shapes == told.shapes)
    seconds = cost_seconds(chief, known)
    fitting: list[tuple[float, Plan, CardMemory]] = []
    for plan, simulated in named_steps(chief):
        most = max((card_memory(p, plan, known)[0] for p in profiles), key=lambda memory: memory.reserved_bytes)
        if most.reserved_bytes <= limit_bytes:
            said = prediction(chief, simulated, seconds)
            predicted = replace(
                told,
                peak_bytes=said.live_bytes,
                peak_at=f"{said.peak_op}{f' in {said.peak_block}' if said.peak_block else ''}",
                step_time_ratio=said.step_time_ratio,
                replayed_flops=said.replayed_flops,
                gap=said.step_time_ratio - told.bound,
            )
            fitting.append((said.step_time_ratio, replace(plan, predicted=predicted), most))
    return None if not fitting else min(fitting, key=lambda each: each[0])[1:]


def allowed_text(num_bytes: int) -> str:
    """Return a budget as an argument.

    >>> allowed_text(2**30)
    'budget=1073741824 (1.00 GiB)'
    """
    return f"budget={num_bytes} ({size(num_bytes)})"
