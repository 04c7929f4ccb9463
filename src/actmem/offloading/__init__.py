"""Move values out of the way and back: stores, lanes, tickets.

What lives here: bytes and where they are. What must not: anything that knows of operators, plans or models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actmem.offloading.transfer import Ledger, Offloader, Ticket

if TYPE_CHECKING:
    import torch

    from actmem.settings import Offload

__all__ = ["Ledger", "Offloader", "Ticket", "make_offloader"]


def make_offloader(offload: Offload, device: torch.device) -> Offloader:
    """Make what sends values of a device away as the settings say.

    Raises:
        OffloadError: the directory cannot be used, or there is no room.
    """
    from actmem.offloading.making import make  # late: most plans offload nothing

    return make(offload, device)
