"""The program of a block call: what ran, in which order, on which values, without tensors.

NOTE [ Known programs ]
A block runs the same operators call after call, so a call need not be recorded anew each time. A `Learner` records one
call as every tape does, and keeps what it saw as a `Program`: values become numbers. From then on a `Follower`
(`follower.py`) compares each call with the program, operator by operator, and builds no graph. When all of it was the
same, the handles refer to the program, and a replay runs a list that was prepared before (`prepared_replay.py`).

What is compared: the operator; the storage, version, geometry and dtype of every tensor that a recorded call reads;
every other argument, by type and value; the numerics flags and the default dtype; and what autograd saves, in order.
What a call is given that the plan keeps or that is never replayed need not be compared, as nothing is made from it
again: its result is what it is.

At the first difference, what was compared so far is turned into the values and nodes that it stands for
(`Recorded`), and the tape records on from there. So there is one set of holding rules: a program only says again what
they said when it was learnt. One thing is not the same after a difference: what the tape would have reserved until the
end of the forward (NOTE [ Barriers ]) may be gone, and a later saved tensor is then held itself.

Not every call has a program. Those that offload, run under other hooks, call recorded functions as one operator, or
write other than by a simple operator in place on a value that a replay makes, are recorded each time.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from actmem.decisions import Reason
from actmem.engine.barriers import all_debts
from actmem.engine.comparisons import compiled, source_of
from actmem.engine.operators import Operator, describe
from actmem.engine.tape import Tape
from actmem.engine.values import UNCHECKED, Geometry, Handle, Node, Value, geometry, tensors
from actmem.torchcompat import never_compile

__all__ = ["END", "Learner", "Pack", "Place", "Program", "Recorded", "Step", "argument", "equal", "gone", "still"]

_SIMPLE = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that can be compared from one call to the next."""


_MOST_PROGRAMS = 256
_FROM_OUTSIDE = (Reason.EXTERNAL, Reason.UNSEEN, Reason.PARAMETER)


class Place:
    """A tensor that a recorded call reads: where it stands, which value it shows, and how."""

    __slots__ = ("dtype", "item", "number", "offset", "position", "requires_grad", "size", "stride", "version")

    def __init__(self, position: int | str, item: int, number: int, view: Geometry, tensor: Tensor) -> None:
        self.position, self.item, self.number = position, item, number
        self.size, self.stride, self.offset, self.dtype, _ = view
        self.version = tensor._version
        self.requires_grad = tensor.requires_grad

    @property
    def view(self) -> Geometry:
        """The geometry, without bits: a program has none."""
        return self.size, self.stride, self.offset, self.dtype, 0


class Pack:
    """A tensor that autograd saves."""

    __slots__ = ("light", "number", "requires_grad", "version", "view")

    def __init__(self, number: int, view: Geometry, tensor: Tensor) -> None:
        self.number, self.view = number, view
        self.light = -1
        """The number, if the value is not held."""
        self.version, self.requires_grad = tensor._version, tensor.requires_grad


class Step:
    """One call of an operator that is not a view."""

    __slots__ = (
        *(
            "again",
            "aliases",
            "args",
            "call",
            "counts",
            "flags",
            "func",
            "given",
            "kwargs",
            "num_args",
            "operator",
            "outs",
        ),
        *("device", "only", "places", "recorded", "rest", "run", "single", "strays", "written"),
    )

    def __init__(self, operator: Operator, counts: dict[Any, int]) -> None:
        self.operator = operator
        self.func, self.call, self.again = operator.func, operator.call, operator.again
        self.counts = counts
        """What the plan has counted so far."""
        self.recorded = False
        """A replay may run it: what it reads is compared."""
        self.num_args = 0
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] | None = None
        self.places: tuple[Place, ...] = ()
        """Values that the block made, where they are arguments of their own."""
        self.strays: tuple[Place, ...] = ()
        """Values that the block made, in lists or by name."""
        self.given: tuple[Place, ...] = ()
        """Values that came from outside."""
        self.rest: tuple[tuple[int, Any], ...] = ()
        """Position and value of the other arguments."""
        self.outs: tuple[tuple[int, int], ...] = ()
        """Position among the results, and number, of each value that it makes; -1: what it writes."""
        self.single = True
        """It returns one tensor."""
        self.only = -1
        """The number of its only result, if it is recorded and not held."""
        self.aliases = False
        """It returns its first argument, in another shape."""
        self.run: Any = None
        """Compares a call with it, and runs it (`comparisons.py`); None if that is not written down."""
        self.written = -1
        """The value that it overwrites; -1 if none."""
        self.device: Any = None
        """Where that is."""
        self.flags: tuple[Any, ...] | None = None

    @property
    def reads(self) -> tuple[Place, ...]:
        """All places."""
        return (*self.places, *self.strays, *self.given)


