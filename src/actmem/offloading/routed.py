"""One lane for each device: a model may be spread over several, and each has its own streams.

A stream orders what runs on its own device only. A copy of a tensor on another device would run there, unordered, and
no event of the stream would tell its end. So each tensor takes the lane of its device, made when it is first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from actmem.offloading.lanes import Copy, Lane

if TYPE_CHECKING:
    from torch import Tensor

    from actmem.offloading.stores import Slot, Store

__all__ = ["RoutedLane"]


class RoutedLane:
    """Copy tensors of several devices, each through a lane of its own.

    Args:
        make: makes the lane of a device.
    """

    def __init__(self, make: Callable[[torch.device], Lane]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._lanes: dict[torch.device, Lane] = {}
        self._lane_of: dict[int, Lane] = {}
        """Identity of a slot in use -> the lane that copies it."""

    def out(self, source: Tensor, store: Store, slot: Slot) -> Copy:
        """Start copying a contiguous tensor into a slot of the same number of bytes."""
        lane = self._lane_of[id(slot)] = self._lane(source.device)
        return lane.out(source, store, slot)

    def back(self, store: Store, slot: Slot, target: Tensor) -> Copy:
        """Start filling a contiguous tensor from a slot of the same number of bytes."""
        return self._lane(target.device).back(store, slot, target)

    def give(self, store: Store, slot: Slot) -> None:
        """Return a slot to its store as soon as no copy touches it."""
        lane = self._lane_of.pop(id(slot), None)
        if lane is None:  # nothing was copied
            store.give(slot)
        else:
            lane.give(store, slot)

    def settle(self) -> None:
        """Wait until every copy has ended and every returned slot is back in its store."""
        for lane in [*self._lanes.values()]:
            lane.settle()

    def close(self) -> None:
        """Close every lane. May be called twice."""
        for lane in [*self._lanes.values()]:
            lane.close()

    def _lane(self, device: torch.device) -> Lane:
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = self._make(device)
            return self._lanes[device]
