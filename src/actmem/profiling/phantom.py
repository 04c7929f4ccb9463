"""The tape that holds nothing: it learns what a block makes, and lets every value die when the program lets go of it.

NOTE [ Phantoms ]
What a plan holds must not show in the profile. So autograd is given handles that lead to no bytes. A backward step
that asks for one gets a phantom: on fake tensors a new one of the same geometry, else a copy that was put aside when
the value was saved. Neither is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from actmem.engine.following import Following
from actmem.engine.holding import storage_of
from actmem.engine.observing import Observation
from actmem.engine.operators import Operator
from actmem.engine.tape import Handle, Tape
from actmem.engine.values import Value as TapeValue
from actmem.errors import UnsupportedError
from actmem.profiles import Call, Value
from actmem.profiling.chronicle import Chronicle
from actmem.torchcompat import FakeTensor, is_traceable_wrapper_subclass, never_compile, storage_key

__all__ = ["Recorded", "record"]

_ASKS_DEVICE: Any = torch.ops.prim.device.default


class _Mark:
    """Stands where the report's row would: the number of a value, and what the tape notes there in passing."""

    __slots__ = ("cause", "copied", "index", "offloaded", "overwritten", "parents", "replayed", "why")

    def __init__(self, index: int) -> None:
        self.index = index


class Recorded(Observation):
    """What one block call made, in the tape's own words."""

    def __init__(self, state: frozenset[int], layer: int, chronicle: Chronicle) -> None:
        super().__init__(state)
        self.layer = layer
        self.ops: list[tuple[str, str, int]] = []
        """Operator, module and cost of each call."""
        self.handles: list[TapeValue] = []
        self._chronicle = chronicle
        self._met: list[tuple[TapeValue, int, int, str, int]] = []
        """Value, storage, bytes, kind, call: the values are held, for they hold no bytes."""

    def begin(self, func: Any) -> None:
        """Note a call: of the operator that the chronicle has just seen, or, where it writes, is about to see."""
        super().begin(func)
        cost = self._chronicle.claim(str(func), (self.layer, len(self.ops)), self._claimed)
        self.ops.append((str(func), "", cost))

    def _claimed(self, call: int, cost: int) -> None:
        op, module, _ = self.ops[call]
        self.ops[call] = (op, module, cost)

    def placed(self, module: str) -> None:
        """Say in which module the latest call ran."""
        op, _, cost = self.ops[-1]
        self.ops[-1] = (op, module, cost)

    def made(self, value: TapeValue, operator: Operator, module: str, tensor: Tensor) -> None:  # noqa: ARG002
        """Note a value that a call made."""
        self._meet(value, tensor, "made", len(self.ops) - 1)

    def given(self, value: TapeValue, tensor: Tensor, num_bytes: int) -> None:  # noqa: ARG002
        """Note a value that came from outside."""
        kind = "state" if storage_key(tensor.untyped_storage()) in self._state else "input"
        self._meet(value, tensor, kind, -1)

    def saved(self, value: TapeValue, handle: Any) -> None:  # noqa: ARG002
        """Note a handle."""
        self.handles.append(value)

    def settle(self) -> None:
        """Do nothing: nothing is held."""

    def _meet(self, value: TapeValue, tensor: Tensor, kind: str, call: int) -> None:
        storage = tensor.untyped_storage()
        number = self._chronicle.ledger.number(storage)
        value.row = _Mark(len(self._met))
        self._met.append((value, number, storage.nbytes() if kind != "state" else 0, kind, call))

    def finish(self) -> tuple[tuple[Call, ...], tuple[Value, ...], tuple[int, ...]]:
        """Return the calls, the values and the handles as plain data. Called when the forward is over."""
        makes: list[list[int]] = [[] for _ in self.ops]
        on_storage: dict[int, list[int]] = {}
        for index, (_, storage, _, _, call) in enumerate(self._met):
            on_storage.setdefault(storage, []).append(index)
            if call >= 0:
                makes[call].append(index)
        values: list[Value] = []
        for index, (value, storage, num_bytes, kind, call) in enumerate(self._met):
            versions = on_storage[storage]
            at = versions.index(index)
            later = versions[at + 1] if at + 1 < len(versions) else -1
            reads = () if value.node is None else _reads(value)
            values.append(
                Value(
                    num_bytes=num_bytes,
                    storage=storage,
                    call=call,
                    kind=kind,
                    why=None if value.node is not None else value.why or "external",
                    reads=reads,
                    writes=versions[at - 1] if at and value.slot < 0 else -1,
                    overwritten=self._met[later][4] if later >= 0 else -1,
                    constant=value.why == "constant",
                )
            )
        calls = tuple(
            Call(op, module, cost, tuple(made)) for (op, module, cost), made in zip(self.ops, makes, strict=True)
        )
        handles = tuple(-1 if value.row is None else value.row.index for value in self.handles)
        self._met.clear()
        self.handles.clear()
        return calls, tuple(values), handles


