"""What the plan said at every operator: the decision trace, folded over identical blocks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actmem.engine.tracing import Traced, subsumed
from actmem.plan import Rule
from actmem.report.text import paths_of, size

__all__ = ["BlockTrace", "Trace", "gather"]


@dataclass(frozen=True)
class BlockTrace:
    """Blocks in which the same operators ran and were decided alike."""

    engine: str
    """What ran: `tape`, `checkpoint` (torch's, in eager) or `compiled`."""
    paths: tuple[str, ...]
    rows: tuple[Traced, ...]
    """One for each operator call but views, in order."""


@dataclass(frozen=True)
class Trace:
    """What the plan said, and by which rule. Print it."""

    rules: tuple[Rule, ...]
    blocks: tuple[BlockTrace, ...]
    subsumed: tuple[str, ...]
    """Targets that covered nothing which other targets of the plan do not cover."""

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
                decision = row.decision if row.never is None or row.decision == "save" else f"never ({row.never})"
                rule = f"{row.rule + 1}: {self.rules[row.rule]!r}"
                table.add_row(row.module or ".", row.op, str(row.nth), size(row.num_bytes), decision, rule)
            console.print(table)
            console.print()
        for line in self.subsumed:
            console.print(line, markup=False)
        if not self.blocks:
            console.print("nothing is decided yet: run a training step, then print the trace again.")
        return out.getvalue().rstrip() + "\n"


def _name(rule: Rule, beside: Rule) -> str:
    return repr(rule) if rule.target == beside.target else repr(rule.target)


def gather(rules: tuple[Rule, ...], traced: Iterable[tuple[str, str, Sequence[Traced]]]) -> Trace:
    """Fold decisions, given as (path, engine, rows), into a trace."""
    folded: dict[tuple[str, tuple[Traced, ...]], list[str]] = {}
    for path, engine, rows in traced:
        folded.setdefault((engine, tuple(rows)), []).append(path)
    blocks = tuple(BlockTrace(engine, tuple(paths), rows) for (engine, rows), paths in folded.items())
    every = [row for block in blocks for row in block.rows]
    lines = [
        f"target {rules[rule].target!r} adds nothing: all that it covers belongs to "
        f"{' and '.join(_name(rules[other], rules[rule]) for other in others)} too."
        for rule, others in subsumed(every).items()
    ]
    return Trace(rules, blocks, tuple(lines))
