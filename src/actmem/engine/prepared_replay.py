"""Replay what a call of a known program needs, by functions that were written before. See NOTE [ Known programs ].

A backward step asks for a saved tensor, and all operators that lead to it run, as in NOTE [ Lazy, memoised replay ].
Which these are, in which order, and what is released after each, depends only on the program and on what was opened
before. A `Segment` is a Python function that does it, one line for each argument and each call. It is derived once,
from the same rules (`holding_rules.replay_order`), for a call all of whose handles are alive. If one died unopened, or
if the numerics flags are others now, the call is turned into values and nodes first: what only that handle needed is
then released, as everywhere.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from actmem.engine.holding_rules import made, replay_order
from actmem.engine.known_programs import Place, Program, Recorded, Step, gone
from actmem.engine.replay import enter, held_tensor, leave
from actmem.engine.values import Value, copied, see
from actmem.torchcompat import below_autograd, numerics, without_autocast

__all__ = ["KnownCall", "Segment"]


class Segment:
    """What runs when one value is asked for."""

    def __init__(self, program: Program, available: frozenset[int], saved: frozenset[int], wanted: int) -> None:
        """Prepare it.

        Args:
            program: what the block ran.
            available: the values that are held, or were replayed and are still needed.
            saved: the values that autograd saved and that were not replayed yet.
            wanted: the one that is asked for.
        """
        skeleton, steps = _skeleton(program, available)
        order = [steps[id(node)] for _, node in reversed(replay_order(_at(skeleton, wanted), _name))]
        made_here = frozenset(number for index in order for _, number in program.steps[index].outs)
        self.left = saved - made_here
        """Saved values that are still to be replayed afterwards."""
        later: set[int] = set()
        for number in self.left:
            later |= {steps[id(node)] for _, node in replay_order(_at(skeleton, number), _name)}
        needed = {p.number for index in later - set(order) for p in program.steps[index].reads}
        self.available = frozenset(n for n in (available | made_here) if n in needed)
        """Values that will be read afterwards."""
        self.over = tuple(n for n in available | saved if n not in self.left and n not in self.available)
        """Values that nothing needs afterwards."""
        last = {p.number: k for k, index in enumerate(order) for p in program.steps[index].reads}
        self.first = tuple(n for n in last if n in available)
        """The values that it starts from, in the order in which the function takes them."""
        self.flags = next((f for index in order if (f := program.steps[index].flags) is not None), None)
        """The numerics flags under which it may run; None if they do not matter."""
        self.fits = all(program.steps[index].flags in (None, self.flags) for index in order)
        lines = _Lines(program, frozenset(self.first), saved & made_here, needed)
        for n in self.first:
            lines.add(f"v{n} = held.pop()")
        for k, index in enumerate(order):
            step = program.steps[index]
            old = step.written
            others = old in available or old in saved or old in needed or last.get(old, -1) > k
            ends = [n for n in dict.fromkeys(p.number for p in step.reads) if last[n] == k and n not in needed]
            lines.call(step, copies=old >= 0 and others, ends=ends, reads=last)
        here = made_here | set(self.first)  # what an earlier segment made and this one does not read is not passed on
        kept = [n for n in sorted(self.available) if program.lights[n] and n in here]
        lines.add(f"return {{{', '.join(f'{n}: v{n}' for n in kept)}}}")
        self.run = lines.function()
        """Runs it: takes the tensors of `first`, last first, in a list that it empties, and the values by number."""


class _Lines:
    """The source of a segment, as it is written."""

    def __init__(self, program: Program, held: frozenset[int], saved: frozenset[int], needed: set[int]) -> None:
        self._program, self._held, self._saved, self._needed = program, held, saved, needed
        self._lines = ["def run(held, real):"]
        self._names: dict[str, Any] = {"see": see, "copied": copied, "made": made}

    def add(self, line: str) -> None:
        self._lines.append(f"    {line}")

    def _name(self, x: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = x
        return name

    def call(self, step: Step, *, copies: bool, ends: list[int], reads: dict[int, int]) -> None:
        """Write one call: show what it reads, run it, keep what is needed, and release the rest."""
        if copies:
            self.add(f"copy = copied(v{step.written})")
        shown: dict[tuple[Any, int], str] = {}
        for k, place in enumerate(step.reads):
            shown[place.position, place.item] = f"a{k}"
            self._show(f"a{k}", place, "copy" if copies and place.number == step.written else f"v{place.number}")
        args = [self._argument(i, x, shown) for i, x in enumerate(step.args)]
        args += [f"{name}={self._argument(name, x, shown)}" for name, x in (step.kwargs or {}).items()]
        result = f"{self._name(step.again)}({', '.join(args)})"
        keeps = [(slot, n) for slot, n in step.outs if n in reads or n in self._needed or n in self._saved]
        if step.single and len(step.outs) == 1 and step.outs[0][0] == 0:
            self.add(f"v{step.outs[0][1]} = {result}")
        else:
            self.add(f"out = {result}")
            for slot, n in keeps:
                self.add(f"v{n} = a0" if slot < 0 else f"v{n} = out[{slot}]")
            self.add("out = None")
        names = [f"a{k}" for k in range(len(step.reads))] + ["copy"] * copies
        for _, n in keeps:
            if n in self._saved:
                self.add(f"made(real[{n}], v{n})")
                self.add(f"real[{n}] = None")
        ended = {*ends, *(n for _, n in step.outs if n not in reads and n not in self._needed)}
        for n in ends:
            if n in self._held:
                self.add(f"real[{n}] = None")
        kept = {n for _, n in keeps} | set(ends) | {n for slot, n in step.outs if step.single and slot == 0}
        names += [f"v{n}" for n in sorted(ended & kept)]
        if names:
            self.add(f"{' = '.join(names)} = None")

    def _show(self, name: str, place: Place, base: str) -> None:
        """Show a value as the call read it. As `see`: what the block made is laid out as it was when it was born."""
        n, (size, stride, offset, dtype, _) = place.number, place.view
        birth = self._program.births[n]
        s, t, d = self._name(size), self._name(stride), self._name(dtype)
        if n not in self._held and birth is not None and birth[3] is dtype:
            self.add(f"{name} = {base}" if birth == place.view else f"{name} = {base}.as_strided({s}, {t}, {offset})")
        else:
            self.add(f"{name} = see({base}, {s}, {t}, {offset}, {d}, 0)")

    def _argument(self, where: Any, x: Any, shown: dict[tuple[Any, int], str]) -> str:
        if (where, -1) in shown:
            return shown[where, -1]
        if type(x) is list and any(place == where for place, _ in shown):
            return f"[{', '.join(shown.get((where, j)) or self._name(y) for j, y in enumerate(x))}]"
        return self._name(x)

    def function(self) -> Any:
        exec("\n".join(self._lines), self._names)
        return self._names["run"]


def _skeleton(program: Program, available: frozenset[int]) -> tuple[list[Value | None], dict[int, int]]:
    """Return the values and nodes that a call stands for, without tensors, and the step of each node."""
    values: list[Value | None] = [None] * len(program.made_by)
    for number in available:
        values[number] = value = Value(gone, None, 0, None)
        value.held = True
    recorded = Recorded(program, values)
    recorded.build(len(program.steps) - 1, [gone] * len(values))
    return values, {id(node): index for index, node in recorded.nodes.items()}


def _at(values: list[Value | None], number: int) -> Value:
    value = values[number]
    assert value is not None
    return value


def _name(_: Value) -> str:
    return "a value of a known program"


class KnownCall:
    """The values of one call that was the program's, from the end of its forward on."""

    def __init__(self, program: Program, real: list[Value | None]) -> None:
        self._program = program
        self._real = real
        """By number: what is held, and what autograd saved and is not replayed yet."""
        self._made: dict[int, Tensor] = {}
        """What was replayed and will be read again."""
        self._opened: tuple[int, ...] = ()

    def replay(self, value: Value) -> bool:
        """Fill a value that autograd saved, and all others that are made on the way.

        Returns:
            Whether there may be more to replay from here. If not, all other values have nodes, or are filled.
        """
        real = self._real
        number = next((n for n in self._program.saved if real[n] is value), -1)
        left = [n for n in self._program.saved if n != number and real[n] is not None]
        segment = None
        if number >= 0 and all(sys.getrefcount(real[n]) > 2 for n in left):
            segment = self._segment(number)
        if segment is None or not segment.fits or (segment.flags is not None and segment.flags != numerics()):
            self._record()
            return False
        self._opened = (*self._opened, number)
        tensors: list[Any] = [self._made[n] if n in self._made else held_tensor(_at(real, n)) for n in segment.first]
        self._made = {n: t for n, t in self._made.items() if n in segment.available and n not in segment.first}
        tensors.reverse()
        enter()
        try:
            with below_autograd(), without_autocast():
                self._made.update(segment.run(tensors, real))
        finally:
            leave()
        for n in segment.over:
            real[n] = None
        return bool(segment.left)

    def _segment(self, number: int) -> Segment:
        key = (*self._opened, number)
        found = self._program.segments.get(key)
        if found is None:
            program = self._program
            before = program.segments.get(self._opened) if self._opened else None
            available = program.kept if before is None else before.available
            saved = frozenset(program.saved) if before is None else before.left
            found = program.segments[key] = Segment(program, available, saved, number)
        return found

    def _record(self) -> None:
        """Turn the call into values and nodes."""
        for n, tensor in self._made.items():
            self._real[n] = value = Value(gone, None, 0, None)
            made(value, tensor)
        recorded = Recorded(self._program, self._real)
        recorded.build(len(self._program.steps) - 1, [gone] * len(self._real))
        self._real, self._made = [], {}
