"""One block as a program: what it replays, and how many bytes it adds at given moments.

NOTE [ The block program ]
For each unit u (NOTE [ Units ]) and item i, all of them 0 or 1:

    r[u]    the unit is replayed at some time of the backward
    a[i]    the item is needed: 1 if a backward step asks for it
    k[i]    the item is kept               k[i] >= a[i] - r[u(i)] - o[u(i)]
    o[u]    the unit is offloaded          r[u] + o[u] <= 1
    r[u] <= a[i]  for each item i that u reads

As long as bytes have a price only before the block's backward, this is a smallest cut, and the linear program alone
finds it. A moment inside the block's own backward needs to know what was replayed by then, and what is still waited
for:

    p[u] = 1 if u was replayed by then. p[u] <= r[u]; p[u] = r[u] if something that u makes was asked for by then;
           p[u] >= p[w] + r[u] - 1 for each unit w that reads u; p[u] <= sum of p[w] otherwise
    x[i] = 1 if the item is there and still waited for: x[i] >= k[i] + p[u(i)] while a handle is open,
           x[i] >= k[i] + p[u(i)] + r[w] - p[w] - 1 for each unit w that reads it

Once all r and o are whole numbers, so is the rest. What the tape does within a replay is not in here, so the bytes are
never above the true ones, and what is found is judged by emulation (`Timeline.effect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actmem.decisions import Decision
from actmem.planner.highs import Program
from actmem.planner.problem import BlockProblem, Item
from actmem.planner.work import Work

__all__ = ["BlockProgram", "Priced", "Table", "price", "tabulate"]

_PATIENCE = 50_000
"""Simplex iterations for one block; past them the bound is that of the search so far."""

Terms = dict[int, float]
Bools = npt.NDArray[np.bool_]


class BlockProgram:
    """The columns and rows of one block in a program. See NOTE [ The block program ]."""

    def __init__(
        self,
        program: Program,
        problem: BlockProblem,
        *,
        second: float,
        sent_byte: float | None = None,
        sent_limit_bytes: int = 0,
    ) -> None:
        """Set up the program.

        Args:
            program: the program to add to.
            problem: what there is to decide.
            second: what a second of replay costs.
            sent_byte: what a byte that is offloaded costs; None if none may be.
            sent_limit_bytes: how much may be offloaded.
        """
        self._program, self._problem, self._second = program, problem, second
        self._r = [program.column(u.seconds * second, upper=1.0, whole=True) for u in problem.units]
        self._o = [] if sent_byte is None else [program.column(upper=1.0, whole=True) for _ in problem.units]
        self._a: list[int | None] = []
        self._k: list[int | None] = []
        self._sent: Terms = {}
        for item in problem.items:
            self._add_item(item, sent_byte)
        if self._sent:
            unit = max(self._sent.values())
            program.row({c: size / unit for c, size in self._sent.items()}, upper=sent_limit_bytes / unit)
        for u, unit in enumerate(problem.units):
            for i in unit.reads:
                needed = self._a[i]
                if needed is not None:
                    program.row({self._r[u]: 1.0, needed: -1.0}, upper=0.0)
            if self._o:
                program.row({self._r[u]: 1.0, self._o[u]: 1.0}, upper=1.0)

    def _add_item(self, item: Item, sent_byte: float | None) -> None:
        asked = item.first_unpack >= 0
        program = self._program
        needed = None if asked else program.column(upper=1.0)
        self._a.append(needed)
        if item.unit < 0 and asked:
            self._k.append(None)
            return
        kept = program.column(upper=1.0)
        self._k.append(kept)
        terms = {kept: 1.0}
        if item.unit >= 0:
            terms[self._r[item.unit]] = 1.0
            if self._o:
                terms[self._o[item.unit]] = 1.0
        if needed is not None:
            terms[needed] = -1.0
        program.row(terms, lower=1.0 if asked else 0.0)
        if self._o and item.unit >= 0 and sent_byte is not None:
            sent = program.column(sent_byte * item.num_bytes, upper=1.0)
            terms = {sent: 1.0, self._o[item.unit]: -1.0}
            if needed is not None:
                terms[needed] = -1.0
            program.row(terms, lower=0.0 if asked else -1.0)
            if item.num_bytes:
                self._sent[sent] = float(item.num_bytes)

    # ---------------------------------------------------------------- bytes

    def bytes_after(self, k: int) -> tuple[Terms, int]:
        """Return the bytes that the block adds after one of its events, as a sum over columns and a constant."""
        if k < 0:
            return {}, 0
        if k >= self._problem.first_unpack:
            return self._bytes_inside(k)
        terms: Terms = {}
        constant = 0
        for column, item in zip(self._k, self._problem.items, strict=True):
            amount = item.kept_bytes(k)
            if column is None:
                constant += amount
            elif amount:
                terms[column] = float(amount)
        return terms, constant

    def _bytes_inside(self, k: int) -> tuple[Terms, int]:
        """Add what is known after an event of the block's own backward."""
        problem, program = self._problem, self._program
        asked = {i.unit for i in problem.items if 0 <= i.first_unpack <= k}
        may: set[int] = set()
        for u in range(len(problem.units) - 1, -1, -1):  # readers come after what they read
            if u in asked or any(w in may for i in problem.units[u].makes for w in problem.items[i].readers):
                may.add(u)
        done = {u: self._r[u] if u in asked else program.column(upper=1.0) for u in may}
        for u in may - asked:
            readers = {w for i in problem.units[u].makes for w in problem.items[i].readers if w in may}
            program.row({done[u]: 1.0, self._r[u]: -1.0}, upper=0.0)
            for w in readers:
                program.row({done[u]: 1.0, done[w]: -1.0, self._r[u]: -1.0}, lower=-1.0)
            program.row({done[u]: -1.0, **{done[w]: 1.0 for w in readers}}, lower=0.0)
        terms: Terms = {}
        constant = 0
        for i, item in enumerate(problem.items):
            column, amount = self._present(i, item, k, done)
            if column is None:
                constant += amount
            else:
                terms[column] = float(amount)
        return terms, constant

    def _present(self, i: int, item: Item, k: int, done: dict[int, int]) -> tuple[int | None, int]:
        """Add whether an item is there and waited for. Return the column, or None, and bytes."""
        program = self._program
        there: Terms = {}
        kept = item.kept_bytes(k)
        column = self._k[i]
        sure = 1.0 if kept and column is None else 0.0
        if kept and column is not None:
            there[column] = -1.0
        if item.unit in done:
            there[done[item.unit]] = -1.0
        fetched = self._fetched(item, k, done)
        if fetched is not None:
            there[fetched] = -1.0
        is_open = item.first_unpack >= 0 and item.last_drop > k
        if not there and (not sure or is_open):
            return None, kept if sure else 0
        waited = [w for w in item.readers if w not in done or done[w] != self._r[w]]
        if not is_open and not waited:
            return None, 0
        present = program.column(upper=1.0)
        if is_open:
            program.row({present: 1.0, **there}, lower=sure)
            return present, item.num_bytes
        for w in waited:
            terms = {present: 1.0, **there, self._r[w]: -1.0}
            if w in done:
                terms[done[w]] = terms.get(done[w], 0.0) + 1.0
            program.row(terms, lower=sure - 1.0)
        return present, item.num_bytes

    def _fetched(self, item: Item, k: int, done: dict[int, int]) -> int | None:
        """Add whether an item that was offloaded is back."""
        if not self._o or item.unit < 0:
            return None
        column = self._program.column(upper=1.0)
        sent = self._o[item.unit]
        if 0 <= item.first_unpack <= k:
            self._program.row({column: 1.0, sent: -1.0}, lower=0.0)
        for w in item.readers:
            if w in done:
                self._program.row({column: 1.0, sent: -1.0, done[w]: -1.0}, lower=-1.0)
        return column

    # ---------------------------------------------------------------- reading a solution

    def keep(self, values: Sequence[float]) -> tuple[Decision, ...]:
        """Return the decisions that a solution represents."""
        again = frozenset(u for u, r in enumerate(self._r) if values[r] > 0.5)
        sent = frozenset(u for u, o in enumerate(self._o) if values[o] > 0.5)
        return self._problem.keep(again, sent)

    def spent(self) -> Terms:
        """Return what the replays cost, as a sum over columns."""
        return {r: u.seconds * self._second for r, u in zip(self._r, self._problem.units, strict=True)}

    def is_whole(self, values: Sequence[float]) -> bool:
        """Return whether a solution of the relaxed program solves the program itself."""
        return all(abs(values[c] - round(values[c])) < 1e-6 for c in (*self._r, *self._o))


