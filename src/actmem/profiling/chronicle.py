"""Log every operator of a step, what is alive after it, and when the program lets go of what a block made.

NOTE [ Measured seconds ]
No two calls take the same time, yet equal layers must stay equal: a plan has rules for layers that are alike. So calls
are alike if they have the same cost and their tensors have the same memory layout (a product with a transposed weight
differs from its backward), and all calls that are alike get the time of the fastest of them, over two steps: the first
call of a kind also chooses a kernel, and any call may be interrupted. The time to call an operator that does nothing is
measured too, and subtracted.

What their kernels allocate for themselves is read from the allocator's own log, in the second step only: the first call
of a kind may fill a cache. It may depend on numbers, as that of indexing does, so that calls that are alike differ in
it; a replay is assumed to take the most that any of them took.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from actmem.distributedcompat import LinkTraffic, link_traffic
from actmem.engine import WHOLE_CALLS
from actmem.log_entries import CallRan, Entry, Left, LiveEntry, OperatorEntry, OpRan, Packed, StorageDied, TensorGone
from actmem.measuring import (
    ByteLedger,
    Formula,
    Formulas,
    called_from_python,
    flop_formula,
    is_foreign,
    is_listed,
    number_bytes,
    storages_of,
    tensors_in,
    watches,
    workspace_bytes,
)
from actmem.measuring import Entry as LedgerEntry
from actmem.profiles import Cost
from actmem.profiling.kernel_workspaces import KernelWorkspaces
from actmem.torchcompat import (
    TorchDispatchMode,
    as_outside,
    current_graph_task,
    dispatch_modes,
    divide,
    is_composite,
    log_allocations,
    logged_allocations,
    never_compile,
    num_bytes,
    op_name,
)

__all__ = [
    "Accumulated",
    "Allocated",
    "BackwardBegan",
    "BackwardEnded",
    "Chronicle",
    "Freed",
    "TensorDied",
    "changes",
    "settled",
]

_ASKS_DEVICE: Any = torch.ops.prim.device.default
"""What `tensor.device` is on a fake tensor."""


_NUMBER_BYTES = 8
"""What so few bytes hold is a number, which stays on the host."""


@final
@dataclass(slots=True, unsafe_hash=True)  # see NOTE [ The log ]
class TensorDied(Entry):
    """In forward: a tensor is gone. `settled` leaves those whose storage lives on."""

    layer: int
    index: int
    storage: int


@final
@dataclass(slots=True, unsafe_hash=True)  # see NOTE [ The log ]
class BackwardBegan(LiveEntry):
    """The gradient of a block's output is complete. `expand` needs to know, and leaves it out."""

    layer: int
    live_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)  # see NOTE [ The log ]
class BackwardEnded(LiveEntry):
    """The gradient of a block's input is complete. `expand` needs to know, and leaves it out."""

    layer: int
    live_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)  # see NOTE [ The log ]
class Accumulated(LiveEntry):
    """The gradient of a parameter is complete. `changes` leaves it out of the log."""

    layer: int
    """The block call whose module it belongs to; -1 outside of the blocks, or if several have it."""
    name: str
    """In the module of the block, or in the model."""
    storage: int
    """The gradient's."""
    live_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)  # see NOTE [ The log ]
class Allocated(Entry):
    """The step allocated a storage. `changes` leaves it out of the log."""

    storage: int
    num_bytes: int


@final
@dataclass(slots=True, unsafe_hash=True)  # see NOTE [ The log ]
class Freed(Entry):
    """A storage is no longer counted. `changes` leaves it out of the log."""

    storage: int


