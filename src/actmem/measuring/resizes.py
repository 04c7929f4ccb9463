"""Notice storages that are resized outside every operator.

`UntypedStorage.resize_` is no operator, so no dispatch mode sees it; FSDP fills and frees its parameters with it.
While somebody watches, the method is replaced by one that reports; when the last watcher leaves, the class is as it
was.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch

__all__ = ["watching_resizes"]

_listeners: list[Callable[[torch.UntypedStorage], None]] = []
_restore: list[Callable[[], None]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def watching_resizes(listener: Callable[[torch.UntypedStorage], None]) -> Generator[None]:
    """Call `listener` with each storage that was resized, after the fact, until the block is left."""
    with _lock:
        if not _listeners:
            _restore.append(_install())
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                _restore.pop()()


_storage_class: Any = torch.UntypedStorage


def _install() -> Callable[[], None]:
    """Replace the method. Return what puts the former one back."""
    before: Any = _storage_class.__dict__.get("resize_")  # None: inherited from the C class
    original: Any = _storage_class.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = original(self, size)
        for listener in tuple(_listeners):
            listener(self)
        return result

    def restore() -> None:
        if _storage_class.__dict__.get("resize_") is not resize_:
            return  # somebody replaced ours since and will put it back; without listeners it only forwards
        if before is None:
            del _storage_class.resize_
        else:
            _storage_class.resize_ = before

    _storage_class.resize_ = resize_
    return restore
