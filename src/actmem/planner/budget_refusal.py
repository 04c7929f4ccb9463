"""The error for a budget that cannot be met: the smallest peak, what it consists of, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from actmem.devices import Device
from actmem.errors import BudgetError
from actmem.plan import Plan
from actmem.planner.card_fit import allowed_text
from actmem.planner.enough_ranks import enough_ranks
from actmem.planner.solver import Solution
from actmem.profiles import Profile
from actmem.simulation import Simulated, decisions, groups_of, is_accelerator, lowering, outside_torch, simulate
from actmem.units import size

__all__ = ["Words", "refusal"]

Words = Literal["all", "measured", "none"]
"""What a refusal says: what would help, too; that, except for measures, whose effect the caller predicts; or nothing
but the smallest peak, for callers that only want to know whether a plan fits."""


def refusal(
    p: Profile,
    s: Solution,
    named: Sequence[tuple[Plan, Simulated]],
    budget_bytes: int,
    *,
    offloaded: bool,
    headroom: float,
    beyond_bytes: int,
    known: Device,
    words: Words = "all",
) -> BudgetError:
    """Return the error for a budget that cannot be met."""
    accelerator = is_accelerator(known)
    if words == "none":
        peak = min((s.peak_bytes, *(found.peak_bytes for _, found in named)))
        return BudgetError(f"no plan fits {size(budget_bytes)}. The smallest peak is {size(peak)}.")
    keeps, exact, simulated = s.keeps, True, simulate(p, s.keeps, exact=True, timeline=True)
    for plan, found in named:
        if found.peak_bytes < simulated.peak_bytes:
            keeps, exact, simulated = decisions(p, plan), False, found
    peak = simulated.peak_bytes + (0 if accelerator else p.numbers_bytes)
    layer = simulated.peak_layer
    where = f"in {p.layers[layer].path or 'the model itself'}" if layer >= 0 else "outside the blocks"
    rest = peak - p.base_bytes + (p.starting_gradients_bytes if p.is_step else 0)
    parts = [f"parameters {size(p.parameters_bytes // p.shard)}"]
    if p.buffers_bytes:
        parts.append(f"buffers {size(p.buffers_bytes)}")
    parts += [
        f"optimizer state {size(p.optimizer_bytes // p.shard)} ({p.optimizer})",
        f"gradients, activations and temporaries {size(rest)}",
        f"of which all gradients {size(p.gradients_bytes // p.shard)}",
    ]
    less = f" (after {headroom:.0%} that stay free)" if headroom else ""
    first = (
        f"no plan fits {size(budget_bytes)}{less}. The smallest peak is {size(peak)}, at {simulated.peak_op} {where}: "
    )
    lines = [first + f"{', '.join(parts)}."]
    if exact and s.least_peak_bytes is not None:
        lines[0] += f" No plan of these blocks can be below {size(s.least_peak_bytes)}."
    if s.time_limit_hit:
        lines.append("The search was stopped by time_limit: a longer one may find a smaller peak.")
    helps = lowering(
        p,
        keeps,
        simulated,
        exact=exact,
        offloaded=offloaded,
        accelerator=accelerator,
        shards=(),
        measures=words == "all",
    )
    lines += [f"What would help: {text}" for text in helps]
    lines += enough_ranks(p, keeps, budget_bytes, known, exact=exact)
    enough = math.ceil((peak + beyond_bytes) / (1 - headroom) / 2**20) * 2**20
    lines.append(f"Or allow it: {allowed_text(enough)}.")
    if beyond_bytes:
        outside = size(outside_torch(known, groups_of(p)))
        lines.append(
            f"Of the budget of {size(budget_bytes + beyond_bytes)} on {known.name}, {size(beyond_bytes)} are not for "
            f"tensors: {outside} lie outside torch, the rest is for cuBLAS's workspaces and for what the caching "
            "allocator adds."
        )
    error = BudgetError("\n".join(lines))
    error.smallest_bytes = peak
    error.smallest_decisions = keeps if exact else None
    return error
