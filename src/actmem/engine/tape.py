"""The tape: a dispatch mode that sees what runs in a block's forward, and a hook that sees what autograd saves of it.

NOTE [ Replay the tape, not the code ]
Recomputation elsewhere runs a module's Python code a second time. Here Python runs once. The tape sits below
autograd, sees every operator of the forward, and writes down those whose results the plan does not keep. When
autograd saves a tensor, it gets a `Handle` instead: a value and a geometry. In the backward pass a handle is opened
(`replay.py`), and only the operators that lead to its value are run again, from what is held. No hook, cache, counter
or random generator is touched twice, because no code that touches one is run.

What a recorded operator reads is resolved at once, by storage and version (NOTE [ Values ]), so that the following
holds at any moment: **every handle is closed**: each chain that leads to its value ends in values that are held.
Recording cannot break that. Saving (`pack`) establishes it for the new handle (NOTE [ Barriers ]). A write in place
would break it, so what it overwrites is copied first if anything can still reach it (`_preserve`).

Versions are read late: the counter of a tensor that an operator writes moves after the handler has returned. So a
value becomes held, and its version is noted, when something first refers to it, never at its birth.
"""

# pyright: reportPrivateUsage=false
# `_cdata` is read here and not through `torchcompat.storage_key`, because this is the hot path.

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from actmem.engine import barriers
from actmem.engine.checksum import checksum
from actmem.engine.coverage import Coverage
from actmem.engine.cutting import Cut
from actmem.engine.deciding import Verdicts
from actmem.engine.observing import Observation
from actmem.engine.operators import DESCRIBED, Operator, describe
from actmem.engine.trees import tensors
from actmem.engine.values import KEPT, UNCHECKED, Boxed, Node, Value, geometry
from actmem.torchcompat import (
    TorchDispatchMode,
    alias,
    alias_in_handler,
    is_traceable_wrapper_subclass,
    never_compile,
    numerics,
    outer_hooks,
    storage_key,
    without_dispatch_modes,
)

__all__ = ["Flattened", "Handle", "Tape"]

_ref = weakref.ref
_operators = DESCRIBED


class Handle:
    """What autograd holds in the place of a saved tensor: a value, and how to see it."""

    __slots__ = ("bits", "checksum", "dtype", "offset", "size", "stride", "tape", "value")

    def __init__(self, tape: Tape, value: Value, tensor: Tensor, bits: int) -> None:
        self.tape = tape
        self.value = value
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.bits = bits
        self.checksum: int | None = None


