"""The same decisions for equal layers, in another order: the same time, and another pattern of memory.

NOTE [ Arranging ]
The search says how many of several equal layers get which decisions, and has those that hold most come last: their
memory is freed first, and so the fewest bytes are alive at once. What torch's caching allocator reserves is not the
same question. If some of those that hold most come first, the segments that they leave behind may be reused by what
follows, and the peak of tensors is often the same. Which order is best depends on sizes and on what is freed between,
so a few are tried, and judged by the simulated allocator (`card_fit.py`): the layers in ascending order of what they
hold, turned by 0, 1, 2, 4, ... places, at most 16 orders.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.planner.solver import Keeps
from actmem.profiles import Layer

__all__ = ["arrangements"]

_NUM_TURNS = 16


def arrangements(layers: Sequence[Layer], keeps: Keeps, held_bytes: Sequence[int]) -> list[Keeps]:
    """Return other orders of the decisions of equal layers. See NOTE [ Arranging ].

    Args:
        layers: the block calls of a step.
        keeps: the decisions of each.
        held_bytes: what each holds under them.

    >>> from actmem.decisions import Decision
    >>> layers = [Layer(str(n), 0, None, (), {}, (), (), (), 0) for n in range(3)]
    >>> less, more = [Decision.RECOMPUTE], [Decision.SAVE]
    >>> [[keep is more for keep in order] for order in arrangements(layers, [less, less, more], [0, 0, 8])]
    [[True, False, False], [False, True, False]]
    """
    paths = [layer.path for layer in layers]
    equal: dict[int, list[int]] = {}
    for nth, layer in enumerate(layers):
        if paths.count(layer.path) == 1:  # a block that is called again has the same decisions each time
            equal.setdefault(layer.kind, []).append(nth)
    most = max(map(len, equal.values()), default=0)
    found: list[Keeps] = []
    for by in [0, *(1 << power for power in range(_NUM_TURNS - 1) if 1 << power < most)]:
        turned = list(keeps)
        for group in equal.values():
            ascending = sorted(group, key=lambda nth: held_bytes[nth])
            start = len(group) - by % len(group)
            for nth, taken in zip(group, [*ascending[start:], *ascending[:start]], strict=True):
                turned[nth] = keeps[taken]
        if turned != keeps and turned not in found:
            found.append(turned)
    return found
