"""Programs that run for many steps and then change: bitwise as plain, and no byte more than a tape that records."""

from __future__ import annotations

import dataclasses
import weakref
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem.engine import follower
from tests.property.programs import BLOCKS, Model, Outcome, Program, settled

NUM_STEPS = 7
HALF = actmem.Selective(save=[actmem.every_second("matmul")])


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                storage = t.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        alive = {id(s): s.nbytes() for r in self.storages.values() if (s := r()) is not None}
        return sum(alive.values())


@dataclasses.dataclass
class Tally:
    """What a search saw, so that it cannot pass empty."""

    programs: int = 0
    refused: int = 0
    followed: int = 0
    deviated: int = 0
    in_the_middle: int = 0


@dataclasses.dataclass
class Step:
    """What one step of a run must not change, and what it took."""

    outcome: Outcome
    held: int
    peak: int


def changed(program: Program) -> Program:
    """Leave one more instruction out."""
    r = Random(program.seed + 5)
    left = [(b, i) for b in range(2) for i in range(program.num_steps) if (b, i) not in program.skip]
    return dataclasses.replace(program, skip=program.skip | {r.choice(left)}) if left else program


def run(programs: list[Program], mode: Any) -> list[Step]:
    """Run one model for some steps, each with its own program."""
    model = Model(programs[0])
    applied = None if mode is None else actmem.apply(model, mode, blocks=BLOCKS)
    torch.manual_seed(programs[0].seed + 2)
    found: list[Step] = []
    for program in programs:
        for block in model.blocks:
            block.program = program
        model.program = dataclasses.replace(program, skip=frozenset())
        for p in (*model.parameters(), model.leaf, model.other):
            p.grad = None
        with Live() as live:
            loss = model()
            held = live.now()
            if program.twice:
                loss.backward(retain_graph=True)
            loss.backward()
        tensors: dict[str, Tensor | None] = {"loss": loss.detach()}
        named = [*model.named_parameters(), ("leaf", model.leaf), ("other", model.other)]
        tensors |= {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in named}
        tensors |= {f"value of {n}": p.detach().clone() for n, p in (*named, *model.named_buffers())}
        tensors |= {"default generator": torch.get_rng_state(), "own generator": model.generator.get_state()}
        found.append(Step(Outcome(tensors), held, live.peak))
        del loss
    if applied is not None:
        applied.remove()
    return found


def compare(seed: int, mode: Any, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program plain, followed and recorded, with a change in the middle."""
    r = Random(seed)
    drawn = Program(r.randrange(2**31), strict=r.random() < 0.6, num_steps=r.randrange(3, 10), twice=r.random() < 0.2)
    accepted = settled(drawn)
    other = None if accepted is None else settled(changed(accepted[0]))
    if accepted is None or other is None:
        return
    changes = r.choice([[5], [4, 5], [4, 6], [3]])
    programs = [other[0] if i in changes else accepted[0] for i in range(NUM_STEPS)]
    try:
        plain = run(programs, None)
    except RuntimeError:  # plain autograd refuses it after the change
        return
    try:
        with monkeypatch.context() as patch:
            patch.setattr(follower, "FIRST_PATIENCE", 1 << 30)
            recorded = run(programs, mode)
    except actmem.VersionError:
        tally.refused += 1
        return
    with monkeypatch.context() as patch:
        count(patch, tally)
        followed = run(programs, mode)
    tally.programs += 1
    for i in range(NUM_STEPS):
        where = f"step {i} of {programs[i].describe()}\nunder {mode!r}, changed in {changes}"
        difference = followed[i].outcome.difference(plain[i].outcome)
        assert difference is None, f"{difference}: {where}"
        if i not in changes and (i == 0 or i - 1 not in changes):  # after a difference, what would have been reserved may be gone
            assert followed[i].held == recorded[i].held, where
            assert followed[i].peak <= recorded[i].peak, where


def count(patch: pytest.MonkeyPatch, tally: Tally) -> None:
    """Count how many calls follow a program, and how many leave it."""
    close, deviate = follower.Follower.close, follower.Follower._deviate

    def closed(tape: Any) -> None:
        close(tape)
        tally.followed += tape.followed

    def left(tape: Any) -> None:
        tally.deviated += tape._program is not None
        tally.in_the_middle += tape._program is not None and tape._at > 0
        deviate(tape)

    patch.setattr(follower.Follower, "close", closed)
    patch.setattr(follower.Follower, "_deviate", left)


@pytest.mark.parametrize("mode", [actmem.Full(), HALF], ids=["full", "selective"])
def test_known_programs_that_change_are_bitwise_and_hold_what_a_recording_holds(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally()

    @settings(max_examples=max(8, settings().max_examples // 4))
    @given(st.integers(0, 2**40))
    def example(seed: int) -> None:
        for n in range(4):
            compare(seed * 4 + n, mode, tally, monkeypatch)

    example()
    assert tally.programs >= 10
    assert tally.followed >= tally.programs // 2 and tally.in_the_middle >= tally.programs // 8
