"""The values of one block call, by storage, and what is held of them.

A storage is found by its key and confirmed by a weak reference, because the allocator gives the key of a dead storage
to the next. Values that recorded operators make are only known here. Values that none makes (inputs, parameters,
what the plan keeps, what is never replayed) may have to be held, and this file decides when that happens and how:

- inputs and parameters when an operator first reads them; parameters by their object, so that whoever swaps their
  data finds it swapped here too; other tensors by an alias that has the same version counter and no history,
  because a tensor with history would close a cycle through the graph that holds the handle;
- the rest when something that autograd saves cannot do without it (NOTE [ Barriers ]).

NOTE [ Copies ]
What is held by reference belongs to the program, which may write to it. Plain autograd refuses that only for what it
saved itself; a chain also starts from what it did not save, such as the vector that spectral norm moves on in every
call, or a scratch buffer that all blocks use. So before a recorded operator writes, what it overwrites is copied for
everyone who can still reach it: for values of its own tape by `preserve`, for those of other block calls, of any
model, by `preserve_elsewhere`. Whoever holds a value by reference is noted at the storage itself, weakly: the note
dies with the storage, and nothing is copied for a value that no graph reaches any more.

Parameters are noted nowhere: whoever gathers or swaps their data (FSDP) writes the same numbers again. And a write
outside every applied block is seen too late: it is refused when backward needs what was there (`VersionError`).
"""

# pyright: reportPrivateUsage=false
# `_cdata`, `_base` and `_version` are read here and not through functions of `torchcompat`: this is near the hot path.

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from actmem.decisions import Reason
from actmem.engine.holding_rules import HOLD, RESERVE, number_held, on_meeting, preserve
from actmem.engine.observation import Observation
from actmem.engine.values import UNCHECKED, Boxed, Value, copied, flat, tensors, without_bits
from actmem.torchcompat import alias, alias_in_handler, counting_versions, in_fake_mode, outer_hooks

__all__ = ["Holdings", "find", "preserve_elsewhere", "storage_of"]

_ref = weakref.ref
_EXTERNAL, _PARAMETER, _UNSEEN = Reason.EXTERNAL, Reason.PARAMETER, Reason.UNSEEN


