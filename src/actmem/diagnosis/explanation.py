"""Find the causes that fit a text, and rank them.

torch lists each tensor whose shape, dtype or device is not that of the forward pass. How they differ distinguishes the
causes of the same message.
"""

from __future__ import annotations

import importlib
import re
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from actmem.diagnosis.memory_errors import OutOfMemory, products, read_out_of_memory
from actmem.diagnosis.recompute_errors import RECOMPUTING
from actmem.diagnosis.surroundings import AROUND
from actmem.error_causes import OWN, Cause, Pairs

__all__ = ["CAUSES", "Candidate", "Explanation", "Meta", "Pair", "explain", "fraction", "other_operator", "read_pairs"]

CAUSES: tuple[Cause, ...] = (*RECOMPUTING, *AROUND, *OWN)
"""All known causes; for equal messages the most specific comes first."""

_LINE_START = re.compile(r"^(?:\[[^\]\n]*\]:?[ \t]*|[|>│][ \t]?)+", re.MULTILINE)
# torch's own advice mentions torch.compile and dynamic shapes whether they are in use or not.
_ADVICE = re.compile(r"Tip: To see a more detailed error message, either pass .{0,1500}?workaround examples\.")
_WIDTH = 100
_MEMORY = "out-of-memory"


@dataclass(frozen=True)
class Candidate:
    """One cause that fits, with the evidence for it."""

    cause: Cause
    evidence: tuple[str, ...]
    """What was seen in the text."""
    score: float
    """Higher is more likely. Comparable only between candidates for the same text."""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the likely causes, most likely first. Print it."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Cause | None:
        """The most likely cause; None if nothing known fits."""
        return self.candidates[0].cause if self.candidates else None

    def __bool__(self) -> bool:
        return bool(self.candidates)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return {"candidates": [{"evidence": list(c.evidence), **asdict(c.cause)} for c in self.candidates]}

    def __str__(self) -> str:
        if not self.candidates:
            return _UNKNOWN
        return "\n\n".join(_written(number, c) for number, c in enumerate(self.candidates, 1))


_UNKNOWN = "\n".join(
    (
        "No known cause fits this text.",
        "Check the model itself: print(actmem.doctor(model, example=batch))",
        "If it is about recomputation or offloading, please report it with the full traceback, the versions of torch",
        "and the trainer, and the few lines that set up recomputation.",
    )
)


def explain(
    error_or_text: BaseException | str,
    *,
    model: Any = None,
    sequence: int | None = None,
    batch: int | None = None,
) -> Explanation:
    """Find the likely causes of an error in recomputation, offloading or memory, each with its fix.

    Args:
        error_or_text: an exception, a warning, a traceback as text, or a whole log. An unknown text gives an
            explanation without candidates, never an error.
        model: whose error it is, for an out-of-memory error: a name of the catalogue, a model with a `config`, or a
            config of transformers. The tensor that did not fit is then looked for among its own.
        sequence: tokens per sequence, for the same.
        batch: sequences per batch, for the same.

    >>> print(explain("ValueError: Unexpected keyword arguments: max_seqlen"))
    1. keywords-refused
       cause    The reentrant form of torch's checkpoint takes no keyword arguments for the function.
       fix      Pass use_reentrant=False, or bind the arguments first: checkpoint(functools.partial(f, max_seqlen=n), x).
       actmem   A block is called as before, with any arguments: actmem.apply(model, actmem.Full())
       reports  https://github.com/unslothai/unsloth-zoo/issues/1038
    >>> explain("all is well").best is None
    True
    """  # noqa: E501  # a doctest output does not wrap
    text = _flat(_text_of(error_or_text))
    pairs = read_pairs(text)
    found: dict[str, Candidate] = {}
    for cause in CAUSES:
        match = re.search(cause.message, text)
        if match is not None and (candidate := _weighed(cause, match, text, pairs)) is not None:
            found[cause.name] = candidate
    if _MEMORY in found and (reading := read_out_of_memory(text)) is not None:
        found[_MEMORY] = _of_memory(found[_MEMORY], reading, model, sequence, batch)
    special = {c.cause.message for c in found.values() if not c.cause.general}
    kept = [c for c in found.values() if not c.cause.general or c.cause.message not in special]
    return Explanation(tuple(sorted(kept, key=lambda c: -c.score)))


