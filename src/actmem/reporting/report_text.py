"""Render a report as text, for a terminal or a log."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from actmem.decisions import Decision
from actmem.units import size

if TYPE_CHECKING:
    from rich.table import Table

    from actmem.reporting.compiled import CompiledGraph
    from actmem.reporting.compiled_parts import CompiledPart
    from actmem.reporting.summary import KindReport, Report

__all__ = ["paths_of", "render", "size"]


def render(report: Report, *, width: int = 140) -> str:
    """Return a report as text."""
    from rich.console import Console

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
    if report.shared_bytes:
        console.print(
            f"Blocks share {size(report.shared_bytes)}: the tables list it with each block, the totals count it once.",
            markup=False,
        )
    if report.moved is not None:
        moved = report.moved
        console.print(
            f"offloaded {size(report.offloaded_bytes)} in that step. So far: {size(moved.out_bytes)} copied out, "
            f"{size(moved.back_bytes)} fetched back ({size(moved.stayed_bytes)} had not left memory), "
            f"{size(moved.dropped_bytes)} dropped with graphs that were freed, "
            f"{size(moved.waiting_bytes)} still offloaded. The store occupies {size(moved.store_bytes)}, which is not "
            "part of the device's memory.",
            markup=False,
        )
    for part in report.compiled_parts:
        console.print(_part_line(part), markup=False)
    for graph in report.compiled:
        console.print()
        console.print(_graph_table(graph))
        console.print(_graph_line(graph), markup=False)
    if report.checkpointed:
        console.print(
            f"run by torch's checkpoint, which runs their code twice: {paths_of(report.checkpointed)}. "
            "actmem.measure shows what it holds.",
            markup=False,
        )
    collectives = report.collective_bytes
    if collectives:
        again = sum(collectives.get(d, 0) for d in (Decision.RECOMPUTE, "replayed"))
        console.print(
            f"results of collectives: {size(sum(collectives.values()) - again)} held, {size(again)} communicated again "
            "in the backward pass.",
            markup=False,
        )
    for rule in report.unmatched:
        console.print(f"matched nothing in this model: {rule}", markup=False)
    if report.unobserved:
        console.print(
            f"not run yet: {paths_of(report.unobserved)}. Run a training step, then print the report again.",
            markup=False,
        )
    for note in report.notes:
        console.print(note, markup=False)
    return out.getvalue().rstrip() + "\n"


def _table(kind: KindReport) -> Table:
    from rich.table import Table

    table = Table(title=f"{paths_of(kind.paths)}: {kind.kind}", title_justify="left", show_edge=False)
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
            if row.by_autograd or row.decision in ("input", "copy", "never", Decision.OFFLOAD)
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


def _graph_table(graph: CompiledGraph) -> Table:
    from rich.table import Table

    also = f", also used by {paths_of(graph.shared_with)}" if graph.shared_with else ""
    table = Table(
        title=f"{paths_of(graph.blocks) if graph.blocks else 'no block'}: a compiled graph{also}",
        title_justify="left",
        show_edge=False,
    )
    for name in ("module", "operator", "shape", "dtype", "bytes", "count", "the plan says"):
        table.add_column(name, justify="right" if name in ("bytes", "count") else "left")
    for kept, count in graph.saved:
        table.add_row(
            kept.module or ".",
            kept.op,
            str(list(kept.shape)),
            kept.dtype,
            size(kept.num_bytes),
            str(count),
            kept.asked or "(outside the blocks)",
        )
    return table


def _part_line(part: CompiledPart) -> str:
    blocks = "1 block" if part.num_blocks == 1 else f"{part.num_blocks} blocks"
    calls = "1 call of a compiled graph" if part.num_calls == 1 else f"{part.num_calls} calls of compiled graphs"
    begin = f"{part.module or 'the blocks themselves'}, in {blocks}: {calls} in the forward pass"
    if part.is_divided:
        return f"{begin}, recorded operator by operator."
    held = f"{size(part.held_bytes)} of {size(part.made_bytes)} held"
    return f"{begin}, {part.num_replayed} replayed; {held}."


def _graph_line(graph: CompiledGraph) -> str:
    asked = graph.num_asked.get(Decision.SAVE, 0)
    line = (
        f"the partitioner saves {size(graph.saved_bytes)}. The plan asked to save the results of {asked} operators; "
        f"it holds those of {graph.num_asked_and_saved}, and backward does not need the rest."
    )
    if graph.against_plan_bytes:
        line += (
            f" {size(graph.against_plan_bytes)} is held although the plan says recompute: at the edges of a block, the "
            "partitioner decides."
        )
    return line


def paths_of(paths: tuple[str, ...]) -> str:
    """Name a list of blocks briefly: the first, the last and how many."""
    paths = tuple(p or "the model" for p in paths)
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} blocks)"
