"""Observe what a block ran and in which module, and find the least that must be held.

The first step settles each debt as it comes (NOTE [ Barriers ]): greedily, without knowing what will be saved next.
From the second step on the program is known, and with it the cheapest way to separate what is never replayed from what
autograd saves: a minimum cut, in which cutting a value costs its bytes.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from actmem.decisions import Reason
from actmem.engine.operators import Operator
from actmem.engine.values import Value
from actmem.torchcompat import module_call, named_modules, storage_key

__all__ = ["Cut", "Observation", "ObservedOperator", "Places", "UnseenFunctions", "smallest_cut"]


class ObservedOperator:
    """One value: where it was made, how large it is, and what became of it."""

    __slots__ = (
        "cause",
        "copied",
        "dtype",
        "held",
        "index",
        "kind",
        "module",
        "num_bytes",
        "offloaded",
        "op",
        "overwritten",
        "parents",
        "replayed",
        "saved",
        "shape",
        "storage",
        "why",
    )

    def __init__(
        self, module: str, op: str, kind: str, tensor: torch.Tensor, num_bytes: int, why: Reason | None
    ) -> None:
        self.module = module
        """Path of the module inside the block; "" is the block's own forward."""
        self.op = op
        self.kind = kind
        """"made" by an operator, a parameter or buffer ("state"), by code that the tape does not see
        ("unseen"), or any other "input"."""
        self.shape = () if tensor.is_nested else tuple(tensor.shape)  # a strided nested tensor has none
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.num_bytes = num_bytes
        self.why = why
        """Why the value is not replayed; None if it may be."""
        self.saved = False
        """Autograd saved it."""
        self.held = False
        """It was alive after the forward pass."""
        self.replayed = 0
        self.cause: Reason | None = None
        """For a value that is held instead of one that is never replayed: why that one is not."""
        self.index = -1
        """Position of its operator in the block call; -1 if it came from outside."""
        self.copied = False
        """It was copied before an operator overwrote it, because a replay may still need it."""
        self.offloaded = False
        """It was offloaded when the forward was over."""
        self.overwritten = False
        """A later operator wrote to its storage."""
        self.storage: weakref.ref[Any] | None = None
        """The storage that it is on. Blocks may share one; weak references to one object are one object themselves."""
        self.parents: tuple[ObservedOperator, ...] = ()
        """The values that a replay of its operator reads."""

    def __str__(self) -> str:
        where = f"{self.module or 'the block'} " if self.kind == "made" else ""
        return f"{where}{self.op} {list(self.shape)} {self.dtype}"


