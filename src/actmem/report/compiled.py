"""What a compiled graph saves, beside what the plan asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actmem.engine.checkpoint import Kept
from actmem.engine.tracing import Traced

__all__ = ["CompiledGraph", "compiled_graphs"]


@dataclass(frozen=True)
class CompiledGraph:
    """One graph that torch.compile made: its blocks, what the plan asked of them, and what the partitioner saved."""

    blocks: tuple[str, ...]
    """The blocks that were traced into it."""
    shared_with: tuple[str, ...]
    """Blocks for which the same graph serves, because they are built alike and the plan says the same for them."""
    num_asked: Mapping[str, int]
    """How many operators the plan asked to save, and to recompute."""
    saved: tuple[tuple[Kept, int], ...]
    """What the partitioner saved, without inputs and parameters, and how many of each."""

    @property
    def saved_bytes(self) -> int:
        """What the graph holds for its backward, without inputs and parameters."""
        return sum(kept.num_bytes * count for kept, count in self.saved)

    @property
    def against_plan_bytes(self) -> int:
        """What it saves although the plan says recompute: the partitioner decides the last at the edges of a block."""
        return sum(kept.num_bytes * count for kept, count in self.saved if kept.asked == "recompute")

    @property
    def num_asked_and_saved(self) -> int:
        """How many values it saves as asked. The others no backward step needs, or the partitioner found a cheaper."""
        return sum(count for kept, count in self.saved if kept.asked == "save")


def compiled_graphs(
    graphs: Sequence[tuple[tuple[str, ...], tuple[Kept, ...]]],
    asked: Mapping[str, Sequence[Traced]],
    families: Sequence[tuple[str, ...]],
) -> tuple[CompiledGraph, ...]:
    """Say what each graph saves; values of one kind are counted together."""
    found: list[CompiledGraph] = []
    for blocks, kept in graphs:
        num_asked = Counter(row.decision for path in blocks for row in asked[path])
        folded = Counter(kept)
        shared = tuple(p for family in families if set(family) & set(blocks) for p in family if p not in asked)
        # The first block of a family may be called otherwise than the rest. The graph made last serves them.
        found = [replace(f, shared_with=tuple(p for p in f.shared_with if p not in shared)) for f in found]
        found.append(CompiledGraph(blocks, shared, dict(num_asked), tuple(folded.items())))
    return tuple(found)
