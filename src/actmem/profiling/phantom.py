"""A tape that holds nothing: it records what a block makes, and every value dies when the program lets go of it.

NOTE [ Phantoms ]
What a plan holds must not show in the profile. So autograd is given handles without bytes behind them. A backward step
that asks for one gets a phantom: on fake tensors a new tensor of the same geometry, else one with the bytes that were
set aside when the value was saved. Neither is counted.

Only facts are recorded, which are the same whatever a plan holds: what each call refers to, what it writes and how,
which tensors show a value and when they die, which handles a Python Function asks for. What follows from them under a
plan is up to the holding rules (NOTE [ Holding rules ] in `engine/holding_rules.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmem.decisions import Decision, Reason
from actmem.engine import (
    Flattened,
    Handle,
    Observation,
    Operator,
    Places,
    Tape,
    asked_by_function,
    geometry,
    see,
    storage_of,
    tensors,
    without_bits,
)
from actmem.engine import Value as TapeValue
from actmem.errors import UnsupportedError
from actmem.log_entries import Dropped, GivenGone, Loosened, Packed, Unpacked
from actmem.profiles import Call, Value, Write
from actmem.profiling.chronicle import Chronicle, TensorDied
from actmem.torchcompat import FakeTensor, is_traceable_wrapper_subclass, never_compile, num_bytes, op_name, storage_key

__all__ = ["Recorded", "record"]

_ASKS_DEVICE: Any = torch.ops.prim.device.default


class _Mark:
    """Takes the place of a report row: the number of a value, and what the tape notes there in passing."""

    __slots__ = ("cause", "copied", "index", "offloaded", "overwritten", "parents", "replayed", "why")

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass
class _Made:
    """A call, as it is recorded while the block runs."""

    op: str
    out_bytes: int
    module: str = ""
    cost: int = -1
    refs: tuple[int, ...] = ()
    shown: tuple[int, ...] = ()
    writes: tuple[Write, ...] = ()
    never: Reason | None = None
    yields: bool = True
    fresh: bool = True
    is_collective: bool = False
    """A collective that may run again where a plan says so."""
    is_single: bool = False
    """It returned one fake tensor. The tape finds out that such a result is a view before it looks at what was read."""


@dataclass
class _Met:
    """A value, and what was seen when it was first met. It is held: a value holds no bytes here."""

    value: TapeValue
    storage: int
    num_bytes: int
    kind: str
    call: int
    shown: int
    leaf: str = ""
    pieces: bool = False


class Recorded(Observation):
    """What one block call made, in the tape's own words."""

    def __init__(self, state: frozenset[int], layer: int, chronicle: Chronicle) -> None:
        super().__init__(state)
        self.layer = layer
        self.calls: list[_Made] = []
        self.handles: list[TapeValue] = []
        """What each handle showed when autograd was given it."""
        self.by_function: set[int] = set()
        """Handles that Python autograd Functions asked for."""
        self.num_given = 0
        """How often they did."""
        self.out_bytes = 0
        """Bytes of the value that the rules were last asked about."""
        self.arguments: tuple[Any, Any] = (), None
        """Of the operator being recorded."""
        self._chronicle = chronicle
        self._met: list[_Met] = []
        self._handles_given: list[weakref.ref[_Handle]] = []
        self._witnesses: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._num_witnesses = 0
        self._places: list[tuple[int | str, int]] | None = None
        """Where the latest call keeps what it refers to, once that is known."""
        self._open = True

    def begin(self, func: Any) -> None:
        """Note a call of the operator that the chronicle has just seen or, if it writes, is about to see."""
        super().begin(func)
        self.calls.append(_Made(op_name(func), self.out_bytes))
        self._places = None
        self.calls[-1].cost = self._chronicle.claim(op_name(func), (self.layer, len(self.calls) - 1), self._claimed)

    def _claimed(self, call: int, cost: int) -> None:
        self.calls[call].cost = cost

    def placed(self, module: str) -> None:
        """Record the module in which the latest call ran."""
        self.calls[-1].module = module

    def refers(self, refs: list[tuple[Any, ...]], args: Any, kwargs: Any) -> None:
        """Note what the latest call refers to."""
        call = self.calls[-1]
        found = [(ref[2].row.index, _argument(ref, args, kwargs)) for ref in refs if ref[2].row is not None]
        call.refs = tuple(index for index, _ in found)
        self._places = [(ref[0], ref[1]) for ref in refs if ref[2].row is not None]
        call.shown = tuple(self._witness(_origin(tensor)) for _, tensor in found)

    def special(self, operator: Operator, never: Reason | None, writes: Any, unread: Any, coverage: Any) -> None:
        """Note a call that writes, draws or is never replayed."""
        call = self.calls[-1]
        call.never, call.fresh, call.yields = never, operator.fresh, never is Reason.GENERATOR
        call.is_collective = operator.reissued
        positions = {where: n for n, where in enumerate(self._places or ())}
        found: list[Write] = []
        for k, write in enumerate(writes):
            made = next(
                (i for i, m in enumerate(self._met) if m.call == len(self.calls) - 1 and m.value.slot == -1 - k), -1
            )
            piece = "" if coverage is None else "last" if coverage.full else "piece"
            early = [
                n
                for n, reference in enumerate(self._handles_given)
                if write.early is not None and (handle := reference()) is not None and handle.value is write.early
            ]
            found.append(
                Write(
                    new=made,
                    storage=self._chronicle.ledger.number(write.tensor.untyped_storage()),
                    ref=positions.get((write.where, write.item), -1),
                    whole=write.whole,
                    unread=write.where in unread,
                    piece=piece,
                    early=tuple(early),
                )
            )
        call.writes = tuple(found)

    def made(self, value: TapeValue, operator: Operator, module: str, tensor: Tensor) -> None:  # noqa: ARG002
        """Note a value that a call made."""
        if value.node is not None and self._places is None:
            self.refers(value.node.refs, *self.arguments)
        self._meet(value, tensor, "made", len(self.calls) - 1, tensor)

    def given(self, value: TapeValue, tensor: Tensor, num_bytes: int) -> None:  # noqa: ARG002
        """Note a value that came from outside."""
        kind = "state" if storage_key(tensor.untyped_storage()) in self._state else "input"
        self._meet(value, tensor, kind, -1, _origin(tensor))

    def saved(self, value: TapeValue, handle: Any) -> None:
        """Note a handle."""
        self.handles.append(value)
        self._handles_given.append(weakref.ref(handle))

    def settle(self) -> None:
        """End the forward: nothing is held."""
        self._open = False

    def _meet(self, value: TapeValue, tensor: Tensor, kind: str, call: int, shown: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = self._chronicle.ledger.number(storage)
        leaf = _leaf(tensor) if kind != "made" else ""
        value.row = _Mark(len(self._met))
        self._met.append(
            _Met(value, number, storage.nbytes(), kind, call, self._witness(shown), leaf, value.coverage is not None)
        )

    def _witness(self, tensor: Tensor) -> int:
        """Return the number of a tensor, and note its death: an owed value can be held while a tensor shows it."""
        known = self._witnesses.get(id(tensor))
        if known is not None and known[1]() is tensor:
            return known[0]
        number, self._num_witnesses = self._num_witnesses, self._num_witnesses + 1
        storage = self._chronicle.ledger.number(tensor.untyped_storage())

        def gone(_: Any) -> None:
            if self._open:
                self._chronicle.note(TensorDied(self.layer, number, storage))

        self._witnesses[id(tensor)] = number, weakref.ref(tensor, gone)
        return number

    def finish(self) -> tuple[tuple[Call, ...], tuple[Value, ...], tuple[int, ...]]:
        """Return the calls, the values and the handles as plain data. Called when the forward is over."""
        makes: list[list[int]] = [[] for _ in self.calls]
        on_storage: dict[int, list[int]] = {}
        for index, met in enumerate(self._met):
            on_storage.setdefault(met.storage, []).append(index)
            if met.call >= 0:
                makes[met.call].append(index)
        values: list[Value] = []
        for index, met in enumerate(self._met):
            value, versions = met.value, on_storage[met.storage]
            at = versions.index(index)
            later = versions[at + 1] if at + 1 < len(versions) else -1
            held = met.call >= 0 and self.calls[met.call].is_collective
            values.append(
                Value(
                    num_bytes=met.num_bytes if met.kind != "state" else 0,
                    storage=met.storage,
                    call=met.call,
                    kind=met.kind,
                    why=Reason.COLLECTIVE if held else None if value.node is not None else value.why or Reason.EXTERNAL,
                    reads=() if held or value.node is None else _reads(value),
                    writes=versions[at - 1] if at and value.slot < 0 else -1,
                    overwritten=self._met[later].call if later >= 0 else -1,
                    constant=value.why is Reason.CONSTANT,
                    copy_bytes=met.num_bytes,
                    leaf=met.leaf,
                    slot=value.slot,
                    shown=met.shown,
                    pieces=met.pieces,
                )
            )
        calls = tuple(self._finished(call, tuple(made)) for call, made in zip(self.calls, makes, strict=True))
        handles = tuple(-1 if value.row is None else value.row.index for value in self.handles)
        self._met.clear()
        self.handles.clear()
        self._handles_given.clear()
        self._witnesses.clear()
        return calls, tuple(values), handles

    def _finished(self, call: _Made, makes: tuple[int, ...]) -> Call:
        never = call.never
        if call.yields and never is None and makes:
            value = self._met[makes[0]].value
            never = None if value.node is not None else value.why
        is_view = call.is_single and not makes and not call.writes
        # Not all that a call made need have its node: what was saved before it was filled may be held.
        nodes = (self._met[v].value.node for v in makes)
        state = next((node.state[1] for node in nodes if node is not None and node.state is not None), None)
        referred = (
            () if is_view or call.is_collective else call.refs,
            () if is_view or call.is_collective else call.shown,
        )
        return Call(
            op=call.op,
            module=call.module,
            cost=call.cost,
            makes=makes,
            refs=referred[0],
            shown=referred[1],
            writes=call.writes,
            never=Reason.COLLECTIVE if call.is_collective else never,
            yields=call.yields and never is not None,
            fresh=call.fresh,
            state_bytes=0 if state is None or state.device != self._chronicle.device else state.nbytes,
            out_bytes=call.out_bytes,
            again_refs=call.refs if call.is_collective else (),
            again_shown=call.shown if call.is_collective else (),
        )


def _origin(tensor: Tensor) -> Tensor:
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    return tensor if base is None else base


def _leaf(tensor: Tensor) -> str:
    """Return "parameter" or "leaf" if a tensor shows what the graph accumulates a gradient for, and so keeps; else "".

    The local tensor of a DTensor that was made of an activation requires a gradient and has no history itself; the
    activation, whose view it is, has one.
    """
    origin = _origin(tensor)
    if isinstance(origin, nn.Parameter):
        return "parameter"
    return "leaf" if origin.requires_grad and origin.is_leaf else ""


def _argument(ref: tuple[Any, ...], args: Any, kwargs: Any) -> Tensor:
    where: Any = args[ref[0]] if isinstance(ref[0], int) else kwargs[ref[0]]
    return where if ref[1] < 0 else where[ref[1]]


def _reads(value: TapeValue) -> tuple[int, ...]:
    assert value.node is not None
    return tuple(dict.fromkeys(r[2].row.index for r in value.node.refs if r[2] is not None and r[2].row is not None))


class _Verdicts:
    """Recompute everything: only then does the tape record how each value is made."""

    def __init__(self, recorded: Recorded) -> None:
        self.known: dict[Operator, Decision] = {}
        self._recorded = recorded

    def new_counts(self) -> dict[Any, int]:
        return {}

    def decide(self, _operator: Operator, _address: str, _counts: Any, out: Any) -> Decision:
        self._recorded.out_bytes = sum(map(num_bytes, tensors(out)))
        return Decision.RECOMPUTE


class _Phantom:
    """Counts the holders of a saved value: the handle, and what was unpacked from it."""

    def __init__(self, recorded: Recorded, index: int, chronicle: Chronicle) -> None:
        self.recorded, self.layer, self.index, self.chronicle = recorded, recorded.layer, index, chronicle
        self._is_held = True
        self._num_given = 0

    def watch(self, handle: Any) -> None:
        """Note when autograd lets go of the handle."""
        weakref.finalize(handle, self._let_go).atexit = False

    def give(self, storage: Any) -> None:
        """Note what was unpacked, and when it is gone."""
        number = -1
        if asked_by_function():
            number, self.recorded.num_given = self.recorded.num_given, self.recorded.num_given + 1
            self.recorded.by_function.add(self.index)
        if storage is not None:
            self._num_given += 1
            weakref.finalize(storage, self._gone, number).atexit = False

    def _let_go(self) -> None:
        self._is_held = False
        self.chronicle.note((Loosened if self._num_given else Dropped)(self.layer, self.index))

    def _gone(self, number: int) -> None:
        self._num_given -= 1
        if number >= 0:
            self.chronicle.note(GivenGone(self.layer, number))
        if not self._num_given and not self._is_held:
            self.chronicle.note(Dropped(self.layer, self.index))


class PhantomTape(Tape):
    """Record a block call and hold nothing. See NOTE [ Phantoms ]."""

    _refers_always = True

    def __init__(
        self,
        recorded: Recorded,
        chronicle: Chronicle,
        inputs: list[Tensor],
        trainable: Any,
        device: torch.device,
        places: Places,
    ) -> None:
        verdicts: Any = _Verdicts(recorded)
        super().__init__(verdicts, recorded, inputs=inputs, trainable=trainable, places=places, reissue=True)
        self._recorded = recorded
        self._chronicle = chronicle
        self._outer = None
        self.device = device

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operator, except the query for a fake tensor's device, which only fake tensors make."""
        if func is _ASKS_DEVICE:
            return func(*args)
        calls = self._recorded.calls
        self._recorded.arguments, num_calls = (args, kwargs), len(calls)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._recorded.arguments = (), None
        if len(calls) > num_calls:
            calls[-1].is_single = isinstance(out, FakeTensor)
        return out

    def _node(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        node = super()._node(operator, args, kwargs)
        self._recorded.refers(node.refs, args, kwargs)
        return node

    def _in_cut(self, func: Any) -> None:
        super()._in_cut(func)
        self._recorded.placed(self.address)

    def _anchor(self, operator: Operator, node: Any, given: Tensor) -> bool:  # noqa: ARG002
        return True  # whether a collective can run again is up to the plan, and what it holds

    def _hold(self, value: TapeValue, tensor: Tensor, make_alias: Callable[[Tensor], Tensor]) -> None:
        pass

    def _keep_from_dying(self, value: TapeValue, a: Tensor, num_bytes: int) -> None:
        pass

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Give autograd a handle without bytes behind it."""
        if is_traceable_wrapper_subclass(tensor) and not tensor.is_nested:
            return self._pack_wrapper(tensor)
        if tensor.is_nested or storage_of(tensor) is None:
            raise UnsupportedError(
                f"a block saves a {type(tensor).__name__} for backward, which cannot be profiled. Profile the model "
                "before it is made sparse, with batches that are padded instead of nested."
            )
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        if value is None or value.storage() is not storage or (value.node is not None and value.written_unseen(tensor)):
            value = TapeValue(weakref.ref(storage), None, 0, Reason.EXTERNAL)
            self._values[storage._cdata] = value  # pyright: ignore[reportPrivateUsage]
            self._recorded.given(value, tensor, storage.nbytes())
        handle = _Handle(self, value, geometry(tensor))
        index = len(self._recorded.handles)
        handle.phantom = _Phantom(self._recorded, index, self._chronicle)
        handle.phantom.watch(handle)
        self._recorded.saved(value, handle)
        self._chronicle.note(Packed(self._recorded.layer, index))
        if not tensor.requires_grad:
            self._recent.append(handle)
        if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf and _leaf(tensor)):
            handle.leaf = tensor
        elif not isinstance(tensor, FakeTensor):
            handle.copy = self._copied_aside(tensor)
        return handle

    def _copied_aside(self, tensor: Tensor) -> Tensor:
        before, self.paused = self.paused, True
        try:
            with self._chronicle.pause(), torch.no_grad():
                return _laid_alike(without_bits(tensor.detach()))
        finally:
            self.paused = before


class _Handle(Handle):
    __slots__ = ("copy", "leaf", "phantom")

    copy: Tensor | None
    """The bytes that were saved, if there are any."""
    leaf: Tensor | None
    """The saved tensor itself, if it stays alive anyway."""
    phantom: _Phantom

    def __init__(self, tape: Tape, value: TapeValue, view: Any) -> None:
        super().__init__(tape, value, view)
        self.copy = self.leaf = None


@never_compile
def _unpack(handle: Any) -> Tensor:
    if isinstance(handle, Flattened):
        inner = {name: _unpack(x) if isinstance(x, (_Handle, Flattened)) else x for name, x in handle.inner.items()}
        kind: Any = handle.kind
        return kind.__tensor_unflatten__(inner, handle.context, handle.size, handle.stride)
    phantom = handle.phantom
    phantom.chronicle.note(Unpacked(phantom.layer, phantom.index, phantom.chronicle.live_bytes))
    copy = handle.copy
    size, stride, _, dtype, bits = handle.view
    if handle.leaf is not None:
        if isinstance(handle.leaf, torch.nn.Parameter) or not asked_by_function():
            phantom.give(None)
            return handle.leaf
        copy = handle.leaf  # the tape may give a Function a copy, and it matters how long that lives
    with phantom.chronicle.pause(), torch.no_grad():
        if copy is not None:
            tensor = _laid_alike(copy)
        else:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=handle.tape.device)
        if bits:
            tensor = see(tensor, size, stride, tensor.storage_offset(), dtype, bits)
    phantom.chronicle.ledger.give(tensor.untyped_storage())
    phantom.give(tensor.untyped_storage())
    return tensor


def _laid_alike(tensor: Tensor) -> Tensor:
    """Return a copy with the same layout on its storage: what a kernel makes of it depends on that."""
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    copy = tensor.as_strided((span,), (1,)).clone()
    return copy.as_strided(tensor.size(), tensor.stride())


def record(
    block: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    recorded: Recorded,
    chronicle: Chronicle,
    inputs: list[Tensor],
    trainable: Any,
    device: torch.device,
) -> Any:
    """Run a block's forward under a tape that holds nothing."""
    tape = PhantomTape(recorded, chronicle, inputs, trainable, device, Places(block))
    try:
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, _unpack), tape:
            return forward(*args, **kwargs)
    finally:
        tape.close()
