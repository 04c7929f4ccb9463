"""What a block's forward reads of itself: the proof that another block would do the same.

NOTE [ Equal by what is read ]
Two blocks of the same classes, called with arguments of equal shapes, can do different things only by what their
modules hold: numbers, flags, functions, objects. Names do not show which of those matter. So while the first block
runs, every attribute that is read from its modules is noted. Another block is equal to it if it holds the same in each
of those places. A layer index that was never read may differ.

"The same" means: the identical object; equal plain values; containers, functions (their code, defaults and closures)
and other objects with the same contents; tensors of the same geometry, and with the same numbers unless they are
parameters or buffers, which have no numbers in a fake step; submodules in the same place. What cannot be inspected is
the same only as itself.

What is read may also be changed between two calls, by the block or by the model around it. So it is checked again
before each call that is to be skipped. Only what lies outside the model's objects, such as a global counter, is not
seen.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from actmem.measuring import device_of
from actmem.structure import named_modules
from actmem.torchcompat import FakeTensor, without_dispatch_modes

__all__ = ["PLAIN", "Reads", "noted"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size)
"""Types whose values are compared directly."""

_MISSING = object()
_STATE = ("_parameters", "_buffers")
_STORES = (*_STATE, "_modules")
_EVERYTHING = "__dict__"
_FORWARD = (0, "forward")
_CODE = (
    *(types.FunctionType, types.GetSetDescriptorType, property),
    *(staticmethod, classmethod, functools.cached_property),
)
"""Attributes of classes that read the rest themselves."""
_HOOKS = (OrderedDict, dict)
_MOST_NUMBERS = 4096
"""Elements up to which the numbers of a tensor are compared."""
_DEEPEST = 12


class Reads:
    """The attributes that were read from a block's modules while it ran."""

    def __init__(self, block: nn.Module) -> None:
        """Start with nothing read.

        Args:
            block: the block that is run, or a copy of it.
        """
        self._block = block
        self._modules = _modules(block)
        self.index = {id(module): i for i, module in enumerate(self._modules)}
        self._before: dict[tuple[int, str], Any] = {_FORWARD: None}
        """Module and name -> what was there when it was read. The forward of the block itself is read by its caller."""
        self._after: dict[tuple[int, str], Any] = {}
        self._changed: frozenset[tuple[int, str]] = frozenset()
        self._fixed: dict[tuple[int, str], Any] = {}
        """Of these, what cannot change itself, only be replaced: plain values, and modules of the block."""
        self._hollow: dict[tuple[int, str], type] = {}
        """Of these, the hooks that are not there: half of all that is read."""
        self._first: nn.Module | None = None
        """The block of the model itself that was compared last, and its modules: many are compared with it."""
        self._modules_of_first: list[nn.Module] = []

    def note(self, at: int, name: str) -> None:
        """Note that an attribute is being read."""
        place = at, name
        if place not in self._before:
            found, is_state = _lookup(self._modules[at], name)
            # Methods and properties are the same for all of a class.
            if not isinstance(found, _CODE) or name in _held(self._modules[at]):
                self._before[place] = _Image(self.index).of(found, is_state=is_state)

    def close(self) -> None:
        """Note what the attributes hold when the block has ended."""
        image = _Image(self.index)
        for place in self._before:
            if place == _FORWARD:
                continue
            found, is_state = _lookup(self._modules[place[0]], place[1])
            self._after[place] = image.of(found, is_state=is_state)
            if isinstance(found, PLAIN) or id(found) in self.index:
                self._fixed[place] = found
            elif _is_hollow(found):
                self._hollow[place] = type(found)
        self._changed = frozenset(place for place, seen in self._after.items() if self._before[place] != seen)

    @property
    def changed(self) -> bool:
        """Whether the block changed something that it had read: its next call may behave differently."""
        return bool(self._changed)

    def _is_as_left(self) -> bool:
        """Return whether the attributes hold what they did when the block had ended."""
        image, helds, fixed, hollow = _Image(self.index), [_held(m) for m in self._modules], self._fixed, self._hollow
        for place, seen in self._after.items():
            at, name = place
            found, is_state = (helds[at][name], False) if name in helds[at] else _lookup(self._modules[at], name)
            if (place in fixed and fixed[place] is found) or (hollow.get(place) is type(found) and not found):
                continue
            if image.of(found, is_state=is_state) != seen:
                return False
        return True

    def hold_for(self, first: nn.Module, other: nn.Module) -> bool:
        """Return whether `other` holds what `first` does wherever this block read, and nothing of it has changed since.

        Args:
            first: the block of the model itself.
            other: another one, of the same structure.
        """
        if not self._is_as_left():
            return False
        if first is other:
            return True
        if self._first is not first:
            self._first, self._modules_of_first = first, _modules(first)
        ours, theirs = self._modules_of_first, _modules(other)
        images = [_Image({id(module): i for i, module in enumerate(modules)}) for modules in (ours, theirs)]
        helds = [(_held(mine), _held(its)) for mine, its in zip(ours, theirs, strict=True)]
        for place in self._before:  # a block reads a hundred attributes, and a large model has a hundred blocks
            at, name = place
            mine, its = helds[at]
            if name in mine and name in its:
                a, b, is_state, is_its_state = mine[name], its[name], False, False
                if type(a) in _HOOKS and type(a) is type(b) and not a and not b:
                    continue
            else:
                (a, is_state), (b, is_its_state) = _lookup(ours[at], name), _lookup(theirs[at], name)
            if a is b:
                if place in self._changed and not isinstance(a, PLAIN):
                    return False  # the first block left something in it for the other to find
                continue
            if images[0].of(a, is_state=is_state) != images[1].of(b, is_state=is_its_state):
                return False
        return True

    def unchanged(self, copied: nn.Module, original: nn.Module) -> bool:
        """Return whether the copy of another block still holds the original's plain values wherever this one read."""
        ours, theirs = _modules(copied), _modules(original)
        for at, name in self._before:
            a, b = _lookup(ours[at], name)[0], _lookup(theirs[at], name)[0]
            if (isinstance(a, PLAIN) or isinstance(b, PLAIN)) and (type(a), a) != (type(b), b):
                return False
        return True