class Observation:
    """The rows of one block call."""

    def __init__(self, state: frozenset[int], function: Callable[[], Any] | None = None) -> None:
        self._state = state
        """Storages of the model's parameters and buffers, which are alive whatever the tape holds."""
        self._function = function
        """Says which autograd Function runs; None if nobody wants to know."""
        self.in_functions: list[tuple[ObservedOperator, Any]] = []
        """The values that are not replayed and were made in an autograd Function, with its class."""
        self.launching: list[Any] = []
        """The autograd Functions that launched a Triton kernel."""
        self.rows: list[ObservedOperator] = []
        self.funcs: list[Any] = []
        """The operators of the call, in order, without views."""
        self.divided: list[str] = []
        """The module of each call of a compiled graph whose operators the tape saw one by one."""
        self.elsewhere: list[ObservedOperator] = []
        """Values that are held whatever the tape does: no hook of autograd sees who holds them."""
        self._values: list[tuple[weakref.ref[Value], ObservedOperator]] = []
        self._handles: list[tuple[weakref.ref[Any], ObservedOperator]] = []

    def begin(self, func: Any) -> None:
        """Note that an operator ran."""
        self.funcs.append(func)

    def made(self, value: Value, operator: Operator, module: str, tensor: torch.Tensor) -> None:
        """Note a value that an operator made."""
        row = ObservedOperator(module, operator.name, "made", tensor, tensor.untyped_storage().nbytes(), value.why)
        row.index = len(self.funcs) - 1
        if value.node is not None:
            row.parents = value.node.parents
        self._add(value, row)
        if self._function is not None and value.why is not None and (kind := self._function()) is not None:
            self.in_functions.append((row, kind))

    def launched(self) -> None:
        """Note that a Triton kernel was launched."""
        if self._function is not None and (kind := self._function()) is not None:
            self.launching.append(kind)

    def special(self, operator: Operator, never: Reason | None, writes: Any, unread: Any, coverage: Any) -> None:
        """Note a call that writes, draws or is never replayed. For whoever wants to know how values came about."""

    def given(self, value: Value, tensor: torch.Tensor, num_bytes: int) -> None:
        """Note a value that came from outside."""
        origin = tensor if tensor._base is None else tensor._base  # pyright: ignore[reportPrivateUsage]
        kind = "state" if storage_key(tensor.untyped_storage()) in self._state else "input"
        parameter = isinstance(origin, torch.nn.Parameter) or (origin.is_leaf and origin.requires_grad)
        name = ("parameter" if parameter else "buffer") if kind == "state" else "input"
        self._add(value, ObservedOperator("", name, kind, tensor, num_bytes, value.why))

    def unseen(self, value: Value, module: str) -> None:
        """Note that a value that came from outside was made inside a module, by what the tape does not see."""
        row = value.row
        if row is not None and row.kind == "input":
            row.kind, row.op, row.module, row.cause = "unseen", "unseen", module, Reason.UNSEEN

    def _add(self, value: Value, row: ObservedOperator) -> None:
        value.row = row
        row.storage = value.storage
        self.rows.append(row)
        self._values.append((weakref.ref(value), row))

    def saved(self, value: Value, handle: Any) -> None:
        """Note that autograd saved a value."""
        if value.row is not None:
            self._handles.append((weakref.ref(handle), value.row))

    def settle(self) -> None:
        """Note what is saved and held now, when only handles keep values alive. Done when the forward is over."""
        for row in self.rows:
            row.saved = row.held = False
        for reference, row in self._handles:
            handle = reference()
            if handle is not None:
                (handle.value.row or row).saved = True
        for reference, row in self._values:
            value = reference()
            row.held = value is not None and value.held is not None
            if row.held and value is not None and row.why is None:
                row.why = value.why
        for row in self.elsewhere:
            row.saved = row.held = True
            row.cause = Reason.UNSEEN

    def conclude(self) -> None:
        """Note the same again when backward begins, for good: a branch without a gradient dies in between."""
        self.settle()
        self._values.clear()
        self._handles.clear()

    def signature(self) -> Any:
        """Return a key that is equal for calls that ran the same program on values of the same size."""
        return tuple(self.funcs), tuple((r.num_bytes, r.why, r.saved, r.held) for r in self.rows)

    def forget_program(self) -> None:
        """Keep the rows, and drop the links between them."""
        self.funcs.clear()
        self.in_functions.clear()
        for row in self.rows:
            row.parents = ()


class UnseenFunctions:
    """What the blocks of one model know of autograd Functions that launch unseen kernels. See `unseen_functions.py`."""

    def __init__(self, *, replay: bool) -> None:
        self.replay = replay
        """Take every Function that launches unseen kernels, not only those that were declared."""
        self.taken: dict[str, Any] = {}
        """Functions that were recorded as one operator, without the user's word."""
        self.held: dict[str, str] = {}
        """Functions that are not: name -> why."""

    def takes(self, declaration: Any) -> bool:
        """Return whether a declared Function is recorded as one operator, and note that it is."""
        if declaration.name in self.held or (declaration.found and not self.replay):
            return False
        self.taken[declaration.name] = declaration
        return True

    def hold(self, declaration: Any, why: str) -> None:
        """Note that what a Function makes is held from now on."""
        self.taken.pop(declaration.name, None)
        self.held[declaration.name] = why

    def notes(self) -> Iterator[str]:
        """Say which Functions are run again without the user's word, and which are not although that was asked for."""
        libraries: dict[str, list[str]] = {}
        found: list[str] = []
        for name, declaration in self.taken.items():
            if declaration.library is None:
                found.append(name)
            else:
                libraries.setdefault(declaration.library, []).append(name.rpartition(".")[2])
        for library, names in libraries.items():
            yield (
                f"replayed as one operator each, because {library} is known to launch deterministic kernels: "
                f"{', '.join(sorted(names))}."
            )
        if found:
            yield f'replayed as one operator each, because of opaque="replay": {", ".join(sorted(found))}.'
        for name, why in sorted(self.held.items()):
            yield f"held, because {name} may not run again: {why}."


