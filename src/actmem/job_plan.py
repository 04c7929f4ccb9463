"""Hold the plans of a parallel job, one for each stage, and what is expected of them together. Without torch."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast

from actmem.errors import ModeError, PlanError
from actmem.ops import did_you_mean
from actmem.plan import Plan, plan_from
from actmem.plan_files import parsed, read_text, write_text
from actmem.settings import STRICT

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["JobPlan", "JobRecord", "RankPlan"]

JOB_PLAN_VERSION = 1
"""The version of job plan files that this actmem reads and writes."""


@dataclass(frozen=True)
class JobRecord:
    """What the planner expects of a job, and what it assumed. See NOTE [ The clock of a job ]."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    step_seconds: float
    """One step, until the slowest rank is done."""
    plain_seconds: float
    """The same if every rank saved everything, whether or not that fits."""
    bound_seconds: float
    """Lower bound on the step under any plans within the budget."""
    budget_bytes: int
    """The budget of each rank, less the headroom."""
    device: str
    """The device whose speed was assumed."""

    @property
    def step_time_ratio(self) -> float:
        """Time of a step, relative to saving everything."""
        return self.step_seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def bound(self) -> float:
        """Lower bound on that ratio of any plans within the budget."""
        return self.bound_seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def gap(self) -> float:
        """Upper bound on how much smaller the ratio of the best plans could be."""
        return self.step_time_ratio - self.bound


@dataclass(frozen=True)
class RankPlan:
    """The plan of the ranks that run the same part of a model."""

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    ranks: tuple[int, ...]
    """The ranks that were planned for."""
    stages: tuple[int, ...]
    """The stages of a pipeline that they run; () if there is no pipeline."""
    plan: Plan
    busy: float
    """The part of a step in which they compute or communicate; the rest is waiting."""
    microbatches_in_flight: int = 0
    """The most microbatches that wait for their backward pass, counted for each stage."""
    waiting_for_weights: int = 0
    """Where the backward pass is split: the most that wait only for the gradients of weights."""

    @property
    def name(self) -> str:
        """What it is the plan of.

        >>> from actmem.decision_rules import Rule
        >>> RankPlan((0, 4), (0, 7), Plan([Rule("save")], [], "", ""), 1.0).name
        'ranks 0 and 4, stages 0 and 7'
        """
        named = [_numbered("rank", self.ranks)]
        if self.stages:
            named.append(_numbered("stage", self.stages))
        return ", ".join(named)


