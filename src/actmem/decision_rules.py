"""Say which operators of which layers a decision is for, without torch.

NOTE [ rules ]
A rule is a decision (`save`, `recompute` or `offload`) with selectors, all of which must match. Rules are tried in
order and the first match wins. The last rule has no selectors: it is the default, and it is always written out, so that
nothing is decided implicitly. A rule that follows one without selectors could never match, and is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from actmem.decisions import Decision
from actmem.errors import ModeError
from actmem.ops import GROUPS, INPUT, did_you_mean, is_glob, packet_name, split_selector
from actmem.settings import STRICT

__all__ = [
    "OWN",
    "TARGETS",
    "Rule",
    "Slices",
    "check_rules",
    "check_target",
    "unknown_decision",
]

if TYPE_CHECKING:
    DecisionLike = Decision | Literal["save", "recompute", "offload"]
    """A decision as it may be written. A rule has the member of `Decision`."""
else:
    DecisionLike = Decision  # what pydantic reads from a file


TARGETS = (
    *("norm", "attn_proj", "attention", "mlp", "mla_up_proj"),
    *("routed_experts", "shared_experts", "router", "linear_attn", "moe_act"),
)
"""The names of the parts of a block, whatever the model itself calls them."""


OWN = "own:"
"""Prefix of the name of a target that a model declares itself."""


@dataclass(frozen=True)
class Slices:
    """A selection of integers, written as Python slices: `0:24`, `::2`, `3`, `-2:` or `0,4:6`.

    >>> slices = Slices.parse("0,4:6,-2:")
    >>> [index for index in range(10) if slices.contains(index, length=10)]
    [0, 4, 5, 8, 9]
    """

    text: str
    """The text as it was written."""
    parts: tuple[tuple[int | None, int | None, int], ...]
    """One (start, stop, step) for each comma-separated part; a single index is a slice of one."""

    @classmethod
    def parse(cls, text: str, *, name: str = "layers") -> "Slices":
        """Read slice text; `name` is the field it came from, for the error message.

        Raises:
            ModeError: if the text is not a Python slice, or cannot select anything.
        """
        return cls(text, tuple(_slice_part(part, text, name) for part in text.split(",")))

    @property
    def has_negative(self) -> bool:
        """Whether a bound counts from the end, so that the length must be known."""
        return any(bound is not None and bound < 0 for start, stop, _ in self.parts for bound in (start, stop))

    def contains(self, index: int, length: int | None = None) -> bool:
        """Return whether an index is selected, out of `length` (which negative bounds need)."""
        if length is None:
            if self.has_negative:
                raise ValueError(f"{self.text!r} counts from the end, so contains() needs a length")
            length = index + 1
        return any(index in range(*slice(*part).indices(length)) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Rule:
    """A decision, and selectors for the values that it applies to. See NOTE [ rules ].

    >>> Rule("offload", module="*.mlp", op="matmul", layers="0:24")
    Rule('offload', layers='0:24', module='*.mlp', op='matmul')
    >>> Rule("save").is_default
    True

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    decision: DecisionLike
    """What to do: `save`, `recompute` or `offload`."""
    _: KW_ONLY
    layers: str | None = None
    """Python slice over the index of the block: `0:24`, `::2`, `3`, `-2:`, `0,4:6`."""
    layer_type: str | None = None
    """Glob over the model's own name for the type of a block: `sliding_attention`, `linear_*`."""
    module: str | None = None
    """Glob over full module paths (`*.mlp`); a match covers everything below that module."""
    target: str | None = None
    """Name of a part of the block, such as `norm` or `mlp`; `own:NAME` for one that the model itself declares."""
    op: str | None = None
    """Operator group (`matmul`), operator (`aten.mm`), glob (`aten.*mm`), or several (`aten.mm|aten.linear`). `input`
    selects the inputs of a block."""
    nth: str | None = None
    """Python slice (`::2`) over the operators that match the other selectors, counted from 0 in each block call."""
    min_bytes: int = 0
    """Match only values of at least this many bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decision", _check_decision(self.decision))
        for name in ("layers", "layer_type", "module", "target", "op", "nth"):
            _check_text(name, getattr(self, name))
        if self.layers is not None:
            Slices.parse(self.layers, name="layers")
        if self.nth is not None and Slices.parse(self.nth, name="nth").has_negative:
            raise ModeError(
                f"nth = {self.nth!r} counts from the end, but the number of matching operators is not known while a "
                "block runs. Expected bounds of 0 or more, such as nth='::2' or nth='0:4'."
            )
        if self.target is not None:
            check_target(self.target)
        if self.op is not None:
            _check_op(self.op)
        if self.module is not None and "::" in self.module:
            raise ModeError(
                f"module = {self.module!r} is not a module path. Expected a glob, such as '*.mlp'; the operator goes "
                "into op."
            )
        _check_min_bytes(self.min_bytes)

    @property
    def selectors(self) -> dict[str, str | int]:
        """The selectors that are set, by name, in the order of the fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "decision"}
        return {name: value for name, value in values.items() if value not in (None, 0)}

    @property
    def is_default(self) -> bool:
        """Whether the rule has no selectors and so matches every value."""
        return not self.selectors

    def __repr__(self) -> str:
        arguments = [repr(self.decision), *(f"{name}={value!r}" for name, value in self.selectors.items())]
        return f"Rule({', '.join(arguments)})"