class Program:
    """What a block call ran. Values are numbers, in the order in which they were met."""

    def __init__(
        self,
        steps: list[Step],
        packs: list[Pack],
        made_by: list[int],
        why: list[Reason | None],
        births: list[Geometry | None],
    ) -> None:
        self.steps, self.packs = steps, packs
        self.births = births
        """The geometry of each value when the block made it; None for those from outside."""
        self.made_by = made_by
        """The step that makes each value; -1: it comes from outside."""
        self.why = why
        """Why it is not recomputed; None if it is."""
        self.slots = [0] * len(made_by)
        for step in steps:
            for slot, number in step.outs:
                self.slots[number] = slot
        self.kept: frozenset[int] = frozenset()
        """The values that are held when the forward is over."""
        self.captured: list[bool] = []
        """Whether a value is held from its birth: the block makes it, and it is held when the forward is over. Until
        something decided to hold it, it was alive anyway."""
        self.versions = [0] * len(made_by)
        """The version of each value that the block made, when it was read or saved."""
        for found in (*(p for step in steps for p in step.reads), *packs):
            self.versions[found.number] = found.version
        self.lights: list[bool] = []
        """Whether a value is not held, and a replay makes it."""
        self.saved: tuple[int, ...] = ()
        """Those of them that autograd saves."""
        self.fleeting: tuple[int, ...] = ()
        """Values from outside that are not held when the forward is over."""
        self.segments: dict[Any, Any] = {}
        """Prepared replays, by what was opened before and what is opened now."""

    def signature(self) -> tuple[Any, ...]:
        """Return a key that is equal for programs that are the same. Call it before `settle` is."""
        steps = [
            (
                *(id(s.operator), s.recorded, s.num_args, repr(s.args), repr(s.kwargs), s.outs, s.flags, s.written),
                repr(s.counts),
                tuple((p.position, p.item, p.number, p.view, p.version, p.requires_grad) for p in s.reads),
            )
            for s in self.steps
        ]
        packs = [(p.number, p.view, p.version, p.requires_grad) for p in self.packs]
        return tuple(steps), tuple(packs), tuple(self.made_by), tuple(self.why), tuple(self.births)

    def settle(self, kept: list[bool]) -> None:
        """Note which values are held when the forward is over."""
        self.kept = frozenset(n for n, is_kept in enumerate(kept) if is_kept)
        self.captured = [is_kept and by >= 0 for is_kept, by in zip(kept, self.made_by, strict=True)]
        self.lights = [
            why is None and by >= 0 and not is_kept
            for why, by, is_kept in zip(self.why, self.made_by, kept, strict=True)
        ]
        self.saved = tuple(dict.fromkeys(p.number for p in self.packs if self.lights[p.number]))
        self.fleeting = tuple(n for n, by in enumerate(self.made_by) if by < 0 and not kept[n])
        for pack in self.packs:
            pack.light = pack.number if self.lights[pack.number] else -1
        for then, step in enumerate(self.steps, 1):
            if step.recorded and len(step.outs) == 1 and not self.captured[step.outs[0][1]]:
                step.only = step.outs[0][1]
            step.aliases = step.operator.may_alias and not step.outs
            step.run = _written_down(step, then)
        self.steps.append(END)


