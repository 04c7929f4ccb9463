"""Exchanging the class of a block, so that its forward asks an engine.

NOTE [ How a block is applied ]
The block's real class is exchanged for a subclass of itself, whose `forward` asks the block's `Script` what to do.
Nothing is written to the instance: names, hooks, `state_dict` and the module tree stay as they are. `forward` lies
inside the module's hooks, so that what FSDP gathers before and frees after it stays outside.

The subclass is only there to run the forward. In everything else the block is still what it was:

- To copy or pickle it, the original class is put back for as long as its own `__reduce_ex__`, `__deepcopy__` or
  `__copy__` runs: what comes out is what it would be of a plain block, to the byte. A pickler looks at the class once
  more after `__reduce_ex__`, and then goes through the list items that it returned: these end the exchange.
- To assign to `block.__class__` exchanges the class *below* the subclass: the block stays applied, and keeps the new
  class when the plan is removed. The parts of torch that make a new class from the old one (parametrizations, FSDP2,
  `replicate`) are shown the original: they write to it, and compare it with those that they made. All others read the
  truth: Dynamo looks up methods by `__class__`, and guards on it.
- The subclass is made without telling the original: no `__init_subclass__` runs, and no code of a metaclass. Only
  `original.__subclasses__()` shows it, until it is collected.

Why not something on the instance? `nn.Module.compile()` keeps an attribute that `__call__` asks, but outside the hooks;
an instance's own `forward` would be copied and pickled with it, as hooks are. Dynamo would ask both for their identity,
and compile each block by itself. And to change `forward` in the original class would reach every instance of it.

Blocks of one class for which the plan says the same (a `Family`) get the same subclass. So Dynamo, which asks for the
class of a module before it uses a graph again, compiles one graph for all of them, as it does for the plain model.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import sys
from abc import ABCMeta
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from actmem.engine.calling import Script
from actmem.engine.checkpoint import Family
from actmem.errors import UnsupportedError
from actmem.torchcompat import apart_from_graphs, checkpoint, never_compile

__all__ = ["applied_script", "install", "uninstall"]

Classes = dict[tuple[type, Family], type]

_set_class: Callable[[object, type], None] = vars(object)["__class__"].__set__
"""Exchange the real class, whatever `__class__` and `__setattr__` of the object do."""

_MAKES_CLASSES = ("torch.nn.utils.parametrize", "torch.distributed.")
"""Modules that make a new class from a module's class, and assign it."""

_CHECKED = (vars(copyreg)["__newobj__"], vars(copyreg)["__newobj_ex__"])
"""What `__reduce_ex__` returns where a pickler checks that it is given the class of the object."""


def install(block: nn.Module, script: Script, classes: Classes) -> None:
    """Change the class of `block` so that its forward asks `script`. See NOTE [ How a block is applied ].

    Args:
        block: the module.
        script: what to do when it is called.
        classes: the subclasses made so far for this model, by original class and family.
    """
    key: tuple[type, Family] = type(block), script.family
    if key not in classes:
        classes[key] = _subclass(*key, classes)
    vars(classes[key])["_actmem_scripts"][id(block)] = script
    _set_class(block, classes[key])


def _subclass(original: Any, family: Family, classes: Classes) -> type:
    """Make the class of the applied blocks of one family: the forward, and what hides it."""
    scripts: dict[int, Script] = {}
    forward = _forward(original, family, scripts)
    forward.__doc__ = original.forward.__doc__
    forward.__wrapped__ = original.forward  # inspect.signature follows it

    def get_class(self: nn.Module) -> type:
        asked_by: str = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        return original if type(self) is managed and asked_by.startswith(_MAKES_CLASSES) else type(self)

    def assign_class(self: nn.Module, kind: type) -> None:
        before = type(self)
        _set_class(self, kind)
        if before is managed and id(self) in scripts and not hasattr(kind, "_actmem_scripts"):
            install(self, scripts[id(self)], classes)  # kept here too: a call may be under way
            names: dict[str, Any] = {**vars(managed)}
            for name, value in names.items():  # notes that others left on the class
                if name not in vars(type(self)):
                    setattr(type(self), name, value)

    def reduce(self: Any, protocol: Any) -> Any:
        exchanged = _Exchanged(self, original)
        with exchanged.unless_kept():
            registered: Any = copyreg.dispatch_table.get(original)
            found: Any = self.__reduce_ex__(protocol) if registered is None else registered(self)  # may be a name
            return exchanged.kept_by_items(*found) if found[0] in _CHECKED else found

    def hidden(method: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            with _Exchanged(self, original).unless_kept():
                return method(self, *args)

        return run

    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__class__": property(get_class, assign_class),
        "__reduce_ex__": reduce,
        "__deepcopy__": hidden(copy.deepcopy),
        "__copy__": hidden(copy.copy),
        "forward": forward,
        "_actmem_scripts": scripts,
        "_actmem_original": original,
    }
    # type.__new__ by name: else a metaclass of the user's would be called. An ABC needs a cache of its own.
    kind: Any = original.__class__
    if issubclass(original, GraphModule):  # writes the forward of the graph to its own class
        names["recompile"] = hidden(original.recompile)
    make: Any = ABCMeta.__new__ if issubclass(kind, ABCMeta) else type.__new__
    managed: Any = make(kind, original.__name__, (_Untold, original), names)
    managed.__bases__ = (original,)
    return managed


