"""Functions that are recorded as one operator: declared pure, or compiled.

NOTE [ The trial ]
Whether a function may run again is somebody's word, and the tape's self-check, which compares checksums in the backward
pass, comes too late to take it back: what the function made is gone. So where the word is not the user's own, each
observed call runs the function a second time at once, on the same arguments and generator states. If the bits differ,
what it made is held and its name is reported.

This is a part of the tape, and uses what is its own.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actmem.decisions import Reason
from actmem.engine.holding_rules import inherited, kept_by, reason
from actmem.engine.operators import Operator
from actmem.engine.overwrites import Write
from actmem.engine.tape import Tape
from actmem.engine.values import Again, Value, checksum, has_bytes, take_apart, tensors
from actmem.errors import SelfCheckError
from actmem.torchcompat import autocasts, dispatch_modes

__all__ = ["record_call", "recording", "unrecorded"]


def recording() -> Tape | None:
    """Return the tape that records in this thread now, or None."""
    for mode in reversed(dispatch_modes()):
        if isinstance(mode, Tape):
            if mode.paused:
                return None
            mode.interrupted()
            return mode
    return None


def record_call(
    tape: Tape,
    operator: Operator,
    call: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    written: Sequence[int] = (),
    never: Reason | None = None,
    refuted: Callable[[str], None] | None = None,
) -> Any:
    """Run a function and record it as one operator. It is held, whoever vouches for it, if it communicates.

    Args:
        tape: what records.
        operator: what a replay calls, and its name.
        call: what is called now.
        args: its arguments.
        kwargs: its arguments by name.
        written: which of its flattened arguments it writes.
        never: why it may not run again, if it may not.
        refuted: told why the function may not run again, if a trial shows it; None if no trial is asked for.
    """
    leaves: list[Any] = []
    spec = take_apart((args, kwargs), leaves)
    trial = _Trial(tape, operator, leaves) if refuted is not None and tape.observation is not None else None
    tape.communicated = False
    writes = [Write(i, -1, leaves[i], operator, tuple(leaves), {}) for i in written]
    states = [(g, g.get_state()) for g in _generators(operator, leaves)]
    out = None if writes else unrecorded(tape, call, args, kwargs)
    again = None if writes else _again(tape, operator, spec, states)
    if tape.communicated:
        never = Reason.COLLECTIVE
    elif trial is not None and again is not None and (why := trial.why(out, again)) is not None:
        assert refuted is not None
        refuted(why)
        never = Reason.UNREPEATABLE
    size_of = writes[0].tensor if writes else out
    kept = kept_by(tape._verdicts.decide(operator, tape.address, tape._counts, size_of))
    if tape._numbered and (cut := tape._in_cut(operator.name)) is not None:
        kept, never = cut, None
    if any(not isinstance(x, Tensor) and next(tensors(x), None) is not None for x in leaves):
        never = never or Reason.OPAQUE  # tensors in an object that cannot be taken apart and put together again
    given = reason(kept, never, exact=tape._exact)
    for write in writes:
        write.old = tape._lookup(write.tensor)
        write.fate = given or inherited(write.old, whole=False)
    node = tape._node(operator, tuple(leaves), None) if given is None else None
    made: list[tuple[int, weakref.ref[Value]]] = []
    if writes:
        if node is not None:
            node.overwrite([(w.where, w.item, w.tensor, False) for w in writes])
        tape._leave_behind(writes, frozenset())
        out = unrecorded(tape, call, args, kwargs)
        made = tape._record_writes(operator, node, writes, None)
    if node is not None:
        node.func = again or _again(tape, operator, spec, states)
    tape._record_outputs(operator, node, out, given, made, not_these=leaves)
    return out


def _again(tape: Tape, operator: Operator, spec: Any, states: list[tuple[torch.Generator, Tensor]]) -> Again:
    drawn = [(g, s) for g, s in states if _drew(tape, g, s)]
    return Again(operator.func, spec, drawn, autocasts() if operator.declared else ())


class _Trial:
    """Runs a function a second time, and compares. See NOTE [ The trial ]."""

    def __init__(self, tape: Tape, operator: Operator, leaves: list[Any]) -> None:
        self._tape, self._name, self._leaves = tape, operator.name, leaves
        self._possible = all(map(has_bytes, tensors(leaves)))
        self._before = self._sums(leaves)

    def why(self, out: Any, again: Again) -> str | None:
        """Return why the function may not run again; None if nothing speaks against it."""
        if not self._possible:
            return None
        if self._sums(self._leaves) != self._before:
            raise SelfCheckError(
                f"{self._name} wrote into its arguments, and torch did not see it: what other operators read there "
                "cannot be recomputed. Keep the block that calls it out of the plan: blocks='...'; or clone the "
                "argument before the call."
            )
        second = unrecorded(self._tape, again, tuple(self._leaves), {})
        if self._sums(second) == self._sums(out):
            return None
        return "two runs on the same arguments gave different bits"

    def _sums(self, x: Any) -> list[Any]:
        if not self._possible:
            return []
        return unrecorded(self._tape, lambda: [(t.shape, t.dtype, checksum(t)) for t in tensors(x)], (), {})


def unrecorded(tape: Tape, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function whose operators the tape does not record."""
    tape.paused = True
    try:
        return call(*args, **kwargs)
    finally:
        tape.paused = False


def _drew(tape: Tape, generator: torch.Generator, state: Tensor) -> bool:
    return not unrecorded(tape, torch.equal, (state, generator.get_state()), {})


def _generators(operator: Operator, leaves: list[Any]) -> list[torch.Generator]:
    """Return the generators that a call may draw from: those it is given, and that of the device of its tensors."""
    generators = [torch.default_generator]
    first = next(tensors(leaves), None)
    if first is not None and first.device.type != "cpu":
        generators = [g for g in (operator.generator((), {}, first.device),) if g is not None]
    return generators + [x for x in leaves if isinstance(x, torch.Generator) and x not in generators]
