"""The decision trace: what the plan decided at every operator, folded over identical blocks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actmem.decision_rules import Rule
from actmem.decisions import Decision
from actmem.engine import Traced, subsumed
from actmem.reporting.report_text import paths_of, size

__all__ = ["BlockTrace", "Trace", "gather"]


@dataclass(frozen=True)
class BlockTrace:
    """Blocks in which the same operators ran under the same decisions."""

    engine: str
    """What ran: `tape`, `checkpoint` (torch's, in eager) or `compiled`."""
    paths: tuple[str, ...]
    rows: tuple[Traced, ...]
    """One for each operator call except views, in order."""


@dataclass(frozen=True)
class Trace:
    """What the plan decided, and by which rule. Print it."""

    rules: tuple[Rule, ...]
    blocks: tuple[BlockTrace, ...]
    subsumed: tuple[str, ...]
    """Messages about targets that covered only what other targets of the plan cover too."""

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        out = io.StringIO()
        console = Console(file=out, width=140, highlight=False)
        for block in self.blocks:
            table = Table(title=f"{paths_of(block.paths)}: {block.engine}", title_justify="left", show_edge=False)
            for name in ("module", "operator", "nth", "bytes", "decision", "rule"):
                table.add_column(name, justify="right" if name in ("nth", "bytes") else "left")
            for row in block.rows:
                decision = (
                    row.decision if row.never is None or row.decision is Decision.SAVE else f"never ({row.never})"
                )
                rule = f"{row.rule + 1}: {self.rules[row.rule]!r}"
                table.add_row(row.module or ".", row.op, str(row.nth), size(row.num_bytes), decision, rule)
            console.print(table)
            console.print()
        for line in self.subsumed:
            console.print(line, markup=False)
        if not self.blocks:
            console.print("nothing has been decided yet: run a training step, then print the trace again.")
        return out.getvalue().rstrip() + "\n"


def _name(rule: Rule, beside: Rule) -> str:
    return repr(rule) if rule.target == beside.target else repr(rule.target)


def gather(rules: tuple[Rule, ...], traced: Iterable[tuple[str, str, Sequence[Traced]]]) -> Trace:
    """Fold decisions into a trace. They are (path, engine, rows) tuples."""
    folded: dict[tuple[str, tuple[Traced, ...]], list[str]] = {}
    for path, engine, rows in traced:
        folded.setdefault((engine, tuple(rows)), []).append(path)
    blocks = tuple(BlockTrace(engine, tuple(paths), rows) for (engine, rows), paths in folded.items())
    every = [row for block in blocks for row in block.rows]
    lines = [
        f"target {rules[rule].target!r} adds nothing: everything it covers is also covered by "
        f"{' and '.join(_name(rules[other], rules[rule]) for other in others)}."
        for rule, others in subsumed(every).items()
    ]
    return Trace(rules, blocks, tuple(lines))
