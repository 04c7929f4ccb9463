"""Every moment of a step under a plan: what runs, where, and how many bytes of each category are alive.

NOTE [ Categories ]
A profile's log has the bytes that the program itself keeps alive after each operator, not what they are. That
follows from when they come and go:

    parameters, buffers, optimizer   are alive when the step begins
    gradients      stay from their birth in backward until the end. So at each moment that no later one is below, all
                   that is alive stays, and what came since backward began is gradients. Between two such moments a
                   gradient is shown at the second, and as temporary until then; exact where backward begins and ends.
                   A step of the user's own loop says how many there are at each phase and each block
    outside        what is there when backward begins and was not made by a gradient: logits, losses, embeddings; with
                   sharding also the gathered parameters. At any time at most the fewest bytes between then and there
    temporary      all else

What a plan holds, replays and fetches comes on top: `simulator.py`. The sum is always exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from actmem.log_entries import (
    CallRan,
    Entered,
    GradientsCounted,
    Left,
    LiveEntry,
    OperatorEntry,
    Packed,
    PhaseBegan,
    Unpacked,
)
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.simulation.plan_effect import follow
from actmem.simulation.simulator import Simulated, replayed_cost

__all__ = ["CONSTANT", "NAMES", "VARYING", "Ground", "Moments", "Program", "program", "walk"]


@dataclass(frozen=True)
class Moments:
    """The moments of a step, one for each operator that runs, replayed ones included. Lists of equal length."""

    constant_bytes: dict[str, int]
    """Categories that stay constant."""
    by_category: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The other categories, moment by moment."""
    costs: list[int] = field(default_factory=list[int])
    """Index of the profile's cost that runs."""
    layers: list[int] = field(default_factory=list[int])
    """Index of its layer; -1 outside the layers."""
    modules: list[str] = field(default_factory=list[str])
    """Its module in the layer. In backward: the one whose saved value was last asked for; "" if that is unknown."""
    phases: list[str] = field(default_factory=list[str])
    """"forward", "backward", "replay" or "optimizer"."""
    totals: list[int] = field(default_factory=list[int])
    """All bytes alive."""

    @property
    def peak(self) -> int:
        """The first moment at which most bytes are alive."""
        return self.totals.index(max(self.totals)) if self.totals else -1


class Place(NamedTuple):
    """Where the program itself is, at a position of the log."""

    layer: int
    module: str
    phase: str


