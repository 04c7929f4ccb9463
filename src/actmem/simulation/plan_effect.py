"""Resolve a plan for every operator of a profile, and say what its step would take."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from actmem.decisions import Decision, Reason
from actmem.engine import WHOLE_CALLS, Cut, Operator, Verdicts, describe, resolve, smallest_cut
from actmem.errors import PlanError
from actmem.offloading import bound_of
from actmem.plan import Plan
from actmem.profiles import Layer, Profile, with_collectives
from actmem.simulation.flight import InFlight
from actmem.simulation.simulator import Simulated, Watcher, simulate

__all__ = ["Ruling", "decisions", "follow", "ruling"]


class Ruling(NamedTuple):
    """What the rules of a plan say of each layer."""

    verdicts: list[Verdicts | None]
    """None where they say nothing."""
    keeps: list[list[Decision]]
    """The decision for each call."""


def follow(
    profile: Profile,
    plan: Plan,
    *,
    timeline: bool = False,
    on_top: bool = False,
    said: Ruling | None = None,
    watcher: Callable[[], Watcher] | None = None,
) -> Simulated:
    """Simulate a step from the third on, when the smallest cuts are known.

    Args:
        profile: what the step does.
        plan: what is decided.
        timeline: as for `simulate`.
        on_top: as for `simulate`.
        said: what the rules say, if known.
        watcher: makes a new one for each attempt: the last one saw the step that is returned.
    """
    profile = with_collectives(profile, again=plan.collectives == "recompute")
    said = said or ruling(profile, plan)
    keeps = said.keeps
    options: dict[str, Any] = {"exact": plan.exact, "timeline": timeline, "on_top": on_top}
    if plan.offload is not None:
        options |= {
            "inputs_sent": [verdicts is not None and verdicts.offloads_inputs for verdicts in said.verdicts],
            "min_offload_bytes": plan.offload.min_bytes,
            "in_flight": InFlight(0),
        }
    options["plain"] = [verdicts is None or verdicts.keeps_everything for verdicts in said.verdicts]
    first = simulate(profile, keeps, **options, watcher=None if watcher is None else watcher())
    options |= {"in_flight": _in_flight(plan, first)}
    if plan.exact:
        if not first.sent_bytes:
            return first
        return simulate(profile, keeps, **options, watcher=None if watcher is None else watcher())
    # The smallest cut goes by bytes, and so is not computed where copies or other ranks matter.
    uncut = [
        (verdicts is not None and verdicts.offloads) or any(call.is_again for call in layer.calls)
        for verdicts, layer in zip(said.verdicts, profile.layers, strict=True)
    ]
    forced = _cuts(profile, first, uncut)
    if not any(forced) and not first.sent_bytes:
        return first
    return simulate(profile, keeps, forced=forced, **options, watcher=None if watcher is None else watcher())


def _in_flight(plan: Plan, found: Simulated) -> InFlight | None:
    """Return how much is in flight under a plan, from what its blocks send. None if it sends nothing."""
    offload = plan.offload
    if offload is None or not found.sent_bytes:
        return None
    if not offload.use_streams:  # each copy is waited for, and nothing is prefetched
        return InFlight(0)
    return InFlight(bound_of(offload.in_flight_bytes, found.sent_by_layer), offload.max_in_flight, found.fetch_order)


def _cuts(profile: Profile, first: Simulated, uncut: Sequence[bool]) -> list[dict[int, Reason] | None]:
    """Return, for each layer, the calls that its block's smallest cut holds. The block's first call is cut."""
    known: dict[Any, Cut | None] = {}
    cut_of: dict[str, tuple[Cut | None, Layer]] = {}
    forced: list[dict[int, Reason] | None] = []
    for layer, fates, is_uncut in zip(profile.layers, first.fates, uncut, strict=True):
        if layer.path not in cut_of:
            funcs = tuple(call.op for call in layer.calls)
            rows: list[Any] = [fate for fate in fates if fate is not None]
            key = funcs, tuple((row.num_bytes, row.why, row.saved, row.held) for row in rows)
            if key not in known and not is_uncut:
                known[key] = smallest_cut(rows, funcs)
            cut_of[layer.path] = known.get(key), layer
        cut, cut_layer = cut_of[layer.path]
        if cut is None or layer.shapes != cut_layer.shapes:
            forced.append(None)
            continue
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip((call.op for call in layer.calls), cut.funcs, strict=False)
        )
        num_same = sum(1 for _ in same)
        forced.append({index: why for index, why in cut.hold.items() if index < num_same})
    return forced


def decisions(profile: Profile, plan: Plan) -> list[list[Decision]]:
    """Return, for each layer, the decision for each of its calls."""
    return ruling(profile, plan).keeps


def ruling(profile: Profile, plan: Plan) -> Ruling:
    """Return what the rules of a plan say of each layer."""
    index = {path: i for i, path in enumerate(plan.blocks)}
    known: dict[Any, list[Decision]] = {}
    found = Ruling([], [])
    for layer in profile.layers:
        verdicts = _verdicts(layer, plan, index[layer.path]) if layer.path in index else None
        found.verdicts.append(verdicts)
        if verdicts is None:
            found.keeps.append([Decision.SAVE] * len(layer.calls))
            continue
        key = layer.kind, verdicts.key
        if key not in known:
            known[key] = _decide(layer, verdicts)
        found.keeps.append(known[key])
    return found


def _verdicts(layer: Layer, plan: Plan, index: int) -> Verdicts:
    return resolve(
        plan.rules,
        layer=index,
        num_layers=len(plan.blocks),
        modules={m: f"{layer.path}.{m}".strip(".") for m in layer.modules},
        roles=dict(layer.roles),
        layer_type=layer.layer_type,
    )


def _decide(layer: Layer, verdicts: Verdicts) -> list[Decision]:
    counts: dict[Any, int] = verdicts.new_counts()
    found: list[Decision] = []
    for call in layer.calls:
        size = call.out_bytes if call.out_bytes >= 0 else sum(layer.values[v].num_bytes for v in call.makes)
        out = torch.empty(size, dtype=torch.uint8, device="meta")
        found.append(verdicts.decide(_operator(call.op), call.module, counts, out))
    return found


@functools.cache
def _operator(name: str) -> Operator:
    """Find an operator by its name, such as `aten.mm.default`."""
    if name.startswith(WHOLE_CALLS):
        return Operator(None, name)  # a Python function that was recorded as one operator
    func: Any = torch.ops
    try:
        for part in name.split("."):
            func = getattr(func, part)
    except AttributeError as error:
        raise PlanError(
            f"the profile has the operator {name}, which this torch does not know. Import the library that registers "
            "it, or make the profile again."
        ) from error
    return describe(func)
