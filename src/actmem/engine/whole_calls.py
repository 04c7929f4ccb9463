"""Functions that are recorded as one operator: declared pure, or compiled.

This is a part of the tape, and uses what is its own.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmem.decisions import Reason
from actmem.engine.holding_rules import inherited, kept_by, reason
from actmem.engine.operators import Operator
from actmem.engine.overwrites import Write
from actmem.engine.tape import Tape
from actmem.engine.values import Again, Value, take_apart, tensors
from actmem.torchcompat import dispatch_modes

__all__ = ["record_call", "recording"]


def recording() -> Tape | None:
    """Return the tape that records in this thread now, or None."""
    for mode in reversed(dispatch_modes()):
        if isinstance(mode, Tape):
            return None if mode.paused else mode
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
) -> Any:
    """Run a function and record it as one operator.

    Args:
        tape: what records.
        operator: what a replay calls, and its name.
        call: what is called now.
        args: its arguments.
        kwargs: its arguments by name.
        written: which of its flattened arguments it writes.
        never: why it may not run again, if it may not.
    """
    leaves: list[Any] = []
    spec = take_apart((args, kwargs), leaves)
    writes = [Write(i, -1, leaves[i], operator, tuple(leaves), {}) for i in written]
    states = [(g, g.get_state()) for g in _generators(operator, leaves)]
    out = None if writes else _unrecorded(tape, call, args, kwargs)
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
        out = _unrecorded(tape, call, args, kwargs)
        made = tape._record_writes(operator, node, writes, None)
    if node is not None:
        node.func = Again(operator.func, spec, [(g, s) for g, s in states if _drew(tape, g, s)])
    tape._record_outputs(operator, node, out, given, made, not_these=leaves)
    return out


def _unrecorded(tape: Tape, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tape.paused = True
    try:
        return call(*args, **kwargs)
    finally:
        tape.paused = False


def _drew(tape: Tape, generator: torch.Generator, state: Tensor) -> bool:
    return not _unrecorded(tape, torch.equal, (state, generator.get_state()), {})


def _generators(operator: Operator, leaves: list[Any]) -> list[torch.Generator]:
    """Return the generators that a call may draw from: those it is given, and that of the device of its tensors."""
    generators = [torch.default_generator]
    first = next(tensors(leaves), None)
    if first is not None and first.device.type != "cpu":
        generators = [g for g in (operator.generator((), {}, first.device),) if g is not None]
    return generators + [x for x in leaves if isinstance(x, torch.Generator) and x not in generators]