@dataclass(frozen=True)
class JobPlan:
    """One plan for each stage of a pipeline, or one for all ranks where there is none. `actmem.fit_job` makes it.

    >>> from actmem.decision_rules import Rule
    >>> plan = Plan([Rule("recompute")], ["layers.0", "layers.1"], "9f2c", "Full()")
    >>> job = JobPlan((RankPlan((0,), (0,), plan, 0.8, 2), RankPlan((1,), (1,), plan, 0.9, 1)), world=2)
    >>> JobPlan.from_json(job.to_json()) == job
    True
    >>> job.for_rank(1) == plan
    True
    >>> print(job)
    plan of a job of 2 ranks
    rank 0, stage 0: 2 microbatches in flight, busy for 80 % of the step
      plan of Full()
      2 blocks: layers.0 ... layers.1
      model fingerprint: 9f2c
        1  recompute  everything
    rank 1, stage 1: 1 microbatch in flight, busy for 90 % of the step
      plan of Full()
      2 blocks: layers.0 ... layers.1
      model fingerprint: 9f2c
        1  recompute  everything

    Raises:
        ModeError: if a rank or a stage has two plans.
    """

    __pydantic_config__: ClassVar[dict[str, bool | str]] = STRICT

    parts: tuple[RankPlan, ...]
    """The plans, in the order of the stages."""
    world: int
    """How many ranks the job has."""
    predicted: JobRecord | None = None
    """The planner's prediction."""
    version: int = JOB_PLAN_VERSION
    """The version of the format."""

    def __post_init__(self) -> None:
        for what in ("ranks", "stages"):
            every = [number for part in self.parts for number in cast("tuple[int, ...]", getattr(part, what))]
            twice = sorted({number for number in every if every.count(number) > 1})
            if twice:
                raise ModeError(f"{what} {twice} are in two parts of the job's plan. Each has one plan.")

    def __str__(self) -> str:
        lines = [f"plan of a job of {self.world} rank{'' if self.world == 1 else 's'}"]
        if (p := self.predicted) is not None:
            step = f"{p.step_seconds:.4g} s, {p.step_time_ratio:.4f}x of saving everything on {p.device}"
            lines += [
                f"predicted step: {step}; lower bound within the budget {p.bound:.4f}x (gap {100 * p.gap:.2f} %)",
                f"budget of each rank: {p.budget_bytes / 2**20:,.1f} MiB",
            ]
        for part in self.parts:
            words = [f"busy for {100 * part.busy:.0f} % of the step"]
            if part.microbatches_in_flight:
                number = part.microbatches_in_flight
                words.insert(0, f"{number} microbatch{'' if number == 1 else 'es'} in flight")
            if part.waiting_for_weights:
                words.insert(1, f"{part.waiting_for_weights} waiting for weights")
            lines.append(f"{part.name}: {', '.join(words)}")
            lines += [f"  {line}" for line in str(part.plan).splitlines()]
        return "\n".join(lines)

    def for_rank(self, rank: int) -> Plan:
        """Return the plan of a rank, for `apply`. Without a pipeline, all ranks have the same.

        Raises:
            PlanError: the job has no such rank, or it was not planned for.
        """
        if type(rank) is not int or not 0 <= rank < self.world:
            raise PlanError(
                f"rank = {rank!r} is not in this job of {self.world} ranks: they are 0 to {self.world - 1}."
            )
        for part in self.parts:
            if rank in part.ranks or not part.stages:
                return part.plan
        known = sorted(rank for part in self.parts for rank in part.ranks)
        raise PlanError(
            f"rank {rank} was not planned for by itself: the job's plan has ranks {_listed(known)}. Take the plan of "
            f"the stage that it runs, job.for_stage(stage), or plan with actmem.fit_job(..., ranks=[..., {rank}])."
        )

    def for_stage(self, stage: int) -> Plan:
        """Return the plan of the ranks that run a stage of the pipeline, for `apply`.

        Raises:
            PlanError: the pipeline has no such stage, or there is none.
        """
        for part in self.parts:
            if stage in part.stages:
                return part.plan
        known = sorted(stage for part in self.parts for stage in part.stages)
        if not known:
            raise PlanError("the job has no pipeline, and one plan for all ranks. Write job.for_rank(rank).")
        raise PlanError(f"stage = {stage!r} is not in the job's plan, which has the stages {_listed(known)}.")

    def to_json(self) -> str:
        """Write the plan as JSON: the same plan always gives the same text."""
        parts = [
            {**{f.name: getattr(part, f.name) for f in fields(part)}, "plan": json.loads(part.plan.to_json())}
            for part in self.parts
        ]
        document: dict[str, object] = {"version": self.version, "world": self.world}
        if self.predicted is not None:
            document["predicted"] = asdict(self.predicted)
        return json.dumps(document | {"parts": parts}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "JobPlan":
        """Read a job's plan from JSON text.

        Raises:
            PlanError: if the text is not a job's plan, or one that this version of actmem cannot read.
        """
        return _job_from(parsed(text, source="the plan text", suffix=".json"), "the plan text")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a `.json` file, replacing an existing one.

        Raises:
            PlanError: if the name does not end in `.json`, or the file cannot be written.
        """
        write_text(path, self.to_json(), "job")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "JobPlan":
        """Read a job's plan from a `.json` or `.toml` file.

        Raises:
            PlanError: if there is no such file, or it is not a job's plan that this version of actmem can read.
        """
        text, suffix = read_text(path, "actmem.fit_job(...).save(...)")
        return _job_from(parsed(text, source=repr(str(path)), suffix=suffix), repr(str(path)))


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'' if len(numbers) == 1 else 's'} {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    """Write numbers as text.

    >>> _listed([0]), _listed([0, 4]), _listed(range(64))
    ('0', '0 and 4', '0, 1, 2, ..., 62 and 63')
    """
    named = [str(n) for n in numbers]
    if len(named) > 8:
        named = [*named[:3], "...", *named[-2:]]
    return " and ".join(part for part in (", ".join(named[:-1]), *named[-1:]) if part)


def _job_from(document: object, source: str) -> JobPlan:
    if not isinstance(document, dict) or not isinstance(cast("dict[str, object]", document).get("parts"), list):
        hint = ""
        if isinstance(document, dict) and "rules" in document:
            hint = " It is a plan for one model: read it with actmem.Plan.load(path)."
        raise PlanError(f"{source} is not the plan of a job: it has no list of parts.{hint}")
    found = cast("dict[str, Any]", document)
    version = found.get("version")
    if version != JOB_PLAN_VERSION:
        raise PlanError(
            f"{source}: version = {version!r} is not known to this actmem, which reads {JOB_PLAN_VERSION}. Make the "
            "plan again with actmem.fit_job(...)."
        )
    for nth, part in enumerate(found["parts"]):
        if isinstance(part, dict) and "plan" in part:
            plan_from(cast("object", part["plan"]), f"{source}, parts[{nth}].plan")  # says best what is wrong with it
    from pydantic import TypeAdapter, ValidationError  # slow to import, and only needed to read a file

    try:
        return TypeAdapter(JobPlan).validate_json(json.dumps(found, default=str))
    except ValidationError as error:
        raise PlanError(f"{source}: {_explain(error)}") from error


def _explain(error: "ValidationError") -> str:
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    kind = {1: JobPlan, 2: JobRecord}.get(len(first["loc"]), RankPlan)
    keys = [field.name for field in fields(kind)]
    match first["type"]:
        case "unexpected_keyword_argument":
            return f"{where} is not a known key. Permitted: {', '.join(keys)}.{did_you_mean(where, keys)}"
        case "missing":
            return f"{where} is missing. It is one of {', '.join(keys)}."
        case "value_error":  # one of our own checks
            return str(cast("dict[str, Any]", first)["ctx"]["error"])
        case _:
            return f"{where} = {first['input']!r} is not permitted: {first['msg'].lower()}."
