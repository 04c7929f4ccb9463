"""Summarise the observations of every block in one report: group values, fold identical layers, add up totals."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from actmem import ops
from actmem.decisions import Decision, Reason
from actmem.engine import REASONS, Observation, ObservedOperator
from actmem.errors import ModeError
from actmem.offloading import TransferCounts
from actmem.plan import Plan
from actmem.reporting.compiled import CompiledGraph
from actmem.reporting.compiled_parts import CompiledPart, list_compiled_parts
from actmem.units import size

__all__ = ["KindReport", "Report", "ReportRow", "summarise"]


@dataclass(frozen=True)
class ReportRow:
    """Values of one block with the same origin and the same decision."""

    module: str
    """Path of the module inside the block that produced them; "" is the block's own forward."""
    op: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Bytes of one such value."""
    count: int
    decision: str
    """`save`, `recompute`, `offload`, `input` (came from outside), `copy` (of a tensor that this call of the block or a
    later one overwrote), or `never` (cannot be replayed, so it is held)."""
    why: str
    """The reason for `never` and `copy`; otherwise empty."""
    opaque: bool
    """Whether it is held because it depends on a kernel that the tape cannot see."""
    by_autograd: bool
    """Whether plain autograd would have held it. If not, it is held because a replay starts from it."""
    replayed: int
    """How many times a replay recomputed them in the observed step."""
    collective: bool = False
    """Whether a collective produced it, or it is held because it depends on a collective that is not run again."""


_OVERWRITTEN = "overwritten before backward, by this call of the block or a later one; a replay starts from it"


class Counted(NamedTuple):
    """The bytes of one value of one block, for totals: a storage shared by several blocks counts once."""

    storage: int
    """Identifies the storage; equal for values that share it, in all reports of one step."""
    num_bytes: int
    decision: str
    by_autograd: bool


@dataclass(frozen=True)
class KindReport:
    """Blocks with the same structure and the same observations."""

    kind: str
    paths: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    """Every value that autograd saved or that is held; other values cost nothing and are not listed."""

    @property
    def num_blocks(self) -> int:
        """How many blocks this represents."""
        return len(self.paths)

    def bytes_of(self, *decisions: str, by_autograd: bool | None = None) -> int:
        """Add up the bytes of one block's values under the given decisions."""
        return sum(
            r.num_bytes * r.count
            for r in self.rows
            if r.decision in decisions and (by_autograd is None or r.by_autograd is by_autograd)
        )


