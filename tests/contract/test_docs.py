"""The examples in the documentation run, and what it lists is complete."""

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import actmem
from actmem import Applied, Budget, Full, Rule, Rules, Selective, Targets, ops
from actmem.modes import Mode
from actmem.plan import TARGETS
from tests.zoo import ZOO

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("modes.md", "tuning.md", "budgets.md")
# What the examples call the user's models.
MODELS = {
    "model": "qwen3",
    "moe_model": "qwen3_moe",
    "sliding_model": "gemma3_sliding",
    "vision_language": "vision_language",
}


def examples() -> list[Any]:
    found = []
    for page in PAGES:
        text = (DOCS / page).read_text()
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: block.start()].count("\n") + 2
            found.append(pytest.param(page, line, block[1], id=f"{page}:{line}"))
    return found


def stepper(case: str) -> Callable[[nn.Module], None]:
    def train_step(model: nn.Module) -> None:
        ZOO[case].step(model).backward()

    return train_step


@pytest.mark.parametrize(("page", "line", "code"), examples())
def test_an_example_runs_and_what_it_applies_trains(
    page: str, line: int, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"actmem": actmem, "torch": torch, "folder": str(tmp_path)}
    for name, case in MODELS.items():
        if re.search(rf"\b{name}\b", code):
            built = ZOO[case].build()
            given |= {name: built, "train_step": stepper(case), "batch": ZOO[case].batch(built)}
    exec(compile("\n" * (line - 1) + code, str(DOCS / page), "exec"), given)
    applied = given.get("applied")
    if not isinstance(applied, Applied):
        return
    for name in MODELS:
        if name in given:
            given["train_step"](given[name])
    report = applied.report()
    if applied.plan.offload is None:
        assert report.num_replayed > 0
    else:
        assert report.moved is not None
        assert report.moved.out_bytes == report.moved.back_bytes > 0
    applied.remove()


def test_the_page_of_modes_names_every_mode_group_target_and_option() -> None:
    text = (DOCS / "modes.md").read_text()
    options = {field.name for kind in (Rule, Rules, Full, Selective, Targets, Budget) for field in fields(kind)}
    wanted = {*ops.GROUPS, *TARGETS, *options} - {"_", "names", "listed"}  # these are written without their names
    assert [name for name in sorted(wanted) if f"`{name}`" not in text and f"{name}=" not in text] == []
    assert [mode.__name__ for mode in get_args(Mode) if f"`{mode.__name__}(" not in text] == []
