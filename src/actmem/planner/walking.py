"""Every moment of a step under a plan: what runs, where, and how many bytes of each category are alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmem.plan import Plan
from actmem.planner.categories import VARYING, Program, program
from actmem.planner.deciding import decisions, inputs_sent
from actmem.planner.emulating import Emulated, Room
from actmem.planner.following import follow, under_way
from actmem.planner.simulating import Simulated
from actmem.profiles import Layer, Profile

__all__ = ["Ground", "Moments", "walk"]


@dataclass(frozen=True)
class Moments:
    """The moments of a step, one for each operator that runs, replayed ones included. Lists of equal length."""

    constant_bytes: dict[str, int]
    """Categories that are the same all the time."""
    by_category: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """The other categories, moment by moment."""
    costs: list[int] = field(default_factory=list[int])
    """Which of the profile's costs runs."""
    layers: list[int] = field(default_factory=list[int])
    """In which layer; -1 outside."""
    modules: list[str] = field(default_factory=list[str])
    """In which module of the layer. In backward: the one whose saved value was last asked for; "" if that is open."""
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
    """Go through a step under a plan, as the planner's own simulation does, and tell the categories apart.

    Returns:
        The moments, and what the planner's simulation found. Their totals are equal at every moment.

    >>> from actmem.plan import Rule
    >>> walk(Ground(Profile()), Plan([Rule("save")], [], "", "SaveEverything()"))[0].totals
    []
    """
    profile = ground.profile
    keeps = decisions(profile, plan)
    simulated = follow(profile, plan, timeline=True, keeps=keeps)
    offload = plan.offload
    walked = _Walk(ground, under_way(profile, plan, keeps))
    given = [False] * len(keeps) if offload is None else inputs_sent(profile, plan)
    for i, (layer, keep) in enumerate(zip(profile.layers, keeps, strict=True)):
        walked.tapes.append(
            _Tape(
                layer,
                keep,
                walked.room,
                exact=plan.exact,
                sends_inputs=given[i],
                min_offload_bytes=0 if offload is None else offload.min_bytes,
                forced=None if plan.exact else _forced(layer, simulated.whys[i]),
            )
        )
    walked.go()
    found = walked.moments
    assert found.totals == [live for _, live in simulated.timeline], "the categories do not add up to the simulation"
    return found, simulated


def _forced(layer: Layer, whys: Sequence[str | None]) -> dict[int, str]:
    """Return the calls of the smallest cut: those whose results are all held because of it, or of the plan."""
    found: dict[int, str] = {}
    for index, call in enumerate(layer.calls):
        reasons = [whys[v] for v in call.makes] if whys else []
        if reasons and all(reason in ("cut", "save") for reason in reasons):
            found[index] = str(reasons[0])
    return found


class _Room(Room):
    """A room that knows what its bytes are: held from forward, copied, or fetched. The rest was replayed."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__(sizes)
        self.tagged_bytes = {"saved": 0, "transfers": 0}

    def release(self, storage: int) -> None:
        before = self.extra_bytes
        super().release(storage)
        self.tagged_bytes["saved"] += self.extra_bytes - before

    def die(self, storage: int) -> None:
        before = self.extra_bytes
        super().die(storage)
        self.tagged_bytes["saved"] += self.extra_bytes - before


class _Tape(Emulated):
    """A block call that tells its room which copies are not replayed ones."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tags: dict[int, str] = {}

    def _tag(self, v: int, name: str) -> None:
        self._tags[v] = name
        self._counted()[name] += self._layer.values[v].num_bytes

    def _untag(self, v: int) -> None:
        name = self._tags.pop(v, None)
        if name is not None:
            self._counted()[name] -= self._layer.values[v].num_bytes

    def _counted(self) -> dict[str, int]:
        assert isinstance(self._room, _Room)
        return self._room.tagged_bytes

    def _overwrite(self, v: int) -> None:
        was = self._private[v]
        super()._overwrite(v)
        if self._private[v] and not was:
            self._tag(v, "saved")

    def _fetch(self, v: int) -> None:
        super()._fetch(v)
        self._tag(v, "transfers")

    def _let_go(self, v: int) -> None:
        if self._private[v] and not self.away[v]:
            self._untag(v)
        super()._let_go(v)

    def _run(self, index: int, sample: Callable[[int, int], None]) -> None:
        super()._run(index, sample)
        for v in self._layer.calls[index].makes:
            old = self._layer.values[v].writes
            if old >= 0 and not self._private[old]:
                self._untag(old)  # it was written where it lay: the bytes are a replayed value's now


class _Walk:
    """A step under way."""

    def __init__(self, ground: Ground, in_flight_bytes: int) -> None:
        self._profile, self._program, self._askers = ground.profile, ground.program, ground.askers
        self._in_flight_bytes = in_flight_bytes
        self.room = _Room(dict(self._profile.storages))
        self.tapes: list[_Tape] = []
        self.moments = Moments(self._program.constant_bytes, {c: [] for c in VARYING})
        self._at = self._sent = 0
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
            elif verb == "enter":
                self._layer, self._module = int(entry[1]), ""
            elif verb == "leave":
                done = self.tapes[int(entry[1])]
                done.leave()
                self._sent += done.sent_bytes
                self._layer, self._module = -1, ""
            elif verb == "phase":
                self._layer, self._module = -1, ""
                self._phase = "backward" if entry[1] == "backward" else "optimizer"

    def _replayed(self, call: int, born_bytes: int) -> None:
        run = self._profile.layers[self._layer].calls[call]
        self._note(run.cost, self._layer, run.module, "replay", self._program.live[self._at], born_bytes)

    def _note(self, cost: int, layer: int, module: str, phase: str, live_bytes: int, born_bytes: int) -> None:
        tagged, found, at = self.room.tagged_bytes, self.moments, self._at
        under_way = min(self._in_flight_bytes, self._sent)
        bytes_of = (
            self._program.gradients[at],
            self._program.outside[at],
            tagged["saved"],
            self.room.extra_bytes - tagged["saved"] - tagged["transfers"] + born_bytes,
            tagged["transfers"] + under_way,
            self._program.temporary(at, live_bytes),
        )
        for series, num_bytes in zip(found.by_category.values(), bytes_of, strict=True):
            series.append(num_bytes)
        found.totals.append(live_bytes + self.room.extra_bytes + born_bytes + under_way)
        found.costs.append(cost)
        found.layers.append(layer)
        found.modules.append(module)
        found.phases.append(phase)


def _askers(profile: Profile) -> dict[tuple[int, int], str]:
    """Return, for each handle of each layer, the module whose operator had it saved, where the log leaves no doubt.

    An operator's inputs are saved before it runs and its results after, so a value that the operator before has just
    made may belong to either. Then the module is named if both are in one.
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