@dataclass(frozen=True)
class Report:
    """What a plan did in the observed step.

    Bytes are per step, over all blocks, without parameters. A tensor shared by several blocks, such as a mask or a
    rotary table, is listed with each of them and counts once in the totals.
    """

    plan: Plan
    kinds: tuple[KindReport, ...]
    unobserved: tuple[str, ...]
    """Blocks that have not run a training step yet."""
    unmatched: tuple[str, ...]
    """Rules that decided nothing in this model."""
    notes: tuple[str, ...]
    compiled: tuple[CompiledGraph, ...] = ()
    """The graphs that torch.compile made of the blocks that it compiled."""
    checkpointed: tuple[str, ...] = ()
    """Blocks that torch's own checkpoint ran, in eager mode."""
    moved: TransferCounts | None = None
    """Bytes offloaded and fetched back over all steps so far; None if the plan offloads nothing."""
    counted: tuple[Counted, ...] = field(default=(), repr=False)
    """Every value in the rows of `kinds`, block by block."""
    compiled_parts: tuple[CompiledPart, ...] = ()
    """The modules whose compiled graphs the tape recorded as single operators."""

    def __add__(self, other: Report) -> Report:
        """Combine the reports of two plans applied to different parts of one model; shared storages count once.

        The combined report shows the first report's plan.
        """
        moved = [m for m in (self.moved, other.moved) if m is not None]
        if len(moved) == 2:
            raise ModeError(
                "both plans offload, each with its own ledger. Read the two reports separately: report.moved."
            )
        return Report(
            self.plan,
            self.kinds + other.kinds,
            self.unobserved + other.unobserved,
            self.unmatched + other.unmatched,
            tuple(dict.fromkeys(self.notes + other.notes)),
            self.compiled + other.compiled,
            self.checkpointed + other.checkpointed,
            moved[0] if moved else None,
            self.counted + other.counted,
            self.compiled_parts + other.compiled_parts,
        )

    def _total(self, *decisions: str, by_autograd: bool | None = None) -> int:
        return sum(self._storages(*decisions, by_autograd=by_autograd).values())

    def _storages(self, *decisions: str, by_autograd: bool | None = None) -> dict[int, int]:
        return {
            c.storage: c.num_bytes
            for c in self.counted
            if c.decision in decisions and (by_autograd is None or c.by_autograd is by_autograd)
        }

    @property
    def plain_bytes(self) -> int:
        """Bytes that plain autograd holds for backward inside the blocks."""
        return self._total(*Decision, "input", "never", by_autograd=True)

    @property
    def held_bytes(self) -> int:
        """Bytes held for backward inside the blocks under this plan."""
        return self._total(*_HELD)

    @property
    def shared_bytes(self) -> int:
        """Bytes shared between blocks: how much the rows of all blocks count more than once."""
        return sum(k.num_blocks * k.bytes_of(*_HELD) for k in self.kinds) - self.held_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that the plan saves."""
        return self._total(Decision.SAVE)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that plain autograd holds and this plan does not."""
        held = self._storages(*_HELD)  # another block may hold it, as its input
        return sum(n for storage, n in self._storages(Decision.RECOMPUTE).items() if storage not in held)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes offloaded in the observed step."""
        return self._total(Decision.OFFLOAD)

    @property
    def never_replayed_bytes(self) -> int:
        """Bytes held although the plan says recompute, because they cannot be replayed."""
        return self._total("never")

    @property
    def opaque_bytes(self) -> dict[str, int]:
        """Bytes held because of kernels that the tape cannot see, by module inside the block."""
        found: Counter[str] = Counter()
        for kind in self.kinds:
            for row in kind.rows:
                if row.opaque:
                    found[row.module or "."] += kind.num_blocks * row.num_bytes * row.count
        return dict(found)

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Bytes that collectives produced, or that are held because collectives are not run again, by decision.

        "never" and "save" are held. "recompute" is communicated again in the backward pass, and so is "replayed", an
        intermediate that other replays need.
        """
        found: Counter[str] = Counter()
        for kind in self.kinds:
            for row in kind.rows:
                if row.collective:
                    found[row.decision] += kind.num_blocks * row.num_bytes * row.count
        return dict(found)

    @property
    def num_replayed(self) -> int:
        """How many values were recomputed by a replay, over all blocks."""
        return sum(k.num_blocks * r.replayed for k in self.kinds for r in k.rows)

    def __str__(self) -> str:
        from actmem.reporting.report_text import render

        return render(self)


def summarise(
    plan: Plan,
    observed: Iterable[tuple[str, str, Observation | None]],
    *,
    matched: set[int],
    notes: Sequence[str] = (),
    compiled: tuple[CompiledGraph, ...] = (),
    checkpointed: Sequence[str] = (),
    moved: TransferCounts | None = None,
) -> Report:
    """Fold observations into a report. They are (path, kind, observation) tuples in the order of the blocks."""
    folded: dict[tuple[str, tuple[_Row, ...]], list[str]] = {}
    counted: list[Counted] = []
    unobserved: list[str] = []
    taped: list[Observation] = []
    elsewhere = {*checkpointed, *(path for graph in compiled for path in (*graph.blocks, *graph.shared_with))}
    for path, kind, observation in observed:
        if observation is None:
            if path not in elsewhere:
                unobserved.append(path)
        else:
            listed = _listed(observation.rows)
            folded.setdefault((kind, _rows(listed)), []).append(path)
            counted += _counted(listed)
            taped.append(observation)
    kinds = tuple(
        KindReport(kind, tuple(paths), tuple(ReportRow(*row) for row in rows)) for (kind, rows), paths in folded.items()
    )
    silent = (
        tuple(repr(r) for i, r in enumerate(plan.rules) if i not in matched and not r.is_default)
        if (kinds or elsewhere) and not unobserved
        else ()
    )
    report = Report(
        plan,
        kinds,
        tuple(unobserved),
        silent,
        (),
        compiled,
        tuple(checkpointed),
        moved,
        tuple(counted),
        list_compiled_parts(taped),
    )
    return replace(report, notes=(*_held_notes(report), *notes))


