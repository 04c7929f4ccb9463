"""Finding the causes that fit a text, and ranking them."""

from __future__ import annotations

import re
import textwrap
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from actmem.causes.around import AROUND
from actmem.causes.cause import Cause
from actmem.causes.own import OWN
from actmem.causes.pairs import Pair, fraction, other_operator, read_pairs
from actmem.causes.recomputing import RECOMPUTING

__all__ = ["CAUSES", "Candidate", "Explanation", "explain"]

CAUSES: tuple[Cause, ...] = (*RECOMPUTING, *AROUND, *OWN)
"""All that is known, most special first where messages are alike."""

_LINE_START = re.compile(r"^(?:\[[^\]\n]*\]:?[ \t]*|[|>│][ \t]?)+", re.MULTILINE)
# torch's own advice names torch.compile and dynamic shapes whether they are in use or not.
_ADVICE = re.compile(r"Tip: To see a more detailed error message, either pass .{0,1500}?workaround examples\.")
_WIDTH = 100


@dataclass(frozen=True)
class Candidate:
    """One cause that fits, and what speaks for it."""

    cause: Cause
    evidence: tuple[str, ...]
    """What was seen in the text."""
    score: float
    """Higher is more likely. Good for comparing the candidates of one text only."""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the likely causes, best first. Print it."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Cause | None:
        """The most likely cause; None if nothing known fits."""
        return self.candidates[0].cause if self.candidates else None

    def __bool__(self) -> bool:
        return bool(self.candidates)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {"candidates": [{"evidence": list(c.evidence), **asdict(c.cause)} for c in self.candidates]}

    def __str__(self) -> str:
        if not self.candidates:
            return _UNKNOWN
        return "\n\n".join(_written(number, c) for number, c in enumerate(self.candidates, 1))


_UNKNOWN = "\n".join(
    (
        "No known cause fits this text.",
        "Look at the model itself: print(actmem.doctor(model, example=batch))",
        "If it is about recomputing or offloading, please report it, with the whole traceback, the versions of torch",
        "and of the trainer, and the few lines that set recomputation up.",
    )
)


def explain(error_or_text: BaseException | str) -> Explanation:
    """Name the likely causes of an error of recomputation or offloading, each with what to change.

    Args:
        error_or_text: an exception, a warning, a traceback as text, or a whole log. A text that is not known gives
            an explanation without candidates, never an error.

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
    special = {c.cause.message for c in found.values() if not c.cause.general}
    kept = [c for c in found.values() if not c.cause.general or c.cause.message not in special]
    return Explanation(tuple(sorted(kept, key=lambda c: -c.score)))


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
        except Exception:  # noqa: BLE001  # an error that cannot be printed is still an error that has a name
            return type(error).__name__
    return str(error)


def _flat(text: str) -> str:
    """Bring a text on one line, without what loggers and launchers put before lines, and without torch's advice."""
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
