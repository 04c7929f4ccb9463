"""The smallest set of values to hold, once the whole program of a block is known.

The first step settles each debt as it comes (NOTE [ Barriers ]): greedily, without knowing what will be saved next.
From the second step on the program is known, and with it the cheapest way to part what is never replayed from what
autograd saves: a minimum cut, in which cutting a value costs its bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from actmem.engine.observing import Row

__all__ = ["Cut", "smallest_cut"]

_FREE = (None, "external", "barrier")


class Cut:
    """Which values to hold, by the position of their operator in a call that runs the same operators."""

    __slots__ = ("funcs", "hold")

    def __init__(self, funcs: tuple[Any, ...], hold: dict[int, str]) -> None:
        self.funcs = funcs
        self.hold = hold
        """Position -> why: "save" if only values that the plan keeps stand before it, else "cut"."""


def smallest_cut(rows: Sequence[Row], funcs: Sequence[Any]) -> Cut | None:
    """Return the cut if it holds fewer bytes than the first step held, else None.

    Args:
        rows: the values of an observed call.
        funcs: the operators of that call, in order.
    """
    given = [r for r in rows if (r.kind == "made" and r.why not in _FREE) or r.why == "unseen"]
    paid = sum(r.num_bytes for r in rows if r.held and (r.why == "barrier" or r in given))
    children: dict[int, list[Row]] = {}
    for r in rows:
        for parent in r.parents:
            children.setdefault(id(parent), []).append(r)
    below = _reach(given, lambda r: children.get(id(r), []))
    wanted = [r for r in rows if r.saved and id(r) in below]
    if not paid or not wanted:
        return None
    # Here, because it is slow to import and few programs need it.
    networkx: Any = importlib.import_module("networkx")
    graph: Any = networkx.DiGraph()
    above = _reach(wanted, lambda r: r.parents)
    source, sink = "source", "sink"
    for r in rows:
        if id(r) not in below or id(r) not in above:
            continue
        # A version that is overwritten later would have to be copied, and one that has no operator cannot be named.
        fixed = r.overwritten or r.index < 0
        graph.add_edge((id(r), 0), (id(r), 1), **({} if fixed else {"capacity": r.num_bytes}))
        for parent in r.parents:
            if id(parent) in below:
                graph.add_edge((id(parent), 1), (id(r), 0))
    for r in given:
        if id(r) in above:
            graph.add_edge(source, (id(r), 0))
    for r in wanted:
        graph.add_edge((id(r), 1), sink)
    try:
        cost, (near, _) = networkx.minimum_cut(graph, source, sink)
    except (networkx.NetworkXUnbounded, networkx.NetworkXError):
        return None
    if cost >= paid:
        return None
    by_id = {id(r): r for r in rows}
    cut = [by_id[n[0]] for n in near if n != source and n[1] == 0 and (n[0], 1) not in near]
    forced = _reach([r for r in given if r.why != "save"], lambda r: children.get(id(r), []))
    # Several outputs of one operator are held together or not at all: the tape asks once per operator.
    return Cut(tuple(funcs), {r.index: "cut" if id(r) in forced else "save" for r in cut})


def _reach(rows: Sequence[Row], step: Callable[[Row], Sequence[Row]]) -> set[int]:
    seen = {id(r) for r in rows}
    stack = list(rows)
    while stack:
        for r in step(stack.pop()):
            if id(r) not in seen:
                seen.add(id(r))
                stack.append(r)
    return seen
