"""docs/doctor.md lists what there is, and its examples run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import actmem
from tests.diagnosis.tables import causes_table, checks_table
from tests.zoo import ZOO

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def between(name: str) -> str:
    return PAGE.partition(f"<!-- {name}: begin -->\n")[2].partition(f"\n<!-- {name}: end -->")[0]


def test_the_page_lists_every_cause_and_every_check() -> None:
    assert between("causes") == causes_table()
    assert between("checks") == checks_table()


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_an_example_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = ZOO["qwen3"]
    model = case.build()
    given: dict[str, Any] = {"actmem": actmem, "torch": torch, "model": model, "batch": case.batch(model)}
    exec(code, given)
    assert capsys.readouterr().out.strip()
