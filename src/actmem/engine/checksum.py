"""A cheap sum over the bits of a tensor, to tell whether a replay made the same ones."""

from __future__ import annotations

import torch

from actmem.torchcompat import FakeTensor

__all__ = ["checksum", "has_bytes"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_bytes(tensor: torch.Tensor) -> bool:
    """Tell whether there is anything to sum: a fake or meta tensor has a shape only."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that almost surely changes when any bit of `tensor` does.

    It costs one pass over the tensor and no copy.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> checksum(x) == checksum(x.clone()), checksum(x) == checksum(x + 1e-6)
    (True, False)
    """
    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype is not torch.bool:
            tensor = tensor.view(_INTEGERS[tensor.element_size()])
        total = tensor.sum(dtype=torch.int64)
        # The second sum sees an exchange of two halves, which the first one does not.
        halved = next((d for d, n in enumerate(tensor.shape) if n > 1), None)
        if halved is None:
            return int(total)
        part = tensor.narrow(halved, 0, (tensor.size(halved) + 1) // 2).sum(dtype=torch.int64)
        return hash((int(total), int(part)))
