"""Add microbatches to the profile of a pipeline's stage without running them.

NOTE [ Equal microbatches ]
A stage of 1F1B runs some forward passes, then backward and forward passes in turn, then what is left of the backward
passes. How many microbatches are in flight depends on the stage; all else that a stage in the middle does is the same
for each of them. So a short pipeline is profiled, with five in flight, and the forward and the backward pass of one of
them are repeated as often as needed: in front of it, so that the first is still the first and the last the last.

A copy is exact if the pass before did the same, and that is checked, entry by entry: the same operators, allocations
and frees, with bytes that differ by one constant. Then each storage of a copy is one of four. What the pass itself
allocates is new. What the pass before left for it comes from the pass that is now before it. What both passes use, such
as a parameter, stays. And what is there from the start, but not in the pass before, is a buffer of the microbatch's
own, to receive what another stage sends: it is new as well, and there from the start.

More turns of backward and forward passes than two change little, so those are left out of the log. The actions of the
schedule are those of all turns, so that the time of a step can be told: those that were left out refer to the passes of
the last turn that was not. What the turns change: torch's schedule keeps what it sent last before the first turn in a
variable until the turns are over. It is the output of the last microbatch but one of those in flight, and from the turn
in which that one's backward pass runs, nothing else holds it (`with_kept_output`). The last stage keeps the losses of
all microbatches (`with_more_losses`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actmem.log_entries import Entered, Entry, LayerEntry, Left, LiveEntry, PhaseBegan, StorageDied, Unpacked
from actmem.profiles import Action, Layer, Profile

__all__ = [
    "MOST_TURNS",
    "TRACED",
    "NotPeriodicError",
    "with_kept_output",
    "with_more_in_flight",
    "with_more_losses",
    "with_more_turns",
]

TRACED = 5
"""How many microbatches are in flight in the profile that is extended."""
MOST_TURNS = 2
"""How many turns of a backward and a forward pass it has at most."""


class NotPeriodicError(Exception):
    """The microbatches of a stage differ, and none can stand for another."""


@dataclass(frozen=True)
class _Pass:
    """What happens from one position of the log to another."""

    begin: int
    entries: tuple[Entry, ...]
    memory: tuple[tuple[int, int, int], ...]
    """As in `Profile`, with positions counted from `begin`."""

    @property
    def allocated(self) -> dict[int, None]:
        """The storages that are allocated in it."""
        return {storage: None for _, storage, size in self.memory if size}

    def storages(self, layers: Sequence[Layer]) -> list[int]:
        """Return the storages it refers to, in an order that is the same for equal passes."""
        found = [storage for _, storage, _ in self.memory]
        found += [e.storage for e in self.entries if isinstance(e, StorageDied)]
        for layer in layers:
            found += [v.storage for v in layer.values]
            found += [w.storage for c in layer.calls for w in c.writes]
        return found


def with_more_in_flight(profile: Profile, num_layers: int, num_more: int) -> Profile:
    """Return the profile of a stage with more microbatches in flight than it was made with.

    Args:
        profile: the profile of a stage of 1F1B with `TRACED` microbatches in flight.
        num_layers: how many blocks the stage has.
        num_more: how many microbatches to add.

    Raises:
        NotPeriodicError: its microbatches are not alike.
    """
    if num_more < 1:
        return profile
    return _Extension(profile, num_layers, num_more).profile()


def with_kept_output(profile: Profile, *, throughout: bool) -> Profile:
    """Return the profile of a stage of 1F1B in which the schedule keeps an output at the end of the turns.

    Args:
        profile: the profile of a stage with fewer turns than microbatches in flight.
        throughout: it does so in all of the last turn; otherwise from its forward pass on.
    """
    at = max(n for n, action in enumerate(profile.actions) if action.kind == "forward")
    before, forward, after = profile.actions[at - 1 : at + 2]
    return _with_alive(profile, 1, forward.sent_bytes, (before if throughout else forward).begin, after.end)


def with_more_losses(profile: Profile, num_more: int) -> Profile:
    """Return the profile of a last stage with the losses of more microbatches, all of which it keeps."""
    begins = [action.begin for action in profile.actions if action.kind == "forward"][-2:]
    live = [next(e.live_bytes for e in profile.log[at:] if isinstance(e, LiveEntry)) for at in begins]
    return _with_alive(profile, num_more, live[1] - live[0], 0, len(profile.log))


def _with_alive(profile: Profile, num_more: int, num_bytes: int, begin: int, end: int) -> Profile:
    """Return the profile with more storages of so many bytes, from one position of the log to another."""
    if not num_bytes:
        return profile
    log = profile.log
    first = 1 + max((*profile.storages, *(number for number, _, _ in profile.stock)))
    new = range(first, first + num_more)
    events = [(begin, storage, num_bytes) for storage in new] + [(end, storage, 0) for storage in new]
    return replace(
        profile,
        log=(*log[:begin], *(entry.shifted(num_more * num_bytes) for entry in log[begin:end]), *log[end:]),
        memory=tuple(sorted((*profile.memory, *events), key=lambda event: event[0])),
        storages={**profile.storages, **dict.fromkeys(new, num_bytes)},
    )


def with_more_turns(actions: Sequence[Action], stage: int, microbatches: int) -> tuple[Action, ...]:
    """Return the actions of a stage of 1F1B with more turns, whose passes are those of its last turn.

    >>> found = [Action(kind, 0, n, at, at + 1) for at, (kind, n) in enumerate(zip(["forward", "backward"] * 2, (0, 0, 1, 1)))]
    >>> [(x.kind, x.stage, x.microbatch, x.begin) for x in with_more_turns(found, 3, 3)]
    [('forward', 3, 0, 0), ('backward', 3, 0, 1), ('forward', 3, 1, 2), ('backward', 3, 1, 1), ('forward', 3, 2, 2), ('backward', 3, 2, 3)]

    Args:
        actions: those of a profile with fewer turns.
        stage: the number of the stage.
        microbatches: how many a step has.
    """  # noqa: E501  # a doctest does not wrap
    kinds = [action.kind for action in actions]
    num_more = microbatches - kinds.count("forward")
    last = len(kinds) - 1 - kinds[::-1].index("forward")
    turn = actions[last - 1 : last + 1]
    assert not num_more or [action.kind for action in turn] == ["backward", "forward"]
    ordered = [*actions[: last + 1], *(action for _ in range(num_more) for action in turn), *actions[last + 1 :]]
    return tuple(_numbered(ordered, stage))


def _numbered(actions: Sequence[Action], stage: int) -> Iterator[Action]:
    """Yield actions whose microbatches are numbered in the order in which they come."""
    counts: dict[str, int] = {}
    for action in actions:
        number = counts[action.kind] = counts.get(action.kind, -1) + 1
        yield replace(action, stage=stage, microbatch=number)


class _Extension:
    """A log that is being extended."""

    def __init__(self, p: Profile, num_layers: int, num_more: int) -> None:
        self._p, self._num_layers, self._num_more = p, num_layers, num_more
        ends = [at + 1 for at, e in enumerate(p.log) if isinstance(e, Left) and e.layer % num_layers == num_layers - 1]
        begins = _backward_passes(p.log)
        # What is left of the backward passes begins with one after the last turn, which differs from those after it.
        nth = self._nth = len(begins) - TRACED + 2
        if not 2 <= nth < TRACED or len(ends) != len(begins) or ends[TRACED - 1] > begins[0]:
            raise NotPeriodicError
        self._forward = self._pass(ends[nth - 2], ends[nth - 1]), self._pass(ends[nth - 1], ends[nth])
        self._backward = self._pass(begins[nth - 1], begins[nth]), self._pass(begins[nth], begins[nth + 1])
        self._layers = p.layers[nth * num_layers : (nth + 1) * num_layers]
        self._before = p.layers[(nth - 1) * num_layers : nth * num_layers]
        self._sizes = dict(p.storages)
        self._stock = {number: (num_bytes, role) for number, num_bytes, role in p.stock}
        self._new_stock: list[tuple[int, int, str]] = []
        self._new_sizes: dict[int, int] = {}
        self._next = 1 + max((*self._sizes, *self._stock))

    def _pass(self, begin: int, end: int) -> _Pass:
        memory = tuple((at - begin, s, n) for at, s, n in self._p.memory if begin <= at < end)
        return _Pass(begin, self._p.log[begin:end], memory)

    def profile(self) -> Profile:
        """Return the extended profile."""
        grown = self._step(*self._forward)
        shrunk = self._step(*self._backward)
        if grown + shrunk:
            raise NotPeriodicError
        if [layer.kind for layer in self._layers] != [layer.kind for layer in self._before]:
            raise NotPeriodicError
        if any(self._marks(before) != self._marks(this) for before, this in (self._forward, self._backward)):
            raise NotPeriodicError
        outs: list[dict[int, int]] = []
        backs: list[dict[int, int]] = []
        after_forward = self._successors(*self._forward, self._before, self._layers)
        after_backward = self._successors(*self._backward, (), ())
        for n in range(self._num_more):
            outs.append(self._names(*self._forward, self._layers, after_forward, outs, {}))
            backs.append(self._names(*self._backward, (), after_backward, backs, outs[n]))
        last_out = {s: outs[-1][after_forward[s]] for s in self._left_for(*self._forward, after_forward)}
        last_back = {s: backs[-1][after_backward[s]] for s in self._left_for(*self._backward, after_backward)}
        return self._joined(grown, outs, backs, last_out, last_back)

    def _step(self, before: _Pass, this: _Pass) -> int:
        """Return by how many bytes two passes differ, if they are otherwise the same."""
        if len(before.entries) != len(this.entries) or len(before.memory) != len(this.memory):
            raise NotPeriodicError
        steps: set[int] = set()
        for a, b in zip(before.entries, this.entries, strict=True):
            if isinstance(a, StorageDied) and isinstance(b, StorageDied):
                continue
            moved = self._moved(a, self._num_layers)
            if isinstance(a, LiveEntry) and isinstance(b, LiveEntry):
                steps.add(b.live_bytes - a.live_bytes)
                moved = moved.shifted(b.live_bytes - a.live_bytes)
            if moved != b:
                raise NotPeriodicError
        for (at, _, size), (other, _, other_size) in zip(before.memory, this.memory, strict=True):
            if (at, size) != (other, other_size):
                raise NotPeriodicError
        if len(steps) != 1:
            raise NotPeriodicError
        return steps.pop()

    def _marks(self, of: _Pass) -> list[tuple[int, str, bool, int]]:
        """Return where actions of the schedule begin and end in a pass."""
        found: list[tuple[int, str, bool, int]] = []
        for action in self._p.actions:
            for at, is_begin in ((action.begin, True), (action.end, False)):
                if 0 <= at - of.begin < len(of.entries):
                    found.append((at - of.begin, action.kind, is_begin, action.sent_bytes))
        return found

    @staticmethod
    def _moved(entry: Entry, num_layers: int) -> Entry:
        """Return the entry, about a layer so much later."""
        if isinstance(entry, LayerEntry):
            return entry.moved(entry.layer + num_layers, 0)
        if isinstance(entry, (Entered, Left)):
            return replace(entry, layer=entry.layer + num_layers)
        return entry

    def _successors(
        self, before: _Pass, this: _Pass, layers_before: Sequence[Layer], layers: Sequence[Layer]
    ) -> dict[int, int]:
        """Return which storage of a pass stands for which of the pass before."""
        found: dict[int, int] = {}
        for a, b in zip(before.storages(layers_before), this.storages(layers), strict=True):
            if found.setdefault(a, b) != b or self._sizes.get(a) != self._sizes.get(b):
                raise NotPeriodicError
        return found

    @staticmethod
    def _left_for(before: _Pass, this: _Pass, after: dict[int, int]) -> list[int]:
        """Return what the pass before allocates and this pass uses."""
        mine = {s for _, s, _ in this.memory} | {e.storage for e in this.entries if isinstance(e, StorageDied)}
        return [s for s in before.allocated if s in mine and after.get(s, s) != s]

    def _names(
        self,
        before: _Pass,
        this: _Pass,
        layers: Sequence[Layer],
        after: dict[int, int],
        earlier: Sequence[dict[int, int]],
        known: dict[int, int],
    ) -> dict[int, int]:
        """Return the storages of one more copy of a pass, by those of the pass itself."""
        names: dict[int, int] = {}
        new, left = this.allocated, set(before.allocated)
        for s in this.storages(layers):
            if s in names:
                continue
            if s in known:
                names[s] = known[s]
            elif after.get(s) == s:
                names[s] = s
            elif s in new:
                names[s] = self._fresh(s)
            elif s in left:
                names[s] = earlier[-1][after[s]] if earlier else s
            elif s in self._stock:
                names[s] = self._fresh(s)
                self._new_stock.append((names[s], *self._stock[s]))
            else:
                raise NotPeriodicError
        return names

    def _fresh(self, like: int) -> int:
        number = self._next + len(self._new_sizes)
        self._new_sizes[number] = self._sizes[like]
        return number

    def _joined(
        self,
        grown: int,
        outs: Sequence[dict[int, int]],
        backs: Sequence[dict[int, int]],
        last_out: dict[int, int],
        last_back: dict[int, int],
    ) -> Profile:
        """Put the copies in front of the passes that they are copies of."""
        num, width = self._num_more, self._num_layers
        log: list[Entry] = []
        memory: list[tuple[int, int, int]] = []
        events: dict[int, list[tuple[int, int]]] = {}
        for at, storage, size in self._p.memory:
            events.setdefault(at, []).append((storage, size))
        marks: dict[int, list[Action | None]] = {}
        for action in self._p.actions:
            marks.setdefault(action.begin, []).append(action)
            marks.setdefault(action.end, []).append(None)
        actions: list[Action] = []

        def mark(at: int) -> None:
            for action in marks.get(at, ()):
                if action is not None:
                    actions.append(replace(action, begin=len(log), end=len(log)))
                else:
                    actions[-1] = replace(actions[-1], end=len(log))

        def put(at: int, entry: Entry, names: dict[int, int], layers: int, num_bytes: int) -> None:
            mark(at)
            memory.extend((len(log), names.get(s, s), n) for s, n in events.get(at, ()))
            if isinstance(entry, StorageDied):
                log.append(StorageDied(names.get(entry.storage, entry.storage)))
                return
            own = isinstance(entry, (LayerEntry, Entered, Left)) and entry.layer >= self._nth * width
            log.append((self._moved(entry, layers) if own else entry).shifted(num_bytes))

        forward, backward = self._forward[1], self._backward[1]
        for at, entry in enumerate(self._p.log):
            for this, copies, first in ((forward, outs, 0), (backward, backs, num * grown)):
                if at == this.begin:
                    for n, names in enumerate(copies):
                        step = first + (n * grown if this is forward else -n * grown)
                        for offset, its in enumerate(this.entries):
                            put(at + offset, its, names, n * width, step)
            names = (
                last_out
                if forward.begin <= at < forward.begin + len(forward.entries)
                else last_back
                if backward.begin <= at < backward.begin + len(backward.entries)
                else {}
            )
            in_flight = forward.begin <= at < backward.begin
            put(at, entry, names, num * width, num * grown if in_flight else 0)
        mark(len(self._p.log))
        memory.extend((len(log), s, n) for s, n in events.get(len(self._p.log), ()))
        layers = [*self._p.layers[: self._nth * width]]
        for names in outs:
            layers += [_renamed(layer, names) for layer in self._layers]
        layers += self._p.layers[self._nth * width :]
        return replace(
            self._p,
            log=tuple(log),
            memory=tuple(memory),
            layers=tuple(layers),
            storages=self._sizes | self._new_sizes,
            stock=(*self._p.stock, *self._new_stock),
            actions=tuple(actions),
            place=None,  # that of a shorter pipeline
        )


def _backward_passes(log: Sequence[Entry]) -> list[int]:
    """Return where the backward passes through blocks begin. FSDP2 has shorter ones of its own between them."""
    found: list[int] = []
    last = -1
    for at, entry in enumerate(log):
        if isinstance(entry, PhaseBegan):
            last = at if entry.name == "backward" else -1
        elif isinstance(entry, Unpacked) and last >= 0:
            found.append(last)
            last = -1
    return found


def _renamed(layer: Layer, names: dict[int, int]) -> Layer:
    values = tuple(replace(v, storage=names.get(v.storage, v.storage)) for v in layer.values)
    calls = tuple(
        replace(c, writes=tuple(replace(w, storage=names.get(w.storage, w.storage)) for w in c.writes))
        if c.writes
        else c
        for c in layer.calls
    )
    return replace(layer, values=values, calls=calls)
