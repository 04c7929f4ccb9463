"""Leaving a model as it was, after a step that was only run to look at it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from actmem.torchcompat import named_buffers

__all__ = ["Restored", "inputs_of"]


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch that get a gradient, by name."""
    named: Any = batch.items() if hasattr(batch, "items") else enumerate(batch)
    return {f"input {k}": t for k, t in named if isinstance(t, Tensor) and t.is_leaf and t.requires_grad}


class Restored:
    """Put gradients, buffers and the random generator back on leaving."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._gradients = [(p, p.grad) for p in (*model.parameters(), *inputs_of(batch).values())]
        self._buffers = [(slot, name, b, None if b is None else b.clone()) for slot, name, b in named_buffers(model)]
        self._random = torch.get_rng_state()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._random)
        for p, gradient in self._gradients:
            p.grad = gradient
        with torch.no_grad():
            for slot, name, buffer, copy in self._buffers:
                slot[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