def _reads(value: TapeValue) -> tuple[int, ...]:
    assert value.node is not None
    return tuple(dict.fromkeys(r[2].row.index for r in value.node.refs if r[2] is not None and r[2].row is not None))


class _Verdicts:
    """Recompute everything: only then does the tape write down how each value is made."""

    def __init__(self) -> None:
        self.known: dict[Operator, str] = {}

    def new_counts(self) -> dict[Any, int]:
        return {}

    def decide(self, *_: Any) -> str:
        return ""


class _Phantom:
    """Counts who still has a saved value: the handle, and what was unpacked from it."""

    def __init__(self, layer: int, index: int, chronicle: Chronicle) -> None:
        self.layer, self.index, self.chronicle = layer, index, chronicle
        self.count = 0

    def watch(self, thing: Any) -> None:
        self.count += 1
        weakref.finalize(thing, self._gone).atexit = False

    def _gone(self) -> None:
        self.count -= 1
        if not self.count:
            self.chronicle.note("drop", self.layer, self.index)


class PhantomTape(Tape):
    """Record a block call and hold nothing. See NOTE [ Phantoms ]."""

    def __init__(
        self, recorded: Recorded, chronicle: Chronicle, inputs: list[Tensor], trainable: Any, device: torch.device
    ) -> None:
        verdicts: Any = _Verdicts()
        super().__init__(verdicts, recorded, inputs=inputs, trainable=trainable)
        self._recorded = recorded
        self._chronicle = chronicle
        self._outer = None
        self.device = device

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an operator, but for the question on what device a fake tensor is, which only they ask."""
        if func is _ASKS_DEVICE:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _in_cut(self, func: Any) -> str:
        super()._in_cut(func)
        self._recorded.placed(self.address)
        return ""

    def _hold(self, value: TapeValue, tensor: Tensor, make_alias: Callable[[Tensor], Tensor]) -> None:
        pass

    def _keep_from_dying(self, value: TapeValue, a: Tensor, num_bytes: int) -> None:
        pass

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Give autograd a handle that leads to no bytes."""
        if is_traceable_wrapper_subclass(tensor) or tensor.is_nested or storage_of(tensor) is None:
            raise UnsupportedError(
                f"a block saves a {type(tensor).__name__} for backward, and only plain tensors can be profiled. "
                "Profile the model before it is sharded or made sparse; shard=N stands for FSDP."
            )
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        if value is None or value.storage() is not storage:
            value = TapeValue(weakref.ref(storage), None, 0, "external")
            self._values[storage._cdata] = value  # pyright: ignore[reportPrivateUsage]
            self._recorded.given(value, tensor, storage.nbytes())
        handle = _Handle(self, value, tensor, (1 if tensor.is_conj() else 0) | (2 if tensor.is_neg() else 0))
        index = len(self._recorded.handles)
        handle.phantom = _Phantom(self._recorded.layer, index, self._chronicle)
        handle.phantom.watch(handle)
        self._recorded.saved(value, handle)
        self._chronicle.note("pack", self._recorded.layer, index)
        leaf = tensor.is_leaf and tensor.requires_grad
        if isinstance(tensor, nn.Parameter) or leaf:
            handle.copy = tensor
        elif not isinstance(tensor, FakeTensor):
            before, self.paused = self.paused, True
            try:
                with self._chronicle.pause(), torch.no_grad():
                    handle.copy = tensor.detach().clone()
                handle.phantom.watch(handle.copy.untyped_storage())
            finally:
                self.paused = before
        return handle


class _Handle(Handle):
    __slots__ = ("copy", "phantom")

    copy: Tensor | None
    phantom: _Phantom

    def __init__(self, tape: Tape, value: TapeValue, tensor: Tensor, bits: int) -> None:
        super().__init__(tape, value, tensor, bits)
        self.copy = None


@never_compile
def _unpack(handle: Any) -> Tensor:
    phantom = handle.phantom
    phantom.chronicle.note("unpack", phantom.layer, phantom.index, phantom.chronicle.ledger.main.live_bytes)
    with phantom.chronicle.pause():
        if handle.copy is not None:
            return handle.copy  # it is watched from the beginning
        tensor = torch.empty_strided(handle.size, handle.stride, dtype=handle.dtype, device=handle.tape.device)
    phantom.watch(tensor.untyped_storage())
    return tensor


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
    tape = PhantomTape(recorded, chronicle, inputs, trainable, device)
    try:
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, _unpack), Following(tape, block), tape:
            return forward(*args, **kwargs)
    finally:
        tape.close()
