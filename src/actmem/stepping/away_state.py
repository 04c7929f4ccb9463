"""Keep an optimizer's state in a store, and have that of one parameter here while it steps.

NOTE [ State elsewhere ]
Every tensor of the state that is large enough has a slot in the store, and in `optimizer.state` an empty tensor stands
in its place. Around the step of a parameter:

1. what the parameter before it wrote back is waited for, and its memory is free;
2. its own state is there: it was fetched ahead, or is fetched now;
3. the state of the parameter that stepped after it last time is fetched ahead;
4. it steps, and its state begins to be written back.

So there is memory for the state of two parameters at any moment, at points that the program determines: the peak can be
predicted. The copies of 3 and 4 overlap with whatever runs until the next parameter steps, which in a backward pass is
the computation of its gradient.

`state_dict()` fetches everything, and what it returns is whole. `load_state_dict()` sends what was loaded. The file of
a store belongs to this process and is never read by another one: after a crash the next store removes it, and training
resumes from a checkpoint. A slot whose write failed cannot be read, and what is read is compared with a checksum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from actmem.offloading import make_offloader
from actmem.settings import OptimizerState

__all__ = ["AwayState", "goes_away"]


def goes_away(tensor: object, min_bytes: int) -> bool:
    """Return whether a tensor of an optimizer's state is kept elsewhere: not a small one, nor one of unusual layout.

    >>> goes_away(torch.empty(4, 4), 64), goes_away(torch.empty(4, 4), 65), goes_away(3, 0)
    (True, False, False)
    """
    return (
        isinstance(tensor, Tensor)
        and not hasattr(type(tensor), "__tensor_flatten__")
        and tensor.layout is torch.strided
        and tensor.numel() > 1
        and tensor.nbytes >= min_bytes
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


class _Kept(NamedTuple):
    """A tensor of the state that is in a slot."""

    slot: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class AwayState:
    """The state of an optimizer in a store. See NOTE [ State elsewhere ]."""

    def __init__(self, optimizer: Optimizer, settings: OptimizerState, device: torch.device) -> None:
        self._optimizer, self._settings = optimizer, settings
        self._offloader = make_offloader(settings.offload, device)
        self._kept: dict[Tensor, dict[str, _Kept]] = {}
        self._coming: dict[Tensor, list[Any]] = {}
        """Parameters whose state is here or on its way, with the copies that bring it."""
        self._leaving: list[tuple[Any, Tensor]] = []
        """Copies to the store, and what they copy."""

    @property
    def kept_bytes(self) -> int:
        """Bytes in the store."""
        return self._offloader.store.used_bytes

    def settle(self) -> None:
        """Wait until what was written back is in the store, and free its memory."""
        leaving, self._leaving = self._leaving, []
        for copy, _ in leaving:
            copy.release()

    def fetch(self, parameter: Tensor) -> None:
        """Begin to bring the state of a parameter here."""
        if parameter in self._coming:
            return
        kept = self._kept.get(parameter, {})
        state = dict(self._optimizer.state[parameter]) if kept else {}
        copies: list[Any] = []
        for name, its in kept.items():
            state[name] = target = torch.empty(its.shape, dtype=its.dtype, device=its.device)
            copies.append(self._offloader.lane.back(self._offloader.store, its.slot, target))
        if kept:
            self._optimizer.state[parameter] = state
        self._coming[parameter] = copies

    def arrive(self, parameter: Tensor) -> None:
        """Wait until the state of a parameter may be used."""
        self.fetch(parameter)
        for copy in self._coming[parameter]:
            copy.wait()

    def leave(self, parameter: Tensor, *, is_changed: bool = True) -> None:
        """Begin to write the state of a parameter back. What did not change is only dropped."""
        copies = self._coming.pop(parameter, [])
        if parameter not in self._optimizer.state:
            return
        if not is_changed:
            for copy in copies:
                copy.wait()
        state: dict[str, Any] = dict(self._optimizer.state[parameter])
        kept = self._kept.setdefault(parameter, {})
        for name, tensor in state.items():
            if not goes_away(tensor, self._settings.min_bytes):
                continue
            if is_changed:
                its = kept.get(name)
                if its is None or its.slot.num_bytes != tensor.nbytes:
                    self._forget(kept.pop(name, None))
                    its = _Kept(self._offloader.store.take(tensor.nbytes), tensor.shape, tensor.dtype, tensor.device)
                kept[name] = its._replace(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._leaving.append((self._offloader.lane.out(tensor, self._offloader.store, its.slot), tensor))
            if name in kept:
                state[name] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        for name in [name for name in kept if name not in state]:
            self._forget(kept.pop(name))
        self._optimizer.state[parameter] = state  # a dict of its own: `state_dict` may have the other

    def drop_ahead(self) -> None:
        """Drop what was fetched ahead and not stepped."""
        for parameter in list(self._coming):
            self.leave(parameter, is_changed=False)

    def gather(self, *_: Any) -> None:
        """Bring everything here: a hook before `state_dict`."""
        self.settle()
        for parameter in list(self._kept):
            self.arrive(parameter)

    def scatter(self, *_: Any) -> None:
        """Drop what `gather` brought: a hook after `state_dict`, whose result has it."""
        self.drop_ahead()

    def adopt(self, *_: Any) -> None:
        """Send all the state that there is, one parameter after the other: a hook after `load_state_dict`."""
        self.settle()
        for kept in self._kept.values():
            for its in kept.values():
                self._forget(its)
        self._kept.clear()
        self._coming.clear()
        for parameter in list(self._optimizer.state):
            self.leave(parameter)
            self.settle()

    def close(self) -> None:
        """Bring everything back for good, and close the store."""
        self.gather()
        self._coming.clear()
        self._kept.clear()
        self._offloader.close()

    def _forget(self, its: _Kept | None) -> None:
        if its is not None:
            self._offloader.lane.give(self._offloader.store, its.slot)


def hooks_of(optimizer: Optimizer, state: AwayState) -> Iterable[Any]:
    """Yield what to remove, after checkpoints of an optimizer have been made whole."""
    yield optimizer.register_state_dict_pre_hook(state.gather)
    yield optimizer.register_state_dict_post_hook(state.scatter)
    yield optimizer.register_load_state_dict_post_hook(state.adopt)
