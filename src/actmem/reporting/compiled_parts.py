"""Which modules of eager blocks ran compiled graphs, and how often: in the forward pass, and again in replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from actmem import ops
from actmem.engine import Observation, ObservedOperator

__all__ = ["CompiledPart", "list_compiled_parts"]


@dataclass(frozen=True)
class CompiledPart:
    """The compiled graphs that one module ran as single operators, over all blocks of the observed step."""

    module: str
    """Path of the module inside its block; "" is the block's own forward."""
    num_blocks: int
    num_calls: int
    """Calls in the forward pass."""
    num_replayed: int
    """Calls that replays added in the backward pass."""
    made_bytes: int
    """What the graphs returned to the block or saved for their own backward."""
    held_bytes: int
    """How much of it was held until the backward pass."""
    is_divided: bool = False
    """Whether the tape saw the operators inside the graphs instead, as with `aot_eager`: the report lists them, and
    bytes and replays are theirs."""


def list_compiled_parts(observed: Iterable[Observation]) -> tuple[CompiledPart, ...]:
    """Count the calls of compiled graphs, by module.

    >>> list_compiled_parts([])
    ()
    """
    found: dict[str, list[tuple[ObservedOperator, ...]]] = {}
    num_blocks: Counter[str] = Counter()
    divided: Counter[str] = Counter()
    num_divided: Counter[str] = Counter()
    for observation in observed:
        divided.update(observation.divided)
        num_divided.update(set(observation.divided))
        calls: dict[tuple[str, int], list[ObservedOperator]] = {}
        for row in observation.rows:
            if row.kind == "made" and row.op in ops.GROUPS["compiled"]:
                calls.setdefault((row.module, row.index), []).append(row)
        for (module, _), rows in calls.items():
            found.setdefault(module, []).append(tuple(rows))
        num_blocks.update({module for module, _ in calls})
    whole = tuple(
        CompiledPart(
            module,
            num_blocks[module],
            len(calls),
            sum(max(row.replayed for row in call) for call in calls),
            sum(row.num_bytes for call in calls for row in call),
            sum(row.num_bytes for call in calls for row in call if row.held),
        )
        for module, calls in found.items()
    )
    return (*whole, *(CompiledPart(m, num_divided[m], n, 0, 0, 0, is_divided=True) for m, n in divided.items()))
