"""Programs that nobody thought of, run plain and under a mode, must not differ in a single bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import actmem
from actmem.engine.barriers import TRIFLE_BYTES
from tests.property.programs import BLOCKS, Block, Model, Outcome, Program, reduced, run, settled

PROGRAMS_PER_EXAMPLE = 6
BUFFER_BYTES = 2 * sum(b.nbytes for b in Block(Program(0), 0, torch.Generator()).buffers())
HALF = actmem.Selective(save=[actmem.every_second("matmul")])


@dataclasses.dataclass
class Tally:
    """What a search saw, so that it cannot pass empty."""

    programs: int = 0
    refused: int = 0
    """Not run to the end, because a block wrote on a parameter that an earlier call of it needs."""
    recomputed: int = 0
    """Values that plain autograd saves and that were replayed instead."""
    kept: int = 0
    """The other values that plain autograd saves, inputs not counted."""
    plain_bytes: int = 0
    held_bytes: int = 0

    def add(self, report: actmem.Report) -> None:
        for kind in report.kinds:
            for row in kind.rows:
                if row.by_autograd and row.decision != "input":
                    if row.decision == "recompute":
                        self.recomputed += row.count * kind.num_blocks
                    else:
                        self.kept += row.count * kind.num_blocks
        self.plain_bytes += report.plain_bytes
        self.held_bytes += report.held_bytes


def programs(seed: int, *, strict: bool) -> Iterator[tuple[Program, Outcome]]:
    """Return programs that plain autograd accepts, each with what it does there."""
    found = 0
    for n in count():
        r = Random(seed * 1009 + n)
        drawn = Program(
            r.randrange(2**31),
            strict=strict,
            num_steps=r.randrange(4, 14),
            twice=r.random() < 0.2,
            num_calls=r.choice([1, 1, 2, 3]),
            again=r.random() < 0.3,
        )
        accepted = settled(drawn)
        if accepted is not None:
            yield accepted
            found += 1
            if found == PROGRAMS_PER_EXAMPLE:
                return


def wrong(
    program: Program, plain: Outcome, mode: Any, check: Callable[[Outcome], str | None], tally: Tally
) -> str | None:
    """Say what is wrong with a program under a mode, or return None."""
    try:
        outcome = run(program, mode)
    except actmem.VersionError as error:
        tally.refused += 1
        return None if program.again and plain.wrote_parameters else f"refused without need: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the report must say which program it was
        return f"{type(error).__name__}: {error}"
    tally.programs += 1
    tally.add(outcome.report)
    return outcome.difference(plain) or too_much(outcome) or check(outcome)


def too_much(outcome: Outcome) -> str | None:
    """Say if more is held than plain autograd holds, beside what the blocks were given and what is there anyway."""
    report = outcome.report
    trifles = sum(
        kind.num_blocks * row.num_bytes * row.count
        for kind in report.kinds
        for row in kind.rows
        if row.num_bytes <= TRIFLE_BYTES and not row.by_autograd
    )
    copies = sum(kind.num_blocks * kind.bytes_of("copy") for kind in report.kinds)
    limit = report.plain_bytes + outcome.num_input_bytes + BUFFER_BYTES + copies + trifles
    return (
        None if report.held_bytes <= limit else f"holds {report.held_bytes} bytes, plain and inputs {limit}\n{report}"
    )


def least() -> int:
    """Return how many programs a search must have run: with the profile "many", 10,000 in all four."""
    return 5 * settings().max_examples


def search(
    modes: Callable[[Program], Any],
    *,
    strict: bool,
    check: Callable[[Outcome], str | None],
    salt: int,
    tally: Tally | None = None,
    num_examples: int | None = None,
) -> Tally:
    """Try programs under a mode each."""
    tally = Tally() if tally is None else tally

    @settings(max_examples=num_examples or settings().max_examples)
    @given(st.integers(0, 2**40))
    def example(seed: int) -> None:
        for program, plain in programs(seed + salt, strict=strict):
            mode = modes(program)
            if (problem := wrong(program, plain, mode, check, tally)) is not None:
                pytest.fail(explain(program, mode, check, problem))

    example()
    return tally


def explain(program: Program, mode: Any, check: Callable[[Outcome], str | None], problem: str) -> str:
    """Describe the smallest part of a program that fails alike."""
    kind = problem.replace(":", " ").split(maxsplit=1)[0]

    def fails(smaller: Program) -> bool:
        accepted = settled(smaller)
        if accepted is None:
            return False
        found = wrong(*accepted, mode, check, Tally())
        return found is not None and found.startswith(kind)

    return f"{problem}\nunder {mode!r}:\n{reduced(program, fails).describe()}"


def everything_replayed(outcome: Outcome) -> str | None:
    """Say if a value was dropped and not replayed, or kept although all that leads to it can be replayed."""
    for kind in outcome.report.kinds:
        for row in kind.rows:
            if row.decision == "recompute" and row.replayed != row.count:
                return f"dropped {row.count}, replayed {row.replayed}: {row}"
            if row.decision == "never" and row.num_bytes > TRIFLE_BYTES:
                return f"kept: {row}"
    return None


def nothing_more(_: Outcome) -> None:
    return None


def test_every_recompute_decision_is_replayed_where_everything_can_be() -> None:
    tally = search(lambda _: actmem.Full(), strict=True, check=everything_replayed, salt=1)
    assert tally.programs >= least() and tally.refused == 0
    assert tally.recomputed >= 10 * tally.programs
    assert tally.kept <= tally.recomputed // 20  # trifles
    assert tally.held_bytes < 0.5 * tally.plain_bytes


def test_random_programs_are_bitwise_under_full_recomputation() -> None:
    tally = search(lambda _: actmem.Full(), strict=False, check=nothing_more, salt=2)
    assert tally.programs >= least() and tally.refused <= tally.programs // 20
    assert tally.recomputed >= 0.6 * (tally.recomputed + tally.kept), "or the search proves little"
    assert tally.held_bytes < tally.plain_bytes


def test_random_programs_are_bitwise_with_every_second_matmul_saved() -> None:
    tally = search(lambda _: HALF, strict=False, check=nothing_more, salt=3)
    assert tally.programs >= least() and tally.refused <= tally.programs // 20
    assert tally.recomputed >= 0.5 * (tally.recomputed + tally.kept)


def operators_by_chance(program: Program) -> actmem.Rules:
    """Return rules that save what some of the program's operators make."""
    r = Random(program.seed)
    seen: set[str] = set()
    try:
        report = run(dataclasses.replace(program, num_calls=1), actmem.Full()).report
        seen = {row.op.rsplit(".", 1)[0] for kind in report.kinds for row in kind.rows if row.op.startswith("aten.")}
    except actmem.VersionError:  # refused under every mode that holds what the program writes
        pass
    names = r.sample(sorted(seen), min(len(seen), r.randrange(1, 5)))
    rules = [actmem.Rule("save", op=name, nth=r.choice([None, None, "::2", "1:"])) for name in names]
    return actmem.Rules([*rules, actmem.Rule("recompute", op="matmul"), actmem.Rule("recompute")])


