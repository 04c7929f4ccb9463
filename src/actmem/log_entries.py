"""The entries of a profile's log: what happened in a step, one after the other.

NOTE [ The log ]
A profile is a log of one step in which autograd was given nothing to hold inside the blocks. So each storage dies when
the program itself lets go of it, and the log is the same whatever a plan decides: what a plan holds, replays and
offloads comes on top, and `simulation.simulate`, the one walk through the log under a plan, works it out.

Each kind of entry is a class, and its `verb` is its name in a file. They are dataclasses and not named tuples, because
equal numbers must not make a pack equal to a drop. The walk that is run most often asks for `type(entry)` once and
looks it up in a table: a `match` takes more than twice as long, as it asks for one class after the other.

Nothing changes an entry once it is made. They are not declared `frozen`, because making one would take seven times as
long, and a large model has a hundred thousand of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast, final

__all__ = [
    "CallRan",
    "Dropped",
    "Entered",
    "Entry",
    "GivenGone",
    "GradientsCounted",
    "LayerEntry",
    "Left",
    "LiveEntry",
    "Loosened",
    "OpRan",
    "OperatorEntry",
    "Packed",
    "PhaseBegan",
    "StorageDied",
    "TensorGone",
    "Unpacked",
    "from_row",
]


class Entry:
    """One entry of the log."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()
    verb: ClassVar[str] = ""

    def shifted(self, num_bytes: int) -> Self:  # noqa: ARG002  # most kinds say nothing of what is alive
        """Return the same entry with so many more bytes alive, if it says how many are.

        >>> OpRan(3, 100).shifted(20), StorageDied(7).shifted(20)
        (OpRan(cost=3, live_bytes=120, workspace_bytes=0), StorageDied(storage=7))
        """
        return self

    def row(self) -> list[Any]:
        """Return the entry as plain data.

        >>> Packed(1, 4).row()
        ['pack', 1, 4]
        """
        return [self.verb, *(getattr(self, name) for name in self.__match_args__)]


class LiveEntry(Entry):
    """An entry that says how many bytes the program itself keeps alive after it."""

    __slots__ = ()
    live_bytes: int

    def shifted(self, num_bytes: int) -> Self:
        """Return the same entry with so many more bytes alive. The kinds that fill a log write this out: it is slow."""
        return replace(cast("Any", self), live_bytes=self.live_bytes + num_bytes) if num_bytes else self


class OperatorEntry(LiveEntry):
    """An operator ran."""

    __slots__ = ()
    cost: int
    """Index into the costs of the profile."""
    workspace_bytes: int
    """What its kernel allocated for itself while it ran, on top of what is alive after it. Known of real steps."""


class LayerEntry(Entry):
    """An entry about something that the tape of a block call numbers."""

    __slots__ = ()
    layer: int
    """Index of the block call."""
    index: int
    """Which call, handle, tensor ... of the layer it is about."""

    def moved(self, layer: int, num_bytes: int) -> Self:  # noqa: ARG002  # as in `Entry.shifted`
        """Return the same entry about another layer, with so many more bytes alive."""
        kind: Any = type(self)
        return kind(layer, self.index)


@final
@dataclass(slots=True, unsafe_hash=True)
class OpRan(OperatorEntry):
    """An operator ran that no tape records."""

    verb: ClassVar[str] = "op"
    cost: int
    live_bytes: int
    workspace_bytes: int = 0

    def shifted(self, num_bytes: int) -> OpRan:
        """Return the same entry with so many more bytes alive."""
        return OpRan(self.cost, self.live_bytes + num_bytes, self.workspace_bytes) if num_bytes else self


