"""Hold a plan: rules, and what they were made for; read and write it as a file, without torch."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from actmem.decision_rules import Rule, check_rules, unknown_decision
from actmem.decisions import Decision
from actmem.errors import ModeError, PlanError
from actmem.ops import did_you_mean
from actmem.plan_files import parsed, read_text, write_text
from actmem.settings import STRICT, Offload, OptimizerState, Split, StepInBackward, check_stepping
from actmem.shapes import TensorShape, shapes_as_text

if TYPE_CHECKING:
    from pydantic import ValidationError


PLAN_VERSION = 1
"""The version of plan files that this actmem reads and writes."""


@dataclass(frozen=True)
class FitRecord:
    """What the planner expects of a plan, and what it assumed."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    peak_bytes: int
    """Peak memory: the most bytes alive at any moment of a step."""
    budget_bytes: int
    """Limit on the peak: the budget less the headroom."""
    step_time_ratio: float
    """Time of the forward and backward pass, relative to saving everything."""
    replayed_flops: int
    bound: float
    """Lower bound on the step time ratio of any plan within the budget."""
    gap: float
    """Upper bound on how much smaller the step time ratio of the best plan could be."""
    device: str
    """The device whose speed was assumed."""
    optimizer: str
    """The optimizer that is counted, and the dtype of its state; "none" if none is counted."""
    shapes: tuple[TensorShape, ...]
    """The tensors of the example that takes the most, and the documents in it, where it is packed."""
    examples: tuple[tuple[TensorShape, ...], ...] = ()
    """The same of other examples that the plan holds for."""
    calls: tuple[tuple[TensorShape, ...], ...] = ()
    """The tensors of each different call of the model, where the plan is for a step of the user's own loop."""
    is_step: bool = False
    """The plan is for a step of the user's own loop, `step=`, not for an example."""
    peak_at: str = ""
    """The operator at the peak, and its block."""
    peak_words: tuple[str, ...] = ()
    """Where the peak is, what it consists of, and what would lower it: one sentence each."""
    headroom: float = 0.0
    """The fraction of the budget that stays free."""
    microbatches: int = 1
    shard: int = 1
    """The number of ranks that parameters, gradients and optimizer state are sharded over."""
    routing: str = "none"
    """How tokens were assumed to be spread over the experts: "balanced", "worst", "quantile 0.99", "measured", "real";
    "any" if the peak holds for every spread, "none" without routing."""
    experts: str = ""
    """Of a rank that exchanges tokens with others: how many rows it receives, and which rank receives the most."""
    modules: str = ""
    """A digest of the module classes and of which parameters are trained; "" if it is not known."""
    time_limit_hit: bool = False
    """Whether `time_limit` stopped the search: a faster or idle machine may find another plan."""
    compiled: str = ""
    """What is compiled, and by which backend; "" if the plan is for blocks in eager."""
    reserved_bytes: int | None = None
    """On a card: the most that torch's caching allocator takes from the driver, simulated over several steps."""
    outside_bytes: int = 0
    """On a card: what lies outside torch. With the reserved bytes it is within the budget."""
    allocator: str = ""
    """On a card: what PYTORCH_CUDA_ALLOC_CONF was assumed to be; "" for torch's defaults."""
    curve: tuple[int, ...] = ()
    """On a card: what is allocated over a step, in a hundred parts that each request equally many bytes."""
    assumptions: tuple[str, ...] = ()
    """What is not known of the card's kernels."""
    notes: tuple[str, ...] = ()
    """What differs here from what was assumed."""


