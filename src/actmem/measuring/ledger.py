"""Bytes that are alive, storage by storage.

NOTE [ what the ledger counts ]

The unit is the storage: a view costs nothing, two tensors on one storage cost it once. A storage is known by a weak
reference to torch's Python object for it. torch keeps that object for as long as the storage itself lives, so its end
is exactly the storage's end, and its `id` is a safe key until the reference's callback removes it. The
allocator reuses addresses at once: a pointer would confuse an old storage with a new one.

An entry is one of three:

- base: belongs to the model or the optimizer when the step begins. Counted.
- step: an operator of the step returned it, or the step resized it, and nobody knew it before. Counted.
- external: an operator of the step read it before anybody knew it: a batch made beforehand, a constant. Not counted,
  only summed. Once the step resizes it, its memory is the step's doing: it turns into a step entry of the new size.

The live set of a past moment is read from births, deaths and resizes, so that the peak costs nothing to remember.

`UntypedStorage.resize_` is not an operator, so no dispatch mode sees it; FSDP fills and frees its parameters with it.
While a listener is present, the method is replaced by one that reports; when the last one leaves, the class is as it
was.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from threading import get_ident
from typing import Any, cast

import torch

from actmem.torchcompat import FakeTensor, has_storage, is_traceable_wrapper_subclass, without_dispatch_modes

__all__ = [
    "Account",
    "ByteLedger",
    "Entry",
    "device_of",
    "is_foreign",
    "state_tensors",
    "storages_of",
    "tensors_in",
    "watching_resizes",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor. A fake one says it itself: to torch it is an operator, which every mode sees."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def storages_of(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """Return the storages that hold the data of `tensor`.

    A wrapper subclass such as a DTensor has those of its inner tensors, a sparse tensor those of its components. An
    opaque (MKL-DNN) tensor has none that can be named.
    """
    plain = type(tensor) in _PLAIN
    if plain and has_storage(tensor):
        return (tensor.untyped_storage(),)
    if not plain and is_traceable_wrapper_subclass(tensor):
        names: list[str] = cast("Any", tensor).__tensor_flatten__()[0]
        parts = (getattr(tensor, name) for name in names)  # a DTensor also lists its mesh
        return tuple(storage for part in parts if isinstance(part, torch.Tensor) for storage in storages_of(part))
    if has_storage(tensor):
        return (tensor.untyped_storage(),)
    with without_dispatch_modes():  # reading a component is an operator, but not work of the step
        return tuple(component.untyped_storage() for component in _components(tensor))


def _components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # pyright: ignore[reportPrivateUsage]  # the public ones want it coalesced
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def is_foreign(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory belongs to numpy or another library, not to torch's allocator."""
    return has_storage(tensor) and not tensor.untyped_storage().resizable()


class Entry(weakref.ref[torch.UntypedStorage]):
    """Remember the life of one storage without holding it."""

    __slots__ = (
        *("birth", "death", "device", "external", "held_by_python", "key", "maker", "nbytes", "phase", "role", "sizes"),
        *("step", "survived"),
    )

    key: int
    device: torch.device
    nbytes: int
    external: bool
    step: bool
    phase: str
    """The phase in which the step allocated it; "" for others."""
    birth: int
    death: int | None
    """It is alive at the end of event k if birth <= k < death."""
    role: str | None
    """The category by its use, once that is seen."""
    survived: bool
    """Allocated by forward and alive when the backward after it began, or when the step ended."""
    sizes: list[tuple[int, int]] | None
    """(event, size from then on), if it was ever resized."""
    maker: str
    """The operator that returned it; "" for others."""
    held_by_python: bool
    """Python code, such as a hand-written autograd Function, called that operator in a backward pass."""

    def nbytes_at(self, event: int) -> int:
        """Return its size at the end of `event`, 0 if it was not alive and counted."""
        if self.external or event < self.birth or (self.death is not None and event >= self.death):
            return 0
        if self.sizes is None:
            return self.nbytes
        return next(size for since, size in reversed(self.sizes) if since <= event)


