"""Offload values and fetch them back: stores, lanes, tickets.

This package knows about bytes and where they are, and nothing about operators, plans or models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actmem.offloading.host import available_bytes
from actmem.offloading.transfer import Offloader, Ticket, TransferCounts
from actmem.offloading.window import Window, bound_of

if TYPE_CHECKING:
    import torch

    from actmem.settings import Offload

__all__ = ["Offloader", "Ticket", "TransferCounts", "Window", "available_bytes", "bound_of", "make_offloader"]


def make_offloader(offload: Offload, device: torch.device) -> Offloader:
    """Build the offloader that the settings describe, for tensors of a device.

    Raises:
        OffloadError: the directory cannot be used, or there is no room.
    """
    from actmem.offloading.factory import make  # late: most plans offload nothing

    return make(offload, device)
