"""All layers in one program, for steps of few layers.

The bound of a blend is off by about one layer's worth of work. Where there are few layers that is a lot. One program
with the decisions of every layer has no such gap. But it does not know that layers are alike, so it must be small.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.planner.highs import Program
from actmem.planner.master import Step
from actmem.planner.pricing import BlockProgram

__all__ = ["Joined", "join"]


@dataclass(frozen=True)
class Joined:
    """The outcome of `join`."""

    keeps: list[tuple[str, ...]]
    """For each layer, its decisions; empty if nothing was found."""
    bound: float
    """No plan that keeps to the rows has fewer seconds, or a smaller peak."""


def join(step: Step, budget_bytes: int | None, *, below: float | None, near: float, time_limit: float) -> Joined:
    """Find decisions for all layers that keep to the rows found so far.

    Args:
        step: the step, and its rows.
        budget_bytes: what the rows must keep to; None to look for the smallest peak instead of the least time.
        below: look only for plans with fewer replay seconds, or a smaller peak, than this.
        near: be content with so many seconds, or bytes, above the least.
        time_limit: in seconds.
    """
    line = step.timeline
    problems = [step.problems[f] for f in line.family_of]
    total = sum(u.seconds for problem in problems for u in problem.units)
    unit = max(1.0, max((step.base_bytes(m) for m in step.rows), default=1) / 1e4)
    scale = 1.0 / unit if budget_bytes is None else 1000.0 / (total or 1.0)
    program = Program()
    blocks = [BlockProgram(program, p, second=0.0 if budget_bytes is None else scale) for p in problems]
    peak = program.column(1.0) if budget_bytes is None else None
    limit = budget_bytes or 0
    for n, moment in enumerate(step.rows):
        if not step.is_sure(moment):
            continue
        terms: dict[int, float] = {}
        used = step.base_bytes(moment) + step.tight.get(moment, 0)
        for group in step.groups:
            for nth in group.layers:
                found, constant = blocks[nth].bytes_after(group.places[n][0])
                used += constant
                terms.update((column, amount / unit) for column, amount in found.items())
        if peak is not None:
            terms[peak] = -1.0
        program.row(terms, upper=(limit - used) / unit)
    if below is not None and peak is not None:
        program.row({peak: 1.0}, upper=below * scale)
    elif below is not None:
        spent = {c: cost for block in blocks for c, cost in block.spent().items() if cost}
        program.row(spent, upper=below * scale)
    found = program.solve(near=near * scale, time_limit=time_limit)
    if found.infeasible:
        return Joined([], below if below is not None else float("inf"))
    keeps = [block.keep(found.values) for block in blocks] if found.values else []
    return Joined(keeps, found.bound / scale)
