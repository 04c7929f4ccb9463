"""What a router chooses in a step on tensors without numbers, and what the routers of other ranks choose.

NOTE [ Other ranks' tokens ]
Where experts are spread over ranks, a rank learns from the others how many tokens they send: they exchange counts, and
the sizes of everything behind follow from those. In one process nobody answers. But the counts are real integers, since
the choice is assumed, and what the others would answer follows from the same assumption: by "balanced", "worst" and a
quantile every rank chooses as this one does, so each sends it what it sends itself; measured counts say it for each.

"worst" and a quantile are about the rank that is profiled: its experts get the most. Which experts those are is known
from the exchange: a step is run in advance to see it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from actmem.distributedcompat import place_in
from actmem.errors import ModeError, UnsupportedError
from actmem.expert_loads import ExpertCounts, ExpertLoads, Quantile, Routing
from actmem.torchcompat import without_fake_mode

__all__ = ["EXCHANGES", "RouterChoice"]

EXCHANGES = frozenset(
    (
        *("_c10d_functional.all_to_all_single", "_c10d_functional.all_gather_into_tensor"),
        *("c10d.alltoall_base_", "c10d._allgather_base_", "c10d.allgather_"),
    )
)
"""Collectives by which ranks tell each other how many tokens they send."""
_BALANCED_DEVIATIONS = 3.0


class RouterChoice:
    """What is assumed of all routers of a step."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self.assumed = False
        """A choice had to be assumed."""
        self.loads: ExpertLoads | None = None
        self._ranks: tuple[int, ...] = ()
        """The ranks that experts are spread over; empty until they exchange something."""
        self._index = 0
        """Which of them this process is."""
        self._tables: list[Tensor] = []
        """What each rank, or this one for all, chose last."""
        self._num_choices, self._layer, self._num_calls = 0, 0, 0
        self._rehearses = False

    @property
    def words(self) -> str:
        """What is assumed, for a report."""
        if isinstance(self.routing, Quantile):
            return f"quantile {self.routing.fraction:g}"
        return "measured" if isinstance(self.routing, ExpertCounts) else self.routing

    @contextlib.contextmanager
    def rehearsal(self) -> Generator[None]:
        """Let a step run that shows where the experts are. What is assumed of other ranks may be wrong in it.

        Raises:
            UnsupportedError: the counts are of several ranks, and the step does not show which of them this one is.
            ModeError: the counts are of another number of layers.
        """
        self._rehearses = True
        yield
        self._rehearses, num_calls, self._num_calls = False, self._num_calls, 0
        if not isinstance(self.routing, ExpertCounts):
            return
        if not num_calls or num_calls % len(self.routing.table):
            raise ModeError(
                f"the counts are of {self.routing.num_experts} experts in {len(self.routing.table)} layers, but "
                f"{num_calls} routers chose among as many experts in a step. Expected a list for each of them, or one "
                "for all."
            )
        if self.routing.num_ranks not in (1, len(self._ranks)):
            seen = f"{len(self._ranks)} ranks exchange tokens" if self._ranks else "no ranks exchange counts"
            raise UnsupportedError(
                f"the counts are of {self.routing.num_ranks} ranks, but {seen} in a step. Expected a list for each "
                "rank of the group that the experts are spread over, or one for all."
            )

    # ------------------------------------------------------------------ this rank

    def choose(self, like: Tensor, num_choices: int) -> Tensor:
        """Choose among `num_choices` for each row of the last dimension."""
        self.assumed = True
        with without_fake_mode():
            width = like.shape[-1] if like.dim() else 1
            if not like.numel() or num_choices < 2:
                return torch.zeros(like.shape, dtype=torch.int64)
            self._num_choices = num_choices
            counts = self._counts(like.numel() // width, width, num_choices)
            chosen = torch.arange(num_choices).repeat_interleave(counts)
            # No row chooses one twice: no count is above the number of rows.
            return chosen.reshape(width, -1).t().reshape(like.shape)

    def _counts(self, rows: int, width: int, num_choices: int) -> Tensor:
        """Return how many rows choose each expert."""
        if isinstance(self.routing, ExpertCounts) and num_choices == self.routing.num_experts:
            return self._measured(rows, width)
        num_ranks = len(self._ranks) or 1
        here = num_choices // num_ranks
        first = self._index * num_choices // num_ranks
        if self.routing == "worst":
            counts = torch.zeros(num_choices, dtype=torch.int64)
            counts[(first + torch.arange(width)) % num_choices] = rows
        elif isinstance(self.routing, Quantile) and num_ranks > 1 and here:
            counts = _hot(self.routing, rows, width, num_choices, num_ranks, range(first, first + here))
        else:
            deviations = _BALANCED_DEVIATIONS
            if isinstance(self.routing, Quantile):
                deviations = NormalDist().inv_cdf(self.routing.fraction)
            counts = _even(rows, width, num_choices, deviations)
        self._tables = [counts]
        return counts

    def _measured(self, rows: int, width: int) -> Tensor:
        assert isinstance(self.routing, ExpertCounts)
        several = self.routing.num_ranks > 1
        self._layer = self._num_calls % len(self.routing.table)
        self._num_calls += 1
        if self._rehearses:
            return _even(rows, width, self.routing.num_experts, _BALANCED_DEVIATIONS)
        table = torch.tensor(self.routing.table[self._layer])
        counts = table[self._index if several else 0]
        if int(counts.sum()) != rows * width or int(counts.max()) > rows:
            raise ModeError(
                f"the counts of rank {self._index} in layer {self._layer} are {int(counts.sum()):,} in all and "
                f"{int(counts.max()):,} at most, but {rows:,} tokens choose {width} experts each: {rows * width:,} in "
                f"all, and {rows:,} at most. Expected counts of one step with the same number of tokens."
            )
        self._tables = list(table) if several else [counts]
        return counts

    def _note(self) -> None:
        """Note what was chosen before an exchange. A router may choose before that too: groups of experts, say."""
        num_ranks = len(self._ranks)
        if num_ranks < 2 or self._num_choices % num_ranks or self._rehearses:
            return
        tables = self._tables if len(self._tables) == num_ranks else self._tables * num_ranks
        by_rank = torch.stack(tables).sum(0).reshape(num_ranks, -1).sum(1)
        rows = tuple(int(n) for n in by_rank)
        if self.loads is None or max(rows) > max(self.loads.rows):
            self.loads = ExpertLoads(ranks=self._ranks, rows=rows, rank=self._ranks[self._index])

    # ------------------------------------------------------------------ the others

    def answer(self, name: str, args: tuple[Any, ...], made: Any) -> None:
        """Correct what an exchange of integers in a silent group returned: other ranks would have sent their own.

        Raises:
            UnsupportedError: what they would have sent does not follow from what is assumed.
        """
        found = _exchange(name, args, made)
        if found is None or not self._num_choices:
            return
        group, source, targets, splits = found
        ranks, index = place_in(group)
        is_all_to_all = "all_to_all" in name or "alltoall" in name
        if source.numel() % len(ranks) or (not is_all_to_all and source.numel() not in (self._num_choices, len(ranks))):
            return
        if ranks != self._ranks:
            self._ranks, self._index = ranks, index
        self._note()
        pieces = self._sent(source, splits) if is_all_to_all else self._told(source)
        if isinstance(targets, Tensor):
            targets.copy_(torch.cat([p.reshape(-1) for p in pieces]).reshape(targets.shape))
        else:
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece.reshape(target.shape))

    def _told(self, source: Tensor) -> list[Tensor]:
        """Return what each rank has where this one has `source`."""
        num_ranks = len(self._ranks)
        if not isinstance(self.routing, ExpertCounts) or self.routing.num_ranks == 1 or self._rehearses:
            return [source] * num_ranks
        table = torch.tensor(self.routing.table[self._layer], dtype=source.dtype)
        for known in (table, table.reshape(num_ranks, num_ranks, -1).sum(-1)):
            if known.shape[1] == source.numel() and torch.equal(known[self._index], source.reshape(-1)):
                return [row.reshape(source.shape) for row in known]
        raise UnsupportedError(
            f"ranks exchange integers of shape {list(source.shape)} that are neither counts by expert nor by rank, and "
            "what the others send does not follow from measured counts that differ between ranks. Give one list of "
            "counts for all ranks, or exchange counts."
        )

    def _sent(self, source: Tensor, splits: tuple[Any, Any]) -> list[Tensor]:
        """Return what each rank sends to this one, where this one sends `source`."""
        num_ranks, (received, sent) = len(self._ranks), splits
        if not sent or len(set(sent)) == 1:
            return [theirs.reshape(num_ranks, -1)[self._index] for theirs in self._told(source)]
        first = sum(sent[: self._index])
        mine = source[first : first + sent[self._index]]
        if any(n != len(mine) for n in received):
            raise UnsupportedError(
                f"ranks exchange {len(source):,} integers in unequal parts, one for each token perhaps. What the "
                "others send is known only if every rank chooses alike. Give one list of counts for all ranks, or "
                "routing='worst'."
            )
        return [mine] * num_ranks


