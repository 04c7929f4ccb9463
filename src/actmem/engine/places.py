"""Which module of a block runs now.

The frames of the stack say so: every call of a module passes through one function of torch. Hooks on modules would say
it too, but a compiler traces hooks into its graphs and guards on them, and so would compile each observed block anew.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from actmem.torchcompat import module_call, named_modules

__all__ = ["Places"]


class Places:
    """The paths of a block's modules."""

    def __init__(self, block: nn.Module) -> None:
        self._paths = {id(module): path for path, module in named_modules(block)}

    def now(self) -> str:
        """Return the path of the innermost module that this thread runs; "" for the block itself."""
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code is module_call:
                path = self._paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            frame = frame.f_back
        return ""
