"""The memory of a step as a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import os
from itertools import groupby
from pathlib import Path
from typing import Any

from actmem.devices import Device
from actmem.errors import ModeError
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.simulation import Ground, Moments, cost_seconds, is_measured, plan_of, resolved, walk

__all__ = ["timeline", "write_timeline"]

_PID, _PHASES, _BLOCKS, _OPERATORS = 1, 1, 2, 3


def timeline(profile: Profile, plan: Plan, device: Device | str | None = None) -> dict[str, Any]:
    """Return a step under a plan as a Chrome trace: slices for operators, blocks and phases, a counter for memory.

    The counter `memory` has the bytes of each category after every operator. Their sum is the memory alive, and its
    maximum is the predicted peak. Every operator is included.

    Args:
        profile: the profile of the step.
        plan: a plan for the same model.
        device: the device that gives each operator its duration: as measured if the profile is real and the device is
            this machine, otherwise by its roofline. Default: each operator takes one microsecond, so the time axis
            counts operators.

    >>> import torch, actmem
    >>> model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    >>> found = actmem.profile(model, (torch.randn(64, 8),), loss=torch.sum)
    >>> plan = actmem.fit(model, (torch.randn(64, 8),), loss=torch.sum, budget="2GiB", device="h100-80gb")
    >>> sorted({event["ph"] for event in timeline(found, plan)["traceEvents"]})
    ['C', 'M', 'X']
    """
    plan = plan_of(profile, plan)
    moments, simulated = walk(Ground(profile), plan)
    known = None if device is None else resolved(device)
    seconds = [1e-6] * len(profile.costs) if known is None else cost_seconds(profile, known)
    starts, clock = [0.0], 0.0
    for cost in moments.costs:
        clock += seconds[cost] * 1e6
        starts.append(clock)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": f"actmem: {plan.mode}"}},
        *_named({_PHASES: "phases", _BLOCKS: "blocks", _OPERATORS: "operators"}),
        *_spans(profile, moments, starts),
        *_operators(profile, moments, starts),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "peak_bytes": simulated.peak_bytes,
            "clock": _clock(profile, known),
        },
    }


def _clock(profile: Profile, known: Device | None) -> str:
    if known is None:
        return "one operator is one microsecond"
    return f"{'measured on' if is_measured(profile, known) else 'roofline of'} {known.name}"


def write_timeline(
    path: str | os.PathLike[str], profile: Profile, plan: Plan, device: Device | str | None = None
) -> None:
    """Write the trace of a step under a plan to a `.json` file. See `timeline`.

    Raises:
        ModeError: if the file cannot be written.
    """
    text = json.dumps(timeline(profile, plan, device), separators=(",", ":"))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModeError(
            f"cannot write the timeline {str(path)!r}: {error.strerror}. Name a file in a folder that exists."
        ) from error


def _named(threads: dict[int, str]) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "pid": _PID, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in threads.items()
    ]


def _spans(profile: Profile, moments: Moments, starts: list[float]) -> list[dict[str, Any]]:
    """Return slices for the phases and for the blocks that run in them. A replay is part of the backward pass."""
    phases = ["backward" if phase == "replay" else phase for phase in moments.phases]
    found: list[dict[str, Any]] = []
    for tid, keys in ((_PHASES, [(phase, -1) for phase in phases]), (_BLOCKS, [*zip(phases, moments.layers)])):  # noqa: B905
        for (phase, layer), run in groupby(range(len(keys)), key=keys.__getitem__):
            at = list(run)
            if tid == _BLOCKS and layer < 0:
                continue
            name = phase if layer < 0 else profile.layers[layer].path
            found.append(_slice(name, phase, tid, starts[at[0]], starts[at[-1] + 1], {}))
    return found


def _operators(profile: Profile, moments: Moments, starts: list[float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for n, cost in enumerate(moments.costs):
        layer = moments.layers[n]
        path = profile.layers[layer].path if layer >= 0 else ""
        module = ".".join(part for part in (path, moments.modules[n]) if part)
        args = {"module": module or "outside the blocks", "alive_bytes": moments.totals[n]}
        found.append(_slice(profile.costs[cost].op, moments.phases[n], _OPERATORS, starts[n], starts[n + 1], args))
        counts = {c: num_bytes for c, num_bytes in moments.constant_bytes.items() if num_bytes}
        counts |= {c: series[n] for c, series in moments.by_category.items()}
        found.append({"ph": "C", "pid": _PID, "name": "memory", "ts": starts[n], "args": counts})
    return found


def _slice(name: str, category: str, tid: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    dur = end - start
    return {"ph": "X", "pid": _PID, "tid": tid, "name": name, "cat": category, "ts": start, "dur": dur, "args": args}