class Ground:
    """What is the same for all plans of a profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.program: Program = program(profile)
        self.places = _places(profile)
        """One for each position of the log."""


def walk(ground: Ground, plan: Plan) -> tuple[Moments, Simulated]:
    """Walk through a step under a plan, as the planner's own simulation does, and separate the categories.

    Returns:
        The moments, and what the planner's simulation found. Their totals are equal at every moment.

    >>> from actmem.decision_rules import Rule
    >>> walk(Ground(Profile()), Plan([Rule("save")], [], "", "SaveEverything()"))[0].totals
    []
    """
    profile, program, places = ground.profile, ground.program, ground.places
    simulated = follow(profile, plan, timeline=True, on_top=True)
    moments = Moments(program.constant_bytes, {category: [] for category in VARYING})
    for (at, total), on_top in zip(simulated.timeline, simulated.on_top, strict=True):
        entry, call, (layer, module, phase) = profile.log[at], on_top.call, places[at]
        if isinstance(entry, OperatorEntry):
            cost = entry.cost
        else:
            assert call is not None, "neither an operator of the program nor a replayed one"
            cost, phase = replayed_cost(profile, layer, call), "replay"
            module = module if call < 0 else profile.layers[layer].calls[call].module
        bytes_of = (
            program.gradients[at],
            program.outside[at],
            on_top.saved_bytes,
            on_top.replayed_bytes,
            on_top.transfers_bytes,
            program.temporary(at, program.live[at]) + on_top.workspace_bytes,
        )
        for series, num_bytes in zip(moments.by_category.values(), bytes_of, strict=True):
            series.append(num_bytes)
        moments.totals.append(total)
        moments.costs.append(cost)
        moments.layers.append(layer)
        moments.modules.append(module)
        moments.phases.append(phase)
    return moments, simulated


def _places(profile: Profile) -> list[Place]:
    askers = _askers(profile)
    places: list[Place] = []
    now = Place(-1, "", "forward")
    for entry in profile.log:
        match entry:
            case CallRan():
                module = profile.layers[entry.layer].calls[entry.index].module
                places.append(Place(entry.layer, module, now.phase))
                continue
            case Unpacked():
                now = Place(entry.layer, askers.get((entry.layer, entry.index), ""), now.phase)
            case Entered():
                now = Place(entry.layer, "", now.phase)
            case Left():
                now = Place(-1, "", now.phase)
            case PhaseBegan():
                now = Place(-1, "", "optimizer" if entry.name == "end" else entry.name)
            case _:
                pass
        places.append(now)
    return places


def _askers(profile: Profile) -> dict[tuple[int, int], str]:
    """Return, for each handle of each layer, the module whose operator saved it, where the log leaves no doubt.

    An operator's inputs are saved before it runs and its results after, so a value that the operator before has just
    made may belong to either. Then the module is named only if both are in the same one.
    """
    found: dict[tuple[int, int], str] = {}
    waiting: list[tuple[int, int, str | None]] = []
    last: tuple[int, int] | None = None
    for entry in profile.log:
        if isinstance(entry, Packed):
            layer, handle = entry.layer, entry.index
            made_by = profile.layers[layer].values[profile.layers[layer].handles[handle]].call
            fresh = last is not None and last[0] == layer and made_by == last[1]
            waiting.append((layer, handle, profile.layers[layer].calls[made_by].module if fresh else None))
        elif isinstance(entry, CallRan):
            last = entry.layer, entry.index
            module = profile.layers[last[0]].calls[last[1]].module
            found |= {(i, h): module for i, h, before in waiting if before in (None, module)}
            waiting.clear()
        elif isinstance(entry, Left):
            found |= {(i, h): before for i, h, before in waiting if before is not None}
            waiting.clear()
    return found


CONSTANT = ("parameters", "buffers", "optimizer")
"""Categories that stay constant throughout the step."""
VARYING = ("gradients", "outside", "saved", "replayed", "transfers", "temporary")
"""Categories that come and go, in the order in which they are stacked."""

NAMES = {
    "parameters": "parameters",
    "buffers": "buffers",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "outside": "activations outside the blocks",
    "saved": "saved activations",
    "replayed": "replayed activations",
    "transfers": "on the way to or from elsewhere",
    "temporary": "temporaries",
}
"""Names of the categories in text."""


@dataclass(frozen=True)
class Program:
    """What the program itself keeps alive, at each position of the log."""

    constant_bytes: dict[str, int]
    """Those of `CONSTANT`."""
    fixed_bytes: int
    """Their sum."""
    gradients: list[int]
    outside: list[int]
    live: list[int]
    """All bytes alive, temporaries included."""
    backward: int
    """The position at which the first backward pass begins."""
    end: int
    """The position at which the last one has ended."""

    in_optimizer: list[bool]
    """Whether an optimizer steps there."""

    def temporary(self, at: int, live_bytes: int) -> int:
        """Return what is left of the bytes that are alive at a position."""
        return live_bytes - self.fixed_bytes - self.gradients[at] - self.outside[at]


def program(profile: Profile) -> Program:
    """Split what a profile's log keeps alive into categories. See NOTE [ Categories ].

    >>> from actmem.log_entries import OpRan
    >>> program(Profile(parameters_bytes=8, base_bytes=8, log=(OpRan(0, 10), PhaseBegan("backward", 10)))).outside
    [2, 2]
    """
    base, log = profile.base_bytes, profile.log
    live: list[int] = []
    now = base
    for entry in log:
        now = entry.live_bytes if isinstance(entry, LiveEntry) else now
        live.append(now)
    phases = [(at, entry.name) for at, entry in enumerate(log) if isinstance(entry, PhaseBegan)]
    backward = next((at for at, name in phases if name == "backward"), len(log))
    end = next((at for at, name in reversed(phases) if name == "end"), len(log))
    all_gradients = profile.gradients_bytes // profile.shard
    constant = {"buffers": profile.buffers_bytes, "optimizer": profile.optimizer_bytes // profile.shard}
    constant["parameters"] = base - sum(constant.values()) - profile.starting_gradients_bytes
    fixed = sum(constant.values())
    if profile.is_step:
        gradients = _told(profile, live, fixed)
    elif profile.microbatches > 1:
        gradients = [all_gradients] * len(log)
    else:
        gradients = _gradients(live, base, all_gradients, backward, end)
    return Program(
        constant_bytes={name: constant[name] for name in CONSTANT},
        fixed_bytes=fixed,
        gradients=gradients,
        outside=_outside(phases, live, fixed, gradients),
        live=live,
        backward=backward,
        end=end,
        in_optimizer=_in_optimizer(profile),
    )


def _told(profile: Profile, live: list[int], fixed: int) -> list[int]:
    """Return the gradients of a step that reports their bytes: those that a backward pass makes, as they arrive."""
    found = [0] * len(live)
    now, begun = profile.starting_gradients_bytes, -1
    for at, entry in enumerate(profile.log):
        if isinstance(entry, GradientsCounted):
            if begun >= 0:
                made = _gradients(live, fixed + now, entry.num_bytes - now, begun, at)
                found[begun:at] = [now + more for more in made[begun:at]]
            now = entry.num_bytes
        elif isinstance(entry, PhaseBegan):
            begun = at if entry.name == "backward" else -1
        found[at] = max(0, min(now, live[at] - fixed))
    return found


def _gradients(live: list[int], base: int, all_bytes: int, backward: int, end: int) -> list[int]:
    found = [0] * len(live)
    if backward >= len(live):
        return found
    last = min(end, len(live) - 1)
    rest = max(0, live[last] - base - all_bytes)  # alive at the end, and not a gradient
    fewest = live[last]
    lows: set[int] = set()
    for at in range(last, backward, -1):
        if live[at] <= fewest:
            fewest = live[at]
            lows.add(at)
    now = 0
    for at in range(backward, len(live)):
        if at in lows:
            now = max(0, min(all_bytes, live[at] - base - rest))
        found[at] = min(now, live[at] - base)
    return found


def _outside(phases: list[tuple[int, str]], live: list[int], fixed: int, gradients: list[int]) -> list[int]:
    free = [now - fixed - taken for now, taken in zip(live, gradients, strict=True)]
    found = free.copy()
    begins = [at for at, name in phases if name == "backward"] or [len(live)]
    ends = [at for at, name in phases if name == "end"]
    first = 0
    for nth, backward in enumerate(begins):
        is_last = nth + 1 == len(begins)
        after = len(live) if is_last else next((at for at in ends if at > backward), begins[nth + 1])
        for at in range(min(backward, len(live) - 1) - 1, first - 1, -1):
            found[at] = min(found[at + 1], free[at])
        for at in range(backward + 1, after):
            found[at] = min(found[at - 1], free[at])
        first = after
    return found


def _in_optimizer(profile: Profile) -> list[bool]:
    found: list[bool] = []
    now = False
    for entry in profile.log:
        if isinstance(entry, PhaseBegan):
            now = entry.name == ("optimizer" if profile.is_step else "end")
        found.append(now)
    return found