@dataclass(frozen=True)
class Priced:
    """The outcome of `price`."""

    keep: tuple[Decision, ...]
    """The decision for each call."""
    bound: float
    """Lower bound on the sum of seconds and prices."""


def price(
    problem: BlockProblem,
    prices: Sequence[tuple[int, float]],
    *,
    work: Work,
    second: float = 1.0,
    sent_byte: float | None = None,
    sent_limit_bytes: int = 0,
) -> Priced:
    """Find the decisions of a block with the least sum of replay seconds and prices.

    Args:
        problem: what there is to decide.
        prices: events of the block, and what a byte costs after each.
        work: the account to which this is charged.
        second: what a second of replay costs.
        sent_byte: what a byte that is offloaded costs; None if none may be.
        sent_limit_bytes: how much may be offloaded.
    """
    total = sum(u.seconds for u in problem.units) * second
    most = sum(i.num_bytes for i in problem.items) * sum(p for _, p in prices)
    scale = 1000.0 / (min(total, most) or max(total, most) or 1.0)  # seconds are below the tolerances of a solver
    program = Program()
    block = BlockProgram(
        program,
        problem,
        second=second * scale,
        sent_byte=None if sent_byte is None else sent_byte * scale,
        sent_limit_bytes=sent_limit_bytes,
    )
    constant = 0.0
    for k, p in prices:
        terms, sure = block.bytes_after(k)
        constant += p * sure * scale
        for column, amount in terms.items():
            program.charge(column, p * amount * scale)
    found = program.solve(work, relaxed=True)
    if not found.values or not block.is_whole(found.values):
        found = program.solve(work, allowance=_PATIENCE)
    if not found.values:
        return Priced(problem.keep(frozenset()), -float("inf"))
    return Priced(block.keep(found.values), (found.bound + constant) / scale)


