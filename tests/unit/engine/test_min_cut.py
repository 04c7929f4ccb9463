"""The smallest set of values to hold: equal to brute force on small graphs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import actmem
from actmem import Full
from actmem.decisions import Reason
from actmem.engine.observation import ObservedOperator, smallest_cut
from actmem.engine.operators import REASONS
from tests.engine.cases import Program, batch, compare, never, simple_step, stack


@dataclass
class Graph:
    """A program of one operator per row, and what a first step held of it."""

    rows: list[ObservedOperator]

    def add(
        self,
        num_bytes: int,
        *parents: int,
        why: Reason | None = None,
        saved: bool = False,
        held: bool = False,
        overwritten: bool = False,
    ) -> int:
        row = ObservedOperator("", f"op{len(self.rows)}", "made", torch.empty(0), num_bytes, why)
        row.saved, row.held, row.overwritten = saved, held, overwritten
        row.index = len(self.rows)
        row.parents = tuple(self.rows[p] for p in parents)
        self.rows.append(row)
        return row.index

    @property
    def funcs(self) -> list[str]:
        return [r.op for r in self.rows]

    @property
    def paid(self) -> int:
        return sum(r.num_bytes for r in self.rows if r.held)

    def cut(self) -> dict[int, str] | None:
        found = smallest_cut(self.rows, self.funcs)
        if found is None:
            return None
        assert found.funcs == tuple(self.funcs)
        return found.hold

    def separates(self, held: set[int]) -> bool:
        """Tell whether every saved value is held, or can be replayed from values that are."""

        def reachable(row: ObservedOperator) -> bool:
            return row.index in held or (row.why in (None, Reason.BARRIER) and all(reachable(p) for p in row.parents))

        return all(reachable(r) for r in self.rows if r.saved)

    def bytes_of(self, held: set[int]) -> int:
        return sum(self.rows[i].num_bytes for i in held)

    def smallest(self) -> int | None:
        """Try every set."""
        free = [r.index for r in self.rows if not r.overwritten]
        sets = (set(c) for n in range(len(free) + 1) for c in combinations(free, n))
        return min((self.bytes_of(s) for s in sets if self.separates(s)), default=None)

    def settle(self, *, greedily: bool = True) -> None:
        """Hold what a first step holds: each debt as it comes, whichever is fewer bytes. Else: the saved value."""
        debts: dict[int, set[int]] = {}
        for row in self.rows:
            owed: set[int] = set()
            for p in row.parents:
                if not p.held:
                    owed |= {p.index} if p.why is not None else debts[p.index]
            debts[row.index] = owed if row.why is None else set()
            if not row.saved:
                continue
            if row.why is not None:
                row.held = True
                continue
            owed = {i for i in owed if not self.rows[i].held}
            if owed and (not greedily or sum(self.rows[i].num_bytes for i in owed) > row.num_bytes):
                row.held, row.why = True, Reason.BARRIER
            else:
                for i in owed:
                    self.rows[i].held = True
            debts[row.index] = set()


# -------------------------------------------------------------------- by hand


def test_one_small_value_in_the_middle_is_held_for_all_that_is_made_from_it() -> None:
    g = Graph([])
    big = g.add(1000, why=Reason.OPAQUE)
    middle = g.add(10, big)
    for _ in range(3):
        g.add(100, middle, saved=True)
    g.settle()
    assert g.paid == 300 and g.cut() == {middle: Reason.CUT}


def test_a_small_never_replayed_value_is_held_itself() -> None:
    g = Graph([])
    source = g.add(50, why=Reason.OPAQUE)
    for _ in range(2):
        g.add(40, source, saved=True)
    g.settle()
    assert g.paid == 80 and g.cut() == {source: Reason.CUT}


def test_nothing_better_is_no_cut() -> None:
    g = Graph([])
    g.add(10, g.add(1000, why=Reason.OPAQUE), saved=True)
    g.settle()
    assert g.paid == 10 and g.cut() is None


def test_a_program_without_barriers_has_no_cut() -> None:
    g = Graph([])
    g.add(10, g.add(1000), saved=True)
    assert g.cut() is None


def test_a_barrier_that_nothing_saved_depends_on_has_no_cut() -> None:
    g = Graph([])
    g.add(10, why=Reason.OPAQUE)
    g.add(10, saved=True)
    assert g.cut() is None


def test_a_version_that_is_overwritten_later_is_not_chosen() -> None:
    g = Graph([])
    big = g.add(1000, why=Reason.OPAQUE)
    middle = g.add(10, big, overwritten=True)
    after = g.add(20, middle)
    for _ in range(3):
        g.add(100, after, saved=True)
    g.settle()
    assert g.cut() == {after: Reason.CUT}


def test_what_only_the_plan_stands_before_is_kept_by_the_plan() -> None:
    g = Graph([])
    kept = g.add(1000, why=Reason.SAVED)
    middle = g.add(10, kept)
    for _ in range(2):
        g.add(100, middle, saved=True)
    g.settle()
    assert g.cut() == {middle: Reason.SAVED}


def test_what_stands_behind_both_is_a_cut() -> None:
    g = Graph([])
    middle = g.add(10, g.add(1000, why=Reason.SAVED), g.add(1000, why=Reason.OPAQUE))
    for _ in range(2):
        g.add(100, middle, saved=True)
    g.settle()
    assert g.cut() == {middle: Reason.CUT}


def test_unseen_inputs_are_barriers_and_other_inputs_are_not() -> None:
    for why, expected in ((Reason.UNSEEN, {1: Reason.CUT}), (Reason.EXTERNAL, None)):
        g = Graph([])
        source = g.add(1000, why=why)
        g.rows[source].kind, g.rows[source].index = "input", -1
        middle = g.add(10, source)
        for _ in range(2):
            g.rows[g.add(100, middle, saved=True)].held = why == Reason.UNSEEN
        for row in g.rows[2:]:
            row.why = Reason.BARRIER if row.held else None
        assert g.cut() == expected


# -------------------------------------------------------------------- against brute force


def drawn(seed: int) -> Graph:
    """Make up to three sources, large as weights are, and up to five values that are made from what came before.

    From a seed, because hypothesis likes its numbers small and alike, and then nothing is worth cutting.
    """
    random = Random(seed)
    g = Graph([])
    for n in range(random.randint(1, 3)):
        why = random.choice([Reason.OPAQUE, Reason.SAVED, None]) if n else Reason.OPAQUE
        g.add(random.randint(4, 40), why=why, saved=random.random() < 0.2)
    for n in range(len(g.rows), len(g.rows) + random.randint(2, 5)):
        parents = random.sample(range(n), k=min(n, random.choice([1, 1, 2])))
        g.add(random.randint(1, 12), *parents, saved=random.random() < 0.6, overwritten=random.random() < 0.2)
    g.settle(greedily=random.random() < 0.7)
    return g


def test_the_cut_is_the_smallest_of_all_sets() -> None:
    num_cuts = 0

    @settings(max_examples=300)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal num_cuts
        g = drawn(seed)
        best, hold = g.smallest(), g.cut()
        if hold is None:  # what the first step holds is as good, or there is nothing to part
            assert best is None or not g.paid or g.paid <= best
            return
        num_cuts += 1
        assert g.separates(set(hold)) and set(hold.values()) <= {Reason.CUT, Reason.SAVED}
        assert g.bytes_of(set(hold)) == best
        assert best is not None and best < g.paid

    check()
    assert num_cuts >= 20  # else the graphs say nothing


# -------------------------------------------------------------------- in a block


@torch.library.custom_op("actmem_tests::large", mutates_args=())
def large(x: Tensor) -> Tensor:
    return x.repeat(9, 1).sin()


def one(block: Program, h: Tensor) -> Tensor:
    row = large(h.detach()).sum(0)
    return (h @ block.v + row).sin() * (h @ block.v * 2 - row).cos()


def other(block: Program, h: Tensor) -> Tensor:
    row = large(h.detach()).exp().sum(0)
    return ((h * 2) @ block.v - row).cos() * (h @ block.v + row.exp()).sin().tanh()


def longer(block: Program, h: Tensor) -> Tensor:
    return one(block, h) + other(block, h)


def switching(period: int, *bodies: object) -> object:
    """Build a model whose blocks run another program in each step."""

    def build() -> torch.nn.Module:
        calls = [0]

        def body(block: Program, h: Tensor) -> Tensor:
            calls[0] += 1
            return bodies[(calls[0] - 1) // 2 // period % len(bodies)](block, h)  # type: ignore[operator]

        return stack(body)  # two blocks: two calls a step

    return build


def test_a_block_that_runs_another_program_in_each_step_stays_bitwise() -> None:
    for bodies in ((one, other), (other, one), (one, longer), (longer, one), (one, longer, other)):
        for period in (1, 2):
            compare(switching(period, *bodies), Full(), num_steps=6)  # type: ignore[arg-type]


def test_a_cut_is_left_where_another_program_begins() -> None:
    fresh = never(compare(lambda: stack(other, num_blocks=1), Full(), num_steps=1, blocks="0"))
    model = stack(one, num_blocks=1)
    with actmem.apply(model, Full(), blocks="0") as applied:
        for _ in range(2):
            simple_step(model, batch())
        assert set(never(applied.report()).values()) == {REASONS["cut"]}
        model[0].body = other
        applied.check_replay()
        simple_step(model, batch())
        assert never(applied.report()) == fresh  # each debt as it comes, as in a first step


def test_a_block_that_runs_one_program_holds_the_cut() -> None:
    for body in (one, other):
        first = compare(lambda: stack(body), Full(), num_steps=1)  # noqa: B023 - called at once
        later = compare(lambda: stack(body), Full(), num_steps=4)  # noqa: B023
        assert later.held_bytes < first.held_bytes
        assert "aten.sum.dim_IntList" in never(later)
