"""What the code of a step can reach, and what all of it contained before the step ran.

NOTE [ What a step reaches ]
A step is a function without arguments, so whatever it uses is found from it: the cells of its closure, its defaults,
the object that it is a method of, the globals that its code names, and from each of those whatever it contains.
Modules, optimizers, schedulers, gradient scalers, generators and containers are searched, and so are other objects,
except those of torch and the standard library. Functions of installed packages are not. What no walk finds is found
when it is used: a module that is called, an optimizer that steps (`loops.py`). The objects keep their identity,
whatever else points to them: only their contents are restored, or exchanged for stand-ins in the meantime.

The bytes of tensors are not copied here. `Preserved` in `restored_state.py` does that, for those that are written to.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

__all__ = ["Reach"]

_OPEN = (nn.Module, Optimizer, LRScheduler, GradScaler)
"""Types that are searched although torch defines them."""
_CLOSED = (type, ModuleType, CodeType, BuiltinFunctionType, DataLoader, Dataset)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_STANDARD = {*sys.stdlib_module_names, "torch"} - {"types", "argparse"}
_INSTALLED = (
    str(Path(__file__).parents[1]),
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
"""Where code other than the user's is located."""
_MISSING: Any = object()

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Position:
    """An iterator, which cannot be rewound, and a copy of it at its original position."""

    iterator: Any
    copied: Any


class Reach:
    """Objects, each with what it contained when it was found. See NOTE [ What a step reaches ]."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}
        """id -> an object and its content, in the order in which they were found."""
        self._known: dict[int, Any] = {}
        self._positions: dict[int, _Position] = {}
        self._changed = 0
        """How many of the found objects contain stand-ins."""
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []

    def add(self, *roots: Any) -> None:
        """Find what can be reached from here, and remember what it contains."""
        waiting = deque[Any](roots)
        while waiting:
            value = waiting.popleft()
            if isinstance(value, (*_ATOMS, _Position)) or id(value) in self._known:
                continue
            self._known[id(value)] = value  # held, so that the id stays its own
            for kind, several in ((Tensor, self.tensors), (nn.Module, self.modules), (Optimizer, self.optimizers)):
                if isinstance(value, kind):
                    cast("list[Any]", several).append(value)
            content = _mapped(value, _content(value), self._position)
            if content is not None:
                self._found[id(value)] = value, content
                waiting.extend(_inside(value, content))

    def _position(self, item: Any) -> Any:
        if not hasattr(item, "__next__") or hasattr(item, "__dict__") or isinstance(item, type):
            return item
        if id(item) not in self._positions:
            with contextlib.suppress(TypeError):  # a generator, for one
                self._positions[id(item)] = _Position(item, copy.copy(item))
        return self._positions.get(id(item), item)

    def has(self, value: Any) -> bool:
        """Return whether an object was found."""
        return id(value) in self._known

    def exchange(self, change: Change) -> None:
        """Replace tensors by stand-ins in everything found since the last time."""
        found = [*self._found.values()][self._changed :]
        self._changed = len(self._found)
        for value, content in found:
            if not isinstance(value, (Tensor, tuple, frozenset)):
                _refill(value, _mapped(value, content, lambda item: _exchanged(item, change)))

    def restore(self) -> None:
        """Restore the contents that every object had when it was found."""
        for value, content in self._found.values():
            _refill(value, _mapped(value, content, _as_it_was))


# -------------------------------------------------------------------- what an object contains


def _content(value: Any) -> Any:
    """Return what an object contains, as a separate plain container; None if it is not searched."""
    if isinstance(value, _CLOSED):
        return None
    if isinstance(value, Tensor):
        hooks = [*_hooks(value, "_backward_hooks"), *_hooks(value, "_post_accumulate_grad_hooks")]
        return (value.grad if value.is_leaf else None, hooks, dict(getattr(value, "__dict__", {})))
    if isinstance(value, dict):
        return [*cast("dict[Any, Any]", value).items()]
    if isinstance(value, (list, deque, set, tuple, frozenset)):
        return [*cast("list[Any]", value)]
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:
            return []  # nothing is bound to it yet
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        return [partial.func, partial.args, partial.keywords]
    if isinstance(value, FunctionType):
        return _of_function(value) if _is_own(value.__code__.co_filename) else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__ == "numpy":
        return value.copy() if getattr(value, "shape", ()) and value.dtype != object else None
    return _of_object(value)


def _of_object(value: Any) -> dict[str, Any] | None:
    if not hasattr(value, "__dict__"):
        return _slots(value)
    package = type(value).__module__.partition(".")[0]
    if package in _STANDARD and not isinstance(value, _OPEN):
        return None
    return dict(vars(value))


def _slots(value: Any) -> dict[str, Any] | None:
    if type(value).__module__.partition(".")[0] in {*_STANDARD, "numpy"}:
        return None
    names = [n for kind in type(value).__mro__ for n in _names(vars(kind).get("__slots__", ()))]
    return {n: getattr(value, n, _MISSING) for n in names} or None


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(n for n in slots if n not in ("__dict__", "__weakref__"))


def _of_function(function: FunctionType) -> dict[str, Any]:
    named = {name: function.__globals__.get(name, _MISSING) for name in sorted(_named(function.__code__))}
    return {
        "cells": function.__closure__ or (),
        "defaults": (function.__defaults__, function.__kwdefaults__),
        "globals": named,
        "attributes": dict(vars(function)),
    }


def _named(code: CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*(_named(c) for c in inner))


def _is_own(file: str) -> bool:
    """Return whether code is the user's, not that of an installed package."""
    return not file.startswith(_INSTALLED)


