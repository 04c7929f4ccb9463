"""Refuse operators and modules that a rule names and that torch, or the model, does not have."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from actmem import ops
from actmem.decision_rules import Rule
from actmem.engine import WHOLE_CALLS
from actmem.errors import ModeError
from actmem.torchcompat import all_operator_names, named_modules

__all__ = ["check_module_glob", "check_operator"]


def check_operator(selector: str) -> None:
    """Refuse a selector that names no operator that torch knows."""
    if selector in ops.GROUPS or selector == ops.INPUT or selector.startswith(WHOLE_CALLS):
        return
    known = all_operator_names() | ops.HIGHER_ORDER
    for part in selector.split("|"):
        if part in ops.GROUPS:
            continue
        packet = None if ops.is_glob(part) else ops.packet_name(part)[0]
        if not any(ops.matches(part, name, "default") or name == packet for name in known):
            hint = ops.did_you_mean(part, sorted({*known, *ops.GROUPS}))
            raise ModeError(
                f"op = {part!r} is not an operator, group or glob that torch knows.{hint} Groups: "
                f"{', '.join(sorted(ops.GROUPS))}."
            )


def check_module_glob(rule: Rule, model: nn.Module) -> None:
    """Refuse a glob that matches no module of the model."""
    assert rule.module is not None
    paths = [path for path, _ in named_modules(model) if path]
    if not any(fnmatchcase(path, rule.module) for path in paths):
        wanted = rule.module.strip("*.")
        names = paths if "." in wanted else list(dict.fromkeys(p.rpartition(".")[2] for p in paths))
        hint = ops.did_you_mean(wanted, names)
        if wanted in names:  # it is there, but not at the root
            hint = f" Did you mean {wanted if '.' in wanted else f'*.{wanted}'!r}?"
        example = max(paths, key=lambda path: path.count("."))
        raise ModeError(
            f"module = {rule.module!r} matches no module of this model.{hint} A glob is matched against whole "
            f"paths, such as {example!r}: module='*{example.rpartition('.')[1]}{example.rpartition('.')[2]}'."
        )
