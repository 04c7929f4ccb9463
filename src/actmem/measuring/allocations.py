"""What the allocator hands out besides the tensors that operators return.

NOTE [ unseen bytes ]

A mode sees what operators return. The allocator sees more: what a kernel takes for itself while it runs, the state of a
random generator that is kept for a replay, a Python number that autograd holds as a tensor. So torch's own log of
allocations runs along with the step, with a mark where each operator begins and ends, and is read afterwards.

Between two marks, allocations and releases are matched with what the ledger booked in the meantime, size by size. What
is left over is *unseen*: held until a release of the same size that the ledger does not explain. The log has no release
of memory from before the step, unless it was allocated while an earlier log ran; such a release explains nothing, and
is skipped. What an operator allocates and frees while it runs is its *workspace*.

Only the CPU's allocator keeps such a log. For an accelerator's memory there are only the ledger's sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from actmem.torchcompat import allocation_mark, log_allocations, logged_allocations

__all__ = ["Allocations", "Unseen", "most_bytes", "number_bytes", "workspace_bytes"]

_BEGINS, _ENDS = "actmem: an operator begins", "actmem: an operator ends"
_BEGIN, _END = allocation_mark(_BEGINS), allocation_mark(_ENDS)


class Unseen(NamedTuple):
    """What was allocated while an operator ran, besides the tensors that operators return."""

    held: dict[str, int]
    """Bytes held for longer, by the operator they are held for."""
    workspace_bytes: int
    """Bytes freed when the operator ends."""
    passing_bytes: int
    """How much of what is held is freed before the next operator begins: numbers that nothing saves."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.held.values()) + self.workspace_bytes


class _Booked(NamedTuple):
    operator: str
    before: dict[int, int]
    """Size -> storages that the ledger opened, less those that died, between the operator before and this one."""
    within: dict[int, int]
    own_bytes: int
    """What the operator allocates only because a dispatch mode sees it: numbers, turned into tensors a second time."""


class Allocations:
    """Follow the allocator through one step. See NOTE [ unseen bytes ]."""

    def __init__(self, *, watches: bool) -> None:
        self._watches = watches
        self._is_open = False
        self._booked: list[_Booked] = []
        self._before: dict[int, int] = {}

    def open(self) -> None:
        """Start the log, unless another profiler is running."""
        self._is_open = self._watches and log_allocations()

    def begins(self, booked: Counter[int]) -> None:
        """Mark the start of an operator, and record what was booked until then."""
        if self._is_open:
            self._before = _taken(booked)
            with _BEGIN:
                pass

    def ends(self) -> None:
        """Mark the end of the operator."""
        if self._is_open:
            with _END:
                pass

    def booked(self, operator: str, booked: Counter[int], own_bytes: int) -> None:
        """Record what was booked for the operator that has ended."""
        if self._is_open:
            self._booked.append(_Booked(operator, self._before, _taken(booked), own_bytes))

    def close(self) -> list[Unseen]:
        """Stop the log. Return what each operator left unseen; nothing if nothing was logged."""
        if not self._is_open:
            return []
        self._is_open = False
        return list(_unseen(logged_allocations(), self._booked))


def _taken(booked: Counter[int]) -> dict[int, int]:
    found = dict(booked)
    booked.clear()
    return found


def _unseen(log: Sequence[int | str], booked: Sequence[_Booked]) -> Iterator[Unseen]:
    held: dict[int, list[str]] = {}
    last: Unseen | None = None
    operators = iter(booked)
    between: list[int] = []
    within: list[int] | None = None
    for entry in log:
        if isinstance(entry, int):
            (between if within is None else within).append(entry)
        elif entry == _BEGINS:
            between += within or []  # an operator that raised has started and not ended
            within = []
        else:
            operator = next(operators)
            released = _settle(held, between, operator.before, operator.operator)
            if last is not None:
                yield last._replace(passing_bytes=released)
            _settle(held, within or [], operator.within, operator.operator)
            last = Unseen(_by_operator(held), workspace_bytes(within or [], operator.own_bytes), 0)
            between, within = [], None
    if last is not None:
        yield last._replace(passing_bytes=_settle(held, between, {}, ""))


def workspace_bytes(changes: Sequence[int], own_bytes: int = 0) -> int:
    """Return the most that an operator took for itself, from what was allocated and released while it ran.

    Args:
        changes: bytes of each allocation, and of each release as less than 0.
        own_bytes: what it allocates only because a dispatch mode sees it: numbers, turned into tensors a second time.

    >>> workspace_bytes([100, 40, -40])  # a result of 100 bytes
    40
    """
    if len(changes) < 2:  # one tensor is allocated, as is nearly always the case
        return 0
    return max(0, most_bytes(changes) - max(0, sum(changes)) - own_bytes)


def _settle(held: dict[int, list[str]], changes: list[int], booked: dict[int, int], operator: str) -> int:
    """Add to what is held, or remove from it, where allocations and bookings differ. Return what is removed.

    Where the ledger has booked nothing of a size, releases come before allocations: a number of one operator ends where
    that of the next begins.
    """
    made = Counter(change for change in changes if change > 0)
    gone = Counter(-change for change in changes if change < 0)
    released_bytes = 0
    for size in {*made, *gone, *booked}:
        pieces = held.get(size, [])
        explained = booked.get(size, 0)
        num_gone = gone[size] if not explained else max(0, explained - made[size] + gone[size])
        released = min(num_gone, len(pieces))
        del pieces[:released]
        released_bytes += released * size
        # At most what was allocated: a tensor on numpy's memory dies without a release in torch's log.
        num_new = min(made[size], made[size] - gone[size] - explained + released)
        if num_new > 0:
            held.setdefault(size, pieces).extend([operator] * num_new)
    return released_bytes


def _by_operator(held: dict[int, list[str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for size, operators in held.items():
        for operator in operators:
            found[operator] = found.get(operator, 0) + size
    return found


def most_bytes(changes: Sequence[int]) -> int:
    """Return the largest partial sum of the changes; 0 if none is positive.

    >>> most_bytes([8, 4, -8, 2])
    12
    """
    live = most = 0
    for change in changes:
        live += change
        most = max(most, live)
    return most


def number_bytes(value: Any) -> int:
    """Return the size of the tensor that torch makes of a Python number; 0 for anything else.

    >>> number_bytes(2.5), number_bytes(True), number_bytes(None)
    (8, 1, 0)
    """
    if isinstance(value, bool):
        return 1
    return 16 if isinstance(value, complex) else 8 if isinstance(value, (int, float)) else 0
