"""Refuse rules that name what torch or the model does not have, or that can match nothing."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from actmem import ops
from actmem.decision_rules import Rule, Slices
from actmem.engine import WHOLE_CALLS
from actmem.errors import ModeError
from actmem.structure import Block
from actmem.torchcompat import all_operator_names, named_modules

__all__ = ["check_rules"]


def _check_operator(selector: str) -> None:
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


def _check_module_glob(rule: Rule, model: nn.Module) -> None:
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


def check_rules(
    rules: tuple[Rule, ...],
    blocks: tuple[Block, ...],
    every_role: Sequence[dict[str, tuple[str, ...]]],
    layer_types: Sequence[str | None],
    model: nn.Module,
) -> None:
    """Refuse rules that name what does not exist, or that can match nothing in this model.

    A rule that names an operator in addition to a target or a layer type only narrows: it may find nothing, and the
    report says so.
    """
    for op in dict.fromkeys(rule.op for rule in rules if rule.op is not None):
        _check_operator(op)
    for rule in rules:
        if rule.module is not None:
            _check_module_glob(rule, model)
        layers = None if rule.layers is None else Slices.parse(rule.layers)
        chosen = [b for b in blocks if layers is None or layers.contains(b.index, len(blocks))]
        if not chosen:
            raise ModeError(
                f"layers = {rule.layers!r} selects none of the {len(blocks)} blocks (0 to {len(blocks) - 1}). "
                f"Name some of these, as in layers='0:{len(blocks)}'."
            )
        if rule.op is not None:
            continue
        types = sorted({kind for b in chosen if (kind := layer_types[b.index]) is not None})
        if rule.layer_type is not None and not any(fnmatchcase(kind, rule.layer_type) for kind in types):
            raise ModeError(
                f"layer_type = {rule.layer_type!r} matches no block of this model. Types that would match: "
                f"{', '.join(types) or 'none, this model does not tell its layers apart by type'}."
                f"{ops.did_you_mean(rule.layer_type, types)}"
            )
        if rule.target is not None and not any(rule.target in every_role[b.index] for b in chosen):
            present = sorted({name for b in chosen for name in every_role[b.index]})
            raise ModeError(
                f"target {rule.target!r} matches no module in the blocks of this model. "
                f"Targets that would match: {', '.join(present) or 'none'}."
            )
