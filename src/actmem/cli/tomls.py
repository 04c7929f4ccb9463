"""Write a plan to a file, as JSON or as TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from actmem.errors import PlanError
from actmem.plan import Plan

__all__ = ["save_plan", "toml_of"]


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan in the form that the name of the file says. `Plan.load` reads both.

    Raises:
        PlanError: the file cannot be written.
    """
    if path.suffix != ".toml":
        plan.save(path)
        return
    try:
        path.write_text(toml_of(json.loads(plan.to_json())), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the plan file {str(path)!r}: {error.strerror}. Name another file.") from error


def toml_of(document: dict[str, Any]) -> str:
    """Write the document of a plan as TOML; what is None is left out.

    >>> print(toml_of({"version": 1, "blocks": ["a"], "rules": [{"decision": "save"}], "offload": {"to": "disk"}}))
    version = 1
    blocks = [
      "a",
    ]
    <BLANKLINE>
    [offload]
    to = "disk"
    <BLANKLINE>
    [[rules]]
    decision = "save"
    <BLANKLINE>
    """
    lines: list[str] = []
    tables: list[str] = []
    for key, value in document.items():
        if isinstance(value, dict):
            tables += ["", f"[{key}]", *_pairs(cast(dict[str, Any], value))]
        elif key != "rules":
            lines += _pairs({key: value})
    for rule in cast(list[dict[str, Any]], document["rules"]):
        tables += ["", "[[rules]]", *_pairs(rule)]
    return "\n".join([*lines, *tables]) + "\n"


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(["[", *(f"  {_value(entry)}," for entry in cast(list[Any], value)), "]"])
    return json.dumps(value, ensure_ascii=False)  # texts, numbers, true and false are written alike in both
