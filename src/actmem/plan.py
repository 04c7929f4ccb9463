"""Hold the resolved decision: rules, and the plan that carries them, without torch.

NOTE [ rules ]
A rule is a decision (`save`, `recompute` or `offload`) with selectors. All selectors that are given must match. Rules
are tried in order and the first match wins. The last rule has no selectors: it is the default, and it is always written
out, so that nothing is decided by what is left unsaid. A rule after one without selectors could never match: refused.
"""

import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from actmem.errors import ModeError, PlanError
from actmem.ops import GROUPS, INPUT, did_you_mean, is_glob, packet_name, split_selector
from actmem.settings import STRICT, Offload

if TYPE_CHECKING:
    from pydantic import ValidationError

Decision = Literal["save", "recompute", "offload"]
DECISIONS: tuple[Decision, ...] = ("save", "recompute", "offload")

TARGETS = (
    *("norm", "attn_proj", "attention", "mlp", "mla_up_proj"),
    *("routed_experts", "shared_experts", "router", "linear_attn", "moe_act"),
)
"""The parts of a block that have a name, whatever the model calls them."""

OWN = "own:"
"""What the name of a target starts with that a model declares for itself."""

PLAN_VERSION = 1
"""The version of plan files that this actmem reads and writes."""


@dataclass(frozen=True)
class Slices:
    """Select integers by python-slice text, such as `0:24`, `::2`, `3`, `-2:` or `0,4:6`.

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
            ModeError: if the text is no slice text, or can select nothing.
        """
        return cls(text, tuple(_slice_part(part, text, name) for part in text.split(",")))

    @property
    def has_negative(self) -> bool:
        """Whether a bound counts from the end, so that the length must be known."""
        return any(bound is not None and bound < 0 for start, stop, _ in self.parts for bound in (start, stop))

    def contains(self, index: int, length: int | None = None) -> bool:
        """Tell whether an index is selected, out of `length` (which negative bounds need)."""
        if length is None:
            if self.has_negative:
                raise ValueError(f"{self.text!r} counts from the end, so contains() needs a length")
            length = index + 1
        return any(index in range(*slice(*part).indices(length)) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Rule:
    """Decide what happens to the values that its selectors match. See NOTE [ rules ].

    >>> Rule("offload", module="*.mlp", op="matmul", layers="0:24")
    Rule('offload', layers='0:24', module='*.mlp', op='matmul')
    >>> Rule("save").is_default
    True

    Raises:
        ModeError: if a field has a value that is not permitted.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    decision: Decision
    """What to do: `save`, `recompute` or `offload`."""
    _: KW_ONLY
    layers: str | None = None
    """Python-slice text over the index of the block: `0:24`, `::2`, `3`, `-2:`, `0,4:6`."""
    layer_type: str | None = None
    """Glob over what the model calls the type of a block: `sliding_attention`, `linear_*`."""
    module: str | None = None
    """Glob over full module paths (`*.mlp`); a match covers everything below that module."""
    target: str | None = None
    """Name of a part of the block, such as `norm` or `mlp`; `own:NAME` for one that the model itself declares."""
    op: str | None = None
    """Operator group (`matmul`), operator (`aten.mm`), glob (`aten.*mm`), or several (`aten.mm|aten.linear`). `input`
    is what a block is given."""
    nth: str | None = None
    """Slice text (`::2`) over the count, from 0 in each block call, of operators that match the other selectors."""
    min_bytes: int = 0
    """Match only values of at least this many bytes."""

    def __post_init__(self) -> None:
        _check_decision(self.decision)
        for name in ("layers", "layer_type", "module", "target", "op", "nth"):
            _check_text(name, getattr(self, name))
        if self.layers is not None:
            Slices.parse(self.layers, name="layers")
        if self.nth is not None and Slices.parse(self.nth, name="nth").has_negative:
            raise ModeError(
                f"nth = {self.nth!r} counts from the end, but how many operators will match is not known while a block "
                "runs. Expected bounds of 0 or more, such as nth='::2' or nth='0:4'."
            )
        if self.target is not None:
            check_target(self.target)
        if self.op is not None:
            _check_op(self.op)
        if self.module is not None and "::" in self.module:
            raise ModeError(
                f"module = {self.module!r} is no module path. Expected a glob, such as '*.mlp'; op takes the operator."
            )
        _check_min_bytes(self.min_bytes)

    @property
    def selectors(self) -> dict[str, str | int]:
        """The selectors that are given, by name, in the order of the fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "decision"}
        return {name: value for name, value in values.items() if value not in (None, 0)}

    @property
    def is_default(self) -> bool:
        """Whether the rule has no selectors, so that it matches every value."""
        return not self.selectors

    def __repr__(self) -> str:
        arguments = [repr(self.decision), *(f"{name}={value!r}" for name, value in self.selectors.items())]
        return f"Rule({', '.join(arguments)})"