def _held_notes(report: Report) -> Iterator[str]:
    """Say what is held because nobody can run it again, by module."""
    for module, num_bytes in report.opaque_bytes.items():
        yield (
            f"held because {module} runs a kernel that the tape cannot see: {size(num_bytes)}. If the function that "
            "launches it is pure, declare it replayable: fn = actmem.replayable(fn)"
        )
    graphs: Counter[tuple[str, str]] = Counter()
    for kind in report.kinds:
        for row in kind.rows:
            if row.decision == "never" and not row.opaque and row.op in ops.GROUPS["compiled"]:
                graphs[row.module or ".", row.why] += kind.num_blocks * row.num_bytes * row.count
    for (module, why), num_bytes in graphs.items():
        yield f"held because a compiled graph in {module} is not run again ({why}): {size(num_bytes)}."


_HELD = (Decision.SAVE, "input", "copy", "never")
_OPAQUE = (Reason.OPAQUE, Reason.UNSEEN, Reason.UNINITIALISED)


_Listed = list[tuple[ObservedOperator, str]]
_What = tuple[str, str, tuple[int, ...], str, int]
_Fate = tuple[str, str, bool, bool]
_Row = tuple[str, str, tuple[int, ...], str, int, int, str, str, bool, bool, int, bool]
"""The fields of a `ReportRow`, which is made only once for all blocks that are alike."""


def _listed(rows: list[ObservedOperator]) -> _Listed:
    """Pair values with decisions, without what costs nothing: state, and values neither saved, held nor replayed."""
    return [(r, _decision(r)) for r in rows if (r.kind != "state" or r.copied) and (r.saved or r.held or r.replayed)]


def _rows(listed: _Listed) -> tuple[_Row, ...]:
    groups: dict[tuple[_What, _Fate, bool], list[int]] = {}
    for r, decision in listed:
        why, opaque, collective = "", False, _is_collective(r.op)
        if decision == "never":
            cause = r.cause or r.why
            why, opaque, collective = _reason(r), cause in _OPAQUE, collective or cause is Reason.COLLECTIVE
        elif decision == "copy":
            why = _OVERWRITTEN
        what = r.module, r.op, r.shape, r.dtype, r.num_bytes
        groups.setdefault((what, (decision, why, opaque, r.saved), collective), []).append(r.replayed)
    return tuple(
        (*what, len(replayed), *fate, sum(replayed), collective)
        for (what, fate, collective), replayed in groups.items()
    )


@functools.cache
def _is_collective(op: str) -> bool:
    packet, _, overload = op.rpartition(".")
    return ops.matches("collective", packet, overload)


_ALONE = itertools.count(-1, -1)
"""Unique numbers for values that do not share their storage."""


def _counted(listed: _Listed) -> Iterator[Counted]:
    for r, decision in listed:
        shared = r.storage is not None and not r.copied  # a copy is never shared
        yield Counted(id(r.storage) if shared else next(_ALONE), r.num_bytes, decision, r.saved)


def _reason(row: ObservedOperator) -> str:
    why = row.cause if row.kind == "unseen" or row.why is None else row.why
    return "" if why is None else REASONS.get(why, why)


def _decision(row: ObservedOperator) -> str:
    if row.offloaded:
        return Decision.OFFLOAD
    if not row.held:
        return Decision.RECOMPUTE if row.saved else "replayed"
    if row.copied and (row.kind != "made" or row.why is Reason.EXTERNAL):
        return "copy"
    if row.kind == "input" and row.why in (Reason.EXTERNAL, Reason.SAVED):
        return "input"
    kept = row.why is Reason.SAVED or (row.why is Reason.BARRIER and row.cause in (Reason.SAVED, Reason.CUT))
    return Decision.SAVE if kept else "never"