@dataclass(frozen=True)
class Plan:
    """The rules of a mode, resolved for one model.

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
    """A digest of the structure of the model that the plan was made for."""
    mode: str
    """The mode that the plan was made from, as it was written."""
    offload: Offload | None = None
    """Where and how to offload, if a rule offloads."""
    exact: bool = False
    """Hold exactly what the rules save, even where a value computed from it is smaller. The planner sets this."""
    collectives: Literal["save", "recompute"] = "save"
    """Whether the rules decide over what was gathered or reduced too: `recompute` communicates again where they say so,
    on every rank alike. Otherwise it is held, as for `apply`."""
    predicted: FitRecord | None = None
    """The planner's prediction, if the planner made the plan."""
    split: Split | None = None
    """What is computed in pieces of tokens, if anything is."""
    step_in_backward: StepInBackward | None = None
    """Whether each parameter is stepped in the backward pass."""
    optimizer_state: OptimizerState | None = None
    """Where the state of the optimizer is kept, if elsewhere."""
    version: int = PLAN_VERSION
    """The version of the plan format."""

    @property
    def bitwise(self) -> bool:
        """Whether losses and gradients are bitwise those of plain training. A split adds sums in another order."""
        return self.split is None or self.split.exact

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(check_rules(self.rules)))
        object.__setattr__(self, "blocks", _check_blocks(self.blocks))
        for name in ("fingerprint", "mode"):
            if not isinstance(getattr(self, name), str):
                raise ModeError(f"{name} = {getattr(self, name)!r} is not permitted. Expected a string.")
        if self.offload is not None and not isinstance(self.offload, Offload):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"offload = {self.offload!r} is not an Offload. Write Offload(to='host') or Offload(to='disk')."
            )
        if self.collectives not in ("save", "recompute"):
            raise ModeError(f"collectives = {self.collectives!r} is not known. Expected 'save' or 'recompute'.")
        if self.split is not None and not isinstance(self.split, Split):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(f"split = {self.split!r} is not a Split. Write Split(loss=16).")
        if self.step_in_backward is not None or self.optimizer_state is not None:
            check_stepping(self.step_in_backward, self.optimizer_state)
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
        if self.collectives == "recompute":
            lines.append("collectives: run again where the rules recompute, on every rank of a group alike")
        if self.split is not None:
            order = "the same" if self.split.exact else "another"
            lines.append(f"in pieces: {self.split!r}; sums over tokens are added in {order} order")
        if self.step_in_backward is not None:
            lines.append("optimizer: each parameter is stepped in the backward pass, and its gradient dropped")
        if self.optimizer_state is not None:
            lines.append(f"optimizer state: {self.optimizer_state!r}; fetched for the step, and written back")
        if self.predicted is not None:
            lines += _foretold(self.predicted)
            if [rule.decision for rule in self.rules] == [Decision.SAVE]:
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
        if self.collectives != "save":
            document["collectives"] = self.collectives
        if self.split is not None:
            document["split"] = asdict(self.split)
        if self.step_in_backward is not None:
            document["step_in_backward"] = asdict(self.step_in_backward)
        if self.optimizer_state is not None:
            document["optimizer_state"] = asdict(self.optimizer_state)
        if self.predicted is not None:
            p = self.predicted
            document["predicted"] = {**asdict(p), **shapes_as_text(p.shapes, p.calls)}
            document["predicted"]["examples"] = [[str(s) for s in shapes] for shapes in p.examples]
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        return _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan from JSON text.

        Raises:
            PlanError: if the text is not a plan, or a plan that this version of actmem cannot read.
        """
        return plan_from(parsed(text, source="the plan text", suffix=".json"), "the plan text")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a `.json` file, replacing an existing one.

        Raises:
            PlanError: if the name does not end in `.json`, or the file cannot be written.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan from a `.json` or `.toml` file.

        Raises:
            PlanError: if there is no such file, or it is not a plan that this version of actmem can read.
        """
        text, suffix = read_text(path, "applied.plan.save(...)")
        return plan_from(parsed(text, source=repr(str(path)), suffix=suffix), repr(str(path)))


def _foretold(p: FitRecord) -> list[str]:
    peak, budget = p.peak_bytes / 2**20, p.budget_bytes / 2**20
    bound = f"lower bound within the budget {p.bound:.4f}x (gap {100 * p.gap:.2f} %)"
    lines = [
        f"predicted peak: {peak:,.1f} MiB of {budget:,.1f} MiB, at {p.peak_at or 'no operator'}",
        *(f"  {sentence}" for sentence in p.peak_words),
        f"predicted step: {p.step_time_ratio:.4f}x of saving everything on {p.device}; {bound}",
        f"assumed: {', '.join(map(str, p.shapes)) or 'no tensors'}; optimizer {p.optimizer}",
    ]
    if p.examples:
        lines[-1] += f"; and for {len(p.examples)} other example{'s' if len(p.examples) > 1 else ''}"
    if p.is_step:
        lines[-1] += "; a step of your own loop"
    if p.microbatches > 1:
        lines[-1] += f"; {p.microbatches} microbatches"
    if p.shard > 1:
        lines[-1] += f"; sharded over {p.shard} ranks"
    if p.routing not in ("none", "real"):
        lines[-1] += f"; routing {p.routing}"
    if p.headroom:
        lines[-1] += f"; {100 * p.headroom:g} % of the budget left free"
    if p.experts:
        lines.append(f"experts: {p.experts}")
    if p.compiled:
        lines.append(
            f"compiled: {p.compiled}; the bound is for plans that its partitioner can carry out, and the peak that of "
            "its graphs"
        )
    if p.reserved_bytes is not None:
        reserved, outside = p.reserved_bytes / 2**20, p.outside_bytes / 2**20
        lines.insert(
            1,
            f"  on the card: {reserved:,.1f} MiB reserved by torch (allocator: {p.allocator or 'the defaults'}), "
            f"{outside:,.1f} MiB outside torch",
        )
    if p.assumptions:
        lines.append(f"not known: {'; '.join(p.assumptions)}")
    lines += [f"note: {text}" for text in p.notes]
    if p.time_limit_hit:
        lines.append("stopped by time_limit before the search was done: another run may find another plan")
    return lines


