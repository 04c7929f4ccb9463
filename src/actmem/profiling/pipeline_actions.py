"""Note in the log of a step what the schedule of a pipeline does: with which microbatch, on which stage, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from actmem.log_entries import Entry
from actmem.profiles import Action
from actmem.profiling.chronicle import Allocated, Freed

__all__ = ["PipelineActions", "actions_in"]


@final
@dataclass(frozen=True, slots=True)
class _Began(Entry):
    """An action of a schedule begins. `actions_in` leaves it out of the log."""

    kind: str
    stage: int
    microbatch: int


@final
@dataclass(frozen=True, slots=True)
class _Ended(Entry):
    """The action that began last is over."""


@final
@dataclass(frozen=True, slots=True)
class _Sent(Entry):
    """What an action left goes to another rank."""

    kind: str
    stage: int
    microbatch: int
    num_bytes: int


_MARKS = frozenset({_Began, _Ended, _Sent})


class PipelineActions:
    """Listens to the schedule of a pipeline, and writes down what it does while there is a log."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        """The ranks of the pipeline."""
        self.num_stages = 0
        self.groups: set[tuple[int, ...]] = set()
        """The ranks of each group in which the step communicated, apart from what stages send to each other."""
        self.note: Callable[[Entry], None] | None = None
        """Adds an entry to the log, while there is one."""

    def met(self, ranks: tuple[int, ...], num_stages: int) -> None:
        """Note the ranks of the pipeline, and how many stages it has."""
        self.ranks, self.num_stages = ranks, num_stages

    def began(self, kind: str, stage: int, microbatch: int) -> None:
        """Note that an action begins."""
        if self.note is not None:
            self.note(_Began(kind, stage, microbatch))

    def ended(self) -> None:
        """Note that it is over."""
        if self.note is not None:
            self.note(_Ended())

    def sent(self, kind: str, stage: int, microbatch: int, num_bytes: int) -> None:
        """Note that the result of a forward or backward action goes to another rank."""
        if self.note is not None and num_bytes:
            self.note(_Sent(kind, stage, microbatch, num_bytes))


def actions_in(log: list[Entry]) -> tuple[list[Entry], tuple[Action, ...]]:
    """Split a log into what is left of it, and the actions of a pipeline. Positions do not count what `changes` takes.

    >>> from actmem.log_entries import StorageDied
    >>> actions_in([_Began("forward", 1, 0), Allocated(0, 8), StorageDied(3), _Ended(), _Sent("forward", 1, 0, 4)])
    ([Allocated(storage=0, num_bytes=8), StorageDied(storage=3)], (Action(kind='forward', stage=1, microbatch=0, begin=0, end=1, sent_bytes=4),))
    """  # noqa: E501  # a doctest output does not wrap
    if _MARKS.isdisjoint(map(type, log)):
        return log, ()
    rest: list[Entry] = []
    found: list[Action] = []
    position = 0
    for entry in log:
        match entry:
            case _Began():
                found.append(Action(entry.kind, entry.stage, entry.microbatch, position, position))
            case _Ended():
                found[-1] = replace(found[-1], end=position)
            case _Sent():
                _note_sent(found, entry)
            case _:
                rest.append(entry)
                position += not isinstance(entry, (Allocated, Freed))
    return rest, tuple(found)


def _note_sent(found: list[Action], sent: _Sent) -> None:
    """Find the action whose result is sent: the last one of the microbatch in that direction."""
    kinds = ("forward",) if sent.kind == "forward" else ("backward", "input")
    for nth in range(len(found) - 1, -1, -1):
        action = found[nth]
        if action.kind in kinds and (action.stage, action.microbatch) == (sent.stage, sent.microbatch):
            found[nth] = replace(action, sent_bytes=sent.num_bytes)
            return