def test_random_programs_are_bitwise_with_operators_saved_by_chance() -> None:
    tally = search(operators_by_chance, strict=False, check=nothing_more, salt=4)
    assert tally.programs >= least() and tally.refused <= tally.programs // 10
    assert tally.recomputed >= 0.25 * (tally.recomputed + tally.kept)


def test_most_values_are_recomputed_over_all_searches() -> None:
    # A sample of each search, in one tally: what the modes save on purpose counts against them.
    tally = Tally()
    searches: list[tuple[bool, Callable[[Program], Any]]] = [
        (True, lambda _: actmem.Full()),
        (False, lambda _: actmem.Full()),
        (False, lambda _: HALF),
        (False, operators_by_chance),
    ]
    for salt, (strict, modes) in enumerate(searches, start=5):
        search(modes, strict=strict, check=nothing_more, salt=salt, tally=tally, num_examples=8)
    assert tally.programs >= 170
    assert tally.recomputed >= 0.6 * (tally.recomputed + tally.kept), tally


def test_what_is_measured_after_forward_agrees_with_the_report() -> None:
    # A sample, because measuring is slow: bytes alive when backward begins, by the meter and not by the engine's word.
    less = 0
    for program, plain in [p for seed in range(5) for p in programs(seed, strict=True)]:
        program = dataclasses.replace(program, num_calls=1, twice=False)
        saved = {}
        for name, mode in (("plain", None), ("full", actmem.Full())):
            model = Model(program)
            applied = actmem.apply(model, mode, blocks=BLOCKS) if mode is not None else None
            saved[name] = actmem.measure(lambda model=model: model().backward(), model=model).saved_bytes
            if applied is not None:
                applied.remove()
        assert saved["full"] <= saved["plain"] + plain.num_input_bytes + 16 * TRIFLE_BYTES, program.describe()
        less += saved["full"] < 0.7 * saved["plain"]
    assert less >= 15
