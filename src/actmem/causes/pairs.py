"""Reading what a message lists: saved and recomputed tensors, and the operators of both runs.

torch names each tensor whose shape, dtype or device is not that of the forward pass. How they differ tells the causes
of one message apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from actmem.causes.cause import Pairs

__all__ = ["Meta", "Pair", "fraction", "other_operator", "read_pairs"]

_META = r"\{[^{}]*?'shape': torch\.Size\(\[([\d, ]*)\]\)[^{}]*?'dtype': torch\.(\w+)[^{}]*\}"
_PAIR = re.compile(rf"tensor at position (\d+): saved metadata: {_META} recomputed metadata: {_META}")
_OPERATOR = re.compile(r"= torch\._ops\.([\w.]+?)\(")
_ORIGINAL = "Operations executed during the original forward:"
_AGAIN = "Operations executed during recomputation:"
_LOW = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
_FLOATS = _LOW | {"float32", "float64"}
_FEW_ROWS = 0.25


@dataclass(frozen=True)
class Meta:
    """What is known of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Pair:
    """One tensor that differs."""

    position: int
    saved: Meta
    again: Meta

    def __str__(self) -> str:
        return f"saved {self.saved}, recomputed {self.again} (position {self.position})"


def read_pairs(text: str) -> tuple[Pair, ...]:
    """Read the tensors that a metadata message lists, in a text whose white space is single blanks.

    >>> read_pairs(
    ...     "tensor at position 3: saved metadata: {'shape': torch.Size([2, 4]), 'dtype': torch.float32} "
    ...     "recomputed metadata: {'shape': torch.Size([0]), 'dtype': torch.float32} ."
    ... )[0].again
    Meta(shape=(0,), dtype='float32')
    """
    return tuple(
        Pair(int(position), Meta(_shape(shape), dtype), Meta(_shape(again), other))
        for position, shape, dtype, again, other in _PAIR.findall(text)
    )


def fraction(pairs: Sequence[Pair], wanted: Pairs) -> float:
    """Tell how many of the pairs differ in the wanted way, as a fraction of all."""
    if not pairs:
        return 0.0
    if wanted == "shifted":
        return _shifted(pairs)
    return sum(map(_TESTS[wanted], pairs)) / len(pairs)


def other_operator(text: str) -> str | None:
    """Name the first operator at which the two runs part, where the message lists the operators of both.

    >>> other_operator(
    ...     "Operations executed during the original forward: $1 = torch._ops.aten.mm.default($0) "
    ...     "Operations executed during recomputation: $1 = torch._ops.aten.sin.default($0)"
    ... )
    'operator 1 was aten.mm.default in forward and aten.sin.default in recomputation'
    """
    _, _, rest = text.partition(_ORIGINAL)
    original, found, again = rest.partition(_AGAIN)
    if not found:
        return None
    first, second = ([op for op in _OPERATOR.findall(part) if ".detach." not in op] for part in (original, again))
    for index in range(max(len(first), len(second))):
        one, other = (ops[index] if index < len(ops) else "nothing" for ops in (first, second))
        if one != other and not (other == "nothing" and index):  # it may stop early, when it has all that is needed
            return f"operator {index + 1} was {one} in forward and {other} in recomputation"
    return None


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _unequal(pair: Pair) -> list[int] | None:
    """List the dimensions that differ; None if there are more or fewer of them."""
    saved, again = pair.saved.shape, pair.again.shape
    return (
        None if len(saved) != len(again) else [i for i, (a, b) in enumerate(zip(saved, again, strict=True)) if a != b]
    )


def _empty(pair: Pair) -> bool:
    return pair.again.shape == (0,) and pair.saved.shape != (0,)


def _doubled(pair: Pair) -> bool:
    unequal = _unequal(pair)
    if not unequal or len(pair.saved.shape) < 3:
        return False
    return all(pair.again.shape[i] == 2 * pair.saved.shape[i] for i in unequal)


def _rows(pair: Pair) -> bool:
    if pair.saved.dtype != pair.again.dtype or _unequal(pair) != [0] or _empty(pair):
        return False
    saved, again = pair.saved.shape[0], pair.again.shape[0]
    return abs(saved - again) <= max(1, _FEW_ROWS * max(saved, again))


def _precision(pair: Pair) -> bool:
    dtypes = {pair.saved.dtype, pair.again.dtype}
    return pair.saved.shape == pair.again.shape and len(dtypes) == 2 and dtypes <= _FLOATS and bool(dtypes & _LOW)


def _kind(pair: Pair) -> bool:
    kinds = {pair.saved.dtype in _FLOATS, pair.again.dtype in _FLOATS}
    return len(kinds) == 2 or len(pair.saved.shape) != len(pair.again.shape)


def _shifted(pairs: Sequence[Pair]) -> float:
    """Tell how much of one list is the other one, a place earlier or later."""
    neighbours = [(a, b) for a, b in pairwise(pairs) if b.position == a.position + 1]
    if len(neighbours) < 2:
        return 0.0
    earlier = sum(a.again == b.saved for a, b in neighbours)
    later = sum(b.again == a.saved for a, b in neighbours)
    return max(earlier, later) / len(neighbours)


_TESTS: dict[str, Callable[[Pair], bool]] = {
    "empty": _empty,
    "doubled": _doubled,
    "rows": _rows,
    "precision": _precision,
    "kind": _kind,
}
