"""What the tape does with one block call, worked out from a profile: which values it holds, sends away and replays.

The same steps as in `engine.tape`, `engine.barriers` and `engine.replay`, on numbers instead of tensors. Where those
change, this changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actmem.engine.barriers import TRIFLE_BYTES
from actmem.engine.holding import UNLIMITED
from actmem.engine.operators import UNINITIALISED
from actmem.engine.values import KEPT
from actmem.profiles import Layer

__all__ = ["Emulated", "Room"]


class Room:
    """The bytes that are alive on top of what the program itself keeps alive, by storage."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._holders: dict[int, int] = {}
        self._dead: set[int] = set()
        self.extra_bytes = 0

    def hold(self, storage: int) -> None:
        """Keep a storage from dying."""
        self._holders[storage] = self._holders.get(storage, 0) + 1

    def release(self, storage: int) -> None:
        """Let go of a storage again."""
        left = self._holders[storage] = self._holders[storage] - 1
        if not left and storage in self._dead:
            self.extra_bytes -= self._sizes.get(storage, 0)

    def die(self, storage: int) -> None:
        """Note that the program let go of a storage."""
        self._dead.add(storage)
        if self._holders.get(storage, 0):
            self.extra_bytes += self._sizes.get(storage, 0)

    def is_dead(self, storage: int) -> bool:
        """Tell whether the program let go of a storage."""
        return storage in self._dead

    def size(self, storage: int) -> int:
        """Return what a storage takes."""
        return self._sizes.get(storage, 0)


