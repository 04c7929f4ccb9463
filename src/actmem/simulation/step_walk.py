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

What a plan holds, replays and fetches comes on top: `step_walk.py`. The sum is always exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actmem.plan import Plan
from actmem.profiles import WITHOUT_LIVE, Profile
from actmem.simulation.flight import Flight, InFlight
from actmem.simulation.plan_effect import decisions, follow, in_flight, inputs_sent, verdicts_of
from actmem.simulation.room import REPLAYED, SAVED, TRANSFERS, Room
from actmem.simulation.simulator import Simulated, replayed_cost
from actmem.simulation.tape_emulator import Emulated

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


class Ground:
    """What is the same for all plans of a profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.program: Program = program(profile)
        self.askers = _askers(profile)


def walk(ground: Ground, plan: Plan) -> tuple[Moments, Simulated]:
    """Walk through a step under a plan, as the planner's own simulation does, and separate the categories.

    Returns:
        The moments, and what the planner's simulation found. Their totals are equal at every moment.

    >>> from actmem.decision_rules import Rule
    >>> walk(Ground(Profile()), Plan([Rule("save")], [], "", "SaveEverything()"))[0].totals
    []
    """
    profile = ground.profile
    keeps = decisions(profile, plan)
    simulated = follow(profile, plan, timeline=True, keeps=keeps)
    offload = plan.offload
    walked = _Walk(ground, in_flight(plan, simulated))
    plain = [verdicts is None or verdicts.keeps_everything for verdicts in verdicts_of(profile, plan)]
    given = [False] * len(keeps) if offload is None else inputs_sent(profile, plan)
    for i, (layer, keep) in enumerate(zip(profile.layers, keeps, strict=True)):
        walked.tapes.append(
            Emulated(
                layer,
                keep,
                walked.room,
                exact=plan.exact,
                sends_inputs=given[i],
                min_offload_bytes=0 if offload is None else offload.min_bytes,
                plain=plain[i],
                forced=None if not simulated.forced or (cut := simulated.forced[i]) is None else dict(cut),
                flight=walked.flight,
            )
        )
    walked.go()
    found = walked.moments
    assert found.totals == [live for _, live in simulated.timeline], "the categories do not add up to the simulation"
    return found, simulated


class _Walk:
    """A step in progress."""

    def __init__(self, ground: Ground, in_flight: InFlight | None) -> None:
        self._profile, self._program, self._askers = ground.profile, ground.program, ground.askers
        self.room = Room(dict(self._profile.storages))
        self.flight = None if in_flight is None else in_flight.begin(self.room)
        self.tapes: list[Emulated] = []
        self.moments = Moments(self._program.constant_bytes, {c: [] for c in VARYING})
        self._at = 0
        self._layer, self._module, self._phase = -1, "", "forward"

    def go(self) -> None:
        """Take all entries of the log, in order. See NOTE [ The log ]."""
        for at, entry in enumerate(self._profile.log):
            self._at = at
            verb: str = entry[0]
            if verb == "op":
                self._note(entry[1], self._layer, self._module, self._phase, entry[2], 0)
            elif verb == "call":
                layer = int(entry[1])
                self.tapes[layer].call(entry[2])
                run = self._profile.layers[layer].calls[int(entry[2])]
                self._note(run.cost, layer, run.module, self._phase, entry[4], 0)
            elif verb == "die":
                self.room.die(entry[1])
            elif verb == "pack":
                self.tapes[int(entry[1])].pack(entry[2])
            elif verb == "unpack":
                self._layer, self._module = int(entry[1]), self._askers.get((int(entry[1]), entry[2]), "")
                self.tapes[self._layer].unpack(entry[2], self._replayed)
            elif verb == "drop":
                self.tapes[int(entry[1])].drop(entry[2])
            elif verb == "loose":
                self.tapes[int(entry[1])].loosen(entry[2])
            elif verb == "done":
                self.tapes[int(entry[1])].done(entry[2])
            elif verb == "gone":
                self.tapes[int(entry[1])].lose(entry[2])
            elif verb == "enter":
                self._layer, self._module = int(entry[1]), ""
            elif verb == "leave":
                self.tapes[int(entry[1])].leave()
                self._layer, self._module = -1, ""
            elif verb == "phase":
                self._layer, self._module = -1, ""
                self._phase = "optimizer" if entry[1] == "end" else str(entry[1])

    def _replayed(self, call: int, born_bytes: int) -> None:
        cost = replayed_cost(self._profile, self._layer, call)
        module = self._module if call < 0 else self._profile.layers[self._layer].calls[call].module
        self._note(cost, self._layer, module, "replay", self._program.live[self._at], born_bytes)

    def _note(self, cost: int, layer: int, module: str, phase: str, live_bytes: int, born_bytes: int) -> None:
        kinds, found, at = self.room.bytes_of, self.moments, self._at
        ahead = 0 if self.flight is None else self.flight.ahead_bytes
        sent = 0 if self.flight is None else self._still_there(self.flight)
        bytes_of = (
            self._program.gradients[at],
            self._program.outside[at],
            kinds[SAVED] - sent,
            kinds[REPLAYED] + born_bytes,
            kinds[TRANSFERS] + sent + ahead,
            self._program.temporary(at, live_bytes),
        )
        for series, num_bytes in zip(found.by_category.values(), bytes_of, strict=True):
            series.append(num_bytes)
        found.totals.append(live_bytes + self.room.extra_bytes + born_bytes + ahead)
        found.costs.append(cost)
        found.layers.append(layer)
        found.modules.append(module)
        found.phases.append(phase)

    def _still_there(self, flight: Flight) -> int:
        """Return the bytes that live only because they were sent and have not been pushed out of the window."""
        return sum(s.num_bytes for s in flight.in_memory if s.storage >= 0 and self.room.is_held_once(s.storage))


def _askers(profile: Profile) -> dict[tuple[int, int], str]:
    """Return, for each handle of each layer, the module whose operator saved it, where the log leaves no doubt.

    An operator's inputs are saved before it runs and its results after, so a value that the operator before has just
    made may belong to either. Then the module is named only if both are in the same one.
    """
    found: dict[tuple[int, int], str] = {}
    waiting: list[tuple[int, int, str | None]] = []
    last: tuple[int, int] | None = None
    for entry in profile.log:
        if entry[0] == "pack":
            layer, handle = int(entry[1]), int(entry[2])
            made_by = profile.layers[layer].values[profile.layers[layer].handles[handle]].call
            fresh = last is not None and last[0] == layer and made_by == last[1]
            waiting.append((layer, handle, profile.layers[layer].calls[made_by].module if fresh else None))
        elif entry[0] == "call":
            last = int(entry[1]), int(entry[2])
            module = profile.layers[last[0]].calls[last[1]].module
            found |= {(i, h): module for i, h, before in waiting if before in (None, module)}
            waiting.clear()
        elif entry[0] == "leave":
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

    >>> program(Profile(parameters_bytes=8, base_bytes=8, log=(("op", 0, 10), ("phase", "backward", 10)))).outside
    [2, 2]
    """
    base, log = profile.base_bytes, profile.log
    live: list[int] = []
    now = base
    for entry in log:
        now = now if entry[0] in WITHOUT_LIVE else int(entry[-1])
        live.append(now)
    backward = next((at for at, e in enumerate(log) if e[0] == "phase" and e[1] == "backward"), len(log))
    end = next((at for at in range(len(log) - 1, -1, -1) if log[at][0] == "phase" and log[at][1] == "end"), len(log))
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
        outside=_outside(profile, live, fixed, gradients),
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
        if entry[0] == "gradients":
            if begun >= 0:
                made = _gradients(live, fixed + now, entry[1] - now, begun, at)
                found[begun:at] = [now + more for more in made[begun:at]]
            now = int(entry[1])
        elif entry[0] == "phase":
            begun = at if entry[1] == "backward" else -1
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


def _outside(profile: Profile, live: list[int], fixed: int, gradients: list[int]) -> list[int]:
    free = [now - fixed - taken for now, taken in zip(live, gradients, strict=True)]
    found = free.copy()
    phases = [(at, entry[1]) for at, entry in enumerate(profile.log) if entry[0] == "phase"]
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
        if entry[0] == "phase":
            now = entry[1] == ("optimizer" if profile.is_step else "end")
        found.append(now)
    return found
