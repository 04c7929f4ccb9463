"""What the report says of compiled blocks that are not one graph: which parts run compiled, which in eager, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from actmem import ops
from actmem.applying.applied_block import BlockRunner
from actmem.reporting import list_compiled_parts, paths_of

__all__ = ["broken_notes"]


def broken_notes(runners: Iterable[BlockRunner]) -> Iterator[str]:
    """Say what became of the blocks that Dynamo could not trace whole, in one note for those of a kind."""
    found: dict[tuple[bool, bool], list[BlockRunner]] = {}
    for runner in runners:
        if runner.given_up:
            found.setdefault((runner.family.offloads, runner.family.names_parts), []).append(runner)
    for (offloads, names_parts), broken in found.items():
        parts = list_compiled_parts(s.observation for s in broken if s.observation is not None)
        divided = {part.module for part in parts if part.is_divided}
        rows = [row for s in broken for row in s.decisions or ()]
        yield pieces_note(
            paths_of(tuple(s.path for s in broken)),
            offloads=offloads,
            names_parts=names_parts,
            reasons=list(dict.fromkeys(reason for s in broken for reason in s.breaks)),
            compiled=[part.module for part in parts],
            eager=[r.module for r in rows if r.op not in ops.GROUPS["compiled"] and r.module not in divided],
        )


def pieces_note(
    paths: str,
    *,
    offloads: bool,
    names_parts: bool,
    reasons: Sequence[str],
    compiled: Iterable[str],
    eager: Iterable[str],
) -> str:
    """Say what became of compiled blocks that are not one graph.

    Args:
        paths: the blocks.
        offloads: whether it is the plan that cut the graph, because it offloads.
        names_parts: whether the plan names modules, so that pieces end where these do.
        reasons: why the graph broke, in torch's words.
        compiled: modules that ran compiled pieces.
        eager: modules that ran operators outside of them.

    >>> pieces_note("h.0", offloads=False, names_parts=False, reasons=["a loop"], compiled=["attn"], eager=["moe"])
    'the graph breaks inside h.0 (a loop): compiled pieces run in attn, and the rest in eager, in moe.'
    """
    why = "the plan offloads at the borders of the graphs of" if offloads else "the graph breaks inside"
    said = f" ({'; '.join(reasons[:3])}{'; ...' if len(reasons) > 3 else ''})" if reasons else ""
    where, rest = _names(compiled), _names(eager)
    then = f"compiled pieces run in {where}" if where else "nothing in there was compiled"
    then += f", and the rest in eager, in {rest}" if where and rest else ""
    if names_parts:
        then += ". The plan names modules, so no piece reaches beyond a module that it decides as a whole"
    ask = "" if reasons or offloads else " TORCH_LOGS=graph_breaks shows the reason."
    return f"{why} {paths}{said}: {then}.{ask}"


def _names(modules: Iterable[str]) -> str:
    names = [m or "the block itself" for m in sorted(set(modules))]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
