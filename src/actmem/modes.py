"""Say what a user asks for: one small frozen class for each mode, without torch.

Every mode but `FromPlan` becomes rules through `.rules()`; see NOTE [ rules ] in plan.py. Modes hold plain data only,
can be compared, and print as the line that makes them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from actmem.errors import ModeError
from actmem.ops import split_selector
from actmem.plan import TARGETS, Rule, check_rules, unknown_target

__all__ = [
    "TARGETS",
    "EverySecond",
    "FromPlan",
    "Full",
    "Mode",
    "Rules",
    "SaveEverything",
    "Selective",
    "Targets",
    "every_second",
]


@dataclass(frozen=True)
class SaveEverything:
    """Save every activation, as plain training does.

    >>> SaveEverything().rules()
    (Rule('save'),)
    """

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return (Rule("save"),)


@dataclass(frozen=True, kw_only=True)
class Full:
    """Recompute everything in layers first, first + every, first + 2 * every, ...; save all in the others.

    >>> Full(every=2).rules()
    (Rule('recompute', layers='0::2'), Rule('save'))

    Raises:
        ModeError: if `every` is below 1 or `first` below 0.
    """

    every: int = 1
    """Distance between the layers to recompute: 1 takes every layer, 2 every second."""
    first: int = 0
    """Index of the first layer to recompute."""

    def __post_init__(self) -> None:
        _check_count("every", self.every, least=1, meaning="1 recomputes every layer, 2 every second")
        _check_count("first", self.first, least=0, meaning="0 starts at the first layer")

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        if (self.every, self.first) == (1, 0):
            return (Rule("recompute"),)
        return Rule("recompute", layers=f"{self.first}::{self.every}"), Rule("save")


@dataclass(frozen=True, repr=False)
class EverySecond:
    """Stand for the 1st, 3rd, 5th, ... operator that a selector matches in each block call. Made by `every_second`."""

    op: str
    """Operator group, operator or glob, with `MODULE_GLOB::` in front where only some modules are meant."""

    def __repr__(self) -> str:
        return f"every_second({self.op!r})"


def every_second(group: str) -> EverySecond:
    """Name the 1st, 3rd, 5th, ... operator of a group, in forward order, counted anew in each block call.

    >>> Selective(save=[every_second("matmul")]).rules()
    (Rule('save', op='matmul', nth='::2'), Rule('recompute'))
    """
    if not isinstance(cast(object, group), str):
        raise ModeError(f"every_second({group!r}) names no operator. Expected a text: write every_second('matmul').")
    _selector_rule(group, found=f"every_second({group!r})")
    return EverySecond(group)


@dataclass(frozen=True, repr=False, kw_only=True)
class Selective:
    """Save the results of the named operators and recompute all else.

    >>> Selective(save=["attention", every_second("matmul"), "*.mlp::aten.mm"])
    Selective(save=['attention', every_second('matmul'), '*.mlp::aten.mm'])
    >>> Selective(save=["attention", "*.mlp::aten.mm"]).rules()
    (Rule('save', op='attention'), Rule('save', module='*.mlp', op='aten.mm'), Rule('recompute'))

    Raises:
        ModeError: if `save` is empty, or an entry is not a selector.
    """

    save: Sequence[str | EverySecond]
    """What to save: operator groups, operators, globs, `MODULE_GLOB::operator`, or `every_second(...)` of any."""

    def __post_init__(self) -> None:
        example = "save=['attention', every_second('matmul')]"
        entries = _entries("save", self.save, example=example)
        for index, entry in enumerate(entries):
            if not isinstance(entry, (str, EverySecond)) or not entry:
                raise ModeError(
                    f"save[{index}] = {entry!r} is no selector. Expected an operator group, an operator, a glob or "
                    f"every_second(...): write {example}."
                )
            _selector_rule(entry, found=f"save[{index}] = {entry!r}")
        object.__setattr__(self, "save", entries)

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return *(_selector_rule(entry, found=repr(entry)) for entry in self.save), Rule("recompute")

    def __repr__(self) -> str:
        return f"Selective(save={list(self.save)!r})"


@dataclass(frozen=True, repr=False)
class Targets:
    """Recompute the named parts of every block and save all else.

    >>> Targets(["norm", "mlp"]).rules()
    (Rule('recompute', target='norm'), Rule('recompute', target='mlp'), Rule('save'))

    Raises:
        ModeError: if no part is named, or one is not known.
    """

    names: Sequence[str]
    """The parts to recompute: norm, attn_proj, attention, mlp, mla_up_proj, routed_experts, shared_experts, router,
    linear_attn or moe_act."""

    def __post_init__(self) -> None:
        entries = _entries("targets", self.names, example="Targets(['norm'])")
        for index, entry in enumerate(entries):
            if not isinstance(entry, str):
                raise ModeError(
                    f"targets[{index}] = {entry!r} is no text. Permitted: {', '.join(TARGETS)}: Targets(['norm'])."
                )
            if entry not in TARGETS:
                raise ModeError(unknown_target(entry))
        object.__setattr__(self, "names", entries)

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return *(Rule("recompute", target=name) for name in self.names), Rule("save")

    def __repr__(self) -> str:
        return f"Targets({list(self.names)!r})"


@dataclass(frozen=True, repr=False)
class Rules:
    """Decide by your own rules: the first that matches wins, the last has no selectors and is the default.

    >>> Rules([Rule("recompute", target="norm"), Rule("save")])
    Rules([Rule('recompute', target='norm'), Rule('save')])

    Raises:
        ModeError: if there is no rule, the last is no default, or a rule can never match.
    """

    listed: Sequence[Rule]
    """The rules, in the order in which they are tried."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "listed", check_rules(self.listed))

    def rules(self) -> tuple[Rule, ...]:
        """Resolve to rules."""
        return tuple(self.listed)

    def __repr__(self) -> str:
        return f"Rules({list(self.listed)!r})"