class Holdings:
    """What a tape knows about the storages that it has met. Operators are recorded by `Tape`, which adds them."""

    def __init__(self, inputs: list[Tensor], trainable: Any, observation: Observation | None) -> None:
        self.paused = False
        """Operators run unrecorded: they belong to a call that is recorded as a whole, to an outer hook, or to the
        self-check."""
        self.communicated = False
        """A collective ran while operators were unrecorded."""
        self.observation = observation
        self._values: dict[int, Value] = {}
        self._trainable: Any = trainable
        """Storages of the block's trainable parameters, or a function that returns them: few blocks ask."""
        self._detached: dict[int, Value] = {}
        """Those parameters, as they are read without being differentiated."""
        self._inputs: set[int] = set()
        """Storages of the block's arguments. Other tensors with a history come from work that the tape cannot see."""
        self._bits = False
        """A conj or neg bit may be set somewhere."""
        self._outer = outer_hooks()
        self._in_fake_mode = in_fake_mode()
        """The tape was made in a profile on fake tensors."""
        self._copied: list[Value] = []
        """Values that were copied before the block wrote to them."""
        self._provisional: list[Value] = []
        """Values that are held by a copy whose version counter is not the tensor's own."""
        self._reserve: list[Tensor] = []
        """Kept alive until the forward is over: constants that a recorded operator read, such as the ones that a
        mask is cut from, and values that the plan keeps."""
        self._budget = 0
        """How many more bytes may be reserved: the block's inputs and what autograd saved so far, less what
        is."""
        for t in inputs:
            self._bits = self._bits or t.is_complex() or t.is_neg()
            if not t.is_nested:
                self._budget += t.nbytes
                if (storage := storage_of(t)) is not None:
                    self._inputs.add(storage._cdata)

    def _lookup(self, tensor: Tensor) -> Value | None:
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)
        return value if value is not None and value.storage() is storage else None

    def _meet(self, a: Tensor, storage: Any, value: Value | None) -> Value:
        """Return the value of `a`, for one that no node makes: held if that is free, owed otherwise."""
        if not a.requires_grad and self._is_trainable(storage):
            return self._undifferentiated(a, storage)
        if value is None or value.storage() is not storage or value.node is not None:
            return self._external(a, storage)  # a node made it, but code that the tape did not see has written it since
        if value.held is None:
            action = on_meeting(value)
            if action is HOLD:
                self._hold(value, a, alias_in_handler)
            elif action is RESERVE:
                self._keep_from_dying(value, a, storage.nbytes())
        elif value.version != UNCHECKED and value.held._version != value.version:
            # Written by code that the tape did not see. Whoever holds the older version gets an error when it is read.
            return self._external(a, storage)
        return value

    def _keep_from_dying(self, value: Value, a: Tensor, num_bytes: int) -> None:
        """Reserve a value until the forward is over, as long as plain autograd would hold as much by now."""
        value.num_bytes = num_bytes
        if num_bytes <= self._budget:
            self._budget -= num_bytes
            self._reserve.append(spare := without_bits(alias_in_handler(a)))
            value.reserved, value.tensor = True, _ref(spare)
        else:
            value.tensor = _ref(a if a._base is None else a._base)  # a view may die long before what it shows

    def _is_trainable(self, storage: Any) -> bool:
        if storage._cdata in self._inputs:
            return False
        if callable(self._trainable):
            self._trainable = self._trainable()
        return storage._cdata in self._trainable

    def _undifferentiated(self, a: Tensor, storage: Any) -> Value:
        """Return the value of a trainable parameter that is read by `W.detach()` or `W.data`.

        It is not the value of the differentiated path, and it is never held: an optimizer that steps inside
        backward changes it while the graph still needs it, and `W.data` does not even count versions. What is made
        from it is held instead.
        """
        value = self._detached.get(storage._cdata)
        if value is None or value.storage() is not storage:
            value = self._detached[storage._cdata] = Value(_ref(storage), None, 0, _PARAMETER)
            if self.observation is not None:
                self.observation.given(value, a, storage.nbytes())
        return value

    def _external(self, a: Tensor, storage: Any) -> Value:
        """Make a value for a tensor that no recorded operator made: an input, a parameter, a buffer, or unseen work."""
        value = Value(_ref(storage), None, 0, _EXTERNAL)
        self._values[storage._cdata] = value
        self._bits = self._bits or a.is_complex() or a.is_neg()
        origin = a if a._base is None else a._base
        if origin.grad_fn is not None and storage._cdata not in self._inputs:
            value.why, value.tensor, value.num_bytes = _UNSEEN, _ref(origin), storage.nbytes()
        else:
            self._hold(value, a, alias_in_handler)
        if self.observation is not None:
            self.observation.given(value, a, storage.nbytes())
        return value

    def _saved_external(self, tensor: Tensor, storage: Any) -> Value:
        """Make a value for a tensor that autograd saves and that no recorded operator made."""
        value = Value(_ref(storage), None, 0, _EXTERNAL)
        self._values[storage._cdata] = value
        self._bits = self._bits or tensor.is_complex() or tensor.is_neg()
        if self._outer is not None:
            value.held = self._box(tensor, alias)
        else:
            self._hold_saved(value, tensor)
        if self.observation is not None:
            self.observation.given(value, tensor, storage.nbytes())
        return value

    def _hold_saved(self, value: Value, tensor: Tensor) -> None:
        """Hold a value by the tensor that autograd shows its hooks."""
        if tensor.grad_fn is None and self._outer is None:
            number_held(value)
            value.held = tensor  # a leaf, or a copy of one: see `_adopt`
            self._provisional.append(value)
        else:
            self._hold(value, tensor, alias)

    def _hold(self, value: Value, tensor: Tensor, make_alias: Callable[[Tensor], Tensor]) -> None:
        """Keep the bytes of a value alive from now on, and note their version."""
        number_held(value)
        origin = tensor if tensor._base is None else tensor._base
        parameter = type(origin) is Parameter or (origin.requires_grad and origin.is_leaf)
        parameter = parameter or (type(origin) is not Tensor and isinstance(origin, Parameter))
        if self._outer is not None and not parameter:
            value.held = boxed = self._box(tensor, make_alias)
            if boxed.version is not None:
                _note_holder(boxed.packed.untyped_storage(), value)
        elif parameter and not (origin.is_conj() or origin.is_neg()):
            value.held = origin
            value.version = UNCHECKED if origin.is_inference() else origin._version
            value.num_bytes = value.num_bytes or origin.untyped_storage().nbytes()
            if not isinstance(origin, Parameter) and value.version != UNCHECKED:
                _note_holder(origin.untyped_storage(), value)  # a leaf that the block was given
        else:
            value.held = base = without_bits(make_alias(tensor))
            storage = base.untyped_storage()
            value.num_bytes = value.num_bytes or storage.nbytes()
            if not base.is_inference():
                value.version = base._version
                _note_holder(storage, value)

    def _box(self, tensor: Tensor, make_alias: Callable[[Tensor], Tensor]) -> Boxed:
        """Give a value to the hooks around the tape: all of its storage, because they may change its layout."""
        assert self._outer is not None
        pack, unpack = self._outer
        paused, self.paused = self.paused, True
        try:
            with counting_versions():
                given = flat(without_bits(make_alias(tensor)))
            boxed = Boxed(pack(given), unpack)
            if type(boxed.packed) is Tensor and storage_of(boxed.packed) is given.untyped_storage():
                boxed.version = None if given.is_inference() else boxed.packed._version
            return boxed
        finally:
            self.paused = paused

    def _adopt(self, args: tuple[Any, ...]) -> None:
        """Replace the copies of leaf tensors that autograd showed its hooks by the tensors themselves.

        The copy has a version counter of its own. The operator that saved the leaf comes next, with the leaf itself.
        """
        waiting, self._provisional = self._provisional, []
        for a in args:
            for t in (a,) if isinstance(a, Tensor) else tensors(a) if isinstance(a, (list, tuple, dict)) else ():
                storage = storage_of(t)
                for value in waiting:
                    if storage is not None and value.storage() is storage:
                        self._hold(value, t, alias_in_handler)
                        waiting.remove(value)
                        break
                if not waiting:
                    return
        for value in waiting:  # what a Python Function saved comes unchanged
            self._hold(value, value.held, alias_in_handler)

    def _preserve(self, value: Value) -> None:
        """Copy what is about to be overwritten, if anything can still reach it.

        Only the caller's reference and this function's own do not count.
        """
        preserve(value, self._values, self._copied, _copy)

    def _forget(self) -> None:
        """Drop everything that no handle can reach."""
        self._values.clear()
        self._copied.clear()
        self._detached.clear()
        self._trainable = frozenset()
        for value in self._provisional:
            self._hold(value, value.held, alias)
        self._provisional.clear()
        self._reserve.clear()
        self._outer = None


