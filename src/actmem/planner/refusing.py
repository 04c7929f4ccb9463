"""What to say when no plan fits: the smallest peak, what takes it, and what would help."""

from __future__ import annotations

import math

from actmem.amounts import size
from actmem.planner.simulating import Simulated, simulate
from actmem.planner.solve import Solution
from actmem.profiles import Profile
from actmem.profiling.sharding import STEP, sharded

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
    lines += [
        f"What would help: {help_}" for help_ in _helps(p, s, simulated, offloaded=offloaded, accelerator=accelerator)
    ]
    enough = math.ceil(peak / (1 - headroom) / 2**20) * 2**20
    lines.append(f"Or allow it: budget={enough} ({size(enough)}).")
    return "\n".join(lines)


def _helps(p: Profile, s: Solution, simulated: Simulated, *, offloaded: bool, accelerator: bool) -> list[str]:
    found: list[str] = []
    peak, timeline = s.peak_bytes, simulated.timeline
    in_step = simulated.peak_op != STEP  # what the optimizer takes depends on no batch and no decision
    static = p.base_bytes + (p.gradients_bytes if p.microbatches == 1 else 0)
    moving = max(0, peak - static)
    if moving and in_step:
        found.append(
            f"half the batch or half the sequence: about {size(static + moving // 2)}, as parameters, optimizer state "
            f"and gradients take {size(static)} whatever the batch."
        )
    inside = _inside(p, timeline)
    if in_step and inside and inside < peak:
        found.append(
            f"a loss that is computed in chunks (no whole logits): {size(inside)}, the peak within the blocks."
        )
    if not offloaded and in_step:
        away = simulate(p, [["offload" if k == "save" else k for k in keep] for keep in s.keeps], exact=True)
        if size(away.peak_bytes) != size(peak):
            where = "offload='host' or 'disk'" if accelerator else "offload='disk'"
            found.append(f"{where}: {size(away.peak_bytes)}.")
    for num_ranks in (2, 8):
        if p.shard == 1:
            one = simulate(sharded(p, num_ranks), s.keeps, exact=True).peak_bytes
            if one < peak and size(one) != size(peak):
                found.append(f"sharding over {num_ranks} ranks, shard={num_ranks}: {size(one)} on each.")
    if p.optimizer_bytes and p.shard == 1:
        found.append(f"an optimizer without state: {size(peak - p.optimizer_bytes)}.")
    return found


def _inside(p: Profile, timeline: tuple[tuple[int, int], ...]) -> int:
    """Return the peak within the forward or the backward of a block."""
    inside: set[int] = set()
    current = False
    for at, entry in enumerate(p.log):
        if entry[0] in ("enter", "unpack"):
            current = True
        elif entry[0] in ("leave", "phase"):
            current = False
        if current:
            inside.add(at)
    return max((live for at, live in timeline if at in inside), default=0)
