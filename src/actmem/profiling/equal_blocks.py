"""Trace one block for many: equal blocks are run once, and the log of that run stands for the others.

NOTE [ Equal blocks ]
On fake tensors, the second and later of several equal blocks, called with arguments of equal shapes, would do what the
first did. So they are not run. Their outputs, and in the backward pass the gradients of their inputs, are made from
nothing, and when the step is over the log of the first is put where theirs would be, with its storages renamed. What
is alive is known exactly on both sides of the gap, so it is known in it. Which storage is which on both sides follows
from what was allocated and freed: a gradient that was made from nothing is the one of the same size that the first
block left.

In the fake copy of the model, equal blocks are the same module: the others need no copy.

Equal means: the same classes and parameters, arguments of equal shapes, and the same wherever the block that was run
read itself (NOTE [ Equal by what is read ] in `reads.py`). A block that is called several times is always run: its
gradients are added up, which takes different memory than creating them. So is a block if something it makes outlives it
other than through its outputs, if an output shares storage with an input, or if it takes or returns anything other than
tensors and plain values: then its run may change what follows.

The gradients that reach the outputs must match too, in strides and in storage bytes: a gradient that is one number
expanded, like that of `out.sum()`, frees next to nothing when the block has used it. They are known only in the
backward pass. If those of a skipped call differ from those of its template, the log cannot be assembled, and the
step runs again with every block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from actmem.engine import has_bytes, put_together, take_apart
from actmem.log_entries import Entered, Entry, LayerEntry, Left, OpRan, StorageDied, Unpacked
from actmem.measuring import device_of, storages_of
from actmem.profiles import Layer
from actmem.profiling.chronicle import Accumulated, Allocated, BackwardBegan, BackwardEnded, Chronicle, Freed
from actmem.profiling.reads import Reads
from actmem.structure import named_modules
from actmem.torchcompat import FakeTensor, active_fake_mode, without_dispatch_modes

__all__ = ["Skipped", "Template", "expand", "identity", "numbers_of", "signature", "skip"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def identity(block: nn.Module, kind: str) -> Any:
    """Return a key that is equal for blocks that may do the same: only a run shows what else matters."""
    found: list[Any] = [kind]
    for _, module in named_modules(block):
        held = vars(module)
        found.append(vars(type(module)).get("_actmem_original", type(module)))
        found.append([(n, x) for n, x in held.items() if isinstance(x, _PLAIN) and type(x) is not int])
        found += [None if b is None else (b.shape, b.dtype) for b in held["_buffers"].values()]
        found += [p.requires_grad for p in held["_parameters"].values() if p is not None]
    return repr(found)


def signature(args: Any, kwargs: Any) -> Any:
    """Return a key that is equal for calls with equal arguments, or None if they cannot be compared."""
    leaves: list[Any] = []
    spec = take_apart((args, kwargs), leaves)
    if not all(isinstance(x, (Tensor, *_PLAIN)) for x in leaves):
        return None
    numbers: dict[int, int] = {}
    seen: list[Any] = []
    for x in leaves:
        if isinstance(x, Tensor):
            same = numbers.setdefault(id(x.untyped_storage()), len(numbers))
            seen.append((x.shape, x.stride(), x.dtype, x.requires_grad, same, has_bytes(x)))
        else:
            seen.append(x)
    return repr(spec), repr(seen)


class _Numbers:
    """The numbers of a tensor that is real in a fake step: a mask, positions."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._version = weakref.ref(tensor.untyped_storage()), tensor._version
        with without_dispatch_modes():
            self._copy = tensor.detach().clone()

    def are(self, tensor: Tensor) -> bool:
        """Return whether another tensor of the same geometry has the same numbers."""
        if self._storage() is tensor.untyped_storage() and self._version == tensor._version:
            return True
        with without_dispatch_modes():
            return torch.equal(self._copy, tensor.detach())


def _real(args: Any, kwargs: Any) -> list[Tensor]:
    leaves: list[Any] = []
    take_apart((args, kwargs), leaves)
    return [x for x in leaves if isinstance(x, Tensor) and has_bytes(x)]


def numbers_of(args: Any, kwargs: Any) -> list[_Numbers]:
    """Note the numbers of the arguments that have them."""
    return [_Numbers(x) for x in _real(args, kwargs)]


