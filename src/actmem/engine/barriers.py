"""What to hold where a chain cannot be replayed to its beginning.

NOTE [ Barriers ]
A value that is never replayed (NOTE [ Never replayed ]) is not held for that reason alone. While nothing needs it, it
costs nothing; a recorded value that was computed from it is said to *owe* it. When autograd saves a value that owes,
one of two things must be held: what is owed, or the value itself, whichever is fewer bytes. So each saved tensor adds
at most its own bytes, and a tape never holds more than plain autograd does, plus the block's inputs. The same applies
to a value that the plan keeps: it is kept as a starting point for replays, and where something computed from it is
smaller, that is held instead.

A trifle (`TRIFLE_BYTES`), such as the constant 0.0 that a mask is made from, is held as soon as a recorded operator
reads it: it is often gone before anything is saved, and its loss would be the loss of the whole chain.

What the plan offloads takes no room on the device, so owing it costs nothing; and the smallest cut, which goes by
bytes that are held, is not computed under such a plan.

What is owed can be lost: its storage died, or was overwritten. Then the value itself is held.

A plan that a planner made is *exact*: what to hold was weighed there, with time as well as bytes. Under it, owing what
the plan keeps costs nothing, and the smallest cut is not computed.

NOTE [ Collectives again ]
Under `collectives="recompute"` the functional collectives (all-gather, reduce-scatter, all-reduce, broadcast) are
recorded like any operator, and a replay issues them again and waits. If one rank did and another did not, both would
hang. So nothing that differs between the ranks of a group may decide it. They are assumed to run the same operators in
the same order, as tensor and sequence parallel do; autograd then asks for the same values in the same order on each.
How large the values between two collectives are may differ (uneven shards), so bytes decide nothing there:

- An input that cannot be replayed from what is held is held itself if it is smaller than the result (an all-gather);
  otherwise the collective is saved. The collective alone decides that, and its sizes are the same on each rank.
- A saved value that was computed from such a result, and owes something else too, is held itself. `ACROSS` marks those.
- The smallest cut is not computed in a block that runs one: it goes by bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from actmem.decisions import Reason
from actmem.engine.values import Value

__all__ = ["ACROSS", "TRIFLE_BYTES", "all_debts", "owe", "owes", "settle"]

TRIFLE_BYTES = 64

_BARRIER = Reason.BARRIER


def _nothing() -> None:
    return None


ACROSS: tuple[Value, ...] = (Value(cast("Any", _nothing), None, 0, Reason.COLLECTIVE),)
"""A marker among the debts of every value whose replay reissues a collective. It cannot be held, and need not be."""


def owes(value: Value) -> bool:
    """Return whether something must still be held before a value can be replayed."""
    if value.held is not None:
        return False
    return value.node is None or any(v.held is None and v is not ACROSS[0] for v in value.debts or ())


def owe(debts: tuple[Value, ...] | None, more: tuple[Value, ...]) -> tuple[Value, ...]:
    """Merge two sets of debts. Values keep the order in which they were met."""
    if debts is None or debts is more:
        return more
    return debts + tuple(v for v in more if v not in debts)


def all_debts(refs: list[tuple[Any, ...]], filling: Any = None) -> tuple[Value, ...] | None:
    """Return what a node that reads these owes.

    Args:
        refs: what it reads.
        filling: the storage that the node fills a piece of. The version before is not owed: once the last piece is
            written, it can be recomputed, and until then neither can the new one. What it owes is passed on.
    """
    debts = None
    for ref in refs:
        value: Value | None = ref[2]
        if value is None or value.held is not None:
            continue
        if value.node is None and (filling is None or value.storage() is not filling):
            debts = owe(debts, (value,))
        elif value.debts is not None:
            debts = owe(debts, value.debts)
    return debts


def settle(
    value: Value,
    num_bytes: int,
    hold: Callable[[Value, Any], None],
    shown: Any,
    find: Callable[[Value], Any],
    free: tuple[Reason, ...] = (Reason.OFFLOADED,),
) -> None:
    """Hold what a recorded value owes, or the value itself: whichever is fewer bytes.

    Args:
        value: what autograd saves.
        num_bytes: its bytes.
        hold: holds a value by what represents it, such as a tensor.
        shown: what represents this value.
        find: returns what represents a value that is owed, or None if it is gone.
        free: reasons for which owing a value costs nothing.
    """
    assert value.debts is not None
    across = ACROSS[0] in value.debts
    owed = [v for v in value.debts if v.held is None and v is not ACROSS[0]]
    if across and not owed:
        value.debts = ACROSS
        return
    found: list[tuple[Value, Any]] = []
    for v in owed:
        alive = find(v)
        if alive is None:
            break
        found.append((v, alive))
    if across or len(found) < len(owed) or sum(v.num_bytes for v in owed if v.why not in free) > num_bytes:
        hold(value, shown)
        value.node, value.why = None, _BARRIER
        if value.row is not None:
            value.row.cause = owed[0].why
    else:
        for v, alive in found:
            hold(v, alive)
    value.debts = None
