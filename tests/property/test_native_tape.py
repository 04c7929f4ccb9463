"""On programs that nobody thought of, the native tape does what the Python tape does: the same bits, the same bytes."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import actmem
from actmem.engine import Tape
from actmem.native import build, native_tape
from actmem.native.core_check import held_bytes
from tests.property import programs as running
from tests.property.programs import Model, Outcome, Program
from tests.property.test_random_programs import HALF, operators_by_chance, programs

NUM_SEEDS = settings().max_examples // 8
"""With the profile "many", 62 for each mode: 372 programs."""

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: the native core is not built"),
    pytest.mark.usefixtures("nothing_compiled"),
]


@pytest.fixture(scope="module", autouse=True)
def _core() -> None:
    build()


class Held:
    """Sums what the handles of each forward hold when its backward begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums: list[int] = []
        handles: list[Any] = []
        hooks = torch.autograd.graph.saved_tensors_hooks

        def watched(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Any:
            def packed(tensor: Any) -> Any:
                handles.append(handle := pack(tensor))
                return handle

            return hooks(packed, unpack)

        forward = Model.forward

        def summed(model: Model) -> Any:
            handles.clear()
            loss = forward(model)
            self.sums.append(held_bytes(handles))
            handles.clear()
            return loss

        monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", watched)
        monkeypatch.setattr(Model, "forward", summed)


def outcome(program: Program, mode: Any, native: bool, *, observed: bool) -> tuple[Outcome | str, list[int]]:
    """Run a program; return what it did, or the error that it was refused with, and what was held."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTMEM_NATIVE", "1" if native else "0")
        held = Held(patch)
        try:
            return running.run(program, mode, checked=observed), held.sums
        except actmem.VersionError as error:
            return str(error).split(" was changed", 1)[-1], held.sums


def drawn(salt: int) -> Iterator[tuple[Program, Outcome]]:
    for seed in range(NUM_SEEDS):
        yield from programs(seed * 977 + salt, strict=False)


@pytest.mark.parametrize("observed", [False, True], ids=["from the first call", "after observed calls"])
@pytest.mark.parametrize("mode", ["full", "half", "chance"])
def test_the_native_tape_is_the_python_tape(mode: str, observed: bool, count_native: Counter[str]) -> None:
    modes: dict[str, Callable[[Program], Any]] = {
        "full": lambda _: actmem.Full(),
        "half": lambda _: HALF,
        "chance": operators_by_chance,
    }
    num_programs = 0
    for program, plain in drawn(len(mode)):
        program = dataclasses.replace(program, num_calls=program.num_calls + 2 * observed)
        under = modes[mode](program)
        (ours, our_bytes), (theirs, their_bytes) = (
            outcome(program, under, native, observed=observed) for native in (True, False)
        )
        described = program.describe()
        if isinstance(ours, str) or isinstance(theirs, str):
            assert ours == theirs, described
        else:
            assert ours.difference(theirs) is None, described
            if not observed:
                assert ours.difference(plain) is None, described
        assert our_bytes == their_bytes, described
        num_programs += 1
    assert num_programs == 6 * NUM_SEEDS
    assert count_native["handles"] > 10 * num_programs, "or the native core took no part"


@pytest.fixture
def count_native(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the handles that the native core gave out."""
    counted: Counter[str] = Counter()
    kind: Any = native_tape(True).kind
    assert kind is not None and issubclass(kind, Tape)
    pack = kind.pack

    def packed(self: Any, tensor: Any) -> Any:
        handle = pack(self, tensor)
        counted["handles"] += type(handle).__module__ == "actmem_core"
        return handle

    monkeypatch.setattr(kind, "pack", packed)
    return counted
