"""A profile whose optimizer steps in the backward pass, or keeps its state elsewhere.

The steps are put where the gradients are complete, and the gradients are gone after them. What is there of the state at
any moment follows NOTE [ State elsewhere ] in `stepping/away_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from actmem.errors import ModeError
from actmem.log_entries import Entry, LiveEntry, OpRan, PhaseBegan
from actmem.plan import Plan
from actmem.profiles import ParameterStep, Profile
from actmem.profiling import STEP
from actmem.settings import OptimizerState

__all__ = ["stepped", "with_stepping"]

Change = tuple[int, int, int]


def with_stepping(profile: Profile, plan: Plan) -> Profile:
    """Return the profile with the optimizer stepping as a plan says.

    Raises:
        ModeError: it cannot be done in such a step.

    >>> from actmem.decision_rules import Rule
    >>> with_stepping(Profile(), Plan([Rule("save")], [], "", "")) == Profile()
    True
    """
    in_backward = plan.step_in_backward is not None
    return stepped(profile, in_backward=in_backward, state=plan.optimizer_state)


def stepped(profile: Profile, *, in_backward: bool, state: OptimizerState | None) -> Profile:
    """Return the profile with the optimizer stepping parameter by parameter.

    Args:
        profile: what the step does, with its optimizer at the end.
        in_backward: whether each parameter is stepped in the backward pass.
        state: where the optimizer's state is kept, if elsewhere.

    Raises:
        ModeError: it cannot be done in such a step.

    >>> stepped(Profile(), in_backward=False, state=None) == Profile()
    True
    """
    if not in_backward and state is None:
        return profile
    _refuse(profile, in_backward=in_backward)
    if not profile.parameter_steps:
        return profile  # it steps so already
    away = {step.name: _away_bytes(step, state) for step in profile.parameter_steps}
    gone = sum(away.values())
    found = replace(
        profile,
        base_bytes=profile.base_bytes - gone,
        optimizer_bytes=profile.optimizer_bytes - gone,
        optimizer_stock=tuple(n for n in profile.optimizer_stock if state is None or n < state.min_bytes),
        log=tuple(entry.shifted(-gone) for entry in profile.log),
    )
    return _in_backward(found, away) if in_backward else _at_end(found, away)


def _refuse(profile: Profile, *, in_backward: bool) -> None:
    if profile.is_step:
        raise ModeError(
            "step_in_backward and optimizer_state cannot be planned for a step of your own loop: what it does with "
            "gradients is up to it. Plan for an example: actmem.fit(model, batch, optimizer=optimizer, budget=...)."
        )
    if in_backward and profile.microbatches > 1:
        raise ModeError(
            f"step_in_backward cannot be combined with microbatches = {profile.microbatches}: gradients are complete "
            "after the last of them, and each parameter would be stepped in the first. Leave one of them out."
        )
    if profile.shard > 1:
        raise ModeError(
            f"step_in_backward and optimizer_state cannot be combined with shard = {profile.shard}: ranks reduce their "
            "gradients after a parameter's own is complete, and what they keep elsewhere is theirs. Leave them out."
        )
    if profile.optimizer == "none":
        raise ModeError(
            "step_in_backward and optimizer_state need an optimizer, and optimizer = None counts none. Name one, or "
            "pass it."
        )


def _away_bytes(step: ParameterStep, state: OptimizerState | None) -> int:
    return 0 if state is None else sum(size for size in step.state_bytes if size >= state.min_bytes)


def _at_end(profile: Profile, away: dict[str, int]) -> Profile:
    """Let the optimizer step parameter by parameter, when it is called."""
    steps = profile.parameter_steps
    here = [away[one.name] + (away[after.name] if after else 0) + one.step_bytes for one, after in _pairs(steps)]
    end = next((e for e in reversed(profile.log) if isinstance(e, PhaseBegan) and e.name == "end"), None)
    last = profile.log[-1] if profile.log else None
    if end is None or not isinstance(last, OpRan):
        return profile
    memory: list[tuple[int, int]] = []
    number = 0
    fetched: dict[str, int] = {}
    for one, after in _pairs(steps):
        for its in (one, after):
            if its is not None and away[its.name] and its.name not in fetched:
                fetched[its.name], number = number, number + 1
                memory.append((fetched[its.name], away[its.name]))
        names = {each: number + nth for nth, each in enumerate(dict.fromkeys(each for each, _ in one.memory))}
        number += len(names)
        memory += [(names[each], size) for each, size in one.memory]
        if one.name in fetched:
            memory.append((fetched.pop(one.name), 0))
    log = (*profile.log[:-1], OpRan(last.cost, end.live_bytes + max(here, default=0)))
    return replace(profile, log=log, optimizer_memory=tuple(memory), parameter_steps=())


def _pairs(steps: Sequence[ParameterStep]) -> Iterator[tuple[ParameterStep, ParameterStep | None]]:
    return zip_longest(steps, steps[1:])


def _in_backward(profile: Profile, away: dict[str, int]) -> Profile:
    """Put a step where each gradient is complete."""
    steps = {step.name: step for step in profile.parameter_steps}
    rows = [row for row in profile.accumulated if row[3] in steps]
    last_use = {storage: nth for nth, (_, _, storage, _) in enumerate(rows)}
    cost = next(n for n, its in enumerate(profile.costs) if its.op == STEP)
    log: list[Entry] = []
    memory: list[Change] = []
    changes, told = list(profile.memory), 0
    number = max((*profile.storages, *(n for n, _, _ in profile.stock)), default=0) + 1
    shift = live = nth = 0
    coming: dict[str, int] = {}
    """Parameter -> the storage of its state, fetched ahead or being written back."""
    for at, entry in enumerate((*profile.log[:-1], None)):
        while told < len(changes) and changes[told][0] <= at:
            memory.append((len(log), *changes[told][1:]))
            told += 1
        while nth < len(rows) and rows[nth][0] == at:
            _, rise, storage, name = rows[nth]
            following = rows[nth + 1][3] if nth + 1 < len(rows) else None
            if nth:
                before = rows[nth - 1][3]
                memory += [(len(log), coming.pop(before), 0)] if before in coming else []
                shift -= away[before]
            for one in (name, following):
                if one is not None and away[one] and one not in coming:
                    coming[one], number = number, number + 1
                    memory.append((len(log), coming[one], away[one]))
            shift += (away[name] if nth == 0 else 0) + (away[following] if following is not None else 0)
            names: dict[int, int] = {}
            for its, size in steps[name].memory:
                if its not in names:
                    names[its], number = number, number + 1
                memory.append((len(log), names[its], size))
            log.append(OpRan(cost, live + rise + shift + steps[name].step_bytes))
            if last_use[storage] == nth:
                shift -= profile.storages.get(storage, 0)
                memory.append((len(log), storage, 0))
            nth += 1
        if entry is not None:
            live = entry.live_bytes if isinstance(entry, LiveEntry) else live
            log.append(entry.shifted(shift))
    end = next(e for e in reversed(log) if isinstance(e, PhaseBegan) and e.name == "end")
    memory += [(len(log), storage, 0) for storage in coming.values()]
    log.append(OpRan(cost, end.live_bytes))
    return replace(profile, log=tuple(log), memory=tuple(memory), optimizer_memory=(), parameter_steps=())
