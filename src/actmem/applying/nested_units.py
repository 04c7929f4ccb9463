"""Modules inside a block that FSDP shards on their own: what they return is held, and no replay reaches into them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from actmem.engine import Tape, recording

__all__ = ["fsdp_units", "keeping_outputs"]


def fsdp_units(block: nn.Module) -> frozenset[int]:
    """Return the modules inside the block that FSDP shards on their own."""
    fsdp: Any = getattr(torch.distributed, "fsdp", None)
    if fsdp is None:
        return frozenset()
    kinds = tuple(
        k for k in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None)) if k is not None
    )
    return frozenset(id(m) for m in block.modules() if m is not block and isinstance(m, kinds))


@contextlib.contextmanager
def keeping_outputs(tape: Tape, block: nn.Module, units: frozenset[int]) -> Generator[None]:
    """Have a tape hold what these modules return. See `Tape.keep_outputs`."""

    def keep(_: nn.Module, __: Any, out: Any) -> None:
        if recording() is tape:  # other threads run modules too
            tape.keep_outputs(out)

    handles = [m.register_forward_hook(keep, prepend=True) for m in block.modules() if id(m) in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