class _NoOperator:
    """The operator of the step after the last."""

    func = call = again = None
    may_alias = False


END = Step(_NoOperator(), {})  # pyright: ignore[reportArgumentType]
"""Stands after the last step, so that there is always a next one."""


def _written_down(step: Step, then: int) -> Any:
    """Write the function of a step; None where it is not worth it: nothing to compare, or several results."""
    if step.only < 0 or any(type(p.position) is not int for p in step.reads):
        return None
    names: dict[str, Any] = {"equal": equal, "still": still, "call": step.call, "flags": step.flags}
    names.update({f"x{i}": x for i, x in step.rest})
    names.update({f"{name}_": x for name, x in (step.kwargs or {}).items()})
    made: list[tuple[str, int, int, int]] = []
    given: list[tuple[str, int, bool, int]] = []
    for k, p in enumerate(step.reads):
        names.update({f"s{k}": p.size, f"t{k}": p.stride, f"o{k}": p.offset, f"d{k}": p.dtype})
        where = f"args[{p.position}]" + (f"[{p.item}]" if p.item >= 0 else "")
        if p.version >= 0:
            made.append((where, p.number, p.version, k))
        else:
            given.append((where, p.number, p.requires_grad, k))
    lists: dict[int, int] = {int(p.position): len(step.args[int(p.position)]) for p in step.reads if p.item >= 0}
    if any(x is not None for i in lists for x in step.args[i]):
        return None
    source = source_of(
        made,
        given,
        [i for i, _ in step.rest if i not in lists],
        lists,
        step.num_args,
        step.only,
        then,
        names=tuple(step.kwargs or ()),
        writes=step.written >= 0,
        flags=step.flags is not None,
    )
    return compiled(source, names)


def still(value: Value, tensor: Tensor) -> bool:
    """Return whether a tensor is a value from outside that was met before, and that nobody wrote since."""
    same = value.storage() is tensor.untyped_storage()
    return same and (value.version == UNCHECKED or value.held._version == value.version)


