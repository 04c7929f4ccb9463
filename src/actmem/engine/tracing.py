"""Which rule decided at which address: the decision trace of one block call. Holds no tensor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actmem.engine.deciding import Verdicts
from actmem.engine.operators import Operator
from actmem.engine.trees import tensors
from actmem.torchcompat import num_bytes

__all__ = ["Traced", "Tracer", "log_once", "subsumed"]

_logger = logging.getLogger("actmem.decisions")


@dataclass(frozen=True)
class Traced:
    """One decision: an address, what the plan says there, and which of its rules."""

    module: str
    """Path of the module inside the block; "" is the block's own forward."""
    op: str
    """The operator with its overload, such as `aten.mm.default`."""
    nth: int
    """How many calls of this operator the module had made before."""
    decision: str
    """`save`, `recompute` or `offload`."""
    rule: int
    """Index of the rule that decided."""
    never: str | None
    """Why the operator is never replayed, whatever the plan says; None if it may be."""
    targets: tuple[int, ...]
    """Indices of all rules whose target this address belongs to."""
    num_bytes: int
    """What the call made."""

    @property
    def address(self) -> tuple[str, str, int]:
        """Where: module, operator and count."""
        return self.module, self.op, self.nth


class Tracer:
    """Decide as `Verdicts` does, and write each decision down. Stands in its place while a call is observed."""

    def __init__(self, verdicts: Verdicts, *, reissue: bool = False) -> None:
        self._verdicts = verdicts
        self._reissue = reissue
        """Functional collectives may run again."""
        self._seen: Counter[tuple[str, str]] = Counter()
        self.known: dict[Operator, str] = {}
        """Empty: every call is asked for, so that every call is written down."""
        self.rows: list[Traced] = []

    def new_counts(self) -> dict[Any, int]:
        """Return the counters of one block call."""
        return self._verdicts.new_counts()

    def decide(self, operator: Operator, address: str, counts: dict[Any, int], out: Any) -> str:
        """Decide, and write it down."""
        why = self._verdicts.decide(operator, address, counts, out)
        self.rows.append(
            Traced(
                module=address,
                op=operator.name,
                nth=self._seen[address, operator.name],
                decision=why or "recompute",
                rule=self._verdicts.latest,
                never=None
                if self._reissue and operator.reissued
                else operator.forbids((), {}, next(tensors(out), None)),
                targets=self._verdicts.targets_of(operator, address, counts),
                num_bytes=sum(map(num_bytes, tensors(out))),
            )
        )
        self._seen[address, operator.name] += 1
        return why


def log_once(rows: Iterable[Traced], rules: tuple[Any, ...], logged: set[tuple[str, str]]) -> None:
    """Log each operator and decision that is not in `logged` yet, with the rule, at level DEBUG."""
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for row in rows:
        if (row.op, row.decision) not in logged:
            logged.add((row.op, row.decision))
            never = f"; never replayed ({row.never})" if row.never else ""
            where = row.module or "the block"
            _logger.debug("%s: %s by %r, first in %s%s", row.op, row.decision, rules[row.rule], where, never)


def subsumed(rows: Iterable[Traced]) -> dict[int, tuple[int, ...]]:
    """Find targets that could be left out, and no decision would change: rule -> the rules that decide in its place.

    Judged by what each target covered when the blocks ran, not by names. Of two that cover the same, the later goes.
    """
    rows = list(rows)
    decided = {row.rule: row.decision for row in rows}
    targets = {rule for row in rows for rule in row.targets}
    found: dict[int, set[int]] = {}
    for rule in sorted(targets, reverse=True):
        instead = [_instead(rule, row, decided, targets, found) for row in rows if rule in row.targets]
        if None not in instead:
            found[rule] = {other for other in instead if other is not None}
    # One that decides in place of another may be left out itself, and a third decides for both.
    return {
        rule: tuple(sorted(set[int]().union(*(found.get(other, {other}) for other in others))))
        for rule, others in sorted(found.items())
    }


def _instead(
    rule: int, row: Traced, decided: dict[int, str], targets: set[int], found: dict[int, set[int]]
) -> int | None:
    """Return the target's rule that decides a row alike if this one is left out; None if none is known to."""
    if row.rule != rule:
        return row.rule if row.rule in row.targets else None
    later = next((other for other in sorted(row.targets) if other > rule and other not in found), None)
    # A rule between the two that names no target might decide otherwise.
    if later is None or not targets.issuperset(range(rule, later)) or decided.get(later) != row.decision:
        return None
    return later