class _Exchanged:
    """A block under another class until this is closed, iterated over (as the list items of a pickle) or forgotten."""

    def __init__(self, block: object, kind: type) -> None:
        self._block: object = block
        self._kind, self._before = kind, type(block)
        self._is_kept = False
        self._items: Iterator[Any] = iter(())
        _set_class(block, kind)

    @contextlib.contextmanager
    def unless_kept(self) -> Generator[None]:
        try:
            yield
        finally:
            if not self._is_kept:
                self.close()

    def kept_by_items(self, func: Any, args: Any, state: Any = None, items: Any = None, *rest: Any) -> tuple[Any, ...]:
        """Return what `__reduce_ex__` returned, so that the exchange ends when its list items are gone through."""
        self._is_kept, self._items = True, items or self._items
        return func, args, state, self, *rest

    def __iter__(self) -> _Exchanged:
        return self

    def __next__(self) -> Any:
        self.close()
        return next(self._items)

    def close(self) -> None:
        """Give the block its class back, unless it was given another meanwhile."""
        if type(self._block) is self._kind:
            _set_class(self._block, self._before)
        self._block = None

    __del__ = close


class _Untold:
    """The first base while a class is made: it keeps `__init_subclass__` of the others from running."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _forward(original: Any, family: Family, scripts: dict[int, Script]) -> Any:
    """Return the forward of applied blocks. It looks up the original one each time: that may be replaced meanwhile."""
    context = family.traced
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    @never_compile
    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        script = scripts.get(id(self))
        if script is None:
            # A replica, as DataParallel makes them, has no script of its own; other instances of the class run plain.
            if not hasattr(self, "_is_replica"):
                return original.forward(self, *args, **kwargs)
            script = next(iter(scripts.values()))
        return script.run(self, original.forward, args, kwargs)

    @never_compile
    def given_up(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (script := scripts.get(id(self))) is not None:
            script.given_up = True
        return run(self, args, kwargs) if is_grad_enabled() else original.forward(self, *args, **kwargs)

    @apart_from_graphs
    def refuse(self: nn.Module) -> Any:
        raise UnsupportedError(
            f"{scripts[id(self)].path} is compiled, and its plan {family.refused}, which no compiled graph does. "
            "Keep the block out of graphs: actmem.apply(..., engine='tape'), or choose another mode."
        )

    apart = apart_from_graphs(run)

    def traced(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_compiling():
            return given_up(self, args, kwargs)  # see NOTE [ Under torch.compile ]
        if not (self.training and is_grad_enabled() and family.active) or family.verdicts_keep_everything:
            return original.forward(self, *args, **kwargs)
        if family.refused:
            return refuse(self)
        if not family.traceable:
            return apart(self, args, kwargs)
        # A graph break inside a `try` makes Dynamo give up this frame, and only then can the tape have it.
        try:
            return checkpoint(original.forward, self, *args, use_reentrant=False, context_fn=context, **kwargs)
        finally:
            pass

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return traced(self, args, kwargs)
        if is_grad_enabled():
            return run(self, args, kwargs)
        return original.forward(self, *args, **kwargs)

    return forward


def applied_script(block: nn.Module) -> Script | None:
    """Return the script of an applied block, or None."""
    scripts: dict[int, Script] = getattr(type(block), "_actmem_scripts", {})
    script = scripts.get(id(block))
    return script if script is not None and script.active else None


def uninstall(block: nn.Module, script: Script) -> None:
    """Change the class of `block` back.

    Where another library subclassed the subclass itself since, what was put in is made to do nothing instead.
    """
    script.active = script.family.active = False
    if vars(type(block)).get("_actmem_scripts", {}).get(id(block)) is script:
        _set_class(block, vars(type(block))["_actmem_original"])
