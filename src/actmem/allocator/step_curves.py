"""The memory of one training step, so that a predicted and a recorded one can be laid over one another.

NOTE [ Steps of a recording ]
A recording has no marks where a step begins. But steps after the first few request the same sizes in the same order, so
the end of the recording repeats itself: the period that explains most of it is a step. It is taken to begin where least
is allocated. The layers of a backward pass and the parameters of an optimizer repeat themselves too: a step is known by
leaving as much allocated as it found, by reaching the peak, and by making up, repeated, at least a quarter of the
recording. A recording that has no such period is taken to be one step.

Two steps of the same program do not have the same number of allocations in a prediction and in a recording, where
numbers and small states are counted differently. So the place within a step is measured in bytes requested so far, in
which small allocations do not matter.
"""

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["NUM_POINTS", "find_steps", "points_of", "step_curve"]

NUM_POINTS = 100


def find_steps(sizes: Sequence[int], allocated: Sequence[int]) -> list[range]:
    """Return the steps of a sequence of allocations, as ranges of their indices. See NOTE [ Steps of a recording ].

    Args:
        sizes: The bytes of each request.
        allocated: What is allocated after each of them.

    >>> find_steps([9, 4, 1, 2, 1, 2], [9, 9, 8, 10, 8, 10])
    [range(2, 4), range(4, 6)]
    >>> find_steps([1, 2, 3], [1, 3, 6])
    [range(0, 3)]
    """
    num = len(sizes)
    equal = _equal_lengths(sizes[::-1])
    periods = [(shift + equal[shift], shift) for shift in range(1, num // 2 + 1) if equal[shift] >= shift]
    peak = max(allocated, default=0)
    for length, period in sorted(periods, key=lambda each: (-each[0], each[1])):
        if 4 * length < num:
            break
        begin = min(range(num - length, num - length + period), key=lambda at: allocated[at] - sizes[at])
        steps = [range(at, at + period) for at in range(begin, num - period + 1, period)]
        starts = [allocated[step.start] - sizes[step.start] for step in steps]
        reached = max(allocated[at] for at in steps[-1])
        if max(starts) - min(starts) <= 0.01 * peak and reached >= 0.9 * peak:
            return steps
    return [range(num)] if num else []


def _equal_lengths(sequence: Sequence[int]) -> list[int]:
    """Return for each place how long what follows is equal to the beginning of the sequence: the Z function."""
    found = [0] * len(sequence)
    left = right = 0
    for at in range(1, len(sequence)):
        length = min(right - at, found[at - left]) if at < right else 0
        while at + length < len(sequence) and sequence[length] == sequence[at + length]:
            length += 1
        found[at] = length
        if at + length > right:
            left, right = at, at + length
    return found


def points_of(sizes: Sequence[int]) -> list[range]:
    """Divide the allocations of a step into parts that request equally many bytes.

    >>> points_of([50, 25, 25])[:2], points_of([50, 25, 25])[50:52]
    ([range(0, 1), range(0, 1)], [range(1, 2), range(1, 2)])
    """
    total = sum(sizes)
    ends = list(accumulate(sizes))
    found: list[range] = []
    first = 0
    for point in range(NUM_POINTS):
        while first < len(sizes) - 1 and ends[first] * NUM_POINTS <= total * point:
            first += 1
        last = first
        while last < len(sizes) - 1 and ends[last] * NUM_POINTS < total * (point + 1):
            last += 1
        found.append(range(first, last + 1) if sizes else range(0))
    return found


def step_curve(sizes: Sequence[int], allocated: Sequence[int]) -> tuple[int, ...]:
    """Return the most that is allocated in each of the parts of a step that `points_of` divides it into.

    >>> step_curve([50, 25, 25], [50, 75, 40])[::25]
    (50, 50, 75, 40)
    """
    return tuple(max(allocated[at] for at in part) for part in points_of(sizes) if part)