@dataclass(frozen=True, eq=False)
class Table:
    """All decisions of a block that differ in what is replayed, in order."""

    numbers: npt.NDArray[np.int64]
    """Bit u is set if unit u is replayed."""
    seconds: npt.NDArray[np.float64]
    bytes_after: dict[int, npt.NDArray[np.int64]]
    """For each requested event, the bytes that the block adds after it."""


def tabulate(problem: BlockProblem, events: Sequence[int]) -> Table:
    """Work out every solution of the block program. For blocks of few units: each additional one doubles the table.

    Args:
        problem: what there is to decide. Nothing is offloaded.
        events: events of the block whose bytes are wanted.
    """
    numbers = np.zeros(1, dtype=np.int64)
    for u in range(len(problem.units) - 1, -1, -1):  # readers come after what they read
        items = [problem.items[i] for i in problem.units[u].makes]
        readers = sum(1 << w for w in {w for item in items for w in item.readers})
        may = numbers if any(map(_is_asked, items)) else numbers[numbers & readers != 0]
        numbers = np.concatenate((numbers, may | 1 << u))
    no = np.zeros(len(numbers), dtype=bool)
    again: list[Bools] = [numbers & 1 << u != 0 for u in range(len(problem.units))]
    kept: list[Bools] = []
    for item in problem.items:
        needed = ~no if _is_asked(item) else _any([again[w] for w in item.readers], no)
        kept.append(needed if item.unit < 0 else needed & ~again[item.unit])
    seconds = np.zeros(len(numbers))
    for u, unit in enumerate(problem.units):
        seconds += again[u] * unit.seconds
    return Table(numbers, seconds, {k: _bytes_after(problem, k, again, kept, no) for k in set(events)})


def _bytes_after(
    problem: BlockProblem, k: int, again: list[Bools], kept: list[Bools], no: Bools
) -> npt.NDArray[np.int64]:
    total = np.zeros(len(no), dtype=np.int64)
    done: list[Bools] = [no] * len(problem.units)
    if k >= problem.first_unpack:
        asked = {i.unit for i in problem.items if 0 <= i.first_unpack <= k}
        for u in range(len(problem.units) - 1, -1, -1):
            readers = {w for i in problem.units[u].makes for w in problem.items[i].readers}
            done[u] = again[u] if u in asked else again[u] & _any([done[w] for w in readers], no)
    for i, item in enumerate(problem.items):
        size = item.kept_bytes(k)
        there = kept[i] if size else no
        if k >= problem.first_unpack:
            size = item.num_bytes
            there = there | done[item.unit] if item.unit >= 0 else there
            if not (_is_asked(item) and item.last_drop > k):
                there = there & _any([again[w] & ~done[w] for w in item.readers], no)
        if size:
            total += there * np.int64(size)
    return total


def _is_asked(item: Item) -> bool:
    return item.first_unpack >= 0


def _any(found: Sequence[Bools], otherwise: Bools) -> Bools:
    for one in found:
        otherwise = otherwise | one
    return otherwise
