"""How tokens are spread over the experts of a model: what a profile on tensors without numbers has to be told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from actmem.errors import ModeError

__all__ = ["ExpertCounts", "ExpertLoads", "Quantile", "Routing", "check_routing"]


@dataclass(frozen=True)
class Quantile:
    """The load of experts that a step stays below with this probability, if every token chooses at random.

    Training is less even than chance unless a loss or a bias balances it: `ExpertCounts` takes what was measured.

    >>> Quantile(0.99)
    Quantile(fraction=0.99)

    Raises:
        ModeError: the fraction is not one from 0.5 to 1, both left out.
    """

    fraction: float

    def __post_init__(self) -> None:
        if type(self.fraction) is not float or not 0.5 < self.fraction < 1:
            raise ModeError(
                f"Quantile({self.fraction!r}) is not permitted. Expected a fraction between 0.5 and 1, as in "
                "Quantile(0.99). For the most that can happen: routing='worst'."
            )


@dataclass(frozen=True)
class ExpertCounts:
    """How many tokens each rank sends to each expert, as measured.

    One list of numbers, one for each expert, holds for every rank. A list of such lists has one for each rank of the
    group that the experts are spread over, in the order of the group; a list of those, one table for each layer that
    routes, in the order in which they run.

    >>> ExpertCounts([[20, 12], [4, 28]]).table
    (((20, 12), (4, 28)),)

    Raises:
        ModeError: these are not counts, or not of one length.
    """

    table: tuple[tuple[tuple[int, ...], ...], ...]
    """By layer, by rank, by expert."""

    def __init__(self, counts: Sequence[Any]) -> None:
        object.__setattr__(self, "table", _table(counts))

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self.table[0][0])

    @property
    def num_ranks(self) -> int:
        """The number of ranks that have counts of their own; 1 if all have the same."""
        return len(self.table[0])

    def of_layers(self, begin: int, end: int) -> ExpertCounts:
        """Return the counts of some of the layers that route; the same ones if all layers have the same.

        >>> ExpertCounts([[[20, 12]], [[4, 28]], [[16, 16]]]).of_layers(1, 3).table
        (((4, 28),), ((16, 16),))
        """
        return self if len(self.table) == 1 else ExpertCounts(self.table[begin:end])

    @classmethod
    def read(cls, path: str | Path) -> ExpertCounts:
        """Read counts from a JSON file: nested lists, as the class takes them.

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> Path(folder.name, "counts.json").write_text("[[20, 12], [4, 28]]")
        19
        >>> ExpertCounts.read(Path(folder.name, "counts.json")).num_ranks
        2
        >>> folder.cleanup()

        Raises:
            ModeError: the file cannot be read, or has something else in it.
        """
        try:
            found = json.loads(Path(path).read_text())
        except OSError as error:
            raise ModeError(f"cannot read the counts of experts in {str(path)!r}: {error.strerror}.") from error
        except ValueError as error:
            raise ModeError(f"{str(path)!r} is not JSON: {error}. Expected lists of counts, {_EXPECTED}.") from error
        return cls(found)

    def __repr__(self) -> str:
        layers, ranks, experts = len(self.table), self.num_ranks, self.num_experts
        return f"<ExpertCounts of {layers} layers, {ranks} ranks and {experts} experts>"


Routing = str | Quantile | ExpertCounts
"""What to assume of routers: "balanced", "worst", or one of the classes here."""


@dataclass(frozen=True)
class ExpertLoads:
    """How many rows each rank of the group that experts are spread over receives in a layer: the layer with the most.

    >>> loads = ExpertLoads(ranks=(0, 4), rows=(96, 160), rank=0)
    >>> loads.hottest
    4
    >>> print(loads)
    rank 0 receives 96 rows; rank 4, the hottest of its group of 2, 160
    """

    ranks: tuple[int, ...]
    """Their numbers in the whole job."""
    rows: tuple[int, ...]
    rank: int
    """The rank that was profiled."""

    @property
    def hottest(self) -> int:
        """The rank that receives the most rows; the first of them."""
        return self.ranks[self.rows.index(max(self.rows))]

    def shifted(self, ranks: int) -> ExpertLoads:
        """Return the same loads on ranks whose numbers are larger by so many."""
        return ExpertLoads(tuple(n + ranks for n in self.ranks), self.rows, self.rank + ranks)

    def __str__(self) -> str:
        here = f"rank {self.rank} receives {self.rows[self.ranks.index(self.rank)]:,} rows"
        if self.rank == self.hottest:
            first = "" if self.rank == self.ranks[0] else f"; rank {self.ranks[0]}, {self.rows[0]:,}"
            return f"{here}, the most in its group of {len(self.ranks)}{first}"
        return f"{here}; rank {self.hottest}, the hottest of its group of {len(self.ranks)}, {max(self.rows):,}"


def check_routing(routing: object, *, by_rank: bool = False) -> None:
    """Refuse what is not a routing.

    Args:
        routing: what a caller passed.
        by_rank: whether quantiles and counts are permitted too.

    Raises:
        ModeError: it is not permitted.
    """
    if routing in ("balanced", "worst") or (by_rank and isinstance(routing, Quantile | ExpertCounts)):
        return
    more = ", Quantile(0.99) or ExpertCounts.read('counts.json')" if by_rank else ""
    raise ModeError(f"routing = {routing!r} is not known. Expected 'balanced' or 'worst'{more}.")


_EXPECTED = "as in [[20, 12], [4, 28]]: one list for each rank, one number for each expert"


def _table(counts: object) -> tuple[tuple[tuple[int, ...], ...], ...]:
    depth = 0
    first: Any = counts
    while isinstance(first, (list, tuple)) and first:
        depth, first = depth + 1, cast("Sequence[Any]", first)[0]
    nested: Any = counts
    if 1 <= depth <= 3 and isinstance(first, int):
        for _ in range(3 - depth):
            nested = [nested]
        try:
            table = tuple(tuple(tuple(row) for row in layer) for layer in nested)
        except TypeError:
            table = ()
        sizes = {(len(layer), len(row)) for layer in table for row in layer}
        if len(sizes) == 1 and all(type(n) is int and n >= 0 for layer in table for row in layer for n in row):
            return table
    raise ModeError(f"these are not counts of tokens by expert: {str(counts)[:80]}. Expected {_EXPECTED}.")
