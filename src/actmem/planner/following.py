"""What a step takes under the rules of a plan, as the engine carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actmem.engine.cutting import smallest_cut
from actmem.plan import Plan
from actmem.planner.deciding import decisions, inputs_sent
from actmem.planner.simulating import Simulated, simulate
from actmem.profiles import Layer, Profile

__all__ = ["follow"]


def follow(
    profile: Profile, plan: Plan, *, timeline: bool = False, keeps: Sequence[Sequence[str]] | None = None
) -> Simulated:
    """Simulate a step from the third on, when the smallest cuts are known. `keeps` is what the rules say, if known."""
    keeps = decisions(profile, plan) if keeps is None else keeps
    options: dict[str, Any] = {"exact": plan.exact}
    if plan.offload is not None:
        options |= {
            "inputs_sent": inputs_sent(profile, plan),
            "min_offload_bytes": plan.offload.min_bytes,
            "in_flight_bytes": under_way(profile, plan, keeps),
        }
    first = simulate(profile, keeps, timeline=timeline, **options)
    offloads = [any(k == "offload" for k in keep) for keep in keeps]
    if plan.exact:
        return first
    known: dict[Any, dict[int, str] | None] = {}
    forced: list[dict[int, str] | None] = []
    for i, layer in enumerate(profile.layers):
        key = layer.kind, tuple(keeps[i]), first.held[i]
        if key not in known:
            known[key] = None if offloads[i] else _cut(layer, first.held[i], first.whys[i])
        forced.append(known[key])
    if not any(forced):
        return first
    return simulate(profile, keeps, forced=forced, timeline=timeline, **options)


def under_way(profile: Profile, plan: Plan, keeps: Sequence[Sequence[str]]) -> int:
    """Return the most bytes that copies may take: the bound once for each direction, or one value if it is larger."""
    if plan.offload is None:
        return 0
    given = inputs_sent(profile, plan)
    kinds = {
        (layer.kind, tuple(keep), sent): layer for layer, keep, sent in zip(profile.layers, keeps, given, strict=True)
    }
    sent = [
        value.num_bytes
        for (_, keep, inputs), layer in kinds.items()
        for value in layer.values
        if (value.call >= 0 and keep[value.call] == "offload") or (inputs and value.kind == "input")
    ]
    return 2 * max(plan.offload.in_flight_bytes, max(sent, default=0))


class _Row:
    """A value, as the smallest cut wants to see it."""

    def __init__(self, kind: str, why: str | None, num_bytes: int, index: int, *, held: bool, saved: bool) -> None:
        self.kind, self.why, self.num_bytes, self.index, self.held, self.saved = (
            kind,
            why,
            num_bytes,
            index,
            held,
            saved,
        )
        self.overwritten = False
        self.parents: tuple[_Row, ...] = ()


def _cut(layer: Layer, held: Sequence[int], whys: Sequence[str | None]) -> dict[int, str] | None:
    saved = frozenset(layer.handles)
    alive = frozenset(held)
    rows: list[Any] = []
    for v, value in enumerate(layer.values):
        row = _Row(value.kind, whys[v], value.num_bytes, value.call, held=v in alive, saved=v in saved)
        row.overwritten = value.overwritten >= 0
        rows.append(row)
    for v, value in enumerate(layer.values):
        if whys[v] is None or whys[v] == "barrier":
            rows[v].parents = tuple(rows[r] for r in value.reads)
    cut = smallest_cut(rows, [call.op for call in layer.calls])
    return None if cut is None else cut.hold
