"""What is held, copied, sent and replayed, and when: the rules of the tape, without tensors.

NOTE [ Holding rules ]
The tape follows these rules on tensors, and a prediction (`simulation/tape_emulator.py`) follows them on numbers. They
deal in values and nodes (NOTE [ Values ]) and never look into what holds a value: a tensor there, a count of bytes
here. So a predicted byte is a measured byte, and a rule is changed in one place.

The tape's short way through `__torch_dispatch__` is written out for speed, and so is what it does to tensors. Random
programs hold both to the predictions that these rules make (`tests/property/test_predicted.py`).

- Meeting (`on_meeting`): what to do with a value that nothing recomputes, when a recorded operator reads it.
- Reasons (`kept_by`, `reason`, `inherited`, `is_piece`): why a new value or version is not recomputed, if it is not.
- Debts: `barriers.py`, NOTE [ Barriers ].
- Writes (`preserve`, `promote`): what is copied before it is overwritten, and what is replayable once it is filled.
- Leaving (`number_held`, `offered`): what may be offloaded when the forward is over.
- Opening (`replay_order`, `written_in_place`, `made`, `needs_private_copy`): what runs again, on whose bytes.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from actmem.decisions import Decision, Reason
from actmem.engine.barriers import TRIFLE_BYTES
from actmem.engine.values import KEPT, Node, Value
from actmem.errors import ReplayError

__all__ = [
    "HOLD",
    "OWE",
    "RESERVE",
    "UNLIMITED",
    "inherited",
    "is_piece",
    "kept_by",
    "made",
    "needs_private_copy",
    "number_held",
    "offered",
    "on_meeting",
    "others_reach",
    "preserve",
    "promote",
    "reason",
    "replay_order",
    "written_in_place",
]

UNLIMITED = 1 << 62
"""What may be reserved under an exact plan, which has weighed it."""

HOLD, RESERVE, OWE = "hold", "reserve", "owe"
"""What becomes of a value that a recorded operator reads and nothing recomputes: it is held from now on, it is kept
alive until the forward is over if the budget allows it, or it is only owed."""

_CONSTANT, _CUT, _EXTERNAL, _PARAMETER = Reason.CONSTANT, Reason.CUT, Reason.EXTERNAL, Reason.PARAMETER
_OFFLOADED, _UNINITIALISED = Reason.OFFLOADED, Reason.UNINITIALISED
_KEPT_BY = {Decision.SAVE: Reason.SAVED, Decision.OFFLOAD: Reason.OFFLOADED}


# -------------------------------------------------------------------- meeting


def on_meeting(value: Value) -> str:
    """Return what to do with a value that has neither a node nor bytes, when a recorded operator reads it."""
    kept = value.why in KEPT
    trifle = not kept and value.num_bytes <= TRIFLE_BYTES and value.coverage is None
    if trifle or value.why is _CUT:
        return HOLD
    return RESERVE if not value.reserved and (kept or value.why is _CONSTANT) else OWE


# -------------------------------------------------------------------- reasons


def kept_by(decision: Decision) -> Reason | None:
    """Return why a value is kept that the plan decides so about; None if it is recomputed."""
    return _KEPT_BY.get(decision)


def reason(kept: Reason | None, never: Reason | None, *, exact: bool) -> Reason | None:
    """Return why the result of an operator is not recomputed; None if it is.

    Args:
        kept: why it is kept, by the plan or the smallest cut, if it is.
        never: why the operator may not run again, if it may not.
        exact: the plan is followed to the letter, so that it takes precedence.
    """
    return (kept or never) if exact else (never or kept)


def inherited(old: Value | None, *, whole: bool) -> Reason | None:
    """Return why a new version cannot be made from the one that it overwrites; None if it can.

    Args:
        old: the version before, if the tape has met it.
        whole: all of its storage is overwritten, and none of it read.
    """
    if old is None:
        return _EXTERNAL
    if (whole and old.why not in (_EXTERNAL, _PARAMETER)) or old.node is not None:
        return None
    return old.why or _EXTERNAL


def is_piece(old: Value | None, fate: Reason | None) -> bool:
    """Return whether a write continues to fill a storage that was born uninitialised and that a replay may fill too."""
    if fate is not _UNINITIALISED or old is None or old.held is not None:
        return False
    return old.coverage is not None and old.pending is not None


def promote(value: Value) -> None:
    """Make a storage that was filled piece by piece replayable, from the call that gave birth to it on."""
    current: Value | None = value
    storage = value.storage()
    while current is not None and current.pending is not None:
        node, current.pending = current.pending, None
        current.node, current.why, current.coverage, current.tensor = node, None, None, None
        if current.row is not None:
            current.row.why, current.row.parents = None, node.parents
        reads = [ref[2] for ref in node.refs if ref[2] is not None and ref[2].pending is not None]
        current = next((v for v in reads if v.storage() is storage), None)


# -------------------------------------------------------------------- writes


def others_reach(value: Value, num_names: int) -> bool:
    """Return whether a handle or a node can reach a value, not counting the references that the caller knows of."""
    return sys.getrefcount(value) > num_names + 2  # this function's name for it, and the argument of the count


def preserve(value: Value, known: dict[Any, Value], copies: list[Value], copy: Callable[[Value], None]) -> None:
    """Copy what is about to be overwritten, if a handle or a node can still reach it.

    Only the references of the caller, of its caller and of this function do not count.

    Values whose storage has died are known until the forward is over, or until the storage's key is used again, which
    is up to the allocator. They are forgotten first, so that it does not decide here. For the same reason what was
    copied lives until the next copy, or the end of the forward, at least.

    Args:
        value: the version that is overwritten. No longer among those that are known.
        known: the values of the block call.
        copies: values that were copied.
        copy: replaces the bytes that hold a value by a copy of them.
    """
    if value.held is None:
        value.tensor = None  # owed perhaps, and nobody held it: from now on nobody can
    elif others_reach(value, 3):
        for key in [key for key, v in known.items() if v.held is None and v.storage() is None]:
            del known[key]
        copies.clear()
        if others_reach(value, 3):
            copy(value)
            copies.append(value)


# -------------------------------------------------------------------- leaving


def offered(values: Iterable[Value], *, inputs: bool) -> list[weakref.ref[Value]]:
    """List the values that may be offloaded when the forward is over, in the order in which they became held.

    The order in which they are known depends on addresses that the allocator uses again.

    Args:
        values: those that are known then.
        inputs: what no operator of the block recomputes is offloaded too.
    """
    found = [v for v in values if v.order >= 0 and (v.why is _OFFLOADED or (inputs and v.node is None))]
    return [weakref.ref(v) for v in sorted(found, key=_order)]


def number_held(value: Value) -> None:
    """Note that a value becomes held."""
    if value.order < 0:
        value.order = next(_numbers)


_numbers = itertools.count()
_order = operator.attrgetter("order")


# -------------------------------------------------------------------- opening


def needs_private_copy(value: Value, num_names: int, *, parameter: bool) -> bool:
    """Return whether a Python Function gets a copy of its own, because its backward may write into what it is given.

    Other backward steps do not write into what they saved.

    Args:
        value: what it asks for.
        num_names: references to the value that the caller has, and that do not count.
        parameter: it is a parameter. The step would have overwritten it in plain training too.
    """
    return not parameter and others_reach(value, num_names + 1)


def replay_order(value: Value, name: Callable[[Value], str]) -> list[tuple[Value, Node]]:
    """List the nodes to run for a value, last first, each with the value that asked for it."""
    order: list[tuple[Value, Node]] = []
    seen: set[int] = set()
    stack: list[tuple[Value, Any]] = []
    if value.node is not None:
        seen.add(id(value.node))
        stack.append((value, iter(value.node.refs)))
    while stack:
        current, refs = stack[-1]
        for ref in refs:
            parent: Value | None = ref[2]
            if parent is not None and parent.held is None:
                node = parent.node
                if node is None:
                    raise ReplayError(
                        f"nothing holds {name(parent)}, which a replay needs. This is a defect of actmem: please "
                        "report it."
                    )
                if id(node) not in seen:
                    seen.add(id(node))
                    stack.append((parent, iter(node.refs)))
                    break
        else:
            assert current.node is not None
            order.append((current, current.node))
            stack.pop()
    order.reverse()
    return order


def written_in_place(node: Node) -> dict[int, bool]:
    """Return, for each value that a call reads and writes, whether it is written in place when the call runs again.

    It is if a replay made it and nothing else will read it. Otherwise a copy is written. By the value's `id`.
    """
    found: dict[int, bool] = {}
    for where, item, *_ in node.writes or ():
        for ref in node.refs:
            value: Value | None = ref[2]
            if value is not None and ref[0] == where and ref[1] == item and id(value) not in found:
                num_refs = sum(r[2] is value for r in node.refs)
                found[id(value)] = value.own and not others_reach(value, num_refs + 1)
    return found


def made(value: Value, held: Any) -> None:
    """Note that a replay made a value, and release its node."""
    value.held, value.own, value.node, value.debts = held, True, None, None
    if value.row is not None:
        value.row.replayed += 1