class Flattened:
    """A saved wrapper subclass (DTensor, nested tensor): its inner tensors packed one by one."""

    __slots__ = ("context", "inner", "kind", "size", "stride")

    def __init__(self, kind: type, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> None:
        self.kind, self.inner, self.context, self.size, self.stride = kind, inner, context, size, stride


class Tape(TorchDispatchMode):
    """Record one forward call of one block. Entered by `engine.calling`, never by hand."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function inside the block run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper around the handler: `never_compile` does the same for nothing."""
        return False

    def __init__(
        self,
        verdicts: Verdicts,
        observation: Observation | None,
        *,
        checking: bool,
        trainable: frozenset[int],
        inputs: set[int],
        cut: Cut | None = None,
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        self.lock = threading.RLock()
        """Held during a replay: backward may run on several threads."""
        self.address = ""
        """Path of the module whose forward is running, if modules are followed."""
        self._values: dict[int, Value] = {}
        self._verdicts = verdicts
        self._known = verdicts.known
        self._counts = verdicts.new_counts()
        self._observation = observation
        self._checking = checking
        self._trainable = trainable
        """Storages of the block's trainable parameters."""
        self._inputs = inputs
        """Storages of the block's arguments: they count as held. Others with a history come from work that the tape
        cannot see."""
        self._outer = outer_hooks()
        self._provisional: list[Value] = []
        self._reserve: list[Tensor] = []
        """Constants that a recorded operator read, such as the ones that a mask is cut from: kept from dying until
        the forward is over."""
        self._bits = False
        self.paused = False
        """Operators run unrecorded: they belong to a call that is recorded as a whole, or to the self-check."""
        self._cut = cut
        self._index = 0
        self._numbered = cut is not None or observation is not None

    # ---------------------------------------------------------------- recording

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write down what is needed to run it again."""
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper subclass: the operators beneath it come here next
        operator = _operators.get(func) or describe(func)
        if self._provisional:
            self._adopt(args)
        if operator.view:
            if operator.view is not True:
                self._bits = True
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        if not operator.plain:
            return self._record_special(operator, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        keep = self._known.get(func)
        if keep is None:
            keep = self._verdicts.decide(operator, self.address, self._counts, out)
        if self._numbered and self._in_cut(func):
            keep = "cut"
        if type(out) is not Tensor:
            self._record_outputs(operator, None if keep else self._node(operator, args, kwargs), out, keep)
            return out
        try:
            storage = out.untyped_storage()
        except NotImplementedError:  # sparse: no storage; whoever reads it will hold the object
            return out
        key = storage._cdata
        values = self._values
        value = values.get(key)
        if value is not None and value.storage() is storage:
            return out  # a view, whatever the schema says
        if keep:
            values[key] = value = Value(_ref(storage), None, 0, keep)
        else:
            refs: list[tuple[Any, ...]] = []
            plain = list(args)
            debts = None
            for i, a in enumerate(args):
                if isinstance(a, Tensor):
                    try:
                        s = a.untyped_storage()
                    except NotImplementedError:
                        debts = self._refer(i, -1, a, refs, debts)
                    else:
                        v = values.get(s._cdata)
                        if v is None or v.storage() is not s or v.node is None:
                            v = self._meet(a, s, v)
                            if v.held is None:
                                debts = barriers.owe(debts, (v,))
                        if v.debts:
                            debts = barriers.owe(debts, v.debts)
                        bits = (a.is_conj() | a.is_neg() << 1) if self._bits else 0
                        refs.append((i, -1, v, a.size(), a.stride(), a.storage_offset(), a.dtype, bits))
                    plain[i] = None
                elif type(a) is list or type(a) is tuple:
                    plain[i], debts = self._refer_list(i, a, refs, debts)
            if kwargs:
                kwargs, debts = self._refer_kwargs(kwargs, refs, debts)
            node = Node(func, plain, kwargs, refs)
            if operator.numerics:
                node.flags = numerics()
            values[key] = value = Value(_ref(storage), node, 0, None)
            if debts:
                value.debts = debts
        if self._observation is not None:
            self._observation.made(value, operator, self.address, out)
        return out

    def _in_cut(self, func: Any) -> bool:
        """Count an operator, and tell whether what it makes belongs to the smallest cut."""
        if self._observation is not None:
            self._observation.begin(func)
        cut = self._cut
        if cut is None:
            return False
        index = self._index
        self._index = index + 1
        if index >= len(cut.funcs) or cut.funcs[index] != func:
            self._cut = None  # another program than the one that was cut: settle each debt as it comes
            return False
        return index in cut.hold

    def _record_special(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that writes, draws, or is never replayed."""
        func = operator.func
        written = list(_written(operator, args, kwargs))
        keep = self._known.get(func)
        if keep is None:
            keep = self._verdicts.decide(operator, self.address, self._counts, written[0][2] if written else None)
        forbidden = operator.forbids(args, kwargs, next(tensors(args), None))
        if self._numbered and self._in_cut(func):
            keep, forbidden = "cut", None
        draws = forbidden is None and operator.draws(args, kwargs)
        state = None
        if draws:
            state = _generator_state(operator, args, kwargs)
            if state is None:
                forbidden = "generator"
        old = [self._lookup(t) for _, _, t in written]
        whole = [
            operator.overwrites and t.numel() * t.element_size() == t.untyped_storage().nbytes() for _, _, t in written
        ]
        # Why the new version of each written storage cannot be made by this node; None if it can.
        fates = [forbidden or keep or _inherited(v, entire) for v, entire in zip(old, whole, strict=True)]
        coverage = (
            self._coverage(operator, written, old)
            if forbidden is None and not keep and fates == ["uninitialised"]
            else None
        )
        node = None
        if (
            forbidden is None and not keep and (operator.fresh or None in fates or coverage)
        ) or forbidden == "uninitialised":
            node = self._node(operator, args, kwargs)
            node.state = state
            if written:
                node.overwrite(written, whole)
        while old:
            v = old.pop()
            if v is not None:
                if v.row is not None:
                    v.row.overwritten = True
                self._values.pop(storage_key(v.storage()), None)
                _preserve(v)
        out = func(*args, **kwargs)
        made: list[tuple[int, weakref.ref[Value]]] = []
        for k, ((_, _, t), fate) in enumerate(zip(written, fates, strict=True)):
            storage = t.untyped_storage()
            value = Value(_ref(storage), node if fate is None else None, -1 - k, fate)
            made.append((-1 - k, _ref(value)))
            if coverage is not None and node is not None:
                value.coverage, value.pending = coverage, node
                node.outs = made
                if coverage.full:
                    _promote(value)
            self._remember(value, storage, t, operator, node)
        if forbidden == "uninitialised" and node is not None and isinstance(out, Tensor) and not written:
            self._record_uninitialised(operator, node, out)
            return out
        if forbidden is not None:
            node = None
        self._record_outputs(operator, node, out, forbidden or keep, made)
        return out

    def record_call(self, operator: Operator, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a declared function, and record it as one operator, whose replay runs `operator.func`."""
        generators = [torch.default_generator]
        first = next(tensors(args, kwargs), None)
        if first is not None and first.device.type != "cpu":
            generators = [g for g in (operator.generator((), {}, first.device),) if g is not None]
        states = [(g, g.get_state()) for g in generators]
        self.paused = True
        try:
            out = call(*args, **kwargs)
        finally:
            self.paused = False
        keep = self._verdicts.decide(operator, self.address, self._counts, out)
        if self._numbered and self._in_cut(operator.name):
            keep = "cut"
        node = None
        if not keep:
            node = self._node(operator, args, kwargs)
            node.state = next(((g, s) for g, s in states if not torch.equal(s, g.get_state())), None)
        self._record_outputs(operator, node, out, keep)
        return out

    @staticmethod
    def _coverage(
        operator: Operator, written: list[tuple[int | str, int, Tensor]], old: list[Value | None]
    ) -> Coverage | None:
        """Return what will have been written of a storage that was born uninitialised, if that can be told."""
        value = old[0]
        if not operator.overwrites or value is None or value.coverage is None or value.held is not None:
            return None
        return value.coverage.with_write(written[0][2])

    def _record_uninitialised(self, operator: Operator, node: Node, out: Tensor) -> None:
        """Make a value of a newborn tensor, with the call that could make another when all of it has been written."""
        storage = out.untyped_storage()
        value = Value(_ref(storage), None, 0, "uninitialised")
        value.coverage = Coverage.of(out)
        value.pending = None if value.coverage is None else node
        self._remember(value, storage, out, operator, None)

    def _record_outputs(
        self,
        operator: Operator,
        node: Node | None,
        out: Any,
        why: str,
        made: list[tuple[int, weakref.ref[Value]]] | None = None,
    ) -> None:
        """Make a value of each output tensor that is no view of something known."""
        made = made or []
        for slot, t in enumerate(tensors(out)):
            try:
                storage = t.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            known = self._values.get(storage._cdata)
            if (known is not None and known.storage() is storage) or is_traceable_wrapper_subclass(t):
                continue
            value = Value(_ref(storage), node, slot, None if node is not None else why)
            self._remember(value, storage, t, operator, node)
            made.append((slot, _ref(value)))
        if node is not None and (len(made) > 1 or (made and made[0][0] != 0)):
            node.outs = made

    def _remember(self, value: Value, storage: Any, tensor: Tensor, operator: Operator, node: Node | None) -> None:
        if value.node is not None and node is not None:
            value.debts = self._debts(node)
        elif value.why not in KEPT:
            value.tensor = _ref(tensor)
            value.num_bytes = storage.nbytes()
        self._values[storage._cdata] = value
        if self._observation is not None:
            self._observation.made(value, operator, self.address, tensor)

    @staticmethod
    def _debts(node: Node) -> tuple[Value, ...] | None:
        debts = None
        for ref in node.refs:
            value: Value | None = ref[2]
            if value is None:
                continue
            if value.held is None and value.node is None:
                debts = barriers.owe(debts, (value,))
            elif value.debts:
                debts = barriers.owe(debts, value.debts)
        return debts

    def _node(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Node:
        """Write down a call, its tensors replaced by references to values."""
        refs: list[tuple[Any, ...]] = []
        plain = list(args)
        for i, a in enumerate(args):
            if isinstance(a, Tensor):
                self._refer(i, -1, a, refs, None)
                plain[i] = None
            elif type(a) is list or type(a) is tuple:
                plain[i], _ = self._refer_list(i, a, refs, None)
        if kwargs:
            kwargs, _ = self._refer_kwargs(kwargs, refs, None)
        node = Node(operator.func, plain, kwargs or None, refs)
        if operator.numerics:
            node.flags = numerics()
        return node

    def _refer(self, i: int | str, j: int, a: Tensor, refs: list[tuple[Any, ...]], debts: Any) -> Any:
        try:
            storage = a.untyped_storage()
        except (NotImplementedError, RuntimeError):
            storage = None
        if storage is None or a.is_quantized:
            value = Value(_ref(a), None, 0, "external")
            value.held = a.detach()
            refs.append((i, j, value, None, None, 0, a.dtype, 0))
            return debts
        value = self._values.get(storage._cdata)
        if value is None or value.storage() is not storage or value.node is None:
            value = self._meet(a, storage, value)
            if value.held is None:
                debts = barriers.owe(debts, (value,))
        if value.debts:
            debts = barriers.owe(debts, value.debts)
        refs.append((i, j, value, *geometry(a)))
        return debts

    def _refer_list(self, i: int | str, items: Any, refs: list[tuple[Any, ...]], debts: Any) -> tuple[Any, Any]:
        if not any(isinstance(x, Tensor) for x in items):
            return items, debts
        plain = list(items)
        for j, x in enumerate(items):
            if isinstance(x, Tensor):
                debts = self._refer(i, j, x, refs, debts)
                plain[j] = None
        return plain, debts

    def _refer_kwargs(
        self, kwargs: dict[str, Any], refs: list[tuple[Any, ...]], debts: Any
    ) -> tuple[dict[str, Any], Any]:
        plain = dict(kwargs)
        for name, x in kwargs.items():
            if isinstance(x, Tensor):
                debts = self._refer(name, -1, x, refs, debts)
                plain[name] = None
            elif type(x) is list or type(x) is tuple:
                plain[name], debts = self._refer_list(name, x, refs, debts)
        return plain, debts

    # ---------------------------------------------------------------- values

    def _lookup(self, tensor: Tensor) -> Value | None:
        storage = tensor.untyped_storage()
        value = self._values.get(storage._cdata)
        return value if value is not None and value.storage() is storage else None

    def _meet(self, a: Tensor, storage: Any, value: Value | None) -> Value:
        """Return the value that `a` shows, for one that no node makes: held if that is free, owed otherwise."""
        if value is None or value.storage() is not storage:
            return self._external(a, storage)
        if value.held is None:
            if value.why in KEPT or (value.num_bytes <= barriers.TRIFLE_BYTES and value.coverage is None):
                self._hold(value, a, alias_in_handler)
            elif value.why == "constant":
                self._reserve.append(spare := alias_in_handler(a))
                value.tensor = _ref(spare)
        elif value.version != UNCHECKED and value.held._version != value.version:
            # Written by code that the tape did not see. Whoever holds the older version will be told when it is read.
            return self._external(a, storage)
        return value

    def _external(self, a: Tensor, storage: Any) -> Value:
        """Make a value for a tensor that no recorded operator made: an input, a parameter, a buffer, or unseen work."""
        if a.is_conj() or a.is_neg():
            self._bits = True
        value = Value(_ref(storage), None, 0, "external")
        self._values[storage._cdata] = value
        origin = a if a._base is None else a._base
        if origin.grad_fn is not None and storage._cdata not in self._inputs:
            value.why = "unseen"
            value.tensor = _ref(origin)
            value.num_bytes = storage.nbytes()
        elif not a.requires_grad and storage._cdata in self._trainable:
            value.why = "parameter"
            value.tensor = _ref(a)
            value.num_bytes = storage.nbytes()
        else:
            self._hold(value, a, alias_in_handler)
        if self._observation is not None:
            self._observation.given(value, a, storage.nbytes())
        return value

    def _hold(self, value: Value, tensor: Tensor, make_alias: Any) -> None:
        """Keep the bytes of a value alive from now on, and note their version."""
        origin = tensor if tensor._base is None else tensor._base
        parameter = isinstance(origin, Parameter) or (origin.requires_grad and origin.is_leaf)
        if self._outer is not None and not parameter:
            pack, unpack = self._outer
            value.held = Boxed(pack(_base_of(tensor, make_alias)), unpack)
        elif parameter and not (origin.is_conj() or origin.is_neg()):
            # By its object: whoever swaps its data (ZeRO-3, FSDP) finds it swapped here too. It has no history, so no
            # cycle.
            value.held = origin
            value.version = origin._version
            value.num_bytes = value.num_bytes or origin.untyped_storage().nbytes()
        else:
            value.held = base = _base_of(tensor, make_alias)
            value.version = UNCHECKED if base.is_inference() else base._version
        if value.row is not None:
            value.row.held = True

    def _adopt(self, args: tuple[Any, ...]) -> None:
        """Exchange the copies of leaf tensors that `pack` was shown for the tensors themselves.

        Autograd shows its hooks a copy of a leaf that has a version counter of its own. The operator that saved it
        comes next, with the leaf.
        """
        for t in tensors(args):
            try:
                storage = t.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            for value in self._provisional:
                if value.storage() is storage:
                    self._hold(value, t, alias_in_handler)
        self._provisional.clear()

    # ---------------------------------------------------------------- saving

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd saves, and return what it is to hold instead."""
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {n: self.pack(x) if isinstance(x := getattr(tensor, n), Tensor) else x for n in names}
            return Flattened(type(tensor), inner, context, tensor.size(), tensor.stride())
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return self._pack_object(tensor)
        value = self._values.get(storage._cdata)
        if value is None or value.storage() is not storage:
            if tensor.is_quantized:
                return self._pack_object(tensor)
            value = self._pack_external(tensor, storage)
        elif value.held is None:
            if value.node is None:
                self._hold(value, tensor, alias)
            elif value.debts:
                barriers.settle(value, storage.nbytes(), lambda v, t: self._hold(v, t, alias), tensor)
        elif value.why is not None and value.version != UNCHECKED and value.held._version != value.version:
            value = self._pack_external(tensor, storage)  # written unseen
        bits = (tensor.is_conj() | tensor.is_neg() << 1) if self._bits else 0
        handle = Handle(self, value, tensor, bits)
        if self._observation is not None:
            self._observation.saved(value)
        if self._checking and value.held is None:
            self.paused = True
            try:
                handle.checksum = checksum(tensor)
            finally:
                self.paused = False
        return handle

    def _pack_external(self, tensor: Tensor, storage: Any) -> Value:
        value = Value(_ref(storage), None, 0, "external")
        self._values[storage._cdata] = value
        if tensor.is_conj() or tensor.is_neg():
            self._bits = True
        if self._outer is not None:
            pack, unpack = self._outer
            value.held = Boxed(pack(tensor), unpack)
        else:
            self._hold(value, tensor, alias)
            if tensor.grad_fn is None:
                self._provisional.append(value)
        if self._observation is not None:
            self._observation.given(value, tensor, storage.nbytes())
        return value

    def _pack_object(self, tensor: Tensor) -> Any:
        with without_dispatch_modes():
            kept = tensor.detach()
        return kept if self._outer is None else Boxed(self._outer[0](kept), self._outer[1])

    # ---------------------------------------------------------------- ends

    def keep_outputs(self, out: Any) -> None:
        """Hold the values of a nested unit's outputs, so that no replay from behind it reaches into the unit."""
        for t in tensors(out):
            value = self._lookup(t)
            if value is not None and value.node is not None and value.held is None:
                self._hold(value, t, alias)
                value.node, value.debts, value.why = None, None, "unit"

    def close(self) -> None:
        """Forget everything that no handle can reach. The tape records nothing after this."""
        self._values.clear()
        self._provisional.clear()
        self._reserve.clear()
        self._outer = None
        if self._observation is not None:
            self._observation.settle()
            self._observation = None


def _inherited(value: Value | None, whole: bool) -> str | None:
    """Tell why the new version of a storage cannot be replayed from its old one, or None if it can."""
    if value is None:
        return "external"
    if whole and value.why != "external" and value.why != "parameter":
        return None
    if value.node is not None or (value.held is not None and value.own):
        return None
    return value.why or "external"


def _promote(value: Value) -> None:
    """Make a storage that was filled piece by piece replayable, from the call that gave birth to it on."""
    current: Value | None = value
    while current is not None and current.pending is not None:
        node, current.pending = current.pending, None
        current.node, current.why, current.coverage, current.tensor = node, None, None, None
        reads = [
            ref[2]
            for ref in node.refs
            if ref[2] is not None and ref[2].storage is not None and ref[2].pending is not None
        ]
        current = next((v for v in reads if v.storage() is value.storage()), None)


def _preserve(value: Value) -> None:
    """Copy what is about to be overwritten, if a handle or a node can still reach it.

    Called with the caller's name and this one's the only references that do not count.
    """
    if value.held is None:
        value.tensor = None  # given, and nobody held it: from now on nobody can
        return
    if sys.getrefcount(value) <= 3:
        return
    held = value.held
    base = held.unpack(held.packed) if type(held) is Boxed else held
    storage = base.untyped_storage().clone()
    value.held = torch.empty(0, dtype=base.dtype, device=base.device).set_(
        storage, base.storage_offset(), base.size(), base.stride()
    )
    value.version = UNCHECKED


def _base_of(tensor: Tensor, make_alias: Any) -> Tensor:
    """Return a tensor on the same storage and version counter, without history and without conj and neg bits."""
    base: Tensor = make_alias(tensor)
    if base.is_conj():
        base = make_alias(torch.ops.aten._conj(base))
    if base.is_neg():
        base = make_alias(torch.ops.aten._neg_view(base))
    return base


def _generator_state(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Generator, Tensor] | None:
    first = next(tensors(args), None)
    device = first.device if first is not None else torch.device(kwargs.get("device") or torch.get_default_device())
    generator = operator.generator(args, kwargs, device)
    if generator is None:
        return None
    try:
        return generator, generator.get_state()
    except RuntimeError:  # a captured graph does not let its generator be read
        return None


def _written(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[tuple[int | str, int, Tensor]]:
    for position, name in operator.writes:
        where: int | str = position if position < len(args) else name
        x = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(x, Tensor):
            yield where, -1, x
        elif isinstance(x, (list, tuple)):
            for j, t in enumerate(x):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                if isinstance(t, Tensor):
                    yield where, j, t