class _Ledger(ByteLedger):
    """A ledger that numbers all storages, and reports when one is allocated and freed, and when a block's dies."""

    def __init__(self, device: torch.device, log: list[Entry]) -> None:
        super().__init__(device)
        self._log = log
        self._numbers: dict[int, int] = {}
        """Key of a living storage -> its number."""
        self._watched: set[int] = set()
        """Numbers of the living ones that a block made or read."""
        self.sizes: dict[int, int] = {}
        """Number -> its bytes; of one that died, those that it then had."""
        self._external: dict[int, tuple[int, int, str]] = {}
        self.ends = False
        """The step is over: what is freed from now on is the profiler's doing."""

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage that a block made or read."""
        entry = self._live.get(id(storage))
        if entry is None:
            entry = self._open(storage, storage.device, external=True)
        found = self._numbers[entry.key]
        if found not in self._watched:
            self._watched.add(found)
            # What was not counted while it was alive takes no memory of the step: it is the caller's.
            self.sizes[found] = 0 if entry.external else entry.nbytes
        return found

    def stock(self) -> list[tuple[int, int, str]]:
        """Return number, bytes and role of what is there when the step begins."""
        return [(self._numbers[e.key], e.nbytes, e.role or "") for e in self._entries if e.device == self._device]

    def numbers_of(self, holdings: Iterable[tuple[Tensor, str]]) -> dict[str, list[int]]:
        """Return the numbers of the storages that tensors have now, by their role."""
        found: dict[str, dict[int, None]] = {}
        for tensor, role in holdings:
            for storage in storages_of(tensor):
                entry = self._live.get(id(storage))
                if entry is not None:
                    found.setdefault(role, {})[self._numbers[entry.key]] = None
        return {role: list(numbers) for role, numbers in found.items()}

    def give(self, storage: torch.UntypedStorage) -> None:
        """Meet a storage that stands for a saved value: the step does not count it."""
        if id(storage) not in self._live:
            entry = self._open(storage, storage.device, external=True)
            self._external.pop(self._numbers[entry.key], None)

    def external_stock(self) -> list[tuple[int, int, str]]:
        """Return the same of what the step read and nobody counts: the batch, constants."""
        return [each for each in self._external.values() if each[1] > _NUMBER_BYTES]

    def replaced(self, entry: LedgerEntry) -> None:
        """Let what has just been returned go on under the number of what it takes the place of."""
        super().replaced(entry)
        if not entry.nbytes:
            return
        number, last = self._numbers.pop(entry.key), self._log[-1] if self._log else None
        if number in self._watched or not isinstance(last, Allocated) or last.num_bytes != entry.nbytes:
            self._log.append(Freed(number))
            self._numbers[entry.key] = number
            return
        self._log.pop()
        key = next(key for key, its in reversed(self._numbers.items()) if its == last.storage)
        self._numbers[key] = number

    def _open(self, storage: torch.UntypedStorage, device: torch.device, *, external: bool = False) -> LedgerEntry:
        entry = super()._open(storage, device, external=external)
        self._numbers[entry.key] = number = len(self.sizes)
        self.sizes[number] = 0 if external else entry.nbytes
        if external and device == self._device:
            self._external[number] = (number, entry.nbytes, "batch")
        elif self.event >= 0:
            self._note_birth(entry)
        return entry

    def _settle(self, entry: LedgerEntry, storage: torch.UntypedStorage) -> bool:
        counted = not entry.external and entry.death is None and entry.nbytes > 0
        changed = super()._settle(entry, storage)
        if changed and self.event >= 0:
            if counted:
                self._log.append(Freed(self._numbers[entry.key]))
            self._note_birth(entry)
        return changed

    def _note_birth(self, entry: LedgerEntry) -> None:
        if entry.device == self._device and entry.nbytes:
            self._log.append(Allocated(self._numbers[entry.key], entry.nbytes))

    def _died(self, entry: LedgerEntry) -> None:
        counted = not entry.external and entry.death is None and entry.device == self._device and entry.nbytes > 0
        super()._died(entry)
        number = self._numbers.pop(entry.key, None)
        if number is None:
            return
        if counted and not self.ends:
            self._log.append(Freed(number))
        if number in self._watched:
            self._watched.discard(number)
            self.sizes[number] = 0 if entry.external else entry.nbytes  # `out=` may have resized it
            self._log.append(StorageDied(number))


class Chronicle(TorchDispatchMode):
    """Keeps the log of a step. See NOTE [ The log ] in `log_entries.py`."""

    only_watches = True
    """See NOTE [ in place unless watched ]."""

    supports_higher_order_operators = True
    sees_regions = True
    """Sees the call of a compiled graph as one operator. See NOTE [ Compiled regions ]."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __init__(
        self,
        device: torch.device,
        *,
        least_seconds: dict[Hashable, float] | None = None,
        finds_workspaces: bool = False,
        kernels: KernelWorkspaces | None = None,
    ) -> None:
        """Start an empty log.

        Args:
            device: where the step runs.
            least_seconds: where to record how long operators take, if they are timed.
            finds_workspaces: whether to find out what kernels allocate for themselves, where that can be seen.
            kernels: what knows it where the step runs on fake tensors; without it, kernels take nothing.
        """
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self.log: list[Entry] = []
        self.ledger = _Ledger(device, self.log)
        self._numbers: dict[tuple[Cost, Hashable], int] = {}
        """What makes calls alike -> the number of their cost."""
        self.paused = False
        """Operators are not logged: they are the profiler's own."""
        self._names: list[str] = []
        self.groups: set[tuple[int, ...]] = set()
        """The ranks of each group in which a collective ran."""
        self._claim: tuple[str, tuple[int, int], Callable[[int, int], None]] | None = None
        self._least, self.device = least_seconds, device
        self._finds_workspaces = finds_workspaces and device.type == "cpu"
        self._kernels = kernels if device.type == "cpu" else None
        self._workspaces: dict[int, int] = {}
        """Number of a cost -> the largest workspace of its calls."""
        self._known: dict[Any, tuple[str, Formula | None, bool, bool, bool, tuple[int, ...]]] = {}
        self._formulas = Formulas()
        self._read: set[int] = set()
        """Storages of parameters that were read, which outlive the step."""

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """Run operators without logging them."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @property
    def costs(self) -> tuple[Cost, ...]:
        """The costs of the operators, by number. See NOTE [ Measured seconds ]."""
        least = self._least
        if least is None:
            return tuple(cost for cost, _ in self._numbers)
        calling = _calling_seconds()
        return tuple(
            replace(alike[0], seconds=max(0.0, least[alike] - calling), workspace_bytes=self._workspaces.get(number, 0))
            for alike, number in self._numbers.items()
        )

    def has_read(self, parameter: Tensor) -> bool:
        """Return whether an operator of the step has read a parameter."""
        return any(id(storage) in self._read for storage in storages_of(parameter))

    @property
    def live_bytes(self) -> int:
        """The bytes that the program keeps alive now."""
        return self.ledger.main.live_bytes

    def note(self, entry: Entry) -> None:
        """Add an entry."""
        self.log.append(entry)

    def claim(self, op: str, call: tuple[int, int], tell: Callable[[int, int], None]) -> int:
        """Attribute the last operator seen, or else the next one, to a call of a block. Return its cost.

        An operator that writes is announced before it runs: then `tell` gets its cost when it has run. A function that
        is recorded as one operator is known here by the last operator that runs in it, or by its first if it writes.
        """
        at = len(self.log) - 1
        while at >= 0 and not isinstance(self.log[at], OperatorEntry):  # deaths may follow it
            at -= 1
        last = self.log[at] if at >= 0 else None
        if isinstance(last, OpRan) and (self._names[last.cost] == op or op.startswith(WHOLE_CALLS)):
            self.log[at] = CallRan(*call, last.cost, last.live_bytes, last.workspace_bytes)
            return last.cost
        self._claim = (op, call, tell)
        return -1

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if self.paused or func is _ASKS_DEVICE:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and is_composite(func):
            divided = divide(self, func, args, kwargs)
            if divided is not NotImplemented:
                return divided
        facts = self._known.get(func)
        if facts is None:
            facts = self._known[func] = _learn(func)
        name, formula, mutates, adopts, listed, places = facts
        ledger = self.ledger
        if not adopts or is_foreign(args[0]):
            self._note_reads(args, kwargs)
        in_backward = current_graph_task() != -1
        if in_backward:
            self._formulas.enter(ledger.event)
        place = ledger.entry_of(args[0]) if listed else None
        if place is not None and not self._formulas.takes_place(name, args, place):
            place = None
        workspace = 0 if self._kernels is None else self._kernels.taken_by(func, args, kwargs)
        is_logged = self._finds_workspaces and log_allocations()
        changes: list[Any] = []
        try:
            with as_outside(func):
                started = self._now()
                result = func(*args, **kwargs)
                ended = self._now()
        finally:
            if is_logged:
                changes = logged_allocations()
        if mutates:
            self._note_reads(args, kwargs)
        moved, computes_in = 0, ""
        held = in_backward and called_from_python()
        for tensor in tensors_in(result):
            ledger.returned(tensor, name, held_by_python=held)
            moved += num_bytes(tensor)
            if tensor.is_floating_point() or tensor.is_complex():
                computes_in = computes_in or _name(tensor)
        made = moved
        for tensor in tensors_in((args, kwargs)):
            moved += num_bytes(tensor)
            computes_in = computes_in or (_name(tensor) if tensor.is_floating_point() else "")
        if place is not None:
            ledger.replaced(place)
        view = not mutates and _shares(args, result)
        flops = 0 if formula is None else formula(args, kwargs, result)
        least = self._least
        numbers = 0
        if self.device.type == "cpu":
            numbers = sum(number_bytes(args[i]) for i in places if i < len(args))
        link, reach, ranks = LinkTraffic() if "c10d" not in name else _traffic(name, args, made, moved - made)
        if len(ranks) > 1:
            self.groups.add(ranks)
        cost = Cost(name, flops, 0 if view else moved, computes_in, number_bytes=numbers, link_bytes=link, reach=reach)
        alike = cost, None if least is None else _lie(args, kwargs)
        number = self._numbers.setdefault(alike, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        if least is not None:
            least[alike] = min(ended - started, least.get(alike, float("inf")))
        if len(changes) > 1:
            # Each mode beneath this one makes a tensor of a number once more.
            workspace = workspace_bytes(changes, numbers * (1 + len(dispatch_modes())))
            self._workspaces[number] = max(workspace, self._workspaces.get(number, 0))
        ledger.event += 1
        claim, self._claim = self._claim, None
        if claim is not None and (claim[0] == name or claim[0].startswith(WHOLE_CALLS)):
            claim[2](claim[1][1], number)
            self.log.append(CallRan(*claim[1], number, ledger.main.live_bytes, workspace))
        else:
            self.log.append(OpRan(number, ledger.main.live_bytes, workspace))
        return result

    def _now(self) -> float:
        """Read the clock once the device has finished its queued work."""
        if self._least is not None and self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        return perf_counter()

    def _note_reads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors_in((args, kwargs)):
            self.ledger.read(tensor)
            if _shows_leaf(tensor):
                self._read.update(id(storage) for storage in storages_of(tensor))


def _shows_leaf(tensor: Tensor) -> bool:
    """Return whether a tensor is one without a history that gets a gradient, or a view of one.

    A view is never asked for its history. If its base was overwritten, torch would make its backward step there and
    then: below autograd, where the history of the base may not yet be written, and earlier than without a profile,
    which decides when the step runs.
    """
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    origin = tensor if base is None else base
    return origin.requires_grad and origin.is_leaf


def _calling_seconds() -> float:
    """Measure the time of a call that computes nothing."""
    tensor, call = torch.zeros(1), torch.ops.aten.alias.default
    least = float("inf")
    for _ in range(50):
        started = perf_counter()
        call(tensor)
        least = min(least, perf_counter() - started)
    return least


def _lie(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the memory layout of a call's tensors."""
    return tuple((t.shape, t.stride() if t.layout is torch.strided else None) for t in tensors_in((args, kwargs)))