def _exchange(name: str, args: tuple[Any, ...], made: Any) -> tuple[Any, Tensor, Any, tuple[Any, Any]] | None:
    """Return the group of an exchange, what this rank gives, where results go, and the sizes received and sent."""
    whole = (None, None)
    match name, args:
        case "_c10d_functional.all_to_all_single", (source, received, sent, group, *_):
            return group, source, made, (received, sent)
        case "_c10d_functional.all_gather_into_tensor", (source, _, group, *_):
            return group, source, made, whole
        case "c10d.alltoall_base_", (target, source, group, received, sent, *_):
            return group, source, target, (received, sent)
        case "c10d._allgather_base_", (target, source, group, *_):
            return group, source, target, whole
        case "c10d.allgather_", ([targets], [source], group, *_):
            return group, source, targets, whole
        case _:
            return None


def _even(rows: int, width: int, num_choices: int, deviations: float) -> Tensor:
    """Return loads that differ as chance makes them differ; the first and the last are the largest."""
    whole = rows * width
    mean = whole / num_choices
    shape = torch.linspace(-1, 1, num_choices, dtype=torch.float64).abs()
    shape -= shape.mean()
    most, least = float(shape.max()), -float(shape.min())
    deviation = deviations * math.sqrt(mean * (1 - width / num_choices))
    scale = min(deviation / most, mean / least, (rows - mean) / most) if most > 1e-9 else 0.0
    return _whole(mean + scale * shape, whole)


def _hot(routing: Quantile, rows: int, width: int, num_choices: int, num_ranks: int, here: range) -> Tensor:
    """Return loads under which the experts of one rank get as much as the quantile says, and the others the rest."""
    whole = rows * width
    mean = whole  # of what all ranks send, the part of one
    deviation = math.sqrt(num_ranks * whole * (1 / num_ranks) * (1 - 1 / num_ranks))
    most = mean + NormalDist().inv_cdf(routing.fraction) * deviation
    from_each = min(math.ceil(most / num_ranks), rows * min(width, len(here)))
    loads = torch.full((num_choices,), (whole - from_each) / (num_choices - len(here)), dtype=torch.float64)
    loads[here.start : here.stop] = from_each / len(here)
    return _whole(loads, whole)


def _whole(loads: Tensor, total: int) -> Tensor:
    """Round loads so that their sum stays."""
    ends = loads.cumsum(0).round().to(torch.int64)
    ends[-1] = total
    return ends.diff(prepend=ends.new_zeros(1))