def check_rules(rules: object, *, name: str = "rules") -> tuple[Rule, ...]:
    """Return the rules as a tuple if they are a valid list: only rules, a default at the end and nowhere else.

    Raises:
        ModeError: otherwise.
    """
    if isinstance(rules, Rule):
        raise ModeError(f"{name} = {rules!r} is one rule. Expected a list: write [{rules!r}].")
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise ModeError(f"{name} = {rules!r} is not a list. Expected a list of Rule, such as [Rule('save')].")
    entries = cast(Sequence[object], rules)
    if not entries:
        raise ModeError(f"{name} is empty. Expected at least the default rule: write [Rule('save')].")
    checked: list[Rule] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Rule):
            raise ModeError(f"{name}[{index}] = {entry!r} is not a Rule. Expected a Rule, such as Rule('save').")
        checked.append(entry)
    for index, rule in enumerate(checked[:-1]):
        if rule.is_default:
            raise ModeError(
                f"{name}[{index}] = {rule!r} has no selectors, so {name}[{index + 1}] = {checked[index + 1]!r} can "
                "never match: the first match wins. Move the default to the end, or give it a selector."
            )
    if not checked[-1].is_default:
        raise ModeError(
            f"{name}[{len(checked) - 1}] = {checked[-1]!r} is the last rule, but it has selectors, so some values "
            "would have no decision. Expected a default at the end: add Rule('save') or Rule('recompute')."
        )
    return tuple(checked)


def check_target(name: str) -> None:
    """Accept the name of a target: one of `TARGETS`, or `own:NAME` for one that a model declares itself.

    Raises:
        ModeError: otherwise.
    """
    if name in TARGETS or (name.startswith(OWN) and name.removeprefix(OWN).isidentifier()):
        return
    raise ModeError(
        f"target {name!r} is not known. Permitted: {', '.join(TARGETS)}; or {OWN}NAME, for a part that the model "
        f"names in its attribute actmem_targets.{did_you_mean(name, TARGETS)}"
    )


_SLICE_PART = re.compile(r"(-?\d{1,9})|(-?\d{1,9})?:(-?\d{1,9})?(?::(\d{1,9})?)?", re.ASCII)


def _slice_part(part: str, text: str, name: str) -> tuple[int | None, int | None, int]:
    examples = "'0:24', '::2', '3', '-2:' or '0,4:6'" if name == "layers" else "'0:24', '::2', '3' or '0,4:6'"
    expected = f"Expected a Python slice, such as {examples}."
    found = f"{name} = {text!r}"
    match = _SLICE_PART.fullmatch(part.strip())
    if match is None:
        where = "" if part == text else f" (at {part.strip()!r})" if part.strip() else " (a part is empty)"
        raise ModeError(f"{found} is not a slice{where}. {expected}")
    single, *bounds = match.groups()
    if single is not None:
        index = int(single)
        return index, None if index == -1 else index + 1, 1
    start, stop, step = (None if bound is None else int(bound) for bound in bounds)
    if step == 0:
        raise ModeError(f"{found} has a step of 0. Expected a step of at least 1, such as '::2'.")
    both_counted_from_one_end = stop is not None and (start is None or (start < 0) == (stop < 0))
    if both_counted_from_one_end and (stop == 0 or (start is not None and stop is not None and stop <= start)):
        raise ModeError(f"{found} selects nothing: {part.strip()!r} ends where it starts, or before. {expected}")
    return start, stop, step or 1


def _check_decision(decision: object) -> Decision:
    if decision not in list(Decision):
        raise ModeError(unknown_decision(decision))
    return Decision(decision)


def unknown_decision(decision: object) -> str:
    """Say that a decision is not known, and which are."""
    hint = did_you_mean(decision, list(Decision)) if isinstance(decision, str) else ""
    return f"decision = {decision!r} is not known. Permitted: {', '.join(Decision)}.{hint}"


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        hint = f" Write {name}={str(value)!r}." if isinstance(value, int) and name in ("layers", "nth") else ""
        raise ModeError(f"{name} = {value!r} is not permitted. Expected a string, or None for no restriction.{hint}")
    if isinstance(value, str) and not value.strip():
        raise ModeError(
            f"{name} = {value!r} is empty. Expected a string, or None for no restriction: leave {name} out."
        )


def _check_op(op: str) -> None:
    module, rest = split_selector(op)
    if module is not None:
        raise ModeError(f"op = {op!r} names a module too. Write module={module!r}, op={rest!r}.")
    if "|" in op:
        for part in op.split("|"):
            _check_op(part)
        return
    if op in GROUPS or op == INPUT or is_glob(op):
        return
    if "." not in op and "::" not in op:
        raise ModeError(
            f"op = {op!r} is not an operator group. Permitted: {', '.join(GROUPS)}; an operator, such as 'aten.mm'; or "
            f"a glob, such as 'aten.*mm'.{did_you_mean(op, [*GROUPS, *_known_operators()])}"
        )
    try:
        packet_name(op)
    except ValueError as error:
        raise ModeError(f"op: {error}") from None


def _known_operators() -> list[str]:
    return sorted(member for group in GROUPS.values() for member in group if not is_glob(member))


def _check_min_bytes(value: object) -> None:
    if type(value) is not int or value < 0:
        raise ModeError(
            f"min_bytes = {value!r} is not a number of bytes. Expected an int of 0 or more, such as 1048576."
        )
