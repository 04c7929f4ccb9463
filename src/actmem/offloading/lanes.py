"""What a lane promises: it moves bytes between tensors and a store, beside the computation.

NOTE [ Lanes ]
A lane begins copies and hands out a `Copy` for each. It never computes: it takes contiguous tensors only, since a clone
that is made on another stream is one more thing that somebody could read too early. The promises, for every lane:

- *The tensor stays.* From `out` and `back` on, the lane holds the tensor itself, until the copy is done or until the
  stream that asks is ordered behind it. A caller who drops it at once does no harm.
- *Both directions are ordered.* A copy out comes after everything that the current stream was given before. A copy
  back comes after that too, because the memory of its target may have been in use, and after the copy out of the same
  slot. The current stream is asked for at each call, never remembered.
- *A slot goes back last.* `Lane.give` returns a slot to its store once no copy touches it any more. `Store.give` on a
  slot that is still being read or written would let the next one write into it.
- *Nothing waits for ever.* What blocks the host is bounded, and raises `OffloadError` when its time is over.

What no lane can do: see that the program is about to write on a source. Who sees it calls `Copy.release` first.
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
"""How long a lane waits for one copy before it calls it stuck."""


class Copy(Protocol):
    """One copy that was begun."""

    def wait(self) -> None:
        """Wait until what was copied may be used.

        After a copy out the bytes are in the slot: this blocks until then. After a copy back the target may be used by
        the stream that is current now: a lane with streams orders that stream, and the host goes on.

        Raises:
            OffloadError: the copy failed, or did not end in time.
        """
        ...

    def release(self) -> None:
        """Let the current stream write on the tensor, or free it, after the copy; block the host only if need be."""
        ...

    def done(self) -> bool:
        """Tell whether the copy has ended, well or not. Never blocks."""
        ...


class Lane(Protocol):
    """Move bytes beside the computation. See NOTE [ Lanes ]."""

    def out(self, source: Tensor, store: Store, slot: Slot) -> Copy:
        """Begin to copy a contiguous tensor into a slot of the same number of bytes."""
        ...

    def back(self, store: Store, slot: Slot, target: Tensor) -> Copy:
        """Begin to fill a contiguous tensor from a slot of the same number of bytes."""
        ...

    def give(self, store: Store, slot: Slot) -> None:
        """Give a slot back to its store as soon as no copy touches it. Never blocks; safe in a finalizer."""
        ...

    def settle(self) -> None:
        """Wait until every copy has ended and every slot that was given is back in its store."""
        ...

    def close(self) -> None:
        """End all that the lane runs, and give back what is left to give. May be called twice."""
        ...


def as_bytes(tensor: Tensor, slot: Slot) -> Tensor:
    """Return a contiguous tensor as one dimension of bytes, after a look at its size.

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
