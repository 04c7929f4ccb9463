"""A report as text, for a terminal or a log."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from actmem.report.summary import KindReport, Report

__all__ = ["render", "size"]


def size(num_bytes: int) -> str:
    """Write a number of bytes for a reader.

    >>> size(512), size(3 * 2**20), size(5 * 2**30)
    ('512 B', '3.0 MiB', '5.00 GiB')
    """
    if num_bytes < 2**10:
        return f"{num_bytes} B"
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"


def render(report: Report, *, width: int = 140) -> str:
    """Write a report as text."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(str(report.plan).rstrip(), markup=False)
    for kind in report.kinds:
        console.print()
        console.print(_table(kind))
    if report.kinds:
        console.print()
        console.print(
            f"held for backward: {size(report.held_bytes)}; plain training holds {size(report.plain_bytes)} in "
            "these blocks. "
            f"recomputed {size(report.recomputed_bytes)}, saved by the plan {size(report.saved_bytes)}, "
            f"never replayed {size(report.never_replayed_bytes)}, {report.num_replayed} values replayed.",
            markup=False,
        )
    for module, num_bytes in report.opaque_bytes.items():
        console.print(
            f"held because {module} runs a kernel that the tape cannot see: {size(num_bytes)}. If the function "
            "that launches it "
            "is pure, declare it, and it is replayed: fn = actmem.replayable(fn)",
            markup=False,
        )
    for rule in report.unmatched:
        console.print(f"matched nothing in this model: {rule}", markup=False)
    if report.unobserved:
        console.print(
            f"not run yet: {_paths(report.unobserved)}. Run a training step, then print the report again.", markup=False
        )
    for note in report.notes:
        console.print(note, markup=False)
    return out.getvalue().rstrip() + "\n"


def _table(kind: KindReport) -> Table:
    table = Table(title=f"{_paths(kind.paths)}: {kind.kind}", title_justify="left", show_edge=False)
    for name, justify in (("module", "left"), ("operator", "left"), ("shape", "left"), ("dtype", "left")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for name in ("bytes", "count", "replayed"):
        table.add_column(name, justify="right")
    table.add_column("decision")
    for row in kind.rows:
        if row.decision == "replayed":
            continue
        decision = (
            row.decision
            if row.by_autograd or row.decision in ("input", "copy", "never")
            else f"{row.decision} (a replay starts here)"
        )
        table.add_row(
            row.module or ".",
            row.op,
            str(list(row.shape)),
            row.dtype,
            size(row.num_bytes),
            str(row.count),
            str(row.replayed or ""),
            f"{decision}: {row.why}" if row.why else decision,
        )
    return table


def _paths(paths: tuple[str, ...]) -> str:
    paths = tuple(p or "the model" for p in paths)
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} blocks)"
