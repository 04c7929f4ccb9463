"""The tape: a dispatch mode that sees what runs in a block's forward, and a hook that sees what autograd saves of it.

NOTE [ Replay the tape, not the code ]
Recomputation elsewhere runs a module's Python code a second time. Here Python runs once. The tape sits below
autograd, sees every operator of the forward, and records those whose results the plan does not keep. When
autograd saves a tensor, it gets a `Handle` instead: a value and a geometry. In the backward pass a handle is opened
(`replay.py`), and only the operators that lead to its value are run again, from what is held. No hook, cache, counter
or random generator is touched twice, because no code that touches one is run.

What a recorded operator reads is resolved at once, by storage and version (NOTE [ Values ]), so that the following
holds at any moment: **every handle is closed**: each chain that leads to its value ends in values that are held.
Recording cannot break that. Saving (`pack`) establishes it for the new handle (NOTE [ Barriers ]). A write in place
would break it, so what it overwrites is copied first if anything can still reach it (`preserve`).

Versions are read late: the counter of a tensor that an operator writes moves after the handler has returned. So a
value becomes held, and its version is noted, when something first refers to it, never at its birth.
"""

# pyright: reportPrivateUsage=false
# `_cdata` is read here and not through `torchcompat.storage_key`, because this is the hot path.

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actmem.decisions import Decision, Reason
from actmem.engine import barriers
from actmem.engine.away import Away
from actmem.engine.coverage import Coverage
from actmem.engine.holding_rules import UNLIMITED, inherited, kept_by, promote, reason
from actmem.engine.holdings import Holdings, find, preserve_elsewhere, storage_of
from actmem.engine.observation import Cut, Observation, Places
from actmem.engine.operators import DESCRIBED, Operator, describe, generator_state
from actmem.engine.overwrites import Write, written_by
from actmem.engine.values import (
    KEPT,
    UNCHECKED,
    Boxed,
    Flattened,
    Handle,
    Node,
    Value,
    checksum,
    forget_geometries,
    geometry,
    has_bytes,
    shared_geometry,
    tensors,
)
from actmem.engine.verdicts import Tracer, Verdicts
from actmem.torchcompat import (
    TorchDispatchMode,
    alias,
    alias_in_handler,
    counting_versions,
    divide,
    in_fake_mode,
    is_traceable_wrapper_subclass,
    is_wrapper,
    never_compile,
    numerics,
    saves_for_graph,
    storage_key,
    without_dispatch_modes,
)

__all__ = ["Tape"]

_TORCHS_OWN = tuple(name for name, x in vars(TorchDispatchMode()).items() if type(x) is deque)
"""What torch needs to enter and leave a mode."""
_ref = weakref.ref
_default_dtype = torch.get_default_dtype
_operators = DESCRIBED
_EMPTY: Any = torch.ops.aten.empty_strided.default
_SAVE, _RECOMPUTE = Decision.SAVE, Decision.RECOMPUTE
_SAVED, _OFFLOADED = Reason.SAVED, Reason.OFFLOADED
_EXTERNAL, _GENERATOR = Reason.EXTERNAL, Reason.GENERATOR
_COLLECTIVE, _OPAQUE, _UNINITIALISED = Reason.COLLECTIVE, Reason.OPAQUE, Reason.UNINITIALISED


