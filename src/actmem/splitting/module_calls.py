"""Stand in for the call of a module, so that what it computes is computed in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from actmem.compilercompat import call_past, has_hooks, replace_call

__all__ = ["SplitCall"]


class SplitCall:
    """Is called in place of a module, until `remove`. Copies and pickles of the module do not have it."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.path = path
        self.module = module
        self.in_graphs = False
        """Whether the module was called inside a compiled graph, where nothing is split."""
        self._restore = replace_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in pieces in training, and otherwise as the module does."""
        if torch.compiler.is_compiling():
            self.in_graphs = True
        elif self.module.training and torch.is_grad_enabled() and not self.is_hooked():
            return self.split(args, kwargs)
        return self.whole(args, kwargs)

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in pieces."""
        raise NotImplementedError

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module itself, with its hooks."""
        return call_past(self.module, args, kwargs)

    def copied_to(self, module: nn.Module) -> SplitCall:
        """Stand in for the call of a copy of the module in the same way."""
        raise NotImplementedError

    def is_hooked(self) -> bool:
        """Whether hooks run when the module is called: then nothing is split."""
        return has_hooks(self.module)

    def remove(self) -> None:
        """Let the module compute its output itself again."""
        self._restore()
