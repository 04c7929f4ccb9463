"""What a lane promises: it moves bytes between tensors and a store while the computation runs.

NOTE [ Lanes ]
A lane begins copies and hands out a `Copy` for each. It never computes: it takes contiguous tensors only, since a clone
made on another stream is one more thing that could be read too early. Every lane promises:

- *The tensor stays.* From `out` and `back` on, the lane holds the tensor itself, until the copy is done or until the
  stream that asks is ordered after it. A caller may drop it at once.
- *Both directions are ordered.* A copy out comes after everything queued on the current stream before it. So does
  a copy back, because the memory of its target may have been in use, and it also comes after the copy out of the same
  slot. The current stream is looked up at each call, never remembered.
- *A slot goes back last.* `Lane.give` returns a slot to its store once no copy touches it. `Store.give` on a slot that
  is still being read or written would let the next user write into it.
- *Nothing waits forever.* Whatever blocks the host has a time limit, and raises `OffloadError` when it is reached.

A lane cannot see that the program is about to write to a source. Whoever sees it calls `Copy.release` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from actmem.errors import OffloadError

if TYPE_CHECKING:
    from actmem.offloading.stores import Slot, Store

__all__ = ["TIMEOUT_SECONDS", "Copy", "Lane", "as_bytes"]

TIMEOUT_SECONDS = 120.0
"""How long a lane waits for one copy before it considers it stuck."""


class Copy(Protocol):
    """One copy that has been started."""

    def wait(self) -> None:
        """Wait until the copied bytes may be used.

        After a copy out the bytes are in the slot: this blocks until then. After a copy back the target may be used by
        the stream that is current now: a lane with streams orders that stream, and the host goes on.

        Raises:
            OffloadError: the copy failed, or did not finish in time.
        """
        ...

    def release(self) -> None:
        """Let the current stream write to the tensor, or free it, after the copy; block the host only if necessary."""
        ...

    def cancel(self) -> bool:
        """Cancel a copy out: nobody will read its slot. Return whether the lane has released the tensor.

        Never blocks the host. A copy that has started may run to completion; the lane holds the tensor until then,
        unless the current stream can be ordered after it.
        """
        ...

    def done(self) -> bool:
        """Return whether the copy has ended, successfully or not. Never blocks."""
        ...


class Lane(Protocol):
    """Moves bytes while the computation runs. See NOTE [ Lanes ]."""

    def out(self, source: Tensor, store: Store, slot: Slot) -> Copy:
        """Start copying a contiguous tensor into a slot of the same number of bytes."""
        ...

    def back(self, store: Store, slot: Slot, target: Tensor) -> Copy:
        """Start filling a contiguous tensor from a slot of the same number of bytes."""
        ...

    def give(self, store: Store, slot: Slot) -> None:
        """Return a slot to its store as soon as no copy touches it. Never blocks; safe in a finalizer."""
        ...

    def settle(self) -> None:
        """Wait until every copy has ended and every returned slot is back in its store."""
        ...

    def close(self) -> None:
        """Stop everything the lane runs, and return the remaining slots. May be called twice."""
        ...


def as_bytes(tensor: Tensor, slot: Slot) -> Tensor:
    """Return a contiguous tensor as one dimension of bytes, after checking its size.

    >>> from types import SimpleNamespace
    >>> as_bytes(torch.zeros(2, 3), SimpleNamespace(num_bytes=24)).shape
    torch.Size([24])
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise OffloadError(
            f"cannot copy a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} as it is: a lane takes "
            "contiguous tensors only. Pass its whole storage, or tensor.contiguous() made on the current stream."
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes != slot.num_bytes:
        raise OffloadError(
            f"tensor of {num_bytes} bytes, slot of {slot.num_bytes} bytes: they must be the same. "
            f"Take a slot with store.take({num_bytes})."
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