class Tape(Holdings, TorchDispatchMode):
    """Record one forward call of one block. Entered by `engine.calling`, never directly."""

    supports_higher_order_operators = True
    sees_regions = True
    """Sees the call of a compiled graph as one operator. See NOTE [ Compiled regions ]."""

    _refers_always = False
    """Find out what a call reads even if no plan needs to know."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function inside the block run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no need for torch's wrapper around the handler: `never_compile` does the same at no cost

    def __init__(
        self,
        verdicts: Verdicts | Tracer,
        observation: Observation | None,
        *,
        inputs: list[Tensor],
        trainable: Any,
        cut: Cut | None = None,
        reissue: bool = False,
        away: Away | None = None,
        exact: bool = False,
        places: Places | None = None,
        opaque: Any = None,
    ) -> None:
        TorchDispatchMode.__init__(self)  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        Holdings.__init__(self, inputs, trainable, observation)
        self.lock = threading.RLock()
        """Held during a replay: backward may run on several threads."""
        self.opaque = opaque
        """What is known of Functions that launch unseen kernels (`UnseenFunctions`); None: only what was declared."""
        self._places = places
        """Where to look up which module runs; None if nobody wants to know."""
        self._verdicts = verdicts
        self._known = verdicts.known
        self._counts = verdicts.new_counts()
        self._recent: list[Handle] = []
        """Handles of tensors without history that autograd saved since the last operator: the next may be filling
        them."""
        self._reissue = reissue
        """Functional collectives may run again. See NOTE [ Collectives again ] in `barriers.py`."""
        self._away = away
        """Takes what the plan offloads when the forward is over."""
        self._cut = cut
        self._exact = exact
        self._free = KEPT if exact else (_OFFLOADED,)
        """Why a value may be kept without weighing its bytes. See NOTE [ Barriers ]."""
        if exact:
            self._budget = UNLIMITED
        self._index = 0
        self._dtype = torch.get_default_dtype()
        self._numbered = cut is not None or observation is not None

    @property
    def address(self) -> str:
        """The path of the module that runs now, if anybody wants to know."""
        return "" if self._places is None else self._places.now()

    # ---------------------------------------------------------------- recording

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record what is needed to run it again."""
        if types and any(map(is_wrapper, types)):
            return NotImplemented  # a wrapper subclass: the operators beneath it come here next
        operator = _operators.get(id(func)) or describe(func)
        if operator.view:
            if operator.view is not True:
                self._bits = True
            return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        if self.paused or ((types or not operator.plain) and in_fake_mode() is not self._in_fake_mode):
            if operator.never is _COLLECTIVE:  # it is not one where torch infers the shapes of a distributed tensor
                self.communicated = True
            return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        if self._provisional:
            self._adopt(args)
        if self._recent and not operator.fills_saved:
            self._recent.clear()
        if not operator.plain and not (operator.calm and not operator.draws(args, kwargs or {})):
            if operator.in_place and not self._numbered and self._known.get(operator) is _RECOMPUTE:
                return self._record_in_place(operator, args, kwargs)
            return self._record_special(operator, args, kwargs or {})
        out = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        decision = self._known.get(operator)
        if decision is None:
            decision = self._verdicts.decide(operator, self.address, self._counts, out)
        kept = None if decision is _RECOMPUTE else _SAVED if decision is _SAVE else _OFFLOADED  # as `kept_by`
        if self._numbered:
            kept = self._in_cut(func) or kept
        if _default_dtype() is not self._dtype and kept is None:
            self._record_outputs(operator, None, out, _OPAQUE)  # a replay would not find the default dtype of this call
            return out
        if type(out) is not Tensor:
            node = self._node(operator, args, kwargs) if kept is None else None
            self._record_outputs(operator, node, out, kept, not_these=args if operator.may_alias else ())
            return out
        try:
            storage = out.untyped_storage()
        except NotImplementedError:  # sparse: no storage; whoever reads it will hold the object
            return out
        if out.is_nested:
            return out  # strided and nested: the same
        key = storage._cdata
        values = self._values
        value = values.get(key)
        if value is not None and value.storage() is storage:
            return out  # a view, whatever the schema says
        if operator.may_alias and any(storage_of(t) is storage for t in tensors(args)):
            return out  # the same, of a storage that is met here for the first time
        if kept is not None:
            values[key] = value = Value(_ref(storage), None, 0, kept)
        else:
            # The same as `_node`, written out for the common case: this runs for most operators of a step.
            refs: list[tuple[Any, ...]] = []
            plain = list(args)
            debts = None
            i = -1
            for a in args:
                i += 1
                if type(a) is Tensor or isinstance(a, Tensor):
                    plain[i] = None
                    try:
                        s, version, view = a.untyped_storage(), a._version, shared_geometry(a, 0)
                    except (NotImplementedError, RuntimeError):  # sparse, nested, made in inference mode
                        self._refer(i, -1, a, refs)
                        debts = barriers.all_debts(refs)
                        continue
                    v = values.get(s._cdata)
                    if v is None or v.storage() is not s or v.node is None or (version and v.slot >= 0):
                        v = self._meet(a, s, v)
                        if v.held is None:
                            debts = barriers.owe(debts, (v,))
                    elif v.debts is not None:
                        debts = barriers.owe(debts, v.debts)
                    refs.append((i, -1, v, geometry(a) if self._bits else view))
                elif type(a) is list or type(a) is tuple:
                    plain[i] = self._refer_list(i, a, refs)
                    debts = barriers.all_debts(refs)
            if kwargs:
                kwargs = self._refer_kwargs(kwargs, refs)
                debts = barriers.all_debts(refs)
            node = Node(operator.again, plain, kwargs, refs)
            if operator.numerics:
                node.flags = numerics()
            values[key] = value = Value(_ref(storage), node, 0, None)
            if debts is not None:
                value.debts = debts
        if self.observation is not None:
            self.observation.made(value, operator, self.address, out)
        return out

    def _record_in_place(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Record an operator that reads and writes its first argument: `_record_special`, for a recorded version."""
        written = args[0]
        old = self._lookup(written) if type(written) is Tensor and not written.is_nested else None
        is_known = old is not None and old.node is not None and old.held is None and not old.written_unseen(written)
        if not is_known or _default_dtype() is not self._dtype:
            del old  # whether anything else can reach it is asked of its reference count
            return self._record_special(operator, args, kwargs or {})
        node = self._node(operator, args, kwargs)
        node.writes = [(0, -1, -1, written.device)]
        storage = written.untyped_storage()
        preserve_elsewhere(written)
        self._recent.clear()
        out = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        self._values[storage._cdata] = value = Value(_ref(storage), node, -1, None)
        value.debts = barriers.all_debts(node.refs)
        node.outs = [(-1, _ref(value))]
        return out

    def _in_cut(self, func: Any) -> Reason | None:
        """Count an operator, and return why its result belongs to the smallest cut; None if it does not."""
        if self.observation is not None:
            self.observation.begin(func)
        cut = self._cut
        if cut is None:
            return None
        index = self._index
        self._index = index + 1
        if index >= len(cut.funcs) or cut.funcs[index] != func:
            self._cut = None  # another program than the one that was cut: settle each debt as it comes
            return None
        return cut.hold.get(index)

    def _record_special(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that writes, draws, or is never replayed."""
        func, call = operator.func, operator.call
        if operator.composite and (divided := divide(self, func, args, kwargs)) is not NotImplemented:
            return divided
        writes = [Write(where, j, t, operator, args, kwargs) for where, j, t in written_by(operator, args, kwargs)]
        ran = not writes and not operator.draws(args, kwargs)  # nothing to retire, and no state to note first
        out: Any = call(*args, **kwargs) if ran else None
        decision = self._known.get(operator)
        if decision is None:
            decision = self._verdicts.decide(operator, self.address, self._counts, writes[0].tensor if writes else out)
        kept = kept_by(decision)
        forbidden = operator.forbids(args, kwargs, next(tensors(args), None))
        again = operator.reissued and self._reissue and kept is None
        if again:
            forbidden = None
        if self._numbered and (cut := self._in_cut(func)) is not None:
            kept, forbidden = cut, None
        if _default_dtype() is not self._dtype and forbidden is None:
            forbidden = _OPAQUE
        state = None
        if forbidden is None and kept is None and operator.draws(args, kwargs):
            state = generator_state(operator, args, kwargs)
            if state is None:
                forbidden = _GENERATOR
        unread = operator.unread(args, kwargs)
        given = reason(kept, forbidden, exact=self._exact)
        for write in writes:
            write.old = self._lookup(write.tensor)
            write.fate = given or (_EXTERNAL if write.where in unread else inherited(write.old, whole=write.whole))
        replayable = forbidden is None and kept is None
        coverage = writes[0].coverage() if replayable and len(writes) == 1 else None
        node = None
        refers = self._refers_always or operator.fresh or coverage is not None
        if replayable and (refers or any(w.fate is None for w in writes)):
            node = self._node(operator, tuple(None if i in unread else a for i, a in enumerate(args)), kwargs)
            node.state = state
            node.overwrite([(w.where, w.item, w.tensor, w.whole) for w in writes if w.where not in unread])
            if again and not self._anchor(operator, node, args[0]):
                node, forbidden, given, again = None, Reason.COLLECTIVE, Reason.COLLECTIVE, False
        self._leave_behind(writes, operator.fills_saved)
        if any(w.item >= 0 for w in writes):
            # An operator on a list counts the versions inside, where a dispatch mode makes torch leave that out.
            with counting_versions():
                out = call(*args, **kwargs)
        elif not ran:
            out = call(*args, **kwargs)
        made = self._record_writes(operator, node, writes, coverage)
        if self.observation is not None:
            self.observation.special(operator, forbidden, writes, unread, coverage)
        if forbidden is _UNINITIALISED and not writes and isinstance(out, Tensor) and storage_of(out) is not None:
            self._record_uninitialised(operator, out)
        else:
            self._record_outputs(operator, node, out, given, made)
        if again and node is not None and (value := self._lookup(out)) is not None:
            value.debts = barriers.ACROSS
        return out

    def _anchor(self, operator: Operator, node: Node, given: Tensor) -> bool:
        """Make sure that a collective can be reissued; False if it should be saved instead.

        See NOTE [ Collectives again ] in `barriers.py`.
        """
        value: Any = node.refs[0][2]
        if not barriers.owes(value):
            return True
        if operator.packet != "_c10d_functional.all_gather_into_tensor":
            return False
        if value.node is None:
            self._hold(value, given, alias_in_handler)
        else:
            barriers.settle(
                value, given.untyped_storage().nbytes(), self._hold_owed_in_handler, given, find, self._free
            )
        return True

    def _leave_behind(self, writes: list[Write], fills_saved: frozenset[int | str]) -> None:
        """Retire the versions that an operator is about to overwrite."""
        for write in writes:
            # The call itself may have been the first to refer to it.
            value, write.old = write.old or self._lookup(write.tensor), None
            if value is not None:
                if value.row is not None:
                    value.row.overwritten = True
                self._values.pop(storage_key(value.storage()), None)
                early = [h for h in self._recent if h.value is value] if write.where in fills_saved else []
                if early:
                    write.early = Value(value.storage, None, 0, None)
                    for handle in early:
                        handle.value, handle.checksum = write.early, None
                self._preserve(value)
                del value, early
            preserve_elsewhere(write.tensor)
        self._recent.clear()

    def _record_writes(
        self, operator: Operator, node: Node | None, writes: list[Write], coverage: Coverage | None
    ) -> list[tuple[int, weakref.ref[Value]]]:
        """Make a value of each new version."""
        made: list[tuple[int, weakref.ref[Value]]] = []
        for k, write in enumerate(writes):
            storage = write.tensor.untyped_storage()
            if self._lookup(write.tensor) is not None:
                continue  # two of the written tensors share a storage: one new version of it
            value = write.early or Value(_ref(storage), None, 0, None)
            value.node, value.slot, value.why = node if write.fate is None else None, -1 - k, write.fate
            if write.early is not None and (value.node is None or barriers.all_debts(value.node.refs) is not None):
                value.node, value.why = None, write.fate or Reason.BARRIER  # its handles are out: it must be closed now
                self._hold(value, write.tensor, alias_in_handler)
                value.version = UNCHECKED  # its counter moves after this handler has returned
            made.append((-1 - k, _ref(value)))
            if coverage is not None and node is not None:
                value.coverage, value.pending = coverage, node
                value.debts = barriers.all_debts(node.refs, storage)
                node.outs = made
                if coverage.full:
                    promote(value)
            self._remember(value, storage, write.tensor, operator)
        return made

    def _record_uninitialised(self, operator: Operator, out: Tensor) -> None:
        """Make a value of a newborn tensor, with the call that could make another once all of it has been written."""
        storage = out.untyped_storage()
        value = Value(_ref(storage), None, 0, _UNINITIALISED)
        value.coverage = Coverage.of(out)
        if value.coverage is not None:
            # Only its geometry matters: the argument of `empty_like` need not be held for it.
            place = {"dtype": out.dtype, "device": out.device}
            value.pending = Node(_EMPTY, [out.size(), out.stride()], place, [])
        self._remember(value, storage, out, operator)

    def _record_outputs(
        self,
        operator: Operator,
        node: Node | None,
        out: Any,
        why: Reason | None,
        made: list[tuple[int, weakref.ref[Value]]] | None = None,
        not_these: Sequence[Any] = (),
    ) -> None:
        """Make a value of each output tensor that is not a view of something known, or of what the call was given."""
        made = made or []
        known = {id(s) for t in not_these if isinstance(t, Tensor) and (s := storage_of(t)) is not None}
        for slot, t in enumerate(tensors(out)):
            storage = storage_of(t)
            if storage is None or is_traceable_wrapper_subclass(t) or self._lookup(t) is not None:
                continue
            if id(storage) in known:
                continue
            value = Value(_ref(storage), node, slot, None if node is not None else why)
            self._remember(value, storage, t, operator)
            made.append((slot, _ref(value)))
        if node is not None and (len(made) > 1 or (made and made[0][0] != 0)):
            node.outs = made

    def _remember(self, value: Value, storage: Any, tensor: Tensor, operator: Operator) -> None:
        if value.node is not None:
            value.debts = value.debts or barriers.all_debts(value.node.refs)
        elif value.why not in KEPT:
            value.tensor = _ref(tensor)
            value.num_bytes = storage.nbytes()
        self._values[storage._cdata] = value
        if self.observation is not None:
            self.observation.made(value, operator, self.address, tensor)

    # ---------------------------------------------------------------- writing calls down

    def _node(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Node:
        """Record a call, with its tensors replaced by references to values."""
        refs: list[tuple[Any, ...]] = []
        plain = list(args)
        for i, a in enumerate(args):
            if isinstance(a, Tensor):
                self._refer(i, -1, a, refs)
                plain[i] = None
            elif type(a) is list or type(a) is tuple:
                plain[i] = self._refer_list(i, a, refs)
        node = Node(operator.again, plain, self._refer_kwargs(kwargs, refs) if kwargs else None, refs)
        if operator.numerics:
            node.flags = numerics()
        return node

    def _refer(self, i: int | str, j: int, a: Tensor, refs: list[tuple[Any, ...]]) -> None:
        storage = storage_of(a)
        if storage is None or a.is_quantized:
            value = Value(_ref(a), None, 0, _EXTERNAL)
            value.held = alias_in_handler(a)
            value.version = UNCHECKED if a.is_inference() else a._version
            refs.append((i, j, value, None))
            return
        value = self._values.get(storage._cdata)
        if value is None or value.storage() is not storage or value.node is None or value.written_unseen(a):
            value = self._meet(a, storage, value)
        refs.append((i, j, value, geometry(a)))

    def _refer_list(self, i: int | str, items: Any, refs: list[tuple[Any, ...]]) -> Any:
        if not any(isinstance(x, Tensor) for x in items):
            return items
        plain = list(items)
        for j, x in enumerate(items):
            if isinstance(x, Tensor):
                self._refer(i, j, x, refs)
                plain[j] = None
        return plain

    def _refer_kwargs(self, kwargs: dict[str, Any], refs: list[tuple[Any, ...]]) -> dict[str, Any]:
        plain = dict(kwargs)
        for name, x in kwargs.items():
            if isinstance(x, Tensor):
                self._refer(name, -1, x, refs)
                plain[name] = None
            elif type(x) is list or type(x) is tuple:
                plain[name] = self._refer_list(name, x, refs)
        return plain

    # ---------------------------------------------------------------- saving

    @never_compile
    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that autograd saves, and return what autograd is to hold instead."""
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            return self._pack_wrapper(tensor)
        if tensor.is_nested or (type(tensor) is not Tensor and is_wrapper(type(tensor))):
            return self._pack_object(tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return self._pack_object(tensor)
        value = self._values.get(storage._cdata)
        if value is None or value.storage() is not storage or (value.node is not None and value.written_unseen(tensor)):
            if tensor.is_quantized:
                return self._pack_object(tensor)
            value = self._saved_external(tensor, storage)
        elif value.held is None:
            if value.node is None:
                self._hold_saved(value, tensor)
            elif value.debts is not None:
                barriers.settle(value, storage.nbytes(), self._hold_owed, tensor, find, self._free)
        elif value.version != UNCHECKED and value.held._version != value.version:
            value = self._saved_external(tensor, storage)  # written unseen
        handle = Handle(self, value, geometry(tensor) if self._bits else shared_geometry(tensor, 0))
        if not value.saved:
            value.saved = True
            self._budget += storage.nbytes()
        if not tensor.requires_grad:
            self._recent.append(handle)
        if self.observation is not None:
            self.observation.saved(value, handle)
            if value.held is None and has_bytes(tensor):
                with without_dispatch_modes():
                    handle.checksum = checksum(tensor)
        return handle

    def _saved_external(self, tensor: Tensor, storage: Any) -> Value:
        value = super()._saved_external(tensor, storage)
        if self.observation is not None and storage._cdata not in self._inputs and (self.paused or saves_for_graph()):
            self.observation.unseen(value, self.address)
        return value

    def _hold_owed(self, value: Value, tensor: Tensor) -> None:
        self._hold(value, tensor, alias)

    def _hold_owed_in_handler(self, value: Value, tensor: Tensor) -> None:
        self._hold(value, tensor, alias_in_handler)

    def _pack_wrapper(self, tensor: Tensor) -> Flattened:
        wait: Any = getattr(tensor, "trigger_wait", None)
        if wait is not None and (self.observation is not None or self._outer is not None):
            wait()  # a collective that is still in flight, and its bytes are about to be read
        flatten: Any = getattr(tensor, "__tensor_flatten__")  # noqa: B009 - only wrapper subclasses have it
        names, context = flatten()
        inner: dict[str, Any] = {}
        for name in names:
            x: Any = getattr(tensor, name)
            # Offsets and the like are kept as the objects they are: that object identifies a nested tensor's length.
            saved = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
            inner[name] = self.pack(x) if saved else x
        return Flattened(type(tensor), inner, context, tensor.size(), tensor.stride())

    def _pack_object(self, tensor: Tensor) -> Any:
        kept = alias(tensor)
        if self._outer is None:
            return kept
        self.paused = True
        try:
            return Boxed(self._outer[0](kept), self._outer[1])
        finally:
            self.paused = False

    def held_elsewhere(self, out: Any) -> None:
        """Note for the report that tensors are held until the backward pass by what no hook of autograd sees."""
        for t in tensors(out) if self.observation is not None else ():
            value = self._lookup(t) if storage_of(t) is not None else None
            if value is not None and value.row is not None and self.observation is not None:
                self.observation.elsewhere.append(value.row)

    # ---------------------------------------------------------------- ends

    def keep_outputs(self, out: Any) -> None:
        """Hold the values of a nested unit's outputs, so that no replay of later operators reaches into the unit."""
        for t in tensors(out):
            value = self._lookup(t) if storage_of(t) is not None else None
            if value is not None and value.node is not None and value.held is None:
                self._hold(value, t, alias)
                value.node, value.debts, value.why = None, None, Reason.UNIT

    def close(self) -> None:
        """Forget everything that no handle can reach. The tape records nothing after this."""
        self._recent.clear()
        forget_geometries()
        for name in _TORCHS_OWN:
            vars(self).pop(name, None)  # more than 2 KB, and handles keep the tape alive
        offered = [] if self._away is None else self._away.offered(self._values.values())
        self._forget()
        if self._away is not None:
            self._away.send(offered)
        if self.observation is not None:
            self.observation.settle()