class Emulated:
    """The tape of one block call."""

    def __init__(
        self,
        layer: Layer,
        keep: Sequence[str],
        room: Room,
        *,
        exact: bool = False,
        sends_inputs: bool = False,
        min_offload_bytes: int = 0,
        forced: dict[int, str] | None = None,
    ) -> None:
        """Begin.

        Args:
            layer: what the block does.
            keep: "save", "offload" or "" (recompute) for each call.
            room: where bytes are counted.
            exact: the plan is to be followed to the letter, not by bytes. See NOTE [ Barriers ].
            sends_inputs: what no call makes again is sent away too, but parameters and buffers.
            min_offload_bytes: smaller values stay.
            forced: calls of the smallest cut, and why each is held.
        """
        self._layer, self._keep, self._room, self._exact = layer, keep, room, exact
        self._sends_inputs, self._min_offload_bytes = sends_inputs, min_offload_bytes
        self._forced = forced or {}
        n = len(layer.values)
        self.held = [False] * n
        self.node = [False] * n
        self.why: list[str | None] = [v.why for v in layer.values]
        self._debts: list[frozenset[int]] = [frozenset()] * n
        self._private = [False] * n
        """Held by a copy of its own: replayed, fetched, or copied before it was overwritten."""
        self._lost = [False] * n
        self.away = [False] * n
        self._readers = [0] * n
        self._refs = [0] * n
        self._saved: set[int] = set()
        self._open = [False] * len(layer.handles)
        self._reserved: list[int] = []
        self._budget = UNLIMITED if exact else layer.inputs_bytes
        self._node_refs = [0] * len(layer.calls)
        self._reads: dict[int, tuple[int, ...]] = {}
        self.sent_bytes = 0
        self.replayed: list[int] = []
        """The calls that were run again, in order."""

    # ---------------------------------------------------------------- forward

    def call(self, index: int) -> None:
        """Run a call."""
        layer = self._layer
        made = layer.calls[index].makes
        if not made:
            return
        for v in made:
            old = layer.values[v].writes
            if old >= 0:
                self._overwrite(old)
        forced = self._forced.get(index)
        keep = forced or ("" if _is_unfilled(layer.calls[index].op) else self._keep[index])
        recorded: list[int] = []
        for v in made:
            value = layer.values[v]
            if forced or (keep and (value.why is None or self._exact)):
                self.why[v] = keep
            elif value.why is None and value.writes in value.reads and not self.node[value.writes]:
                self.why[v] = self.why[value.writes] or "external"  # what it was written on cannot be made again
            elif value.why is None:
                self.why[v], self.node[v] = None, True
                recorded.append(v)
        if not recorded:
            return
        debts: set[int] = set()
        reads = self._reads[index] = _union(layer.values[v].reads for v in recorded)
        for r in reads:
            self._readers[r] += 1
            if self.held[r]:
                continue
            if self.node[r]:
                debts |= self._debts[r]
                continue
            self._meet(r)
            if not self.held[r]:
                debts.add(r)
        for v in recorded:
            self._debts[v] = frozenset(debts)

    def _meet(self, v: int) -> None:
        value, why = self._layer.values[v], self.why[v]
        if why in ("external", None) and value.kind != "made":
            self._hold(v)
        elif why == "parameter":
            return
        elif (why not in KEPT and value.num_bytes <= TRIFLE_BYTES and why != "uninitialised") or why == "cut":
            self._hold(v)
        elif v not in self._reserved and (value.constant or why in KEPT) and value.num_bytes <= self._budget:
            self._budget -= value.num_bytes
            self._reserved.append(v)
            self._room.hold(value.storage)

    def _hold(self, v: int) -> None:
        self.held[v] = True
        self._room.hold(self._layer.values[v].storage)

    def _overwrite(self, v: int) -> None:
        if not self.held[v]:
            self._lost[v] = True
        elif self._readers[v] or any(o and self._layer.handles[h] == v for h, o in enumerate(self._open)):
            value = self._layer.values[v]
            self._room.release(value.storage)
            self._private[v] = True
            self._room.extra_bytes += value.num_bytes

    def pack(self, handle: int) -> None:
        """Save a value for backward."""
        v = self._layer.handles[handle]
        self._open[handle] = True
        if not self.held[v]:
            if not self.node[v]:
                self._hold(v)
            elif self._debts[v]:
                self._settle(v)
        if v not in self._saved:
            self._saved.add(v)
            self._budget += self._room.size(self._layer.values[v].storage) or self._layer.values[v].num_bytes

    def _settle(self, v: int) -> None:
        values = self._layer.values
        owed = [d for d in self._debts[v] if not self.held[d]]
        self._debts[v] = frozenset()
        gone = any(
            self._lost[d]
            or self.why[d] == "parameter"
            or (self._room.is_dead(values[d].storage) and d not in self._reserved)
            for d in owed
        )
        free = ("offload", "save", "cut") if self._exact else ("offload",)
        if gone or sum(values[d].num_bytes for d in owed if self.why[d] not in free) > values[v].num_bytes:
            self._hold(v)
            self.node[v], self.why[v] = False, "barrier"
        else:
            for d in owed:
                self._hold(d)

    def leave(self) -> None:
        """End the forward: let go of what no handle can reach, send away what is to go."""
        values = self._layer.values
        for handle, is_open in enumerate(self._open):
            if is_open:
                self._reach(self._layer.handles[handle])
        for v in self._reserved:
            self._room.release(values[v].storage)
        self._reserved.clear()
        for v, held in enumerate(self.held):
            if held and not self._refs[v]:
                self._let_go(v)
            elif held and self._is_sent(v):
                self._let_go(v)
                self.held[v] = self.away[v] = True
                self.sent_bytes += values[v].num_bytes

    def _is_sent(self, v: int) -> bool:
        value = self._layer.values[v]
        said = self.why[v] == "offload" or (self._sends_inputs and not self.node[v] and value.kind != "state")
        return said and value.num_bytes >= max(1, self._min_offload_bytes)

    def _reach(self, v: int) -> None:
        stack = [v]
        while stack:
            v = stack.pop()
            self._refs[v] += 1
            if self._refs[v] > 1 or self.held[v] or not self.node[v]:
                continue
            call = self._layer.values[v].call
            self._node_refs[call] += 1
            if self._node_refs[call] == 1:
                stack.extend(self._reads[call])

    # ---------------------------------------------------------------- backward

    def unpack(self, handle: int, sample: Callable[[int, int], None]) -> None:
        """Give a backward step what it asks for. `sample` is told of each replayed call, and the bytes alive in it."""
        v = self._layer.handles[handle]
        if self.away[v]:
            self._fetch(v)
        if self.held[v]:
            return
        order = self._order(v)
        for index in order:
            for r in self._reads[index]:
                if self.away[r]:
                    self._fetch(r)
        for index in order:
            self._run(index, sample)

    def _fetch(self, v: int) -> None:
        num_bytes = self._layer.values[v].num_bytes
        self.away[v], self._private[v] = False, True
        self._room.extra_bytes += num_bytes

    def _order(self, v: int) -> list[int]:
        order: list[int] = []
        values = self._layer.values
        first = values[v].call
        seen = {first}
        stack = [(first, iter(self._reads[first]))]
        while stack:
            call, reads = stack[-1]
            for r in reads:
                if not self.held[r] and self.node[r] and values[r].call not in seen:
                    seen.add(values[r].call)
                    stack.append((values[r].call, iter(self._reads[values[r].call])))
                    break
            else:
                order.append(call)
                stack.pop()
        return order

    def _run(self, index: int, sample: Callable[[int, int], None]) -> None:
        values, room = self._layer.values, self._room
        self.replayed.append(index)
        born = 0
        taken: set[int] = set()
        for v in self._layer.calls[index].makes:
            old = values[v].writes
            if old >= 0 and self._private[old] and self._refs[old] == 1:
                taken.add(old)  # nobody else will read it: it is written where it lies
            else:
                born += values[v].num_bytes
        sample(index, born)
        for v in self._layer.calls[index].makes:
            if self.node[v] and self._refs[v]:
                self.node[v] = False
                self.held[v] = self._private[v] = True
                if values[v].writes in taken:
                    self._private[values[v].writes] = False
                    self.held[values[v].writes] = False
                else:
                    room.extra_bytes += values[v].num_bytes
                self._node_refs[index] -= 1
        if not self._node_refs[index]:
            for r in self._reads[index]:
                self._drop(r)

    def drop(self, handle: int) -> None:
        """Note that nobody has a saved value any more."""
        if not self._open[handle]:
            return
        self._open[handle] = False
        if self._refs[self._layer.handles[handle]]:
            self._drop(self._layer.handles[handle])

    def _drop(self, v: int) -> None:
        stack = [v]
        while stack:
            v = stack.pop()
            self._refs[v] -= 1
            if self._refs[v]:
                continue
            if self.held[v] or self._private[v]:
                self._let_go(v)
            elif self.node[v]:
                self.node[v] = False
                call = self._layer.values[v].call
                self._node_refs[call] -= 1
                if not self._node_refs[call]:
                    stack.extend(self._reads[call])

    def _let_go(self, v: int) -> None:
        value = self._layer.values[v]
        if self.away[v]:
            self.away[v] = False
        elif self._private[v]:
            self._room.extra_bytes -= value.num_bytes
        elif self.held[v]:
            self._room.release(value.storage)
        self.held[v] = self._private[v] = False


def _is_unfilled(op: str) -> bool:
    """Tell whether what a call makes has nothing in it yet: there is nothing to keep."""
    return op.split(".")[1] in UNINITIALISED


def _union(groups: object) -> tuple[int, ...]:
    return tuple(dict.fromkeys(r for group in groups for r in group))  # type: ignore[attr-defined]
