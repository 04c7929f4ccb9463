"""Know whether this thread is replaying recorded operators.

The engine brackets every replay with `enter` and `leave`. Whoever counts work asks `replaying`. The file imports no
torch, so that both sides can use it without knowing each other.

>>> enter()
>>> replaying()
True
>>> leave()
>>> replaying()
False
"""

from __future__ import annotations

import threading

__all__ = ["enter", "leave", "replaying"]


class _Depth(threading.local):
    value: int = 0  # a class attribute: every thread starts from it without running an initialiser


_depth = _Depth()


def replaying() -> bool:
    """Say whether operators of this thread are replayed ones."""
    return _depth.value > 0


def enter() -> None:
    """Begin a replay in this thread. Replays nest; call `leave` in a `finally`."""
    _depth.value += 1


def leave() -> None:
    """End the innermost replay of this thread."""
    _depth.value -= 1
