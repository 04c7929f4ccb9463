"""Knowing which module of a block is running, in eager code."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as module_hooks

from actmem.torchcompat import named_modules

__all__ = ["Following", "Place"]

_current = threading.local()


class _Follower(Protocol):
    """Be told where the program is."""

    address: str

    def keep_outputs(self, out: Any) -> None: ...


class Place:
    """Nothing but the path of the module that runs."""

    def __init__(self) -> None:
        self.address = ""

    def keep_outputs(self, out: Any) -> None:
        """Do nothing: who only wants to know the place keeps nothing."""


class Following:
    """Keep `follower.address` at the path of the module that runs, while entered."""

    def __init__(self, follower: _Follower, block: nn.Module, nested: frozenset[int] = frozenset()) -> None:
        self._follower = follower
        self._paths = {id(m): name for name, m in named_modules(block)}
        self._nested = nested
        """Modules whose outputs the follower is asked to keep, by id."""
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._outer: _Follower | None = None

    def __enter__(self) -> None:
        self._outer = getattr(_current, "follower", None)
        _current.follower = self._follower
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._before),
            module_hooks.register_module_forward_hook(self._after, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _current.follower = self._outer

    def _before(self, module: nn.Module, _: Any) -> None:
        if getattr(_current, "follower", None) is self._follower:  # hooks are global; other threads run modules too
            self._stack.append(self._follower.address)
            self._follower.address = self._paths.get(id(module), self._follower.address)

    def _after(self, module: nn.Module, _: Any, out: Any) -> None:
        if getattr(_current, "follower", None) is self._follower and self._stack:
            if id(module) in self._nested:
                self._follower.keep_outputs(out)
            self._follower.address = self._stack.pop()
