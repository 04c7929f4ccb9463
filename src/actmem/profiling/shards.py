"""Profiles with an optimizer, and of one of several ranks.

NOTE [ What sharding takes ]
FSDP2 leaves each rank its shard of parameters, gradients and optimizer state. For the forward and backward pass of a
block the block's parameters are gathered, and the next block's are prefetched; those outside the blocks stay gathered
for the whole step. A block's gradients are unsharded until the block is done, and are then copied and reduce-scattered.
So each rank needs: its shard of everything, the parameters outside the blocks, twice the parameters of the largest
block, and once its gradients on top of those in progress. The last two are what buffers can take, not what they always
take: the predicted peak lies above the observed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

from actmem.log_entries import Dropped, Entry, OpRan, PhaseBegan, Unpacked
from actmem.profiles import Cost, Profile
from actmem.profiling.optimizer_trial import OptimizerTrial

__all__ = ["STEP", "sharded", "with_optimizer", "without_gradients"]

STEP = "optimizer step"
"""The name used for the operator where the optimizer's step is the peak."""


def with_optimizer(profile: Profile, optimizer: OptimizerTrial, num_ranks: int = 1) -> Profile:
    """Add what an optimizer keeps, and its step at the end. Return the profile of one rank of so many.

    >>> with_optimizer(Profile(base_bytes=10), OptimizerTrial("adamw", 20, 5)).base_bytes
    30
    >>> with_optimizer(Profile(), OptimizerTrial("adamw", 20, 5), 4).base_bytes
    5
    """
    state_bytes = optimizer.state_bytes
    log, costs = profile.log, profile.costs
    if optimizer.name != "none" and log:
        end = next(e for e in reversed(log) if isinstance(e, PhaseBegan) and e.name == "end")
        log = (*log, OpRan(len(costs), end.live_bytes + optimizer.step_bytes))
        costs = (*costs, Cost(STEP, 0, 0, ""))
    whole = replace(
        profile,
        base_bytes=profile.base_bytes + state_bytes,
        optimizer_bytes=state_bytes,
        optimizer=optimizer.name,
        optimizer_stock=optimizer.stock,
        optimizer_memory=optimizer.memory,
        parameter_steps=optimizer.steps,
        log=log,
        costs=costs,
    )
    return _divided(whole, num_ranks, added_bytes=state_bytes)


def without_gradients(profile: Profile, num_bytes: int) -> Profile:
    """Remove gradients that were assumed to exist from the start, of parameters that get none.

    >>> without_gradients(Profile(base_bytes=10, gradients_bytes=8, microbatches=2), 3).base_bytes
    7
    """
    if not num_bytes or profile.microbatches == 1:
        return profile
    return replace(
        profile,
        base_bytes=profile.base_bytes - num_bytes,
        gradients_bytes=profile.gradients_bytes - num_bytes,
        log=tuple(_shifted(profile.log, -num_bytes)),
    )


def sharded(profile: Profile, num_ranks: int) -> Profile:
    """Return the profile of one rank of so many. See NOTE [ What sharding takes ].

    >>> sharded(Profile(), 8).shard
    8
    >>> sharded(sharded(Profile(), 8), 16) == sharded(Profile(), 16)
    True
    """
    return profile if num_ranks == profile.shard else _divided(profile, num_ranks, added_bytes=0)


def _divided(profile: Profile, num_ranks: int, *, added_bytes: int) -> Profile:
    """Return the profile of one rank of so many, with so many more bytes alive in its log."""
    now, before = dict(_sharding(profile, num_ranks)), dict(_sharding(profile, profile.shard))
    log: list[Entry] = []
    here = there = 0
    for begin, end in pairwise(sorted({*now, *before, len(profile.log)})):
        here, there = now.get(begin, here), before.get(begin, there)
        log += _shifted(profile.log[begin:end], here - there + added_bytes)
    base_bytes = profile.base_bytes + _static(profile, num_ranks) - _static(profile, profile.shard)
    return replace(profile, shard=num_ranks, base_bytes=base_bytes, log=tuple(log))


def _shifted(log: Sequence[Any], num_bytes: int) -> list[Entry]:
    """Return entries with so many more bytes alive. For most of them `shifted` is written out: there are many."""
    if not num_bytes:
        return list(log)
    return [
        OpRan(entry.cost, entry.live_bytes + num_bytes, entry.workspace_bytes)
        if type(entry) is OpRan
        else entry.shifted(num_bytes)
        for entry in log
    ]


def _static(profile: Profile, num_ranks: int) -> int:
    """Return how many bytes of parameters, optimizer state and gradients that stay are on other ranks, negative."""
    held = profile.parameters_bytes + profile.optimizer_bytes
    held += profile.gradients_bytes if profile.microbatches > 1 else 0
    return -(held - held // num_ranks)


def _sharding(profile: Profile, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield how many more bytes are alive on one of so many ranks, and from which entry of the log on."""
    yield 0, 0
    if num_ranks == 1:
        return
    inside = {layer.path: layer for layer in profile.layers}
    in_blocks = sum(layer.parameters_bytes for layer in inside.values())
    largest = max((layer.parameters_bytes for layer in inside.values()), default=0)
    largest_gradients = max((layer.gradients_bytes for layer in inside.values()), default=0)
    outside = profile.parameters_bytes - in_blocks
    static = _static(profile, num_ranks)
    gathered = outside + 2 * largest
    last: dict[int, int] = {}
    phases: dict[int, str] = {}
    for at, entry in enumerate(cast("Sequence[Any]", profile.log)):  # a large model has a hundred thousand
        kind: Any = type(entry)  # pyright: ignore[reportUnknownVariableType]
        if kind is Unpacked or kind is Dropped:
            last[entry.layer] = at
        elif kind is PhaseBegan:
            phases[at] = entry.name
    done = {at + 1: profile.layers[layer].gradients_bytes for layer, at in last.items()}
    scattered, phase = 0, ""
    for at in sorted({0, *done, *phases}):
        phase = phases.get(at, phase)
        if profile.microbatches == 1:
            if at in done:
                scattered -= done[at] - done[at] // num_ranks
            if phases.get(at) == "end":
                scattered = -(profile.gradients_bytes - profile.gradients_bytes // num_ranks)
        buffers = 0 if phase == "end" else gathered + (largest_gradients if phase == "backward" else 0)
        yield at, static + buffers + scattered
