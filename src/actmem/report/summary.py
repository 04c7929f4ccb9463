"""From the observations of every block to one report: values grouped, identical layers folded, totals."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from actmem import ops
from actmem.engine.observing import Observation, Row
from actmem.engine.operators import REASONS
from actmem.errors import ModeError
from actmem.offloading import Ledger
from actmem.plan import Plan
from actmem.report.compiled import CompiledGraph

__all__ = ["KindReport", "Report", "ReportRow", "summarise"]


@dataclass(frozen=True)
class ReportRow:
    """Values of one block that were made alike and treated alike."""

    module: str
    """Path of the module inside the block that made them; "" is the block's own forward."""
    op: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Bytes of one such value."""
    count: int
    decision: str
    """`save`, `recompute`, `offload`, `input` (came from outside), `copy` (of something that was overwritten since, by
    this call of the block or a later one), or `never` (could not be replayed, so it is held)."""
    why: str
    """For `never` and `copy`: the reason. Else empty."""
    opaque: bool
    """It is held because a kernel that the tape cannot see stands before it."""
    by_autograd: bool
    """Plain autograd would have held it. If not, it is held because a replay starts from it."""
    replayed: int
    """How often an operator ran again to make them, in the observed step."""
    collective: bool = False
    """A collective made it, or it is held because one stands before it that is not run again."""


_OVERWRITTEN = "overwritten before backward, by this call of the block or a later one; a replay starts from it"


class Counted(NamedTuple):
    """The bytes of one value of one block, for totals: what several blocks have in common counts once."""

    storage: int
    """Equal for values on one storage, in all reports of one step."""
    num_bytes: int
    decision: str
    by_autograd: bool


@dataclass(frozen=True)
class KindReport:
    """Blocks that are built alike and did alike."""

    kind: str
    paths: tuple[str, ...]
    rows: tuple[ReportRow, ...]
    """Every value that autograd saved or that is held; values of neither sort cost nothing and are not listed."""

    @property
    def num_blocks(self) -> int:
        """How many blocks this stands for."""
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
    """What a plan did in the step that was observed.

    Bytes are per step, over all blocks, without parameters. What several blocks have in common, such as a mask or a
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
    """What torch.compile made of the blocks that it took in."""
    checkpointed: tuple[str, ...] = ()
    """Blocks that torch's own checkpoint ran, in eager."""
    moved: Ledger | None = None
    """What was sent away and came back, over all steps so far; None if the plan offloads nothing."""
    counted: tuple[Counted, ...] = field(default=(), repr=False)
    """Every value in the rows of `kinds`, block by block."""

    def __add__(self, other: Report) -> Report:
        """Join the reports of two plans that are applied to parts of one model: what both hold counts once.

        The plan that is shown is that of the first.
        """
        moved = [m for m in (self.moved, other.moved) if m is not None]
        if len(moved) == 2:
            raise ModeError(
                "both plans offload, each with a ledger of its own. Look at each report by itself: report.moved."
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
        """What plain autograd holds for backward inside the blocks."""
        return self._total("save", "recompute", "offload", "input", "never", by_autograd=True)

    @property
    def held_bytes(self) -> int:
        """What is held for backward inside the blocks under this plan."""
        return self._total(*_HELD)

    @property
    def shared_bytes(self) -> int:
        """What the blocks hold in common: how much more the rows of all blocks add up to than is held."""
        return sum(k.num_blocks * k.bytes_of(*_HELD) for k in self.kinds) - self.held_bytes

    @property
    def saved_bytes(self) -> int:
        """What the plan keeps."""
        return self._total("save")

    @property
    def recomputed_bytes(self) -> int:
        """What plain autograd holds and this plan does not."""
        held = self._storages(*_HELD)  # by another block, whose input it is
        return sum(n for storage, n in self._storages("recompute").items() if storage not in held)

    @property
    def offloaded_bytes(self) -> int:
        """What was sent away in the observed step."""
        return self._total("offload")

    @property
    def never_replayed_bytes(self) -> int:
        """What is held although the plan says recompute, because it cannot be replayed."""
        return self._total("never")

    @property
    def opaque_bytes(self) -> dict[str, int]:
        """What is held because of kernels that the tape cannot see, by module inside the block."""
        found: Counter[str] = Counter()
        for kind in self.kinds:
            for row in kind.rows:
                if row.opaque:
                    found[row.module or "."] += kind.num_blocks * row.num_bytes * row.count
        return dict(found)

    @property
    def collective_bytes(self) -> dict[str, int]:
        """What collectives made, and what is held because they are not run again, by decision.

        "never" and "save" are held. "recompute" is communicated again in the backward pass, and so is "replayed", which
        other replays need on their way.
        """
        found: Counter[str] = Counter()
        for kind in self.kinds:
            for row in kind.rows:
                if row.collective:
                    found[row.decision] += kind.num_blocks * row.num_bytes * row.count
        return dict(found)

    @property
    def num_replayed(self) -> int:
        """How many values were made again by a replay, over all blocks."""
        return sum(k.num_blocks * r.replayed for k in self.kinds for r in k.rows)

    def __str__(self) -> str:
        from actmem.report.text import render

        return render(self)


def summarise(
    plan: Plan,
    observed: Iterable[tuple[str, str, Observation | None]],
    *,
    matched: set[int],
    notes: Sequence[str] = (),
    compiled: tuple[CompiledGraph, ...] = (),
    checkpointed: Sequence[str] = (),
    moved: Ledger | None = None,
) -> Report:
    """Fold observations, given as (path, kind, observation) in the order of the blocks, into a report."""
    folded: dict[tuple[str, tuple[ReportRow, ...]], list[str]] = {}
    counted: list[Counted] = []
    unobserved: list[str] = []
    elsewhere = {*checkpointed, *(path for graph in compiled for path in (*graph.blocks, *graph.shared_with))}
    for path, kind, observation in observed:
        if observation is None:
            if path not in elsewhere:
                unobserved.append(path)
        else:
            folded.setdefault((kind, _rows(observation.rows)), []).append(path)
            counted += _counted(observation.rows)
    kinds = tuple(KindReport(kind, tuple(paths), rows) for (kind, rows), paths in folded.items())
    silent = (
        tuple(repr(r) for i, r in enumerate(plan.rules) if i not in matched and not r.is_default)
        if (kinds or elsewhere) and not unobserved
        else ()
    )
    return Report(
        plan, kinds, tuple(unobserved), silent, tuple(notes), compiled, tuple(checkpointed), moved, tuple(counted)
    )


_HELD = ("save", "input", "copy", "never")
_OPAQUE = ("opaque", "unseen", "uninitialised")


def _rows(rows: list[Row]) -> tuple[ReportRow, ...]:
    groups: dict[ReportRow, list[int]] = {}
    for r in _listed(rows):
        decision = _decision(r)
        never = decision == "never"
        row = ReportRow(
            module=r.module,
            op=r.op,
            shape=r.shape,
            dtype=r.dtype,
            num_bytes=r.num_bytes,
            count=0,
            decision=decision,
            why=_OVERWRITTEN if decision == "copy" else _reason(r) if never else "",
            opaque=never and (r.cause or r.why) in _OPAQUE,
            by_autograd=r.saved,
            replayed=0,
            collective=ops.matches("collective", *_packet(r.op)) or (never and (r.cause or r.why) == "collective"),
        )
        groups.setdefault(row, []).append(r.replayed)
    return tuple(replace(row, count=len(replayed), replayed=sum(replayed)) for row, replayed in groups.items())


def _listed(rows: list[Row]) -> Iterator[Row]:
    """Leave out what costs nothing: parameters, buffers, and values that are neither saved, held nor replayed."""
    return (r for r in rows if (r.kind != "state" or r.copied) and (r.saved or r.held or r.replayed))


_ALONE = itertools.count(-1, -1)
"""Numbers for values that share their storage with nobody."""


def _counted(rows: list[Row]) -> Iterator[Counted]:
    for r in _listed(rows):
        shared = r.storage is not None and not r.copied  # a copy is nobody else's
        yield Counted(id(r.storage) if shared else next(_ALONE), r.num_bytes, _decision(r), r.saved)


def _reason(row: Row) -> str:
    return REASONS.get(row.why or "", row.why or "")


def _packet(op: str) -> tuple[str, str]:
    packet, _, overload = op.rpartition(".")
    return packet, overload


def _decision(row: Row) -> str:
    if row.offloaded:
        return "offload"
    if not row.held:
        return "recompute" if row.saved else "replayed"
    if row.copied and (row.kind != "made" or row.why == "external"):
        return "copy"
    if row.kind == "input" and row.why in ("external", "save"):
        return "input"
    kept = row.why == "save" or (row.why == "barrier" and row.cause in ("save", "cut"))
    return "save" if kept else "never"
