"""How long a step of a parallel job takes: what each rank does, one thing after the other, and what it waits for.

NOTE [ The clock of a job ]
The profile of a rank says in which order torch's schedule did what, and the time of each action is the sum of its
operators, with those that a plan runs again. A rank does one thing at a time. The forward pass of a microbatch on a
stage begins when that of the stage before it has been received, and its backward pass when the gradient of the stage
after it has. What is sent takes the time that the link needs, while both ranks go on; a rank never waits for what it
sends to be taken. The step is over when the last rank is done, its optimizer's step included.

A longer action never makes a step shorter. So where a rank has one stage, the fastest plan of each rank makes the
fastest step, and the step under lower bounds on the ranks' times is a lower bound on the step. Rules decide the same
for every microbatch: what a rank with one stage must at least run again is spread evenly over its backward actions.
Where a rank has several stages, or splits its backward passes, nobody knows which of them a better plan would relieve.
Then only this is certain: from the first of these actions to the last, the rank computes for at least so much longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actmem.log_entries import OperatorEntry, Unpacked
from actmem.profiles import Action, Profile
from actmem.simulation.simulator import Simulated, replayed_cost

__all__ = ["Stretch", "ends_of", "in_flight", "least_seconds", "stretches"]

_BACKWARD = ("backward", "input", "weight")


@dataclass(frozen=True)
class Stretch:
    """A part of a rank's step: an action of its schedule, or what lies between two of them."""

    seconds: float
    action: Action | None = None

    @property
    def is_backward(self) -> bool:
        """Whether operators may be run again in it; everything is one stretch where there is no pipeline."""
        return self.action is not None and self.action.kind in _BACKWARD


def stretches(
    profile: Profile, seconds: Sequence[float], simulated: Simulated | None = None, *, waiting_seconds: float = 0.0
) -> list[Stretch]:
    """Return what a rank does in a step, in order.

    Args:
        profile: the rank's step.
        seconds: what each of its costs takes.
        simulated: the step under a plan, with its timeline and what the plan adds; None: everything is saved.
        waiting_seconds: how long the step waits for what was offloaded.
    """
    at = [seconds[entry.cost] if isinstance(entry, OperatorEntry) else 0.0 for entry in profile.log]
    if simulated is not None:
        for (position, _), on_top in zip(simulated.timeline, simulated.on_top, strict=True):
            entry = profile.log[position]
            if on_top.call is not None and on_top.call >= 0 and isinstance(entry, Unpacked):
                at[position] += seconds[replayed_cost(profile, entry.layer, on_top.call)]
    found: list[Stretch] = []
    position = 0
    for action in profile.actions:
        found.append(Stretch(sum(at[position : action.begin])))
        found.append(Stretch(sum(at[action.begin : action.end]), action))
        position = action.end
    found.append(Stretch(sum(at[position:])))
    waits = sum(stretch.is_backward for stretch in found)
    if not waits:
        return [replace(stretch, seconds=stretch.seconds + waiting_seconds / len(found)) for stretch in found]
    return [
        replace(s, seconds=s.seconds + waiting_seconds / waits) if s.is_backward else s
        for s in found
        if s.seconds or s.action is not None
    ]


