"""The tape, torch's checkpoint in eager and the compiler's graph take the same decision wherever two of them meet.

What only one of them sees is listed in docs/compile.md, and the list is complete.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actmem import Selective, Targets, every_second, ops
from actmem.engine.verdicts import Traced
from actmem.modes import Mode
from tests.compile.blocks import fresh_compiler
from tests.compile.compiling import trained
from tests.zoo import ZOO

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "compile.md"
MODELS = ("llama", "mixtral", "deepseek_v3")
SELECTIVE = Selective(save=["attention", "grouped_matmul", every_second("matmul")])
MODES: dict[str, Mode] = {
    "every second": SELECTIVE,
    "module": Selective(save=["*.self_attn::matmul", "attention", "*.mlp*::aten._grouped_mm", "*.mlp.gate*::matmul"]),
    "force recompute": Selective(
        save=["attention", "grouped_matmul", every_second("matmul")], force_recompute=["o_proj", "*.mlp*"]
    ),
    "attn_proj": Targets(["attn_proj"]),
    "moe_act": Targets(["moe_act"]),
}
HEAVY = ("matmul", "batched_matmul", "grouped_matmul", "attention", "routing")
ENGINES = ("tape", "checkpoint", "compiled")
DEFAULT = {("llama", "force recompute"), ("mixtral", "every second"), ("deepseek_v3", "attn_proj")}

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds

Rows = dict[tuple[str, str, str, int], Traced]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def cells() -> Iterator[Any]:
    for name in MODELS:
        for mode in MODES:
            if name == "llama" and mode == "moe_act":
                continue
            slow = (name, mode) not in DEFAULT
            yield pytest.param(name, mode, marks=[pytest.mark.slow] if slow else [])


@functools.cache
def decided(name: str, mode: str, engine: str, backend: Any = "aot_eager") -> Rows:
    """Train one step by an engine; return its decisions by block, module, operator and count.

    Where one graph serves several blocks, the first of them is traced and stands for all. So only blocks are kept that
    no other stands for.
    """
    how = "block.compile" if engine == "compiled" else "eager"
    asked: Any = "checkpoint" if engine == "checkpoint" else "auto"
    run = trained(ZOO[name], MODES[mode], how, engine=asked, backend=backend)
    assert run.applied is not None
    blocks = run.applied.trace().blocks
    assert {block.engine for block in blocks} == {engine}
    return {(block.paths[0], *row.address): row for block in blocks for row in block.rows}


def is_heavy(row: Traced) -> bool:
    packet, _, overload = row.op.rpartition(".")
    return any(ops.matches(group, packet, overload) for group in HEAVY)


@pytest.mark.parametrize(("name", "mode"), list(cells()))
def test_every_engine_takes_the_same_decision_at_every_address(name: str, mode: str) -> None:
    tape, *others = (decided(name, mode, engine) for engine in ENGINES)
    for rows in others:
        # Where the plan saves everything, only the tape looks, for the report.
        told = {key[0] for key, row in tape.items() if row.decision == "recompute"}
        assert {key[0] for key in rows} == told, "all kinds of blocks are there"
        met = tape.keys() & rows.keys()
        facts = ("decision", "rule", "targets")
        assert [key for key in met if any(getattr(tape[key], f) != getattr(rows[key], f) for f in facts)] == []
        heavy = {key for key, row in tape.items() if is_heavy(row) and key[0] in told}
        assert heavy == {key for key, row in rows.items() if is_heavy(row)}, "no heavy operator is hidden from either"
        decisions = {tape[key].decision for key in (met if mode == "moe_act" else heavy)}
        assert decisions == {"save", "recompute"}, "the plan tells operators apart here"


@pytest.mark.parametrize("name", MODELS)
def test_heavy_operators_that_the_plan_counts_are_counted_alike(name: str) -> None:
    """Every second product is the first, third, fifth, whoever counts; products of routers are not counted."""
    for engine in ENGINES if (name, "every second") in DEFAULT else ENGINES[:2]:
        for block in {key[0] for key in decided(name, "every second", engine)}:
            rows = [row for key, row in decided(name, "every second", engine).items() if key[0] == block]
            products = [row for row in rows if row.op in ("aten.mm.default", "aten.addmm.default")]
            counted = [row.decision for row in products if not row.module.endswith("gate")]
            assert counted == ["save" if n % 2 == 0 else "recompute" for n in range(len(counted))]
            assert len(counted) >= 4


def seen_by_one(name: str, engine: str, backend: Any = "aot_eager") -> set[tuple[str, str]]:
    """List operators that the tape meets and another engine does not, or the other way round: (who sees it, what)."""
    tape, rows = decided(name, "every second", "tape"), decided(name, "every second", engine, backend)
    found = {("tape", tape[key].op) for key in tape.keys() - rows.keys()}
    return found | {(engine, rows[key].op) for key in rows.keys() - tape.keys()}


def listed(engine: str) -> set[tuple[str, str, str]]:
    """Read the list in the document: (model, who sees it, operator)."""
    text = DOCUMENT.read_text().split("<!-- seen by one: from here -->")[1].split("<!-- seen by one: to here -->")[0]
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\w, ]+) \| `([\w.]+)` \|", text, flags=re.MULTILINE)
    assert rows
    return {(model, who, op) for model, who, missing, op in rows if engine in missing.split(", ") or who == engine}


@pytest.mark.parametrize("engine", ["checkpoint", "compiled"])
def test_the_list_of_what_only_one_engine_sees_is_complete(engine: str) -> None:
    models = MODELS if engine == "checkpoint" else ("mixtral",)
    for name in models:
        found = {(name, who, op) for who, op in seen_by_one(name, engine)}
        assert {row for row in listed(engine) if row[0] == name} == found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_list_is_complete_for_compiled_graphs(name: str) -> None:
    found = {(name, who, op) for who, op in seen_by_one(name, "compiled")}
    assert {row for row in listed("compiled") if row[0] == name} == found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_with_inductor_the_plan_is_asked_about_the_same_operators_as_with_aot_eager(name: str) -> None:
    """inductor takes operators apart, but only after the plan was asked."""
    torch._dynamo.reset()
    by_inductor, by_aot = (decided(name, "every second", "compiled", b) for b in ("inductor", "aot_eager"))
    assert by_inductor == by_aot


def main() -> None:
    """Print what only one engine sees."""
    for name in MODELS:
        for engine in ENGINES[1:]:
            for who, op in sorted(seen_by_one(name, engine)):
                print(f"{name}: {who} sees {op}, {'tape' if who == engine else engine} does not")  # noqa: T201


if __name__ == "__main__":
    main()