def find(value: Value) -> Tensor | None:
    """Return the tensor of a value that is owed; None if it is gone, or its data was swapped."""
    alive = None if value.tensor is None else value.tensor()
    return alive if alive is not None and alive.untyped_storage() is value.storage() else None


def preserve_elsewhere(tensor: Tensor) -> None:
    """Copy what is about to be overwritten for the values of other block calls that hold it. See NOTE [ Copies ]."""
    storage = tensor.untyped_storage()
    holders: _Holders | None = getattr(storage, _HOLDERS, None)
    if holders is None:
        return
    copy = None
    for reference in holders.values:
        value = reference()
        if value is None or not _refers(value, storage):
            continue
        if copy is None:
            copy = _copy_of(value.held)
        _exchange(value, copy)
    delattr(storage, _HOLDERS)  # each of them is dead, has a copy, or was written unseen and will raise


class _Holders:
    """The values that hold a storage by reference, and the number at which to look for dead ones."""

    __slots__ = ("most", "values")

    def __init__(self) -> None:
        self.values: list[weakref.ref[Value]] = []
        self.most = 8


_HOLDERS = "_actmem_holders"


def _note_holder(storage: Any, value: Value) -> None:
    holders: _Holders | None = getattr(storage, _HOLDERS, None)
    if holders is None:
        holders = _Holders()
        setattr(storage, _HOLDERS, holders)
    elif len(holders.values) >= holders.most:
        holders.values = [r for r in holders.values if r() is not None]
        holders.most = 8 + 2 * len(holders.values)
    holders.values.append(_ref(value))


def _refers(value: Value, storage: Any) -> bool:
    """Return whether a value is still held by the bytes of a storage, at the version that it noted."""
    held, version = value.held, value.version
    if type(held) is Boxed:
        held, version = held.packed, held.version
    elif version == UNCHECKED:
        return False
    if version is None or held._version != version or storage.nbytes() < value.num_bytes:
        return False
    return storage_of(held) is storage


def _copy(value: Value) -> None:
    _exchange(value, _copy_of(value.held))


def _copy_of(held: Any) -> Tensor:
    return copied(held.unpack(held.packed) if type(held) is Boxed else held)


def _exchange(value: Value, copy: Tensor) -> None:
    value.version = UNCHECKED  # first: another thread may be reading
    value.held = copy
    if value.row is not None:
        value.row.copied = True


def storage_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor, or None if it has none of its own (sparse, some wrapper subclasses)."""
    if tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