class Template:
    """A call that was run, and stands for calls like it."""

    def __init__(
        self,
        layer: int,
        block: nn.Module,
        args: Any,
        kwargs: Any,
        out: Any,
        *,
        reads: Reads,
        numbers: list[_Numbers],
        alive: Iterable[int],
        chronicle: Chronicle,
    ) -> None:
        """Note what a call received and returned.

        Args:
            layer: number of the call.
            block: the block of the model itself.
            args: its arguments.
            kwargs: the same, by name.
            out: its result.
            reads: what it read from its own modules.
            numbers: those of its arguments, as `numbers_of` noted them before the call.
            alive: storages that it made and that were still alive when it ended.
            chronicle: the log.
        """
        self.layer, self._block, self._reads, self._given = layer, block, reads, numbers
        self.inputs = _numbers(args, kwargs, chronicle)
        leaves: list[Any] = []
        self._spec = take_apart(out, leaves)
        self._leaves = [_geometry(x) if isinstance(x, Tensor) else x for x in leaves]
        self.outputs = _numbers(out, None, chronicle)
        plain = all(isinstance(x, (Tensor, *_PLAIN)) for x in leaves)
        self.gradients: dict[int, Any] = {}
        """Index of an output tensor -> strides and storage bytes of its gradient."""
        for i, x in enumerate(x for x in leaves if isinstance(x, Tensor)):
            if x.requires_grad:
                x.register_hook(_Noting(self.gradients, i))  # pyright: ignore[reportUnknownMemberType]
        self.usable = plain and set(alive) <= set(self.outputs) and not set(self.outputs) & set(self.inputs)

    def is_of(self, block: nn.Module) -> bool:
        """Return whether it is a call of this block of the model itself."""
        return self._block is block

    @property
    def changes(self) -> bool:
        """Whether the call changed something that it read from its block."""
        return self._reads.changed

    def stands_for(self, block: nn.Module, args: Any, kwargs: Any, *, copied: nn.Module | None) -> bool:
        """Return whether a call with arguments of the same shapes would do what this one did.

        Args:
            block: the block of the model itself.
            args: its arguments.
            kwargs: the same, by name.
            copied: the module that would be run, if it is a copy for this block alone.
        """
        if not self.usable:
            return False
        if not all(mine.are(x) for mine, x in zip(self._given, _real(args, kwargs), strict=True)):
            return False
        if copied is not None and not self._reads.unchanged(copied, block):
            return False
        return self._reads.hold_for(self._block, block)

    def outputs_like(self, given: list[Tensor], gradients: dict[int, Any], chronicle: Chronicle) -> Any:
        """Return what a similar call would return, with a history that leads back to its arguments.

        Args:
            given: the arguments that require a gradient.
            gradients: filled in the backward pass with those that reach the outputs, as in `self.gradients`.
            chronicle: the log.
        """
        wanted = [x for x in self._leaves if isinstance(x, _Geometry)]
        apply: Any = _Skip.apply  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType] # untyped
        made = cast("Iterator[Tensor]", iter(apply(wanted, gradients, chronicle, *given) if wanted else ()))
        return put_together(self._spec, iter([next(made) if isinstance(x, _Geometry) else x for x in self._leaves]))


class Skipped:
    """A call that was not run."""

    def __init__(
        self, layer: int, template: Template, inputs: list[int], outputs: list[int], gradients: dict[int, Any]
    ) -> None:
        self.layer, self.template, self.inputs, self.outputs = layer, template, inputs, outputs
        self.gradients = gradients


def skip(layer: int, template: Template, args: Any, kwargs: Any, chronicle: Chronicle) -> tuple[Any, Skipped]:
    """Skip a call that would do what the template did."""
    leaves: list[Any] = []
    take_apart((args, kwargs), leaves)
    given = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    gradients: dict[int, Any] = {}
    out = template.outputs_like(given, gradients, chronicle)
    return out, Skipped(layer, template, _numbers(args, kwargs, chronicle), _numbers(out, None, chronicle), gradients)


def _lies(gradient: Tensor) -> Any:
    strides = tuple(st for n, st in zip(gradient.shape, gradient.stride(), strict=True) if n > 1)
    return strides, gradient.untyped_storage().nbytes()


class _Noting:
    """A hook that records the strides and the storage bytes of a gradient."""

    def __init__(self, into: dict[int, Any], at: int) -> None:
        self._into, self._at = into, at

    def __call__(self, gradient: Tensor) -> None:
        if gradient.layout is torch.strided and not gradient.is_nested:
            self._into[self._at] = _lies(gradient)


class _Geometry:
    def __init__(self, x: Tensor) -> None:
        self.size, self.stride, self.dtype, self.device = x.size(), x.stride(), x.dtype, device_of(x)
        self.requires_grad = x.requires_grad


def _geometry(x: Tensor) -> _Geometry:
    return _Geometry(x)


def _made(like: _Geometry, chronicle: Chronicle) -> Tensor:
    mode = active_fake_mode()
    with without_dispatch_modes():
        bare = torch.empty_strided(like.size, like.stride, dtype=like.dtype, device="meta")
    made = FakeTensor(mode, bare, like.device)
    chronicle.ledger.returned(made)
    return made