class Account:
    """The sums of one device."""

    __slots__ = ("live_bytes", "peak_bytes", "peak_event", "peak_unseen_bytes", "step_live_bytes", "step_peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = 0
        self.step_live_bytes = 0
        self.peak_bytes = 0
        self.step_peak_bytes = 0
        self.peak_event = -1
        self.peak_unseen_bytes = 0
        """The part of the peak that is in no entry."""


class ByteLedger:
    """Keep the entries of one step. See NOTE [ what the ledger counts ]."""

    def __init__(self, device: torch.device) -> None:
        self.event = -1
        """The current event; -1 until the step begins."""
        self.phase = ""
        """The phase to which births are booked."""
        self.external_bytes = 0
        self.accounts: dict[torch.device, Account] = {device: Account()}
        self.main = self.accounts[device]
        self._device = device
        self.booked: Counter[int] = Counter()
        """How many storages of each size this thread has opened on the CPU, less those that it has seen die, since
        somebody emptied it."""
        self._thread = get_ident()
        self._entries: list[Entry] = []
        self._live: dict[int, Entry] = {}

    def add_base(self, tensor: torch.Tensor, role: str) -> None:
        """Count a tensor of the model or the optimizer. The first role of a storage stays."""
        for storage in storages_of(tensor):
            if id(storage) not in self._live:
                self._open(storage, device_of(tensor)).role = role

    def begin(self) -> None:
        """Treat what is counted so far as the state before the step."""
        for account in self.accounts.values():
            account.peak_bytes = account.live_bytes
        self.booked.clear()
        self.event = 0

    def read(self, tensor: torch.Tensor) -> None:
        """Book a tensor that an operator is about to read, or has written: external if unknown, resized if it is."""
        for storage in storages_of(tensor):
            entry = self._live.get(id(storage))
            if entry is None:
                self._open(storage, device_of(tensor), external=True)
            else:
                self._settle(entry, storage)

    def returned(self, tensor: torch.Tensor, maker: str = "", *, held_by_python: bool = False) -> None:
        """Book a tensor that an operator returned: allocated by it if unknown."""
        for storage in storages_of(tensor):
            entry = self._live.get(id(storage))
            if entry is None:
                entry = self._open(storage, device_of(tensor))
                entry.maker, entry.held_by_python = maker, held_by_python
            else:
                self._settle(entry, storage)

    def entry_of(self, value: Any) -> Entry | None:
        """Return the entry of a plain tensor's storage, if it is known and counted."""
        if not isinstance(value, torch.Tensor) or not has_storage(value):
            return None
        entry = self._live.get(id(value.untyped_storage()))
        return None if entry is None or entry.external or entry.death is not None else entry

    def replaced(self, entry: Entry) -> None:
        """Stop counting a storage although it lives: what has just been returned takes its place."""
        entry.death = self.event
        self._book(entry, -entry.nbytes)

    def resized(self, storage: torch.UntypedStorage) -> bool:
        """Book a resize outside every operator. Return whether it changed a counted size."""
        entry = self._live.get(id(storage))
        if entry is None:  # FSDP keeps empty storages between steps and fills them: the step allocates what is in them
            self._open(storage, self._device if storage.device.type == "meta" else storage.device)
            return True
        return self._settle(entry, storage)

    def mark(self, tensor: torch.Tensor, role: str) -> None:
        """Record what a counted storage is used for, unless that is already known."""
        for storage in storages_of(tensor):
            entry = self._live.get(id(storage))
            if entry is not None and entry.role is None:
                entry.role = role

    def sample(self) -> None:
        """End the current event."""
        for account in self.accounts.values():
            if account.live_bytes > account.peak_bytes:
                account.peak_bytes, account.peak_event = account.live_bytes, self.event
            elif account.peak_event < 0 and account.live_bytes == account.peak_bytes:
                account.peak_event = self.event  # nothing was ever above the start, and here we are as high
            account.step_peak_bytes = max(account.step_peak_bytes, account.step_live_bytes)
        self.event += 1

    def settle_forward(self) -> int:
        """Mark what forward left alive and return its bytes on the measured device."""
        total = 0
        for entry in tuple(self._live.values()):  # a copy: the collector may end entries while we walk
            if entry.phase == "forward" and entry.death is None:
                entry.survived = True
                if entry.device == self._device:
                    total += entry.nbytes
        return total

    def by_category(self, categories: tuple[str, ...]) -> dict[str, int]:
        """Divide the peak of the measured device into categories."""
        result = dict.fromkeys(categories, 0)
        for entry in self._entries:
            if entry.device == self._device:
                category = entry.role or ("activations" if entry.survived else "temporary")
                result[category] += entry.nbytes_at(self.main.peak_event)
        result["temporary"] += self.main.peak_unseen_bytes
        return result

    def close(self) -> None:
        """Drop all references to storages, and with them their callbacks, which lead back here."""
        self._entries.clear()
        self._live.clear()

    def _open(self, storage: torch.UntypedStorage, device: torch.device, *, external: bool = False) -> Entry:
        entry = Entry(storage, self._died)
        entry.key = id(storage)
        entry.device = device
        entry.nbytes = storage.nbytes()
        entry.external = external
        entry.step = self.event >= 0
        entry.phase = "" if external else self.phase
        entry.birth = self.event
        entry.death = None
        entry.role = None
        entry.survived = False
        entry.sizes = None
        entry.maker = ""
        entry.held_by_python = False
        self._live[entry.key] = entry
        if external:
            if device == self._device:
                self.external_bytes += entry.nbytes
        else:
            self._entries.append(entry)
            self._book(entry, entry.nbytes)
            self._note(entry, 1)
        return entry

    def _note(self, entry: Entry, count: int) -> None:
        # torch's log does not know the size of what existed before it started, and omits its release.
        if entry.step and entry.nbytes and entry.device.type == "cpu" and get_ident() == self._thread:
            self.booked[entry.nbytes] += count

    def _settle(self, entry: Entry, storage: torch.UntypedStorage) -> bool:
        nbytes = storage.nbytes()
        if nbytes == entry.nbytes:
            return False
        if entry.external:
            entry.external, entry.phase, entry.birth = False, self.phase, self.event
            self._entries.append(entry)
            self._book(entry, nbytes)
        else:
            self._note(entry, -1)
            if entry.sizes is None:
                entry.sizes = [(entry.birth, entry.nbytes)]
            entry.sizes.append((self.event, nbytes))
            self._book(entry, nbytes - entry.nbytes)
        entry.nbytes = nbytes
        self._note(entry, 1)
        return True

    def _died(self, entry: Any) -> None:
        self._live.pop(entry.key, None)
        if entry.external:
            return
        self._note(entry, -1)
        if entry.death is None:  # else another has taken its place
            entry.death = self.event
            self._book(entry, -entry.nbytes)

    def _book(self, entry: Entry, change: int) -> None:
        account = self.accounts.get(entry.device)
        if account is None:
            account = self.accounts[entry.device] = Account()
        account.live_bytes += change
        if entry.step:
            account.step_live_bytes += change


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an operator's arguments or result, or in an optimizer's state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("tuple[Any, ...]", value):
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from tensors_in(item)


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer keeps from step to step: its state, and what is in its own attributes.

    >>> layer = torch.nn.Linear(2, 2)
    >>> [*state_tensors(torch.optim.SGD(layer.parameters()))]
    []
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    attributes = cast("dict[str, Any]", vars(optimizer))
    others = [value for name, value in attributes.items() if name not in ("state", "param_groups")]
    for tensor in tensors_in([dict(optimizer.state), *others]):
        if id(tensor) not in own:
            yield tensor


_listeners: list[Callable[[torch.UntypedStorage], object]] = []
_restore: list[Callable[[], None]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def watching_resizes(listener: Callable[[torch.UntypedStorage], object]) -> Generator[None]:
    """Call `listener` with each storage that was resized, after the fact, until the block is left."""
    with _lock:
        if not _listeners:
            _restore.append(_install())
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                _restore.pop()()


_storage_class: Any = torch.UntypedStorage


def _install() -> Callable[[], None]:
    """Replace the method. Return a function that restores the original."""
    before: Any = _storage_class.__dict__.get("resize_")  # None: inherited from the C class
    original: Any = _storage_class.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        for listener in tuple(_listeners):
            listener(self)
        return result

    def restore() -> None:
        if _storage_class.__dict__.get("resize_") is not resize_:
            return  # something replaced ours since and will restore it; without listeners it only forwards
        if before is None:
            del _storage_class.resize_
        else:
            _storage_class.resize_ = before

    _storage_class.resize_ = resize_
    return restore