@dataclass(frozen=True, repr=False)
class FromPlan:
    """Do what a plan file says.

    >>> FromPlan("plan.json")
    FromPlan('plan.json')

    Raises:
        ModeError: if the path is no path.
    """

    path: str | os.PathLike[str]
    """The plan file, `.json` or `.toml`."""

    def __post_init__(self) -> None:
        path = cast(object, self.path)
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(cast(str, path)):
            raise ModeError(f"path = {path!r} is no path. Expected a plan file: write FromPlan('plan.json').")
        object.__setattr__(self, "path", os.fspath(cast(str, path)))

    def __repr__(self) -> str:
        return f"FromPlan({self.path!r})"


Mode = SaveEverything | Full | Selective | Targets | Rules | FromPlan
"""What `apply` takes, besides a Plan."""


def _check_count(name: str, value: object, *, least: int, meaning: str) -> None:
    if type(value) is not int or value < least:
        raise ModeError(
            f"{name} = {value!r} is not permitted. Expected an int of {least} or more ({meaning}): "
            f"write Full({name}={least})."
        )


def _entries(name: str, value: object, *, example: str) -> tuple[object, ...]:
    """Return a non-empty list as a tuple; a lone text is the usual slip."""
    if isinstance(value, (str, EverySecond)):
        raise ModeError(f"{name} = {value!r} is one entry, not a list. Write [{value!r}].")
    if not isinstance(value, Sequence):
        raise ModeError(f"{name} = {value!r} is no list. Expected a list: write {example}.")
    entries = tuple(cast(Sequence[object], value))
    if not entries:
        raise ModeError(
            f"{name} is empty. Expected at least one entry: write {example}. To recompute all, write Full(); "
            "to save all, write SaveEverything()."
        )
    return entries


def _selector_rule(entry: str | EverySecond, *, found: str) -> Rule:
    """Turn an entry of `save` into its rule; `found` opens the error message."""
    text, nth = (entry.op, "::2") if isinstance(entry, EverySecond) else (entry, None)
    module, op = split_selector(text)
    try:
        return Rule("save", module=module, op=op, nth=nth)
    except ModeError as error:
        raise ModeError(f"{found}: {error}") from None