# --- the fields of a rule ---------------------------------------------------------------------------------------------


def _check_blocks(blocks: object) -> tuple[str, ...]:
    entries = cast(Sequence[object], blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else None
    if entries is None or not all(isinstance(entry, str) for entry in entries):
        raise ModeError(f"blocks = {blocks!r} is not a list of module paths. Expected e.g. ['layers.0', 'layers.1'].")
    return tuple(cast(Sequence[str], entries))


_NUMBERS = re.compile(r"\[[\d,\s]+\]")
"""A list of numbers, which is written on one line."""

# --- plan files -------------------------------------------------------------------------------------------------------


def plan_from(document: object, source: str) -> Plan:
    """Read a plan from what a file holds.

    Raises:
        PlanError: if it is not a plan that this version of actmem can read. `source` says where it is from.
    """
    _check_is_plan(document, source)
    from pydantic import TypeAdapter, ValidationError  # slow to import, and only needed to read a file

    try:
        # By way of JSON, where a list is accepted for a tuple and everything else is strict. TOML dates become strings.
        return TypeAdapter(Plan).validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        raise PlanError(f"{source}: {_explain(error)}") from error


def _check_is_plan(document: object, source: str) -> None:
    keys = ", ".join(_keys(Plan))
    if not isinstance(document, dict):
        raise PlanError(
            f"{source} is not a plan: it holds a {type(document).__name__}, not a table with the keys {keys}."
        )
    found = cast(dict[str, object], document)
    if "parts" in found:
        raise PlanError(
            f"{source} is the plan of a job, which has a part for each rank. Write "
            "actmem.JobPlan.load(path).for_rank(rank), and apply that."
        )
    if not {"version", "rules"} & found.keys():
        names = ", ".join(map(repr, list(found)[:5])) or "none"
        raise PlanError(f"{source} is not a plan: its keys are {names}. Expected {keys}.")
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
    """Describe the first error that pydantic found, in our own words."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    parts = {"offload": Offload, "predicted": FitRecord, "split": Split}
    keys = _keys(Plan if len(first["loc"]) < 2 else parts.get(str(first["loc"][0]), Rule))
    name = str(first["loc"][-1]) if first["loc"] else ""
    match first["type"]:
        case "unexpected_keyword_argument":
            return f"{where} is not a known key. Permitted: {', '.join(keys)}.{did_you_mean(name, keys)}"
        case "enum":  # the decision; worded as the rule itself words it
            return f"{where}: {unknown_decision(first['input'])}"
        case "missing":
            if "predicted" in first["loc"][:1]:
                return f"{where} is missing. A prediction has {', '.join(_required(FitRecord))}."
            return f"{where} is missing. Every plan has {', '.join(_required(Plan))}; every rule has a decision."
        case "value_error":  # one of our own checks
            message = str(cast(dict[str, Any], first)["ctx"]["error"])
            return f"{where}: {message}" if where else message
        case _:
            return f"{where} = {first['input']!r} is not permitted: {first['msg'].lower()}."


def _keys(kind: type[Rule | Plan | Offload | FitRecord | Split]) -> list[str]:
    return [field.name for field in fields(kind)]


def _required(kind: type[Plan | FitRecord]) -> list[str]:
    return [field.name for field in fields(kind) if field.default is MISSING]
