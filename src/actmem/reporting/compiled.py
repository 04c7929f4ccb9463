"""Compare what a compiled graph saves with what the plan asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actmem.decisions import Decision
from actmem.engine import KeptValues, Traced

__all__ = ["CompiledGraph", "compiled_graphs"]


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that torch.compile made: its blocks, what the plan asked of them, and what the partitioner saved."""

    blocks: tuple[str, ...]
    """The blocks traced into the graph."""
    shared_with: tuple[str, ...]
    """Blocks that run the same graph because they have the same structure and the same decisions."""
    num_asked: Mapping[Decision, int]
    """How many operators the plan asked to save, and to recompute."""
    saved: tuple[tuple[KeptValues, int], ...]
    """What the partitioner saved, without inputs and parameters, and how many of each."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that the graph holds for its backward pass, without inputs and parameters."""
        return sum(kept.num_bytes * count for kept, count in self.saved)

    @property
    def against_plan_bytes(self) -> int:
        """Bytes saved although the plan says recompute: at a block's edges the partitioner has the last word."""
        return sum(kept.num_bytes * count for kept, count in self.saved if kept.asked == Decision.RECOMPUTE)

    @property
    def num_asked_and_saved(self) -> int:
        """Number of values saved as asked. For the rest, backward needs none or the partitioner found a cheaper one."""
        return sum(count for kept, count in self.saved if kept.asked == Decision.SAVE)


def compiled_graphs(
    graphs: Sequence[tuple[tuple[str, ...], tuple[KeptValues, ...]]],
    asked: Mapping[str, Sequence[Traced]],
    families: Sequence[tuple[str, ...]],
) -> tuple[CompiledGraph, ...]:
    """Summarise what each graph saves; equal values are counted together."""
    found: list[CompiledGraph] = []
    for blocks, kept in graphs:
        num_asked = Counter(row.decision for path in blocks for row in asked[path])
        folded = Counter(kept)
        shared = tuple(p for family in families if set(family) & set(blocks) for p in family if p not in asked)
        # The first block of a family may be called differently from the rest, which run the graph that was made last.
        found = [replace(f, shared_with=tuple(p for p in f.shared_with if p not in shared)) for f in found]
        found.append(CompiledGraph(blocks, shared, dict(num_asked), tuple(folded.items())))
    return tuple(found)