@dataclass(frozen=True)
class Predicted:
    """What a planner expects of a plan, and what it took for granted.

    Raises:
        ModeError: never by itself; a plan file with another field is refused.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    peak_bytes: int
    """The most bytes that are alive at any moment of a step."""
    budget_bytes: int
    """What they may be at most: the budget, less the headroom."""
    step_time_ratio: float
    """Seconds of forward and backward, over those with everything saved."""
    replayed_flops: int
    bound: float
    """No plan within the budget has a smaller step time ratio than this."""
    gap: float
    """How much smaller the step time ratio of the best plan could be, at most."""
    device: str
    """Whose speed was taken."""
    optimizer: str
    """The optimizer that is counted, and the dtype of its state; "none" if none is."""
    shapes: tuple[str, ...]
    """The tensors of the example, such as `input_ids int64 [1, 8192]`."""
    peak_at: str = ""
    """Which operator, and in which block."""
    peak_words: tuple[str, ...] = ()
    """Where the peak is, what it consists of, and what would lower it: a sentence each."""
    headroom: float = 0.0
    """The part of the budget that is left to the allocator."""
    microbatches: int = 1
    shard: int = 1
    """Over how many ranks parameters, gradients and optimizer state are divided."""
    routing: str = "none"
    """How many tokens an expert was taken to get: "balanced", "worst", "real", or "none" where nothing is routed."""
    modules: str = ""
    """A digest of the classes of the modules and of which parameters are trained; "" if it is not known."""


@dataclass(frozen=True)
class Plan:
    """Carry the rules of a mode, resolved for one model.

    >>> plan = Plan([Rule("recompute", layers="::2"), Rule("save")], ["layers.0", "layers.1"], "9f2c", "Full(every=2, first=0)")
    >>> Plan.from_json(plan.to_json()) == plan
    True
    >>> print(plan)
    plan of Full(every=2, first=0)
    2 blocks: layers.0 ... layers.1
    model fingerprint: 9f2c
      1  recompute  layers=::2
      2  save       everything else

    Raises:
        ModeError: if the rules do not end in a default, or a field has a value that is not permitted.
    """  # noqa: E501  # a doctest input does not wrap

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    rules: tuple[Rule, ...]
    """The rules, tried in order; the last is the default."""
    blocks: tuple[str, ...]
    """Module paths of the blocks, in order; `layers` selects among them."""
    fingerprint: str
    """What the plan was made for: a digest of the model's structure."""
    mode: str
    """The mode that the plan came from, as it was written."""
    offload: Offload | None = None
    """Where to and how, if a rule offloads."""
    exact: bool = False
    """What the rules save is held as they say, even where something made from it is smaller; so a planner wants it."""
    predicted: Predicted | None = None
    """What a planner expects of it, if one made it."""
    version: int = PLAN_VERSION
    """The version of the plan's form."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(check_rules(self.rules)))
        object.__setattr__(self, "blocks", _check_blocks(self.blocks))
        for name in ("fingerprint", "mode"):
            if not isinstance(getattr(self, name), str):
                raise ModeError(f"{name} = {getattr(self, name)!r} is no text. Expected a string.")
        if self.offload is not None and not isinstance(self.offload, Offload):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"offload = {self.offload!r} is no Offload. Write Offload(to='host') or Offload(to='disk')."
            )
        if type(self.version) is not int or self.version != PLAN_VERSION:
            raise ModeError(f"version = {self.version!r} is not known. Expected {PLAN_VERSION}.")

    def __str__(self) -> str:
        named = [path or "the model itself" for path in self.blocks]
        ends = named if len(named) < 2 else (named[0], "...", named[-1])
        lines = [
            f"plan of {self.mode}",
            f"{len(self.blocks)} block{'' if len(self.blocks) == 1 else 's'}: {' '.join(ends) or 'none'}",
            f"model fingerprint: {self.fingerprint}",
        ]
        if self.offload is not None:
            lines.append(f"offloading: {self.offload!r}")
        if self.predicted is not None:
            lines += _foretold(self.predicted)
            if [rule.decision for rule in self.rules] == ["save"]:
                lines.append("the budget is more than the step needs: everything is saved, as plain training does")
        only = "everything" if len(self.rules) == 1 else "everything else"
        for number, rule in enumerate(self.rules, start=1):
            selectors = "  ".join(f"{name}={value}" for name, value in rule.selectors.items())
            lines.append(f"{number:>3}  {rule.decision:<9}  {selectors or only}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Write the plan as JSON: the same plan always gives the same text."""
        document: dict[str, object] = {
            "version": self.version,
            "mode": self.mode,
            "fingerprint": self.fingerprint,
            "blocks": list(self.blocks),
            "rules": [{"decision": rule.decision, **rule.selectors} for rule in self.rules],
        }
        if self.offload is not None:
            document["offload"] = asdict(self.offload)
        if self.exact:
            document["exact"] = True
        if self.predicted is not None:
            document["predicted"] = asdict(self.predicted)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan from JSON text.

        Raises:
            PlanError: if the text is no plan, or a plan that this version of actmem cannot read.
        """
        return _plan_from_text(text, source="the plan text", suffix=".json")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a `.json` file, over what was there.

        Raises:
            PlanError: if the name does not end in `.json`, or the file cannot be written.
        """
        path = Path(path)
        if path.suffix != ".json":
            raise PlanError(
                f"cannot save a plan as {str(path)!r}: a plan is written as JSON. "
                f"Write plan.save({str(path.with_suffix('.json'))!r})."
            )
        try:
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"cannot write the plan file {str(path)!r}: {error.strerror}. Name a file in a folder that exists."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan from a `.json` or `.toml` file.

        Raises:
            PlanError: if there is no such file, it is no plan, or a plan that this version of actmem cannot read.
        """
        path = Path(path)
        if path.suffix not in _READERS:
            raise PlanError(f"cannot tell the form of {str(path)!r} from its name. Expected a .json or .toml file.")
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise PlanError(
                f"there is no plan file {str(path)!r}. Check the path, or write one with applied.plan.save(...)."
            ) from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{str(path)!r} is no text: byte {error.start} is not UTF-8. {_WRITE_AGAIN}") from error
        except OSError as error:
            raise PlanError(f"cannot read the plan file {str(path)!r}: {error.strerror}.") from error
        return _plan_from_text(text, source=repr(str(path)), suffix=path.suffix)


def _foretold(p: Predicted) -> list[str]:
    peak, budget = p.peak_bytes / 2**20, p.budget_bytes / 2**20
    bound = f"no plan within the budget is below {p.bound:.4f}x (gap {100 * p.gap:.2f} %)"
    lines = [
        f"predicted peak: {peak:,.1f} MiB of {budget:,.1f} MiB, at {p.peak_at or 'no operator'}",
        *(f"  {sentence}" for sentence in p.peak_words),
        f"predicted step: {p.step_time_ratio:.4f}x of saving everything on {p.device}; {bound}",
        f"taken for granted: {', '.join(p.shapes) or 'no tensors'}; optimizer {p.optimizer}",
    ]
    if p.microbatches > 1:
        lines[-1] += f"; {p.microbatches} microbatches"
    if p.shard > 1:
        lines[-1] += f"; sharded over {p.shard} ranks"
    if p.routing not in ("none", "real"):
        lines[-1] += f"; routing {p.routing}"
    if p.headroom:
        lines[-1] += f"; {100 * p.headroom:g} % of the budget left to the allocator"
    return lines


def check_rules(rules: object, *, name: str = "rules") -> tuple[Rule, ...]:
    """Return the rules as a tuple if they are a valid list: only rules, a default at the end and nowhere else.

    Raises:
        ModeError: otherwise.
    """
    if isinstance(rules, Rule):
        raise ModeError(f"{name} = {rules!r} is one rule. Expected a list: write [{rules!r}].")
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise ModeError(f"{name} = {rules!r} is no list. Expected a list of Rule, such as [Rule('save')].")
    entries = cast(Sequence[object], rules)
    if not entries:
        raise ModeError(f"{name} is empty. Expected at least the default rule: write [Rule('save')].")
    checked: list[Rule] = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Rule):
            raise ModeError(f"{name}[{index}] = {entry!r} is no Rule. Expected a Rule, such as Rule('save').")
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


# --- the fields of a rule ---------------------------------------------------------------------------------------------

_SLICE_PART = re.compile(r"(-?\d{1,9})|(-?\d{1,9})?:(-?\d{1,9})?(?::(\d{1,9})?)?", re.ASCII)


def _slice_part(part: str, text: str, name: str) -> tuple[int | None, int | None, int]:
    examples = "'0:24', '::2', '3', '-2:' or '0,4:6'" if name == "layers" else "'0:24', '::2', '3' or '0,4:6'"
    expected = f"Expected python-slice text, such as {examples}."
    found = f"{name} = {text!r}"
    match = _SLICE_PART.fullmatch(part.strip())
    if match is None:
        where = "" if part == text else f" (at {part.strip()!r})" if part.strip() else " (a part is empty)"
        raise ModeError(f"{found} is no slice text{where}. {expected}")
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


def _check_decision(decision: object) -> None:
    if decision not in DECISIONS:
        raise ModeError(_unknown_decision(decision))


def _unknown_decision(decision: object) -> str:
    hint = did_you_mean(decision, DECISIONS) if isinstance(decision, str) else ""
    return f"decision = {decision!r} is not known. Permitted: {', '.join(DECISIONS)}.{hint}"


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        hint = f" Write {name}={str(value)!r}." if isinstance(value, int) and name in ("layers", "nth") else ""
        raise ModeError(f"{name} = {value!r} is no text. Expected a string, or None for no restriction.{hint}")
    if isinstance(value, str) and not value.strip():
        raise ModeError(f"{name} = {value!r} is empty. Expected a text, or None for no restriction: leave {name} out.")


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
            f"op = {op!r} is no operator group. Permitted: {', '.join(GROUPS)}; an operator, such as 'aten.mm'; or a "
            f"glob, such as 'aten.*mm'.{did_you_mean(op, [*GROUPS, *_known_operators()])}"
        )
    try:
        packet_name(op)
    except ValueError as error:
        raise ModeError(f"op: {error}") from None


def _known_operators() -> list[str]:
    return sorted(member for group in GROUPS.values() for member in group if not is_glob(member))


def _check_min_bytes(value: object) -> None:
    if type(value) is not int or value < 0:
        raise ModeError(f"min_bytes = {value!r} is no number of bytes. Expected an int of 0 or more, such as 1048576.")


def _check_blocks(blocks: object) -> tuple[str, ...]:
    entries = cast(Sequence[object], blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else None
    if entries is None or not all(isinstance(entry, str) for entry in entries):
        raise ModeError(f"blocks = {blocks!r} is no list of module paths. Expected such as ['layers.0', 'layers.1'].")
    return tuple(cast(Sequence[str], entries))


# --- plan files -------------------------------------------------------------------------------------------------------

_WRITE_AGAIN = "Write the plan again with plan.save(...)."


def _plan_from_text(text: str, *, source: str, suffix: str) -> Plan:
    try:
        document = _READERS[suffix](text)
    except _DuplicateKeyError as error:
        raise PlanError(f"{source} has the key {error.args[0]!r} twice in one place. Keep one of them.") from None
    except RecursionError:
        raise PlanError(f"{source} is nested too deeply to be a plan. {_WRITE_AGAIN}") from None
    except ValueError as error:  # so are the errors of both readers
        where = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise PlanError(
            f"{source} cannot be read as {suffix[1:].upper()}: {where}. It may be cut off. {_WRITE_AGAIN}"
        ) from error
    _check_is_plan(document, source)
    from pydantic import TypeAdapter, ValidationError  # a third of a second that only reading a file is worth

    try:
        # By way of JSON, where a list may stand for a tuple and all else is strict. A TOML date becomes a text.
        return TypeAdapter(Plan).validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        raise PlanError(f"{source}: {_explain(error)}") from error


def _check_is_plan(document: object, source: str) -> None:
    keys = ", ".join(_keys(Plan))
    if not isinstance(document, dict):
        raise PlanError(f"{source} is no plan: it holds a {type(document).__name__}, not a table with the keys {keys}.")
    found = cast(dict[str, object], document)
    if not {"version", "rules"} & found.keys():
        names = ", ".join(map(repr, list(found)[:5])) or "none"
        raise PlanError(f"{source} is no plan: its keys are {names}. Expected {keys}.")
    if "version" not in found:
        raise PlanError(f"{source}: version is missing. Expected version = {PLAN_VERSION}.")
    version = found["version"]
    if type(version) is not int or version < 1:
        raise PlanError(f"{source}: version = {version!r} is not known. Expected {PLAN_VERSION}.")
    if version > PLAN_VERSION:
        raise PlanError(
            f"{source} has version {version}, which is newer than this actmem can read ({PLAN_VERSION}). "
            "Update actmem, or make the plan again with this one."
        )


def _explain(error: "ValidationError") -> str:
    """Say in our own words what pydantic found first."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    parts = {"offload": Offload, "predicted": Predicted}
    keys = _keys(Plan if len(first["loc"]) < 2 else parts.get(str(first["loc"][0]), Rule))
    name = str(first["loc"][-1]) if first["loc"] else ""
    match first["type"]:
        case "unexpected_keyword_argument":
            return f"{where} is not a known key. Permitted: {', '.join(keys)}.{did_you_mean(name, keys)}"
        case "literal_error":  # the decision; say it as the rule itself does
            return f"{where}: {_unknown_decision(first['input'])}"
        case "missing":
            if "predicted" in first["loc"][:1]:
                return f"{where} is missing. A prediction has {', '.join(_required(Predicted))}."
            return f"{where} is missing. Every plan has {', '.join(_required(Plan))}; every rule has a decision."
        case "value_error":  # one of our own checks
            message = str(cast(dict[str, Any], first)["ctx"]["error"])
            return f"{where}: {message}" if where else message
        case _:
            return f"{where} = {first['input']!r} is not permitted: {first['msg'].lower()}."


def _keys(kind: type[Rule | Plan | Offload | Predicted]) -> list[str]:
    return [field.name for field in fields(kind)]


def _required(kind: type[Plan | Predicted]) -> list[str]:
    return [field.name for field in fields(kind) if field.default is MISSING]


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return table


def _read_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unique)


def _read_toml(text: str) -> object:
    return tomllib.loads(text)


_READERS = {".json": _read_json, ".toml": _read_toml}
