"""A head whose classes are divided over ranks.

NOTE [ Classes over ranks ]

In a vocabulary-parallel head each rank has the weights of some classes, as a DTensor, and `ColwiseParallel` says what
the head returns: logits that are divided by class, for torch's `loss_parallel()`, or gathered ones. In chunks this is
an ordinary head on plain tensors: all hidden states, and this rank's weights. Only what is computed of a chunk's rows
must see them as the head would return them: `ClassShards.rows`. So torch's own operators compute each chunk, with the
collectives that they would have for the whole, and every rank issues the same ones, whatever its numbers are.

- The gradient of the hidden states is that of this rank's classes. It is added up over ranks once, after all chunks, by
  the operators of torch that brought the hidden states here.
- Gradients of a chunk are found by the operators that `loss_parallel()` replaces. Where they are found in the backward
  pass, it is entered again if it is not active.
- Where the head would return a DTensor, so does the loss.
"""

# pyright: reportIncompatibleMethodOverride=false
# autograd Functions: forward and backward take what `apply` is given

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmem.distributedcompat import column_style, is_loss_parallel, waited
from actmem.errors import UnsupportedError

__all__ = ["ClassShards", "LossParallel", "as_plain", "find_shards", "is_plain_linear"]


@dataclass(frozen=True)
class ClassShards:
    """How the classes of a head are divided, and how it returns its logits."""

    mesh: Any
    """The ranks."""
    num_classes: int
    """All classes, of all ranks."""
    is_gathered: bool
    """Whether each rank gets the logits of all classes."""
    is_dtensor: bool
    """Whether the logits are a DTensor."""

    @property
    def row_length(self) -> int | None:
        """How long a row of the returned logits is; None if that is the number of this rank's classes."""
        return self.num_classes if self.is_gathered or self.is_dtensor else None

    def placements(self, num_dims: int) -> tuple[Any, ...]:
        """Return how the logits are divided, if they are a DTensor."""
        from torch.distributed.tensor import Replicate, Shard

        return (Replicate() if self.is_gathered else Shard(num_dims - 1),)

    def rows(self, logits: Tensor) -> Tensor:
        """Return some rows as the head would, from the logits of this rank's classes."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self.row_length is None:
            return logits
        shape = torch.Size((*logits.shape[:-1], self.num_classes))
        stride = torch.empty(shape, device="meta").stride()
        by_class = [Shard(logits.dim() - 1)]
        found: Any = DTensor.from_local(logits, self.mesh, by_class, run_check=False, shape=shape, stride=stride)
        if self.is_gathered:
            found = found.redistribute(placements=[Replicate()])
        return found if self.is_dtensor else found.to_local()

    def value(self, found: Tensor) -> Tensor:
        """Return what was computed of the logits, equal on all ranks, as a DTensor if they are one."""
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(found, self.mesh, [Replicate()], run_check=False) if self.is_dtensor else found


def as_plain(x: Any) -> Any:
    """Return a DTensor that is equal on all ranks as a plain tensor; anything else as it is."""
    return x.full_tensor() if hasattr(x, "device_mesh") else x


def find_shards(module: nn.Module, hidden: Tensor, path: str) -> tuple[ClassShards, Tensor]:
    """Find out how the classes of a head are divided, and bring its input to where they are.

    Returns:
        How they are divided, and the whole hidden states, as a plain tensor.

    Raises:
        UnsupportedError: they are divided in another way than by torch's `ColwiseParallel`.
    """
    from torch.distributed.tensor import Replicate, Shard

    named, parameters = path or "the head", list(module.parameters())
    layouts = {getattr(p, "placements", None) for p in parameters}
    if type(module).forward is not nn.Linear.forward or layouts != {(Shard(0),)}:
        shown = " and ".join(sorted(map(str, layouts)))
        raise UnsupportedError(
            f"{named} is a {type(module).__name__} that is divided over ranks as {shown}, and its logits cannot be "
            "computed in chunks. Permitted is a linear layer whose classes alone are divided, (Shard(dim=0),), by "
            "torch's parallelize_module and ColwiseParallel(output_layouts=Replicate()). Divide it so, or leave split "
            "out."
        )
    weight: Any = parameters[0]
    style = column_style(module)
    layout = style.layout
    if layout not in (Replicate(), Shard(-1), Shard(hidden.dim() - 1)):
        raise UnsupportedError(
            f"{named} returns logits that are divided over ranks by {layout}, so each rank has other tokens or values, "
            "and they cannot be computed in chunks. Permitted are Replicate() and Shard(-1): write "
            "ColwiseParallel(output_layouts=Replicate()), or leave split out."
        )
    given: Any = style.prepare(hidden)
    if getattr(given, "placements", None) != (Replicate(),) or given.device_mesh != weight.device_mesh:
        found = f"a DTensor, {given.placements}" if hasattr(given, "placements") else "a plain tensor"
        raise UnsupportedError(
            f"{named} is divided over ranks by its classes, and is called with hidden states that are {found}. Its "
            "logits can be computed in chunks if every rank has all of the hidden states, (Replicate(),): pass "
            "input_layouts=Shard(1) to ColwiseParallel if they are divided by the sequence, or leave split out."
        )
    shards = ClassShards(weight.device_mesh, weight.shape[0], layout == Replicate(), is_dtensor=not style.is_local)
    apply: Any = _WholeHidden.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] # untyped
    return shards, apply(given)


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module does what torch's linear layer does, and no more."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and "forward" not in vars(module)


class _WholeHidden(torch.autograd.Function):
    """This rank's copy of the hidden states. Its gradient is that of this rank's classes: a part of the sum."""

    @staticmethod
    def forward(ctx: Any, given: Any) -> Tensor:
        ctx.mesh = given.device_mesh
        whole = waited(given.to_local())
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        return DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)


class LossParallel:
    """Whether torch's `loss_parallel()` was active, so that it can be entered again in the backward pass."""

    def __init__(self) -> None:
        self._was_active = is_loss_parallel()

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Enter it, if it was active and is not now. It cannot be entered twice."""
        if not self._was_active or is_loss_parallel():
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