def _of_memory(
    known: Candidate, reading: OutOfMemory, model: Any, sequence: int | None, batch: int | None
) -> Candidate:
    """Return the cause of an out-of-memory error in the numbers of its text."""
    evidence = [*known.evidence[:1], *reading.says()]
    if model is not None:
        dimensions = _dimensions(model, sequence, batch)
        fitting = list(products(dimensions, *reading.tensor_bytes))
        evidence.append("; or ".join(fitting) if fitting else "no tensor that follows from the model's sizes fits that")
    name = model if isinstance(model, str) else None
    cause = known.cause
    fix = " ".join(filter(None, (reading.advice(), cause.fix)))
    command = reading.command(name, sequence, batch)
    return Candidate(replace(cause, fix=fix, actmem=command or cause.actmem), tuple(evidence), known.score)


def _dimensions(model: Any, sequence: int | None, batch: int | None) -> dict[str, int]:
    """Return the sizes that a model's config names."""
    if isinstance(model, str):
        # The catalogue builds models too, with torch, which nothing else here needs.
        catalogue: Any = importlib.import_module("actmem.catalogue")
        model = catalogue.find(model)
    config = getattr(model, "config", model)
    text = getattr(config, "text_config", None) or config
    names = {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "vocabulary": "vocab_size",
        "heads": "num_attention_heads",
    }
    found = {name: getattr(text, attribute, None) for name, attribute in names.items()}
    found["heads"] = found["heads"] or getattr(text, "num_heads", None)
    given = {**found, "sequence": sequence, "batch": batch or (1 if sequence else None)}
    return {name: value for name, value in given.items() if isinstance(value, int)}


def _weighed(cause: Cause, match: re.Match[str], text: str, pairs: tuple[Pair, ...]) -> Candidate | None:
    hints = [hint.group() for pattern in cause.hints if (hint := re.search(pattern, text)) is not None]
    if cause.needs_hint and not hints:
        return None
    evidence = [_cut(match.group())]
    score = 1.0 if cause.general else 2.0 if cause.warning else 5.0
    if cause.pairs is not None:
        agreeing = fraction(pairs, cause.pairs)
        if agreeing < 0.5:
            return None
        score += 4 * agreeing
        evidence += [_listed(pairs)]
    elif cause.general and pairs:
        evidence += [_listed(pairs)]
    if not cause.warning and (parted := other_operator(text)) is not None:
        evidence += [parted]
    evidence += [f"“{hint}” in the text" for hint in dict.fromkeys(hints)]
    return Candidate(cause, tuple(evidence), score + min(len(hints), 3))


def _listed(pairs: tuple[Pair, ...]) -> str:
    return f"{pairs[0]}{f' and {len(pairs) - 1} more' if len(pairs) > 1 else ''}"


def _text_of(error: object) -> str:
    if isinstance(error, BaseException):
        try:
            return "".join(traceback.format_exception(error))
        except Exception:  # noqa: BLE001  # an error that cannot be printed still has a name
            return type(error).__name__
    return str(error)


def _flat(text: str) -> str:
    """Join a text to one line, without the line prefixes of loggers and launchers and without torch's advice."""
    return _ADVICE.sub("", " ".join(_LINE_START.sub("", text).split()))


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def _written(number: int, candidate: Candidate) -> str:
    cause = candidate.cause
    evidence = candidate.evidence[1:]
    rows = [("cause", cause.what), ("seen", "; ".join(evidence)), ("fix", cause.fix), ("actmem", cause.actmem)]
    rows += [("reports", " ".join(cause.reports[:2]))]
    lines = [f"{number}. {cause.name}"]
    for label, value in rows:
        if value:
            hang = " " * 12
            lines += textwrap.wrap(
                value,
                _WIDTH + 20,
                initial_indent=f"   {label:9}",
                subsequent_indent=hang,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


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
    """Shape and dtype of one tensor."""

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
    """Parse the tensors that a metadata message lists, in a text with whitespace collapsed to single blanks.

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
    """Return the fraction of the pairs that differ in the wanted way."""
    if not pairs:
        return 0.0
    if wanted == "shifted":
        return _shifted(pairs)
    return sum(map(_TESTS[wanted], pairs)) / len(pairs)


def other_operator(text: str) -> str | None:
    """Name the first operator at which the two runs diverge, if the message lists the operators of both.

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
        if one != other and not (other == "nothing" and index):  # recomputation may stop once it has what it needs
            return f"operator {index + 1} was {one} in forward and {other} in recomputation"
    return None


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _unequal(pair: Pair) -> list[int] | None:
    """Return the dimensions that differ; None if the number of dimensions differs."""
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
    """Return the fraction of one list that equals the other shifted by one position."""
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
