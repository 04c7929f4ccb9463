"""What the tape does with one block call, worked out from a profile: which values it holds, offloads and replays.

The tape's own rules (NOTE [ Holding rules ] in `engine/holding_rules.py`) on its own values and nodes. What holds a
value is not a tensor but an object that counts bytes (`room.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from actmem.decisions import Decision, Reason
from actmem.engine import (
    ACROSS,
    HOLD,
    KEPT,
    RESERVE,
    UNLIMITED,
    Node,
    Value,
    all_debts,
    inherited,
    is_piece,
    kept_by,
    made,
    needs_private_copy,
    number_held,
    offered,
    on_meeting,
    owes,
    preserve,
    promote,
    reason,
    replay_order,
    settle,
    written_in_place,
)
from actmem.profiles import Call, Layer, Write
from actmem.simulation.flight import Away, Flight
from actmem.simulation.room import REPLAYED, SAVED, STATES, TRANSFERS, Copy, Lease, Room

__all__ = ["Emulated", "Fate"]

_PIECES: Any = object()
"""A stand-in for what has been written of a storage that was born uninitialised."""

_EXTERNAL, _OFFLOADED, _PARAMETER = Reason.EXTERNAL, Reason.OFFLOADED, Reason.PARAMETER
_UNINITIALISED, _UNSEEN = Reason.UNINITIALISED, Reason.UNSEEN


class Fate:
    """What became of one value: the same as a row of an observation."""

    __slots__ = (
        "cause",
        "held",
        "index",
        "kind",
        "num_bytes",
        "number",
        "overwritten",
        "parents",
        "replayed",
        "saved",
        "why",
    )

    def __init__(self, number: int, kind: str, why: Reason | None, num_bytes: int, index: int) -> None:
        self.number, self.kind, self.why, self.num_bytes, self.index = number, kind, why, num_bytes, index
        self.held = self.saved = self.overwritten = False
        self.replayed = 0
        self.cause: Reason | None = None
        self.parents: tuple[Fate, ...] = ()


class _Storage:
    """A storage of the program, as a weak reference to it: a call returns itself, or None once nobody holds it."""

    __slots__ = ("_room", "number")

    def __init__(self, room: Room, number: int) -> None:
        self._room, self.number = room, number

    def __call__(self) -> _Storage | None:
        return None if self._room.is_gone(self.number) else self


class _Handle:
    """What autograd holds instead of a saved tensor, and the bytes that were unpacked from it."""

    __slots__ = ("given", "value")

    def __init__(self, value: Value | None) -> None:
        self.value = value
        self.given: Any = None


class _Written:
    """One tensor that a call writes."""

    __slots__ = ("early", "fact", "fate", "old")

    def __init__(self, fact: Write, old: Value | None) -> None:
        self.fact, self.old = fact, old
        self.fate: Reason | None = None
        self.early: Value | None = None


class Emulated:
    """The tape of one block call."""

    def __init__(
        self,
        layer: Layer,
        keep: Sequence[Decision],
        room: Room,
        *,
        exact: bool = False,
        plain: bool = False,
        sends_inputs: bool = False,
        min_offload_bytes: int = 0,
        forced: dict[int, Reason] | None = None,
        flight: Flight | None = None,
    ) -> None:
        """Start the tape of a block call.

        Args:
            layer: what the block does.
            keep: the decision for each call.
            room: where bytes are counted.
            exact: the plan is to be followed to the letter, not by bytes. See NOTE [ Barriers ].
            plain: the plan has nothing to say here, so that there is no tape.
            sends_inputs: what no call recomputes is offloaded too, except parameters and buffers.
            min_offload_bytes: smaller values stay.
            forced: calls of the smallest cut, and why each is held.
            flight: what copies in flight take. None: nothing, and whatever is fetched is a new copy.
        """
        self._layer, self._keep, self._room, self._exact, self._plain = layer, keep, room, exact, plain
        self._sends_inputs, self._min_offload_bytes = sends_inputs, min_offload_bytes
        self._forced = forced or {}
        self._flight = flight
        self._free = KEPT if exact else (_OFFLOADED,)
        self._budget = UNLIMITED if exact else layer.inputs_bytes
        self._by_function = frozenset(layer.by_function)
        self._values: dict[int, Value] = {}
        """The values of the block call, by storage."""
        self._storages: dict[int, _Storage] = {}
        self._detached: dict[int, Value] = {}
        self._copied: list[Value] = []
        self._reserve: list[Lease] = []
        self._gone: set[int] = set()
        """Tensors that are gone although their storage is not."""
        self._handles: dict[int, _Handle] = {}
        self._given: list[Any] = []
        """What was handed to Python Functions."""
        self._alive: dict[int, weakref.ref[Value]] = {}
        self.fates: list[Fate | None] = [None] * len(layer.values)
        self.held: list[bool] = []
        """For each value, whether it is held when the forward is over."""
        self.away: list[bool] = []
        """For each value, whether it was offloaded by then."""
        self.sent_bytes = 0
        self.replayed: list[int] = []
        """The calls that were run again, in order."""

    @property
    def why(self) -> list[Reason | None]:
        """Why each value is not recomputed, if it is not."""
        return [
            value.why if fate is None else fate.why for value, fate in zip(self._layer.values, self.fates, strict=True)
        ]

    # ---------------------------------------------------------------- forward

    def call(self, index: int) -> None:
        """Run a call. The same steps as `Tape.__torch_dispatch__` and the methods that it delegates to."""
        if self._plain:
            return
        call = self._layer.calls[index]
        forced = self._forced.get(index)
        kept = forced or kept_by(self._keep[index])
        again = call.is_again and kept is None
        never = None if forced or again or (kept and call.yields) else call.never
        given = reason(kept, never, exact=self._exact)
        writes = [_Written(write, self._values.get(write.storage)) for write in call.writes]
        for w in writes:
            w.fate = given or (_EXTERNAL if w.fact.unread else inherited(w.old, whole=w.fact.whole))
        replayable = never is None and kept is None
        piece = (
            replayable and len(writes) == 1 and bool(writes[0].fact.piece) and is_piece(writes[0].old, writes[0].fate)
        )
        node = None
        if replayable and (call.fresh or piece or any(w.fate is None for w in writes)):
            node = self._node(index, call)
        if again and node is not None and not self._anchor(call, node):
            node, given, again = None, Reason.COLLECTIVE, False
        self._leave_behind(writes)
        outs = self._write(node, writes, piece=piece)
        for v in call.makes:
            fact = self._layer.values[v]
            if fact.slot < 0:
                continue
            value = Value(self._storage(fact.storage), node, fact.slot, None if node is not None else given)
            if never is _UNINITIALISED and not writes:
                value.why = never
                if fact.pieces:
                    value.coverage, value.pending = _PIECES, Node(index, [], None, [])
                    value.pending.outs = [(fact.slot, weakref.ref(value))]
            self._remember(value, v)
            if again:
                value.debts = ACROSS
            outs.append((fact.slot, weakref.ref(value)))
        if node is not None:
            node.outs = outs

    def _anchor(self, call: Call, node: Node) -> bool:
        """Make sure that a collective can run again, as `Tape` does; False if it is saved instead."""
        value: Any = node.refs[0][2]
        if not owes(value):
            return True
        if not call.op.startswith("_c10d_functional.all_gather_into_tensor."):
            return False
        if value.node is None:
            self._hold(value, None)
        else:
            num_bytes = self._layer.values[self._number(value)].copy_bytes
            settle(value, num_bytes, self._hold, None, self._find, self._free)
        return True

    def _node(self, index: int, call: Call) -> Node:
        refs: list[tuple[Any, ...]] = [
            (k, -1, self._refer(v, shown)) for k, (v, shown) in enumerate(zip(call.refs, call.shown, strict=True))
        ]
        written = [w for w in call.writes if not w.unread and w.ref >= 0]
        for w in written:
            if w.whole:
                refs[w.ref] = (w.ref, -1, None)
        node = Node(index, [], None, refs)
        if call.state_bytes:
            state: Any = Copy(self._room, call.state_bytes, STATES)
            node.state = state
        if written:
            # The call may resize what it overwrites, as `out=` does: the version that it leaves counts.
            left = [w.new if w.new >= 0 else call.refs[w.ref] for w in written]
            sizes = [self._layer.values[v].copy_bytes if w.whole else -1 for w, v in zip(written, left, strict=True)]
            node.writes = [(w.ref, -1, size, _PIECES) for w, size in zip(written, sizes, strict=True)]
        return node

    def _refer(self, v: int, shown: int) -> Value:
        """Return a value that a recorded call reads: met, if nothing recomputes it."""
        fact = self._layer.values[v]
        if fact.why is _PARAMETER and fact.call < 0:
            value = self._detached.get(v)
            if value is None:
                value = self._detached[v] = self._born(Value(self._storage(fact.storage), None, 0, _PARAMETER), v)
            return value
        value = self._values.get(fact.storage)
        if value is None or self._number(value) != v:
            return self._external(v)
        if value.node is None and value.held is None:
            action = on_meeting(value)
            if action is HOLD:
                self._hold(value, None)
            elif action is RESERVE:
                self._keep_from_dying(value, fact.copy_bytes, shown)
        return value

    def _external(self, v: int) -> Value:
        fact = self._layer.values[v]
        why = _UNSEEN if fact.why is _UNSEEN else _EXTERNAL
        value = self._values[fact.storage] = self._born(Value(self._storage(fact.storage), None, 0, why), v)
        if why is _UNSEEN:
            value.tensor, value.num_bytes = self._witness(fact.shown), fact.copy_bytes
        else:
            self._hold(value, None)
        return value

    def _keep_from_dying(self, value: Value, num_bytes: int, shown: int) -> None:
        value.num_bytes = num_bytes
        if num_bytes <= self._budget:
            self._budget -= num_bytes
            self._reserve.append(Lease(self._room, self._storage_of(value)))
            value.reserved = True
        value.tensor = self._witness(shown)

    def _leave_behind(self, writes: list[_Written]) -> None:
        for write in writes:
            # The call itself may have been the first to refer to it.
            value, write.old = write.old or self._values.get(write.fact.storage), None
            if value is not None:
                value.row.overwritten = True
                self._values.pop(write.fact.storage, None)
                early = [h for n in write.fact.early if (h := self._handles.get(n)) is not None and h.value is value]
                if early:
                    write.early = Value(value.storage, None, 0, None)
                    for handle in early:
                        handle.value = write.early
                self._preserve(value)
                del value, early
            if write.fact.new >= 0:
                self._room.copy_for_holders(write.fact.storage, self._layer.values[write.fact.new].copy_bytes)

    def _preserve(self, value: Value) -> None:
        preserve(value, self._values, self._copied, self._copy)

    def _copy(self, value: Value) -> None:
        value.held = Copy(self._room, self._layer.values[self._number(value)].copy_bytes, SAVED)

    def _write(self, node: Node | None, writes: list[_Written], *, piece: bool) -> list[tuple[int, weakref.ref[Value]]]:
        """Make a value of each new version."""
        outs: list[tuple[int, weakref.ref[Value]]] = []
        for k, write in enumerate(writes):
            v = write.fact.new
            if v < 0:
                continue
            storage = self._storage(write.fact.storage)
            value = write.early or Value(storage, None, 0, None)
            value.node, value.slot, value.why = node if write.fate is None else None, -1 - k, write.fate
            if write.early is not None and (value.node is None or all_debts(value.node.refs) is not None):
                value.node, value.why = None, write.fate or Reason.BARRIER
                number_held(value)
                value.held = Lease(self._room, write.fact.storage)  # whoever overwrites it next need not copy it
            outs.append((-1 - k, weakref.ref(value)))
            if piece and node is not None:
                value.coverage, value.pending = _PIECES, node
                value.debts = all_debts(node.refs, storage)
                node.outs = outs
                if write.fact.piece == "last":
                    promote(value)
            self._remember(value, v)
        return outs

    def _remember(self, value: Value, v: int) -> None:
        fact = self._layer.values[v]
        if value.node is not None:
            value.debts = value.debts or all_debts(value.node.refs)
        elif value.why not in KEPT:
            value.tensor, value.num_bytes = self._witness(fact.shown), fact.copy_bytes
        self._values[fact.storage] = self._born(value, v)

    def _born(self, value: Value, v: int) -> Value:
        fact = self._layer.values[v]
        value.row = fate = Fate(v, fact.kind, value.why, fact.copy_bytes, fact.call)
        if value.node is not None:
            fate.parents = value.node.parents
        self.fates[v] = fate
        self._alive[v] = weakref.ref(value)
        return value

    def pack(self, handle: int) -> None:
        """Save a value for backward."""
        v = self._layer.handles[handle]
        fact = self._layer.values[v]
        if self._plain:
            self._handles[handle] = _Handle(None)
            self._handles[handle].given = Lease(self._room, fact.storage)
            return
        value = self._values.get(fact.storage)
        if value is None or self._number(value) != v:
            value = self._values[fact.storage] = self._born(Value(self._storage(fact.storage), None, 0, _EXTERNAL), v)
            self._hold(value, None)
        elif value.held is None:
            if value.node is None:
                self._hold(value, None)
            elif value.debts is not None:
                settle(value, fact.copy_bytes, self._hold, None, self._find, self._free)
        self._handles[handle] = _Handle(value)
        if not value.saved:
            value.saved = True
            self._budget += fact.copy_bytes

    def _hold(self, value: Value, _shown: Any) -> None:
        fact = self._layer.values[self._number(value)]
        number_held(value)
        value.held = Lease(self._room, fact.storage)
        value.num_bytes = value.num_bytes or fact.copy_bytes
        if fact.leaf != "parameter":
            self._room.note_holder(fact.storage, value)

    def _find(self, value: Value) -> Any:
        """Return what represents a value that is owed; None if it is gone."""
        witness: Any = value.tensor
        if witness is None:
            return None
        if value.reserved:
            return value
        return None if witness() in self._gone or self._room.is_dead(self._storage_of(value)) else value

    def lose(self, witness: int) -> None:
        """Note that a tensor is gone although its storage is not."""
        self._gone.add(witness)

    def leave(self) -> None:
        """End the forward: drop what no handle can reach, and offload what the plan offloads."""
        sent = offered(self._values.values(), inputs=self._sends_inputs)
        self._values.clear()
        self._detached.clear()
        self._copied.clear()
        self._reserve.clear()
        self.held, self.away = [False] * len(self.fates), [False] * len(self.fates)
        for reference in sent:
            value = reference()
            if value is not None and self._is_sent(value):
                num_bytes = self._layer.values[self._number(value)].copy_bytes
                value.held = Away(self._flight, value.held, num_bytes)
                self.away[self._number(value)] = True
                self.sent_bytes += num_bytes
        del sent
        for v, reference in self._alive.items():
            value, fate = reference(), self.fates[v]
            if value is not None and value.held is not None and fate is not None:
                self.held[v] = fate.held = True
                fate.why = fate.why if fate.why is not None else value.why
        value = None
        for number, handle in self._handles.items():
            if handle.value is not None:
                handle.value.row.saved = True
            else:
                self.held[self._layer.handles[number]] = True  # there is no tape: autograd holds it

    def _is_sent(self, value: Value) -> bool:
        fact = self._layer.values[self._number(value)]
        if value.held is None or fact.kind == "state" or fact.leaf:
            return False
        return fact.copy_bytes >= max(1, self._min_offload_bytes)

    # ---------------------------------------------------------------- backward

    def unpack(self, handle: int, sample: Callable[[int], None]) -> None:
        """Give a backward step what it asks for. `sample` is called for each replayed call and each copy (-1)."""
        if self._plain:
            return
        opened = self._handles[handle]
        value = opened.value
        assert value is not None
        if value.held is None:
            self._materialise(value, sample)
        elif type(value.held) is Away:
            self._fetch(value)
        given = value.held
        fact = self._layer.values[self._number(value)]
        by_function = handle in self._by_function
        if by_function and needs_private_copy(value, 2, parameter=fact.leaf == "parameter"):
            given = Copy(self._room, fact.copy_bytes, REPLAYED)
            sample(-1)
        if by_function:
            self._given.append(given)
        else:
            opened.given = given

    def _fetch(self, value: Value) -> None:
        away: Away = value.held
        num_bytes = self._layer.values[self._number(value)].copy_bytes
        value.held = away.take_back(self._room) or Copy(self._room, num_bytes, TRANSFERS)

    def _materialise(self, value: Value, sample: Callable[[int], None]) -> None:
        order = replay_order(value, _name)
        self._fetch_all(order)
        while order:
            wanted, node = order.pop()
            if wanted.node is node:
                self._run(node, sample)
            del wanted, node  # release at once what nothing else needs

    def _fetch_all(self, order: list[tuple[Value, Node]]) -> None:
        for _, node in order:
            for ref in node.refs:
                if ref[2] is not None and type(ref[2].held) is Away:
                    self._fetch(ref[2])

    def _run(self, node: Node, sample: Callable[[int], None]) -> None:
        """Run a call again, and leave the results in the values that can still be reached."""
        index: int = node.func
        self.replayed.append(index)
        values = self._layer.values
        results: dict[int, Any] = {}
        in_place = written_in_place(node)
        copies: dict[int, Any] = {}
        for k, (i, _, num_bytes, _) in enumerate(node.writes or ()):
            value: Value | None = node.refs[int(i)][2]
            if value is None:
                results[-1 - k] = Copy(self._room, num_bytes, REPLAYED)
            else:
                if id(value) not in copies:
                    spare = in_place[id(value)]
                    size = values[self._number(value)].copy_bytes
                    copies[id(value)] = value.held if spare else Copy(self._room, size, REPLAYED)
                results[-1 - k] = copies[id(value)]
        value = None
        for v in self._layer.calls[index].makes:
            if values[v].slot >= 0:
                results[values[v].slot] = Copy(self._room, values[v].copy_bytes, REPLAYED)
        state_bytes = self._layer.calls[index].state_bytes
        present = Copy(self._room, state_bytes, STATES) if state_bytes else None  # of the generator, to be put back
        sample(index)
        del present
        for slot, reference in node.outs or ():
            value = reference()
            if value is not None and value.node is node:
                made(value, results[slot])

    def loosen(self, handle: int) -> None:
        """Note that autograd dropped a handle before the bytes that were unpacked from it are gone."""
        if handle in self._handles:
            self._handles[handle].value = None

    def done(self, nth: int) -> None:
        """Note that what was handed to a Python Function is gone."""
        if not self._plain:
            self._given[nth] = None

    def drop(self, handle: int) -> None:
        """Note that nobody holds a saved value any more."""
        self._handles.pop(handle, None)

    # ---------------------------------------------------------------- numbers

    def _storage(self, number: int) -> Any:
        found = self._storages.get(number)
        if found is None:
            found = self._storages[number] = _Storage(self._room, number)
        return found

    def _storage_of(self, value: Value) -> int:
        storage: Any = value.storage
        return storage.number

    def _number(self, value: Value) -> int:
        return value.row.number

    def _witness(self, number: int) -> Any:
        return None if number < 0 else lambda: number


def _name(value: Value) -> str:
    return f"value {value.row.number}"