def equal(a: Any, b: Any) -> bool:
    """Return whether two arguments are the same to an operator, to the last bit.

    >>> equal(1, 1), equal(1, True), equal(0.0, -0.0), equal([1, 2], [1, 2])
    (True, False, False, True)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is float or type(a) is complex:
        return repr(a) == repr(b)
    if type(a) is list or type(a) is tuple:
        return len(a) == len(b) and all(map(equal, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(equal(x, b[name]) for name, x in a.items())
    return type(a) in _SIMPLE and a == b


def _comparable(a: Any) -> bool:
    if type(a) is list or type(a) is tuple:
        return all(map(_comparable, a))
    return type(a) in _SIMPLE


def argument(args: tuple[Any, ...], kwargs: dict[str, Any] | None, position: int | str, item: int) -> Any:
    """Return what a call is given at a place; None if there is nothing."""
    where: Any = args if type(position) is int else (kwargs or {})
    try:
        found = where[position]
        return found if item < 0 else found[item]
    except (LookupError, TypeError):
        return None


class Recorded:
    """Values and nodes as the tape would have made them, from what was compared with a program."""

    def __init__(self, program: Program, values: list[Value | None]) -> None:
        self._program = program
        self.values = values
        """By number: those that exist already, and then all of them."""
        self.nodes: dict[int, Node] = {}
        """The nodes, by the position of their step."""

    def build(self, num_steps: int, storages: list[Any]) -> None:
        """Make what the first steps made.

        Args:
            num_steps: how many were compared.
            storages: weak references to the storages of the values, as far as they are known.
        """
        program, values = self._program, self.values
        for index in range(num_steps):
            step = program.steps[index]
            news = [(slot, n) for slot, n in step.outs if values[n] is None or program.lights[n]]
            if not news:
                continue
            node = self._node(step) if step.recorded else None
            if node is not None:
                self.nodes[index] = node
            made: list[tuple[int, weakref.ref[Value]]] = []
            for slot, n in news:
                value = values[n]
                light = program.why[n] is None and node is not None
                if value is None:
                    why = None if light else program.why[n] or Reason.BARRIER
                    value = values[n] = Value(storages[n], None, slot, why)
                if light and value.held is None:
                    value.node, value.slot, value.debts = node, slot, None
                    value.debts = all_debts(node.refs) if node is not None else None
                    made.append((slot, weakref.ref(value)))
            if node is not None and (len(made) > 1 or (made and made[0][0] != 0)):
                node.outs = made

    def _node(self, step: Step) -> Node:
        refs: list[tuple[Any, ...]] = []
        for place in sorted(step.reads, key=_in_order):
            value = self.values[place.number]
            if value is None:  # came from outside, and was not read yet: nothing that was made needs it
                value = self.values[place.number] = Value(gone, None, 0, Reason.EXTERNAL)
            refs.append((place.position, place.item, value, *place.view))
        node = Node(step.again, step.args, step.kwargs, refs)
        node.flags = step.flags
        if step.written >= 0:
            node.writes = [(0, -1, -1, step.device)]
        return node


def _in_order(place: Place) -> tuple[bool, Any, int]:
    return isinstance(place.position, str), place.position, place.item


def _nothing() -> None:
    return None


gone: Any = _nothing
"""A reference to a storage that is gone, not there yet, or that nobody looks for."""


class Learner(Tape):
    """A tape that records a call, and learns its program if it has one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fit = self._outer is None and self._away is None and self.observation is None and not self._bits
        """Nothing was met so far that has no place in a program."""
        self._weak: list[weakref.ref[Value]] = []
        """The values, by number. Weak, because what else refers to a value decides whether it is copied."""
        self._steps: list[Step] = []
        self._packs: list[Pack] = []
        self._made_by: list[int] = []
        self._births: list[Geometry | None] = []
        self._program: Program | None = None

    def interrupted(self) -> None:
        """Give up: a call that is recorded as a whole has no place in a program."""
        self._fit = False

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operator, and note it."""
        operator = describe(func)
        written = args[0] if operator.in_place and args else None
        before = self._lookup(written) if type(written) is Tensor and not written.is_nested else None
        old = -1 if before is None else before.number
        del before
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._fit and operator.view is not True and not self._note(operator, args, kwargs, out, old):
            self._fit = False
        return out

    def _note(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any, old: int
    ) -> bool:
        """Note a call; False if it has no place in a program."""
        if self.paused or operator.view or operator.composite or operator.reissued or operator.fills_saved:
            return False
        if operator.written(args, kwargs or {}) and not operator.in_place:
            return False
        if operator.draws(args, kwargs or {}) or self._copied or _is_odd(args, kwargs, out):
            return False
        step = Step(operator, dict(self._counts))
        found = list(tensors(out))
        step.single = type(out) is Tensor
        values = [self._lookup(t) for t in found]
        fresh = [(slot, v) for slot, v in enumerate(values) if v is not None and v.number < 0]
        if any(v is None for v in values) or any(v.why in _FROM_OUTSIDE for _, v in fresh):
            return False
        if operator.in_place:
            value = values[0]
            step.written = old
            if len(fresh) != 1 or value is None or value.slot != -1 or step.written < 0:
                return False
            if self._made_by[step.written] < 0 or (value.node is not None and len(value.node.writes or ()) != 1):
                return False
            fresh = [(-1, value)]
            step.device = args[0].device
        nodes = {id(v.node): v.node for _, v in fresh}
        node = next(iter(nodes.values())) if len(nodes) == 1 else None
        if len(nodes) > 1 or (fresh and any(v.slot != slot for slot, v in fresh)):
            return False
        if node is not None and not self._note_reads(step, node, args, kwargs):
            return False
        index = len(self._steps)
        step.outs = tuple((slot, self._number(v, index)) for slot, v in fresh)
        self._births += [geometry(found[max(slot, 0)]) for slot, _ in step.outs]
        self._steps.append(step)
        return True

    def _note_reads(self, step: Step, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        step.recorded, step.num_args, step.args, step.kwargs = True, len(args), node.args, node.kwargs
        step.flags = node.flags
        if node.state is not None or not _comparable([*node.args, *(node.kwargs or {}).values()]):
            return False
        places: list[Place] = []
        for position, item, value, *view in node.refs:
            if value is None or view[0] is None or view[4]:
                return False
            known = value.number
            if known < 0:
                if value.why is not Reason.EXTERNAL or value.held is None or value.node is not None:
                    return False  # made unseen, or a parameter that is read without being differentiated
                known = self._number(value, -1)
                self._births.append(None)
            places.append(Place(position, item, known, tuple(view), argument(args, kwargs, position, item)))
        inside = [p for p in places if self._made_by[p.number] >= 0]
        step.places = tuple(p for p in inside if p.item < 0 and type(p.position) is int)
        step.strays = tuple(p for p in inside if p.item >= 0 or type(p.position) is not int)
        step.given = tuple(p for p in places if self._made_by[p.number] < 0)
        for place in step.given:
            place.version = -1  # an optimizer may have written it since
        tensors_at = {p.position for p in places}
        step.rest = tuple((i, x) for i, x in enumerate(node.args) if i not in tensors_at or type(x) is list)
        return node.writes is None or places[0].number == step.written

    def _number(self, value: Value, made_by: int) -> int:
        value.number = len(self._weak)
        self._weak.append(weakref.ref(value))
        self._made_by.append(made_by)
        return value.number

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Save a tensor, and note it."""
        handle = super().pack(tensor)
        if not self._fit:
            return handle
        if type(handle) is not Handle or handle.view[4]:
            self._fit = False
            return handle
        number = handle.value.number
        if number < 0:
            if handle.value.why is not Reason.EXTERNAL or handle.value.held is None:
                self._fit = False
                return handle
            number = self._number(handle.value, -1)
            self._births.append(None)
        self._packs.append(Pack(number, handle.view, tensor))
        return handle

    def close(self) -> None:
        """End the forward, and see what is held after it."""
        if self._fit and not self._copied and not self._detached and not self._bits:
            why = [self._why(n, reference()) for n, reference in enumerate(self._weak)]
            self._program = Program(self._steps, self._packs, self._made_by, why, self._births)
        else:
            self._weak = []
        self._steps, self._packs, self._made_by, self._births = [], [], [], []
        super().close()

    def _why(self, number: int, value: Value | None) -> Reason | None:
        """Return why a value is not recomputed; None if it is."""
        if value is not None:
            return value.why if value.node is None else None
        by = self._made_by[number]  # nothing refers to it any more
        return None if by >= 0 and self._steps[by].recorded else Reason.EXTERNAL

    def learned(self, shared: dict[Any, Program]) -> Program | None:
        """Return the program, when the forward is over; None if the call has none. Only once.

        Args:
            shared: programs that are known already. One of them is returned if it is the same.
        """
        program, weak = self._program, self._weak
        self._program, self._weak = None, []
        if program is None:
            return None
        alive = [r() for r in weak]
        kept = [v is not None and v.held is not None for v in alive]
        key = (program.signature(), tuple(kept))
        if key in shared:
            return shared[key]
        program.settle(kept)
        if any(not program.lights[p.number] and p.number not in program.kept for p in program.packs):
            return None  # a branch whose graph is gone already
        if any(step.written >= 0 and program.captured[step.written] for step in program.steps):
            return None  # it would have to be copied first
        if len(shared) >= _MOST_PROGRAMS:
            shared.clear()
        shared[key] = program
        return program


def _is_odd(args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> bool:
    """Return whether there is a tensor of another kind than a strided one with a version."""
    if type(out) is not Tensor and not (type(out) is tuple and all(type(t) is Tensor for t in out)):
        return True
    for t in tensors(args, kwargs, out):
        odd_kind = type(t) is not Tensor and not isinstance(t, torch.nn.Parameter)
        if odd_kind or t.is_nested or t.layout is not torch.strided or t.is_inference() or t.is_quantized:
            return True
    return False