@final
@dataclass(slots=True, unsafe_hash=True)
class CallRan(LayerEntry, OperatorEntry):
    """An operator of a block's forward ran, which the tape records as the layer's call `index`."""

    verb: ClassVar[str] = "call"
    layer: int
    index: int
    cost: int
    live_bytes: int
    workspace_bytes: int = 0

    def moved(self, layer: int, num_bytes: int) -> CallRan:
        """Return the same entry about another layer, with so many more bytes alive."""
        return CallRan(layer, self.index, self.cost, self.live_bytes + num_bytes, self.workspace_bytes)

    def shifted(self, num_bytes: int) -> CallRan:
        """Return the same entry with so many more bytes alive."""
        return self.moved(self.layer, num_bytes) if num_bytes else self


@final
@dataclass(slots=True, unsafe_hash=True)
class Entered(LiveEntry):
    """A block's forward begins."""

    verb: ClassVar[str] = "enter"
    layer: int
    live_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)
class Left(LiveEntry):
    """A block's forward is over."""

    verb: ClassVar[str] = "leave"
    layer: int
    live_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)
class Packed(LayerEntry):
    """Autograd saved a value of a block: the handle `index`."""

    verb: ClassVar[str] = "pack"
    layer: int
    index: int


@final
@dataclass(slots=True, unsafe_hash=True)
class Unpacked(LayerEntry, LiveEntry):
    """A backward step asked for the handle `index`."""

    verb: ClassVar[str] = "unpack"
    layer: int
    index: int
    live_bytes: int

    def moved(self, layer: int, num_bytes: int) -> Unpacked:
        """Return the same entry about another layer, with so many more bytes alive."""
        return Unpacked(layer, self.index, self.live_bytes + num_bytes)

    def shifted(self, num_bytes: int) -> Unpacked:
        """Return the same entry with so many more bytes alive."""
        return self.moved(self.layer, num_bytes) if num_bytes else self


@final
@dataclass(slots=True, unsafe_hash=True)
class Dropped(LayerEntry):
    """Nobody has the handle `index` any more, nor what was unpacked from it."""

    verb: ClassVar[str] = "drop"
    layer: int
    index: int


@final
@dataclass(slots=True, unsafe_hash=True)
class Loosened(LayerEntry):
    """Autograd let go of the handle `index` before what was unpacked from it is gone."""

    verb: ClassVar[str] = "loose"
    layer: int
    index: int


@final
@dataclass(slots=True, unsafe_hash=True)
class GivenGone(LayerEntry):
    """What the layer gave in unpack `index` by a Python Function is gone."""

    verb: ClassVar[str] = "done"
    layer: int
    index: int


@final
@dataclass(slots=True, unsafe_hash=True)
class TensorGone(LayerEntry):
    """In forward: the tensor `index` is gone, and what lies on its storage is not."""

    verb: ClassVar[str] = "gone"
    layer: int
    index: int


@final
@dataclass(slots=True, unsafe_hash=True)
class StorageDied(Entry):
    """The program let go of a storage that a block made or read."""

    verb: ClassVar[str] = "die"
    storage: int


@final
@dataclass(slots=True, unsafe_hash=True)
class PhaseBegan(LiveEntry):
    """A backward pass begins, or is over; in a step of the user's own loop also an optimizer's step."""

    verb: ClassVar[str] = "phase"
    name: str
    """"backward", or "end" when it is over. In a step of the user's own loop also "optimizer", and "forward" for what
    goes on after either."""
    live_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)
class GradientsCounted(LiveEntry):
    """In a step of the user's own loop: so many bytes of gradients there are from here on."""

    verb: ClassVar[str] = "gradients"
    num_bytes: int
    live_bytes: int


_KINDS: dict[str, Any] = {
    kind.verb: kind
    for kind in (
        *(OpRan, CallRan, Entered, Left, Packed, Unpacked, Dropped, Loosened),
        *(GivenGone, TensorGone, StorageDied, PhaseBegan, GradientsCounted),
    )
}


def from_row(row: list[Any]) -> Entry:
    """Return the entry that `Entry.row` wrote.

    >>> from_row(["pack", 1, 4])
    Packed(layer=1, index=4)
    """
    verb, *fields = row
    return _KINDS[verb](*fields)
