"""What a block's tape offloads, and when: after the forward, and only what something can still reach.

NOTE [ Offloading ]
An offloaded value is a saved one whose bytes are elsewhere. It is decided like any other (the plan says `offload`), and
held like any other as long as the block's forward runs: most of what a block makes is read again there. When the
forward is over, all that no handle can reach is gone. What is left is offloaded, storage by storage, and the tape holds
a ticket in its place, which a replay or a backward step opens. So nothing is sent in vain, nothing is sent that the
block still writes to, and a value that both a backward step and a replay need is sent and fetched once.

Parameters and buffers are never sent.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from actmem.engine.holding_rules import offered
from actmem.engine.values import UNCHECKED, Boxed, Value, flat
from actmem.offloading import Offloader, Ticket
from actmem.torchcompat import storage_key

__all__ = ["Away"]


class Away:
    """Offload for one block: which of its values, and through what."""

    def __init__(
        self,
        offloader: Offloader,
        *,
        min_bytes: int,
        inputs: bool,
        state: frozenset[int],
        takes_from: Callable[[str], bool],
    ) -> None:
        self._offloader = offloader
        self._min_bytes = min_bytes
        self._inputs = inputs
        self._state = state
        self._takes_from = takes_from

    def offered(self, values: Iterable[Value]) -> list[weakref.ref[Value]]:
        """List the values that may be sent, before the tape forgets those that nothing reaches."""
        return offered(values, inputs=self._inputs)

    def send(self, offered: list[weakref.ref[Value]]) -> None:
        """Send what is still there."""
        self._offloader.begin_block()
        try:
            self._send(offered)
        finally:
            self._offloader.end_block()

    def _send(self, offered: list[weakref.ref[Value]]) -> None:
        for reference in offered:
            value = reference()
            if value is None or not isinstance(value.held, Tensor):
                continue
            tensor = value.held
            storage = tensor.untyped_storage()
            if (
                storage.nbytes() < max(self._min_bytes, 1)
                or isinstance(tensor, torch.nn.Parameter)
                or (tensor.is_leaf and tensor.requires_grad)
                or storage_key(storage) in self._state
                or (value.version != UNCHECKED and tensor._version != value.version)
                or not self._takes_from(tensor.device.type)
            ):
                continue
            whole = flat(tensor)
            ticket = self._offloader.send(tensor)
            value.held = Boxed((ticket, whole.dtype), _fetched)
            value.version = UNCHECKED
            if value.row is not None:
                value.row.offloaded = True


def _fetched(packed: tuple[Ticket, torch.dtype]) -> Any:
    ticket, dtype = packed
    return ticket.fetch().view(dtype)