def ends_of(ranks: Sequence[Sequence[Stretch]], sent_seconds: Callable[[int], float]) -> list[list[float]]:
    """Return when each stretch of each rank is over, from the start of the step. See NOTE [ The clock of a job ].

    Args:
        ranks: what each rank of one pipeline does.
        sent_seconds: how long so many bytes take from one rank to another.

    >>> def forward(stage): return Stretch(2.0, Action("forward", stage, 0, 0, 0, sent_bytes=10))
    >>> ends_of([[forward(0)], [Stretch(1.0), forward(1)]], lambda num_bytes: num_bytes / 10)
    [[2.0], [1.0, 5.0]]
    """
    last_stage = max((s.action.stage for rank in ranks for s in rank if s.action is not None), default=0)
    arrived: dict[tuple[str, int, int, int], float] = {}
    counts: list[Counter[tuple[str, int, int]]] = [Counter() for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, done, count in zip(ranks, ends, counts, strict=True):
            while len(done) < len(rank):
                stretch = rank[len(done)]
                began = done[-1] if done else 0.0
                if stretch.action is not None:
                    needed = _needed(stretch.action, last_stage, count)
                    if needed is not None and needed not in arrived:
                        break
                    began = max(began, 0.0 if needed is None else arrived[needed])
                done.append(began + stretch.seconds)
                moved = True
                if stretch.action is not None:
                    own = _key(stretch.action, count)
                    count[own[:3]] += 1
                    arrived[own] = done[-1] + sent_seconds(stretch.action.sent_bytes)
    if any(len(done) < len(rank) for rank, done in zip(ranks, ends, strict=True)):
        raise AssertionError("the ranks of the pipeline wait for each other. Please report this, with the schedule.")
    return ends


def _key(action: Action, count: Counter[tuple[str, int, int]]) -> tuple[str, int, int, int]:
    """Name an action: a schedule may run several times in a step."""
    kind = "backward" if action.kind == "input" else action.kind
    return kind, action.stage, action.microbatch, count[kind, action.stage, action.microbatch]


def _needed(action: Action, last_stage: int, count: Counter[tuple[str, int, int]]) -> tuple[str, int, int, int] | None:
    """Return the action of another stage that has to be over first."""
    kind, stage, microbatch, nth = _key(action, count)
    if kind == "forward" and stage > 0:
        return kind, stage - 1, microbatch, nth
    if kind == "backward" and stage < last_stage:
        return kind, stage + 1, microbatch, nth
    return None


def least_seconds(
    ranks: Sequence[Sequence[Stretch]],
    more_seconds: Sequence[float],
    sent_seconds: Callable[[int], float],
    *,
    evenly: Sequence[bool],
) -> float:
    """Return a lower bound on a step in which each rank has to run operators again for at least so many seconds.

    Args:
        ranks: what each rank of one pipeline does with everything saved.
        more_seconds: what any plan of the rank adds at least.
        sent_seconds: as for `ends_of`.
        evenly: for each rank, whether every backward action has the same part of that.
    """
    placed = [
        _spread(rank, more) if even else list(rank)
        for rank, more, even in zip(ranks, more_seconds, evenly, strict=True)
    ]
    ends = ends_of(placed, sent_seconds)
    least = max(done[-1] for done in ends if done)
    much = 1.0 + sum(stretch.seconds for rank in placed for stretch in rank)
    for nth, (rank, more) in enumerate(zip(placed, more_seconds, strict=True)):
        again = [i for i, stretch in enumerate(rank) if stretch.is_backward] or list(range(len(rank)))
        if evenly[nth] or not more or not again:
            continue
        first, last = again[0], again[-1]
        late = [*rank[:last], replace(rank[last], seconds=rank[last].seconds + much), *rank[last + 1 :]]
        slow = ends_of([*placed[:nth], late, *placed[nth + 1 :]], sent_seconds)
        after = max(done[-1] for done in slow if done) - slow[nth][last]
        begun = ends[nth][first] - rank[first].seconds
        least = max(least, begun + sum(s.seconds for s in rank[first : last + 1]) + more + after)
    return least


def _spread(rank: Sequence[Stretch], more: float) -> list[Stretch]:
    num_actions = sum(stretch.is_backward for stretch in rank) or len(rank)
    anywhere = not any(stretch.is_backward for stretch in rank)
    return [replace(s, seconds=s.seconds + more / num_actions) if anywhere or s.is_backward else s for s in rank]


def in_flight(actions: Sequence[Action]) -> tuple[int, int]:
    """Return the most microbatches that wait for their backward pass, and for the rest of it, where it is split.

    Stages of the same rank count each.

    >>> order = ["forward 0", "forward 1", "input 0", "forward 2", "weight 0", "input 1", "input 2"]
    >>> in_flight([Action(kind, 0, int(n), 0, 0) for kind, n in map(str.split, order)])
    (2, 2)
    """
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for action in actions:
        now["whole"] += {"forward": 1, "backward": -1, "input": -1}.get(action.kind, 0)
        now["weights"] += {"input": 1, "weight": -1}.get(action.kind, 0)
        most |= now
    return most["whole"], most["weights"]