class Places:
    """Says which module of a block runs, by the frames of the stack: each call of a module is one of the same function.

    Hooks on modules would say it too, but a compiler traces hooks into its graphs and guards on them, and so would
    compile every observed block for itself.
    """

    def __init__(self, block: nn.Module) -> None:
        self._paths = {id(module): path for path, module in named_modules(block)}

    def now(self) -> str:
        """Return the path of the innermost module that this thread runs; "" for the block itself."""
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code is module_call:
                path = self._paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            frame = frame.f_back
        return ""


_FREE = (None, Reason.EXTERNAL, Reason.BARRIER)


class Cut:
    """Which values to hold, by the position of their operator in a call that runs the same operators."""

    __slots__ = ("funcs", "hold")

    def __init__(self, funcs: tuple[Any, ...], hold: dict[int, Reason]) -> None:
        self.funcs = funcs
        self.hold = hold
        """Position -> why: `SAVED` if only values that the plan keeps precede it, else `CUT`."""


def smallest_cut(rows: Sequence[ObservedOperator], funcs: Sequence[Any]) -> Cut | None:
    """Return the cut if it holds fewer bytes than the first step held, else None.

    Args:
        rows: the values of an observed call.
        funcs: the operators of that call, in order.
    """
    given = [r for r in rows if (r.kind == "made" and r.why not in _FREE) or r.why is Reason.UNSEEN]
    paid = sum(r.num_bytes for r in rows if r.held and (r.why is Reason.BARRIER or r in given))
    children: dict[int, list[ObservedOperator]] = {}
    for r in rows:
        for parent in r.parents:
            children.setdefault(id(parent), []).append(r)
    below = _reach(given, lambda r: children.get(id(r), []))
    wanted = [r for r in rows if r.saved and id(r) in below]
    if not paid or not wanted:
        return None
    # Imported here because it is slow to import and few programs need it.
    networkx: Any = importlib.import_module("networkx")
    graph: Any = networkx.DiGraph()
    above = _reach(wanted, lambda r: r.parents)
    # Of several smallest cuts the search takes one by the hashes of the nodes. Numbers have the same in every process.
    number = {id(r): n for n, r in enumerate(rows)}
    source, sink = (-1, 0), (-1, 1)
    for n, r in enumerate(rows):
        if id(r) not in below or id(r) not in above:
            continue
        # A version that is overwritten later would have to be copied, and one without an operator cannot be named.
        fixed = r.overwritten or r.index < 0
        graph.add_edge((n, 0), (n, 1), **({} if fixed else {"capacity": r.num_bytes}))
        for parent in r.parents:
            if id(parent) in below:
                graph.add_edge((number[id(parent)], 1), (n, 0))
    for r in given:
        if id(r) in above:
            graph.add_edge(source, (number[id(r)], 0))
    for r in wanted:
        graph.add_edge((number[id(r)], 1), sink)
    try:
        cost, (near, _) = networkx.minimum_cut(graph, source, sink)
    except (networkx.NetworkXUnbounded, networkx.NetworkXError):
        return None
    if cost >= paid:
        return None
    nodes: list[tuple[int, int]] = sorted(near)
    cut = [rows[n] for n, side in nodes if n >= 0 and side == 0 and (n, 1) not in near]
    forced = _reach([r for r in given if r.why is not Reason.SAVED], lambda r: children.get(id(r), []))
    # Several outputs of one operator are held together or not at all: the tape asks once per operator.
    return Cut(tuple(funcs), {r.index: Reason.CUT if id(r) in forced else Reason.SAVED for r in cut})


def _reach(
    rows: Sequence[ObservedOperator], step: Callable[[ObservedOperator], Sequence[ObservedOperator]]
) -> set[int]:
    seen = {id(r) for r in rows}
    stack = list(rows)
    while stack:
        for r in step(stack.pop()):
            if id(r) not in seen:
                seen.add(id(r))
                stack.append(r)
    return seen