def _hooks(tensor: Tensor, name: str) -> list[Any]:
    return [*(getattr(tensor, name, None) or {}).values()]


def _inside(value: Any, content: Any) -> Iterator[Any]:
    """Yield what to search next."""
    if isinstance(value, FunctionType):
        yield from content["cells"]
        yield from content["defaults"]
        yield from content["attributes"].values()
        for found in content["globals"].values():
            if not isinstance(found, ModuleType):
                yield found
            elif _is_own(getattr(found, "__file__", None) or _INSTALLED[0]):  # a user's module: the names used from it
                yield from (vars(found)[name] for name in content["globals"] if name in vars(found))
    elif isinstance(value, Tensor):
        gradient, hooks, attributes = content
        yield from (gradient, *hooks, *attributes.values())
    elif isinstance(value, dict):
        yield from (each for pair in content for each in pair)
    elif isinstance(content, list):
        yield from cast("list[Any]", content)
    elif isinstance(content, dict):
        yield from cast("dict[str, Any]", content).values()
        for kind in type(value).__mro__:
            yield from (f for f in vars(kind).values() if isinstance(f, FunctionType))


# -------------------------------------------------------------------- giving it another content


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        _refill_tensor(value, content)
    elif isinstance(value, dict):
        named = cast("dict[Any, Any]", value)
        if not _same([*named.items()], content):
            kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict  # a subclass may forbid it
            kind.clear(named)
            for key, item in content:
                kind.__setitem__(named, key, item)
    elif isinstance(value, (list, deque, set)):
        several = cast("list[Any]", value)
        if len(several) != len(content) or any(a is not b for a, b in zip(several, content, strict=True)):
            several.clear()
            anything: Any = value  # pyright: ignore[reportUnknownVariableType]
            (anything.update if isinstance(value, set) else anything.extend)(content)
    elif isinstance(value, CellType):
        if content:
            value.cell_contents = content[0]
        else:
            with contextlib.suppress(ValueError):
                del value.cell_contents
    elif isinstance(value, functools.partial):
        partial = cast("Any", value)
        if any(a is not b for a, b in zip((partial.func, partial.args, partial.keywords), content, strict=True)):
            partial.__setstate__((*content, vars(partial) or None))
    elif isinstance(value, FunctionType):
        _refill_function(value, content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif type(value).__module__ == "numpy":
        if value.flags.writeable:
            value[...] = content
    elif isinstance(content, dict):
        _refill_object(value, cast("dict[str, Any]", content))


def _refill_tensor(value: Tensor, content: Any) -> None:
    gradient, _, attributes = content
    if value.is_leaf and value.grad is not gradient:
        value.grad = gradient
    if getattr(value, "__dict__", attributes) != attributes:
        vars(value).clear()
        vars(value).update(attributes)


def _refill_function(value: FunctionType, content: dict[str, Any]) -> None:
    defaults, by_name = content["defaults"]
    value.__defaults__, value.__kwdefaults__ = defaults, by_name
    for name, bound in content["globals"].items():
        if bound is _MISSING:
            value.__globals__.pop(name, None)
        elif value.__globals__.get(name, _MISSING) is not bound:
            value.__globals__[name] = bound
    _refill_object(value, content["attributes"])


def _refill_object(value: Any, content: dict[str, Any]) -> None:
    if not hasattr(value, "__dict__"):
        for name, item in content.items():
            if item is not _MISSING:
                object.__setattr__(value, name, item)
            elif hasattr(value, name):
                object.__delattr__(value, name)
        return
    own = _namespace(value)
    for name in [n for n in own if n not in content]:
        del own[name]
    own.update(content)


def _namespace(value: object) -> dict[str, Any]:
    return vars(value)


def _same(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is c and b is d for (a, b), (c, d) in pairs)


def _mapped(value: Any, content: Any, change: Callable[[Any], Any]) -> Any:
    """Return the content of an object with each of its items changed."""
    if content is None or isinstance(value, (Tensor, torch.Generator, random.Random)):
        return content
    if isinstance(value, dict):
        return [(change(k), change(v)) for k, v in content]
    if isinstance(value, FunctionType):
        named = {part: {k: change(v) for k, v in content[part].items()} for part in ("globals", "attributes")}
        return {**content, **named, "defaults": (change(content["defaults"][0]), content["defaults"][1])}
    if isinstance(content, list):
        return [change(item) for item in cast("list[Any]", content)]
    if isinstance(content, dict):
        return {k: change(v) for k, v in cast("dict[str, Any]", content).items()}
    return content


def _exchanged(item: Any, change: Change) -> Any:
    """Return an item with stand-ins for tensors: tuples are immutable, so new ones are built with them."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, _Position):
        return item.iterator
    if not isinstance(item, (tuple, frozenset)):
        return item
    before = [*cast("tuple[Any, ...]", item)]
    after = [_exchanged(each, change) for each in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return cast("Any", item)
    kind: Any = cast("Any", item).__class__
    return kind(*after) if hasattr(kind, "_fields") else kind(after)


def _as_it_was(item: Any) -> Any:
    return item.copied if isinstance(item, _Position) else item