def settled(log: list[Entry]) -> list[Entry]:
    """Drop the deaths of tensors whose storage died with them.

    >>> settled([TensorDied(0, 1, 7), StorageDied(7), TensorDied(0, 2, 8), StorageDied(9)])
    [StorageDied(storage=7), TensorGone(layer=0, index=2), StorageDied(storage=9)]
    """
    found: list[Entry] = []
    dead: set[int] = set()
    for entry in reversed(log):
        if isinstance(entry, StorageDied):
            dead.add(entry.storage)
        elif isinstance(entry, (OperatorEntry, Packed, Left)):
            dead.clear()
        if not isinstance(entry, TensorDied):
            found.append(entry)
        elif entry.storage not in dead:
            found.append(TensorGone(entry.layer, entry.index))
    found.reverse()
    return found


class Changes(NamedTuple):
    """What `changes` takes out of a log."""

    log: list[Entry]
    """What is left of it."""
    memory: list[tuple[int, int, int]]
    """The position in the log before which something was allocated or freed, a storage, and its bytes; none if it was
    freed."""
    accumulated: list[tuple[int, int, Accumulated]]
    """The position in the log before which a gradient was complete, how many more bytes were alive then than after the
    entry before that says so, and which gradient."""


def changes(log: list[Entry]) -> Changes:
    """Split a log into what is left of it, and what came and went on the way.

    >>> changes([Allocated(0, 8), StorageDied(3), Freed(0)])
    Changes(log=[StorageDied(storage=3)], memory=[(0, 0, 8), (1, 0, 0)], accumulated=[])
    """
    found = Changes([], [], [])
    left, memory = found.log, found.memory
    latest: LiveEntry | None = None
    for entry in cast("list[Any]", log):  # a large model has a hundred thousand
        kind: Any = type(entry)  # pyright: ignore[reportUnknownVariableType]
        if kind is Allocated:
            memory.append((len(left), entry.storage, entry.num_bytes))
        elif kind is Freed:
            memory.append((len(left), entry.storage, 0))
        elif kind is Accumulated:
            live = 0 if latest is None else latest.live_bytes
            found.accumulated.append((len(left), entry.live_bytes - live, entry))
        else:
            if isinstance(entry, LiveEntry):
                latest = entry
            left.append(entry)
    return found


watches(__file__)


def _learn(func: Any) -> tuple[str, Formula | None, bool, bool, bool, tuple[int, ...]]:
    schema = getattr(func, "_schema", None)
    name = op_name(func)
    mutates = schema is None or bool(schema.is_mutable)
    places = () if schema is None else tuple(i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor")
    return name, flop_formula(func), mutates, name == "aten.lift_fresh.default", is_listed(name), places


def _traffic(name: str, args: tuple[Any, ...], made: int, given: int) -> LinkTraffic:
    """Return what a collective sends, and how far: one that is given room for its result returns it too."""
    if name.startswith("c10d."):
        sizes = [num_bytes(tensor) for tensor in tensors_in(args)] or [0]
        made, given = sizes[0], sizes[-1]
    return link_traffic(name, args, given, made)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shares(args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a call only returned another view of its first tensor."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None or not isinstance(result, Tensor):
        return False
    try:
        return result.untyped_storage() is first.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