@contextlib.contextmanager
def noted(reads: Reads) -> Generator[None]:
    """Note what is read from the modules of a block."""
    index, note, plain = reads.index, reads.note, object.__getattribute__
    kind: Any = nn.Module
    caller: Any = getattr(sys, "_getframe")  # noqa: B009 - private, but in every CPython
    own = sys.modules[nn.Module.__module__].__file__

    def getattribute(self: Any, name: str) -> Any:
        at = index.get(id(self))
        # torch's own code looks up names in `__dict__`: these names pass through here first.
        if at is not None and (name != _EVERYTHING or caller(1).f_code.co_filename != own):
            note(at, name)
        return plain(self, name)

    kind.__getattribute__ = getattribute
    try:
        yield
    finally:
        del kind.__getattribute__


def _held(module: nn.Module) -> dict[str, Any]:
    """Return what an instance holds, without noting the read."""
    return object.__getattribute__(module, _EVERYTHING)


def _is_hollow(thing: Any) -> bool:
    """Return whether a thing is a dict with nothing in it, as hooks are that are not there."""
    return type(thing) in _HOOKS and not thing


def _modules(block: nn.Module) -> list[nn.Module]:
    return [module for _, module in named_modules(block)]


def _lookup(module: nn.Module, name: str) -> tuple[Any, bool]:
    """Return what is stored under a name, and whether it is a parameter or a buffer. No code of the module is run."""
    held = object.__getattribute__(module, _EVERYTHING)
    if name in held:
        return held[name], False
    if name == _EVERYTHING:
        return {k: v for k, v in held.items() if k not in _STORES}, False
    for store in _STORES:
        stored = held.get(store)
        if stored and name in stored:
            return stored[name], store in _STATE
    for kind in type(module).__mro__:
        attributes = kind.__dict__
        if name in attributes:
            return attributes[name], False
    return _MISSING, False


class _Image:
    """A key that is equal for two things that a forward cannot tell apart."""

    def __init__(self, places: Mapping[int, int]) -> None:
        self._places = places
        """The modules of the block, by number."""
        self._seen: dict[int, Any] = {}

    def of(self, thing: Any, depth: int = 0, *, is_state: bool = False) -> Any:
        """Return the image of a thing."""
        if _is_hollow(thing):  # half of all reads are torch's own, of hooks that are not there
            return type(thing), []
        if isinstance(thing, PLAIN):
            return type(thing), repr(thing)
        key = id(thing)
        if key in self._places:
            return "module", self._places[key]
        if key not in self._seen:
            self._seen[key] = "again", len(self._seen)  # while it is being visited
            self._seen[key] = _tensor(thing, is_state) if isinstance(thing, Tensor) else self._look(thing, depth + 1)
        return self._seen[key]

    def _look(self, thing: Any, depth: int) -> Any:
        kind: Any = type(cast("object", thing))
        itself = "itself", id(thing)
        if depth > _DEEPEST or isinstance(thing, (type, types.ModuleType, types.BuiltinFunctionType)):
            return itself
        if isinstance(thing, types.FunctionType):
            cells = [self._cell(cell, depth) for cell in thing.__closure__ or ()]
            return thing.__code__, self.of(thing.__defaults__, depth), self.of(thing.__kwdefaults__, depth), cells
        if isinstance(thing, types.MethodType):
            return kind, self.of(thing.__func__, depth), self.of(thing.__self__, depth)
        if isinstance(thing, functools.partial):
            parts = cast("functools.partial[Any]", thing)
            return kind, [self.of(x, depth) for x in (parts.func, parts.args, parts.keywords)]
        if isinstance(thing, dict):
            items = cast("dict[Any, Any]", thing).items()
            return kind, [(self.of(k, depth), self.of(v, depth)) for k, v in items]
        if isinstance(thing, (list, tuple)):
            return kind, [self.of(x, depth) for x in cast("list[Any]", thing)]
        if isinstance(thing, (set, frozenset)):
            return kind, sorted(repr(self.of(x, depth)) for x in cast("set[Any]", thing))
        own = getattr(thing, "__dict__", None)
        if not isinstance(own, dict) or hasattr(kind, "__slots__"):
            return itself
        if isinstance(thing, nn.Module):  # outside the block
            return itself, [(k, repr(v)) for k, v in cast("dict[str, Any]", own).items() if isinstance(v, PLAIN)]
        return kind, [(k, self.of(v, depth)) for k, v in cast("dict[str, Any]", own).items()]

    def _cell(self, cell: types.CellType, depth: int) -> Any:
        try:
            return self.of(cell.cell_contents, depth)
        except ValueError:
            return "empty"


def _tensor(tensor: Tensor, is_state: bool) -> Any:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "itself", id(tensor)
    lies = tuple(tensor.shape), tensor.stride(), tensor.dtype, device_of(tensor).type, tensor.requires_grad
    if is_state or isinstance(tensor, (nn.Parameter, FakeTensor)) or tensor.is_meta:
        return lies
    if tensor.numel() > _MOST_NUMBERS:
        return lies, id(tensor)
    with without_dispatch_modes():
        return lies, repr(cast("Any", tensor.detach()).tolist())
