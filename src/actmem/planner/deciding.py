"""What a plan says at every call of a profile."""

from __future__ import annotations

import functools
from typing import Any

import torch

from actmem.engine.deciding import resolve
from actmem.engine.operators import Operator, describe
from actmem.errors import PlanError
from actmem.plan import Plan
from actmem.profiles import Layer, Profile

__all__ = ["decisions", "inputs_sent"]


def decisions(profile: Profile, plan: Plan) -> list[list[str]]:
    """Return, for each layer, "save", "offload" or "" (recompute) for each of its calls."""
    index = {path: i for i, path in enumerate(plan.blocks)}
    known: dict[Any, list[str]] = {}
    found: list[list[str]] = []
    for layer in profile.layers:
        if layer.path not in index:
            found.append(["save"] * len(layer.calls))
            continue
        verdicts = _verdicts(layer, plan, index[layer.path])
        key = layer.kind, verdicts.key
        if key not in known:
            known[key] = _decide(layer, verdicts)
        found.append(known[key])
    return found


def inputs_sent(profile: Profile, plan: Plan) -> list[bool]:
    """Return, for each layer, whether what it is given is sent away."""
    index = {path: i for i, path in enumerate(plan.blocks)}
    return [
        layer.path in index and _verdicts(layer, plan, index[layer.path]).offloads_inputs for layer in profile.layers
    ]


def _verdicts(layer: Layer, plan: Plan, index: int) -> Any:
    return resolve(
        plan.rules,
        layer=index,
        num_layers=len(plan.blocks),
        modules={m: f"{layer.path}.{m}".strip(".") for m in layer.modules},
        roles=dict(layer.roles),
        layer_type=layer.layer_type,
    )


def _decide(layer: Layer, verdicts: Any) -> list[str]:
    counts: dict[Any, int] = verdicts.new_counts()
    found: list[str] = []
    for call in layer.calls:
        size = sum(layer.values[v].num_bytes for v in call.makes)
        out = torch.empty(size, dtype=torch.uint8, device="meta")
        found.append(verdicts.decide(_operator(call.op), call.module, counts, out))
    return found


@functools.cache
def _operator(name: str) -> Operator:
    """Find an operator by its name, such as `aten.mm.default`."""
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