class _Skip(torch.autograd.Function):
    """Represents a skipped block in the graph."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, wanted: list[_Geometry], gradients: dict[int, Any], chronicle: Chronicle, *given: Tensor
    ) -> Any:
        ctx.given = [_geometry(x) for x in given]
        ctx.gradients, ctx.chronicle = gradients, chronicle
        made = tuple(_made(x, chronicle) for x in wanted)
        ctx.mark_non_differentiable(*(t for t, x in zip(made, wanted, strict=True) if not x.requires_grad))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                _Noting(ctx.gradients, i)(gradient)
        return None, None, None, *(_made(x, ctx.chronicle) for x in ctx.given)


def _numbers(args: Any, kwargs: Any, chronicle: Chronicle) -> list[int]:
    leaves: list[Any] = []
    take_apart((args, kwargs), leaves)
    return [chronicle.ledger.number(s) for x in leaves if isinstance(x, Tensor) for s in storages_of(x)]


# -------------------------------------------------------------------- assembling the log


class _NotAlikeError(Exception):
    """The log of a template cannot stand for others."""


def expand(
    log: list[Entry], layers: dict[int, Layer], skipped: list[Skipped], sizes: dict[int, int]
) -> tuple[list[Entry], dict[int, Layer]] | None:
    """Insert the template's part of the log where calls were skipped. Return None if that cannot be done.

    Args:
        log: what was seen.
        layers: the calls that were run.
        skipped: the calls that were not.
        sizes: bytes of the numbered storages; those of the copies are added.
    """
    if any(s.gradients != s.template.gradients for s in skipped):
        return None
    templates = dict.fromkeys(s.template.layer for s in skipped)  # each is looked through once, whatever stands on it
    try:
        forward = {layer: _Part(log, Entered, Left, layer) for layer in templates}
        backward = {layer: _Part(log, BackwardBegan, BackwardEnded, layer) for layer in templates}
    except _NotAlikeError:
        return None
    waiting = {s.layer: s for s in skipped}
    done: list[Entry] = []
    every = dict(layers)
    shift = 0
    renamed: dict[int, dict[int, int]] = {}
    same: dict[int, int] = {}
    """A storage that a skipped call made from nothing -> the one that its template left in its place."""
    at = 0
    while at < len(log):
        entry, at = log[at], at + 1
        match entry:
            case Entered(layer, live_bytes) if layer in waiting:
                s = waiting[layer]
                every[layer], renamed[layer] = _renamed(layers[s.template.layer], s, sizes)
                done.append(entry.shifted(shift))
                gap = _Gap(log, at, Left, layer)
                done += gap.filled(forward[s.template.layer], renamed[layer], live_bytes + shift, same, sizes)
                at = gap.end
            case BackwardBegan(layer, live_bytes) if layer in waiting:
                part = backward[waiting[layer].template.layer]
                gap = _Gap(log, at, BackwardEnded, layer)
                done += gap.filled(part, renamed[layer], live_bytes + shift, same, sizes)
                shift += part.added_bytes + live_bytes
                at = gap.end
            case BackwardEnded(layer, live_bytes) if layer in waiting:
                shift -= live_bytes
                continue
            case BackwardBegan() | BackwardEnded():
                continue
            case Freed(storage):
                done.append(Freed(same.get(storage, storage)))
                continue
            case _:
                done.append(entry.shifted(shift))
                continue
        if gap.is_busy:
            return None  # something ran where nothing should have
    return done, every


class _Gap:
    """Where a call was skipped: what the log has there instead of its operators."""

    def __init__(self, log: list[Entry], begin: int, last: type[Left | BackwardEnded], layer: int) -> None:
        self._layer = layer
        self.end = begin
        while self.end < len(log) and not (isinstance(e := log[self.end], last) and e.layer == layer):
            self.end += 1
        self._entries = log[begin : self.end]

    @property
    def is_busy(self) -> bool:
        """Whether anything but storages came and went there."""
        return any(not isinstance(e, (StorageDied, Allocated, Freed)) for e in self._entries)

    def filled(
        self, part: _Part, names: dict[int, int], live_bytes: int, same: dict[int, int], sizes: dict[int, int]
    ) -> list[Entry]:
        """Return what the template did, with the storages that are on both sides of the gap."""
        made = [e for e in self._entries if isinstance(e, Allocated)]
        freed = [same.get(e.storage, e.storage) for e in self._entries if isinstance(e, Freed)]
        for storage in part.freed_from_outside:  # such as the gradient of the output
            if storage not in names:
                match = next((s for s in freed if sizes[s] == sizes[storage]), None)
                if match is not None:
                    freed.remove(match)
                    names[storage] = match
        done = list(part.moved(self._layer, names, live_bytes, sizes))
        done += [e for e in self._entries if isinstance(e, StorageDied)]
        begun = {names[s] for s in part.allocated}
        left = [names[s] for s in part.left_for_later]
        for entry in made:
            if entry.storage in begun:
                left = [s for s in left if s != entry.storage]
                continue
            match = next((s for s in left if sizes[s] == entry.num_bytes), None)
            if match is not None:
                left.remove(match)
            else:  # perhaps it goes on in the place of what is freed here
                match = next((s for s in freed if sizes[s] == entry.num_bytes), None)
                if match is not None:
                    freed.remove(match)
            if match is None:
                done.append(entry)
            else:
                same[entry.storage] = match
        return done + [Freed(s) for s in (*left, *freed)]


class _Part:
    """What a template did between two entries of the log."""

    def __init__(
        self,
        log: list[Entry],
        first: type[Entered | BackwardBegan],
        last: type[Left | BackwardEnded],
        layer: int,
    ) -> None:
        opening = next(((i, e) for i, e in enumerate(log) if isinstance(e, first) and e.layer == layer), None)
        closing = next(((i, e) for i, e in enumerate(log) if isinstance(e, last) and e.layer == layer), None)
        if opening is None or closing is None or closing[0] < opening[0]:
            raise _NotAlikeError
        (begin, opened), (end, closed) = opening, closing
        self._layer = layer
        self._entries = cast("list[Any]", log[begin + 1 : end])
        if any(isinstance(e, LayerEntry) and e.layer != layer for e in self._entries):
            raise _NotAlikeError
        if first is BackwardBegan:  # nothing of this layer may be needed elsewhere
            outside = (*log[:begin], *log[end + 1 :])
            if any(isinstance(e, Unpacked) and e.layer == layer for e in outside):
                raise _NotAlikeError
        self._live_bytes = opened.live_bytes
        self.added_bytes = closed.live_bytes - opened.live_bytes
        """How many more bytes are alive when it is over."""
        self.allocated = allocated = {e.storage: None for e in self._entries if isinstance(e, Allocated)}
        freed = [e.storage for e in self._entries if isinstance(e, Freed)]
        later = {e.storage for e in log[end:] if isinstance(e, Freed)}
        self.freed_from_outside = [s for s in freed if s not in allocated]
        self.left_for_later = [s for s in allocated if s not in set(freed) and s in later]
        """What it allocated and others free: its outputs, the gradients of its inputs."""

    def moved(self, layer: int, names: dict[int, int], live_bytes: int, sizes: dict[int, int]) -> Iterator[Entry]:
        """Yield what another layer would do.

        Args:
            layer: number of its call.
            names: the template's storages -> its own; those that it allocates here are added.
            live_bytes: what is alive when it begins.
            sizes: bytes of the numbered storages; those of the new ones are added.
        """
        shift = live_bytes - self._live_bytes
        for entry in self._entries:  # this runs for each entry of each skipped layer
            kind: Any = type(entry)  # pyright: ignore[reportUnknownVariableType]
            if kind is OpRan:
                yield OpRan(entry.cost, entry.live_bytes + shift, entry.workspace_bytes)
            elif kind is Allocated:
                if entry.storage not in names:
                    names[entry.storage] = number = len(sizes)
                    sizes[number] = entry.num_bytes
                yield Allocated(names[entry.storage], entry.num_bytes)
            elif kind is Freed:
                if entry.storage in names:
                    yield Freed(names[entry.storage])
            elif kind is StorageDied:
                died: int = entry.storage
                yield StorageDied(names.get(died, died))
            elif kind is Accumulated:
                if entry.layer == self._layer:  # what the block shares with others is complete once
                    summed: int = entry.storage
                    yield Accumulated(layer, entry.name, names.get(summed, summed), entry.live_bytes + shift)
            elif isinstance(entry, LayerEntry):
                yield entry.moved(layer, shift)
            elif kind is not BackwardBegan and kind is not BackwardEnded:
                yield entry.shifted(shift)


def _renamed(layer: Layer, s: Skipped, sizes: dict[int, int]) -> tuple[Layer, dict[int, int]]:
    names = dict(zip(s.template.inputs, s.inputs, strict=True))
    names |= dict(zip(s.template.outputs, s.outputs, strict=True))
    for value in layer.values:
        if value.kind == "made" and value.storage not in names:
            names[value.storage] = number = len(sizes)
            sizes[number] = sizes[value.storage]
    values = tuple(v.on_storage(names[v.storage]) if v.storage in names else v for v in layer.values)
    calls = tuple(
        replace(c, writes=tuple(replace(w, storage=names.get(w.storage, w.storage)) for w in c.writes))
        if c.writes
        else c
        for c in layer.calls
    )
    return replace(layer, values=values, calls=calls), names
