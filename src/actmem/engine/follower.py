"""A tape that compares a call with a known program instead of recording it. See NOTE [ Known programs ]."""

# pyright: reportPrivateUsage=false
# `_cdata` and `_version` are read here and not through functions of `torchcompat`, because this is the hot path.

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem.decisions import Reason
from actmem.engine.comparisons import DIFFERENT
from actmem.engine.holding_rules import number_held
from actmem.engine.holdings import preserve_elsewhere
from actmem.engine.known_programs import (
    END,
    Learner,
    Pack,
    Place,
    Program,
    Recorded,
    Step,
    argument,
    equal,
    gone,
    still,
)
from actmem.engine.operators import DESCRIBED, describe
from actmem.engine.prepared_replay import KnownCall
from actmem.engine.tape import Tape
from actmem.engine.values import Handle, Value, geometry
from actmem.torchcompat import alias_in_handler, is_wrapper, never_compile, numerics

__all__ = ["Follower", "Rehearsal"]

_ref = weakref.ref
_default_dtype = torch.get_default_dtype
_operators = DESCRIBED


_NO_STEPS = [END]


class Follower(Tape):
    """Follow a program as long as the call is the same, and record from the first difference on."""

    def __init__(self, program: Program, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.followed = False
        """The whole call was the program's."""
        self._program: Program | None = program
        """None from the first difference on."""
        self._steps = program.steps
        self._at = 0
        self._num_packed = 0
        num_values = len(program.made_by)
        self._storages: list[Any] = [gone] * num_values
        """By number: a weak reference to the storage of each value, once it is there."""
        self._born: dict[int, int] = {}
        """The number of the value on each storage that the block made, by key."""
        self._real: list[Value | None] = [None] * num_values
        """By number: values that are held, and those that autograd saved."""

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, if it is the next one of the program; otherwise record it."""
        step = self._steps[self._at]  # the last one is that of no operator
        if step.func is func and not types:
            if self._provisional:
                self._adopt(args)
            run = step.run
            out = self._run(step, args, kwargs) if run is None else run(self, args, kwargs, self._storages, self._real)
            if out is not DIFFERENT:
                return out
        elif types and any(map(is_wrapper, types)):
            return NotImplemented
        else:
            operator = _operators.get(id(func)) or describe(func)
            if operator.view is True:
                return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        self._deviate()
        return Tape.__torch_dispatch__(self, func, types, args, kwargs)

    def _run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Compare a call with a step that is not written down, and run it."""
        if step.recorded:
            if not self._is_same(step, args, kwargs):
                return DIFFERENT
        elif step.written >= 0 and not self._is_written(step, args):
            return DIFFERENT
        if step.flags is not None and numerics() != step.flags:
            return DIFFERENT
        self._recent.clear()
        if step.written >= 0:
            preserve_elsewhere(args[0])
        out = step.call(*args, **kwargs) if kwargs else step.call(*args)
        if step.aliases and out.untyped_storage() is args[0].untyped_storage():
            self._at += 1
        else:
            self._note_results(step, out)
        return out

    def _is_written(self, step: Step, args: tuple[Any, ...]) -> bool:
        """Return whether a call that is not recorded writes what the program writes there."""
        a = args[0]
        return type(a) is Tensor and not a.is_nested and self._storages[step.written]() is a.untyped_storage()

    def _is_same(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Compare a call that has several results, or tensors by name."""
        if len(args) != step.num_args or _default_dtype() is not self._dtype:
            return False
        for i, x in step.rest:
            if not equal(args[i], x) and not _same_list(args[i], x):
                return False
        if kwargs or step.kwargs:
            if kwargs is None or step.kwargs is None or kwargs.keys() != step.kwargs.keys():
                return False
            for name, x in step.kwargs.items():
                if not equal(kwargs[name], x) and not (x is None and isinstance(kwargs[name], Tensor)):
                    return False
        try:
            return all(self._is_read(p, argument(args, kwargs, p.position, p.item)) for p in step.reads)
        except (NotImplementedError, RuntimeError):  # sparse, nested, made in inference mode
            return False

    def _is_read(self, p: Place, a: Any) -> bool:
        """Return whether an argument is what the program reads at a place."""
        if not isinstance(a, Tensor):
            return False
        if p.version >= 0:
            if type(a) is not Tensor or self._storages[p.number]() is not a.untyped_storage():
                return False
            if a._version != p.version:
                return False
        else:
            value = self._real[p.number]
            if a.requires_grad is not p.requires_grad:
                return False
            if not (self.meets(p.number, a) if value is None else still(value, a)):
                return False
        return geometry(a) == (p.size, p.stride, p.offset, p.dtype, 0)

    def meets(self, number: int, tensor: Tensor) -> bool:
        """Hold a value from outside when it is first met; False if it is not what the program expects."""
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_inference():
            return False
        storage = tensor.untyped_storage()
        if not self._is_unknown(storage):
            return False
        origin = tensor if tensor._base is None else tensor._base
        if type(origin) is Parameter and tensor.requires_grad:
            value = self._parameter(origin, storage)
        else:
            value = self._meet(tensor, storage, None)
            if value.held is None or value is not self._lookup(tensor) or self._bits:
                return False
        self._real[number] = value
        return True

    def _parameter(self, parameter: Parameter, storage: Any) -> Value:
        """Hold a parameter: what `_external` does, for one that is seen as itself."""
        value = Value(_ref(storage), None, 0, Reason.EXTERNAL)
        number_held(value)
        value.held, value.version, value.num_bytes = parameter, parameter._version, storage.nbytes()
        self._values[storage._cdata] = value
        return value

    def _is_unknown(self, storage: Any) -> bool:
        """Return whether a storage was not met before, neither made by the block nor given to it."""
        value = self._values.get(storage._cdata)
        if value is not None and value.storage() is storage:
            return False
        number = self._born.get(storage._cdata)
        return number is None or self._storages[number]() is not storage

    def surprised(self, out: Any) -> Any:
        """Note a result that is not a tensor, where the program had one."""
        self._note_results(self._steps[self._at], out)
        return out

    def _note_results(self, step: Step, out: Any) -> None:
        """Note what a call made that writes, returns several tensors, or is not recorded."""
        program = self._program
        assert program is not None
        if step.written >= 0:
            self._at += 1
            number, storage = step.outs[0][1], out.untyped_storage()
            self._storages[number] = _ref(storage)
            self._born[storage._cdata] = number
            if program.captured[number]:
                self._capture(number, -1, out)
            return
        found = (out,) if type(out) is Tensor else out if type(out) is tuple else ()
        known = [not self._is_unknown(t.untyped_storage()) for t in found if type(t) is Tensor and not t.is_nested]
        if [slot for slot, is_known in enumerate(known) if not is_known] != [slot for slot, _ in step.outs]:
            self._deviate()  # nothing was recorded of it: as for any value that is never replayed
            self._index += 1
            self._record_outputs(step.operator, None, out, Reason.OPAQUE)
            return
        self._at += 1
        for slot, number in step.outs:
            storage = found[slot].untyped_storage()
            self._storages[number] = _ref(storage)
            self._born[storage._cdata] = number
            if program.captured[number]:
                self._capture(number, slot, found[slot])

    def _capture(self, number: int, slot: int, tensor: Tensor) -> None:
        """Hold a value that the block made, from its birth on."""
        assert self._program is not None
        storage = tensor.untyped_storage()
        value = Value(_ref(storage), None, slot, self._program.why[number])
        self._values[storage._cdata] = self._real[number] = value
        self._hold(value, tensor, alias_in_handler)
        value.version = self._program.versions[number]  # that of a tensor which is written moves after this handler

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd saves, if it is the next one of the program."""
        program = self._program
        if program is None:
            return Tape.pack(self, tensor)
        at = self._num_packed
        pack = program.packs[at] if at < len(program.packs) else None
        if pack is None or pack.light < 0:
            return self._pack_held(tensor, pack)
        number = pack.light
        size, stride, offset, dtype, _ = pack.view
        storage = None
        try:
            if (
                type(tensor) is Tensor
                and tensor.shape == size
                and tensor.stride() == stride
                and tensor.storage_offset() == offset
                and tensor.dtype is dtype
                and tensor._version == pack.version
                and tensor.requires_grad is pack.requires_grad
            ):
                storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse or nested
            storage = None
        if storage is None or self._storages[number]() is not storage:
            self._deviate()
            return Tape.pack(self, tensor)
        value = self._real[number]
        if value is None:
            value = self._real[number] = Value(self._storages[number], None, program.slots[number], None)
            value.saved = True
            self._budget += storage.nbytes()
        self._num_packed = at + 1
        handle = Handle(self, value, pack.view)
        if not pack.requires_grad:
            self._recent.append(handle)
        return handle

    def _pack_held(self, tensor: Tensor, pack: Pack | None) -> Any:
        """Save a tensor whose value is held, or is to be held from now on."""
        storage = None if pack is None else _storage_as(tensor, pack)
        if pack is None or storage is None:
            self._deviate()
            return Tape.pack(self, tensor)
        value = self._real[pack.number]
        if value is None:
            if not self._is_unknown(storage):
                self._deviate()
                return Tape.pack(self, tensor)
            origin = tensor if tensor._base is None else tensor._base
            if type(origin) is Parameter and tensor.requires_grad:
                value = self._real[pack.number] = self._parameter(origin, storage)
            else:
                handle = Tape.pack(self, tensor)
                if type(handle) is not Handle or self._bits:
                    self._deviate()
                else:
                    self._real[pack.number] = handle.value
                    self._num_packed += 1
                return handle
        elif not still(value, tensor):
            self._deviate()
            return Tape.pack(self, tensor)
        self._num_packed += 1
        if not value.saved:
            value.saved = True
            self._budget += storage.nbytes()
        handle = Handle(self, value, pack.view)
        if not pack.requires_grad:
            self._recent.append(handle)
        return handle

    def interrupted(self) -> None:
        """Record from now on: other code is about to record a call as a whole."""
        if self._program is not None:
            self._deviate()

    def _deviate(self) -> None:
        """Turn what was compared so far into what the tape would have recorded, and record from now on."""
        program, self._program = self._program, None
        if program is None:
            return
        at = self._at
        recorded = Recorded(program, self._real)
        recorded.build(at, self._storages)
        for number, reference in enumerate(self._storages):
            storage = reference()
            value = recorded.values[number]
            if (
                storage is not None
                and value is not None
                and not program.captured[number]
                and program.made_by[number] >= 0
            ):
                self._values[storage._cdata] = value
        self._index = at  # in the smallest cut
        self._counts = dict(program.steps[at - 1].counts) if at else self._counts
        self._storages, self._real, self._born = [], [], {}
        self._steps, self._at = _NO_STEPS, 0

    def close(self) -> None:
        """End the forward: the handles refer to the program, or to what was recorded."""
        program = self._program
        if program is not None and (self._at < len(program.steps) - 1 or self._num_packed < len(program.packs)):
            self._deviate()
        elif program is not None:
            self.followed = True
            for n in program.fleeting:
                self._real[n] = None
            self.known = KnownCall(program, self._real)
            self._program = None
        self._storages, self._real, self._born = [], [], {}
        super().close()


def _storage_as(tensor: Tensor, pack: Pack) -> Any:
    """Return the storage of a tensor that looks like one of the program; None if it does not."""
    size, stride, offset, dtype, _ = pack.view
    if (
        (type(tensor) is not Tensor and not isinstance(tensor, Parameter))
        or tensor.is_nested
        or tensor.shape != size
        or tensor.dtype is not dtype
        or tensor.requires_grad is not pack.requires_grad
    ):
        return None
    try:
        same = tensor.stride() == stride and tensor.storage_offset() == offset
        return tensor.untyped_storage() if same else None
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _same_list(a: Any, x: Any) -> bool:
    """Return whether a list of tensors has the length of the program's, which has None for each tensor."""
    if type(x) is not list or type(a) not in (list, tuple) or len(a) != len(x):
        return False
    return all(y is None or equal(b, y) for b, y in zip(a, x, strict=True))


class Rehearsal:
    """Which tape each call of a block gets: one that records, one that learns the program, or one that follows it."""

    def __init__(self, shared: dict[Any, Program]) -> None:
        """Start by recording.

        Args:
            shared: the programs of all blocks of a model, by signature. Equal blocks have one.
        """
        self._shared = shared
        self._program: Program | None = None
        self._num_recorded = 0
        self._patience = FIRST_PATIENCE
        """How many calls are recorded before one is learnt from. Doubles whenever that was in vain."""

    def make(self, *args: Any, **kwargs: Any) -> Tape:
        """Return a tape for a call, from the arguments of `Tape`."""
        if self._program is not None:
            return Follower(self._program, *args, **kwargs)
        if self._num_recorded < self._patience:
            self._num_recorded += 1
            return Tape(*args, **kwargs)
        return Learner(*args, **kwargs)

    def done(self, tape: Tape) -> None:
        """Take note of a forward that is over."""
        if isinstance(tape, Learner):
            self._program = tape.learned(self._shared)
            if self._program is None:
                self._wait()
        elif isinstance(tape, Follower) and not tape.followed:
            self._wait()

    def _wait(self) -> None:
        self.forget()
        self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def forget(self) -> None:
        """Record the next call."""
        self._program, self._num_recorded = None, 0


FIRST_PATIENCE, _MOST_PATIENCE = 1, 64
