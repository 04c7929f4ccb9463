"""What to say when no plan fits: the smallest peak, what takes it, and what would help."""

from __future__ import annotations

import math

from actmem.amounts import size
from actmem.planner.peaks import lowering
from actmem.planner.simulating import simulate
from actmem.planner.solve import Solution
from actmem.profiles import Profile

__all__ = ["refusal"]


def refusal(p: Profile, s: Solution, budget_bytes: int, *, offloaded: bool, headroom: float, accelerator: bool) -> str:
    """Write the message of a budget that cannot be kept."""
    simulated = simulate(p, s.keeps, exact=True, timeline=True)
    peak = s.peak_bytes
    layer = simulated.peak_layer
    where = f"in {p.layers[layer].path or 'the model itself'}" if layer >= 0 else "outside the blocks"
    rest = peak - p.base_bytes
    parts = [f"parameters {size(p.parameters_bytes // p.shard)}"]
    if p.buffers_bytes:
        parts.append(f"buffers {size(p.buffers_bytes)}")
    parts += [
        f"optimizer state {size(p.optimizer_bytes // p.shard)} ({p.optimizer})",
        f"gradients, activations and temporaries {size(rest)}",
        f"of which all gradients {size(p.gradients_bytes // p.shard)}",
    ]
    less = f" (after {headroom:.0%} for the allocator)" if headroom else ""
    first = (
        f"no plan fits {size(budget_bytes)}{less}. The smallest peak is {size(peak)}, at {simulated.peak_op} {where}: "
    )
    lines = [first + f"{', '.join(parts)}."]
    if s.least_peak_bytes is not None:
        lines[0] += f" No plan of these blocks can be below {size(s.least_peak_bytes)}."
    helps = lowering(p, s.keeps, simulated, exact=True, offloaded=offloaded, accelerator=accelerator)
    lines += [f"What would help: {text}" for text in helps]
    enough = math.ceil(peak / (1 - headroom) / 2**20) * 2**20
    lines.append(f"Or allow it: budget={enough} ({size(enough)}).")
    return "\n".join(lines)
