"""Offload alone: everything that autograd saves while a context is entered, except the output head.

For those who want nothing decided block by block. Values are offloaded when autograd saves them, by saved-tensor hooks,
on any model; inside a region of torch's checkpoint, and inside an applied block, the region's own hooks come first, and
these see what it keeps.
"""

# pyright: reportPrivateUsage=false
# `_version` is read as the engine reads it.

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from actmem.applying.application import device_of, refuse_host_on_cpu
from actmem.engine import geometry, see, storages_of, without_bits
from actmem.errors import ModeError, StructureError, VersionError
from actmem.offloading import Offloader, Ticket, TransferCounts, make_offloader
from actmem.settings import Offload, Place
from actmem.structure import find_blocks, find_head
from actmem.torchcompat import alias, storage_key

__all__ = ["KeptTensor", "Offloading", "Sent", "can_move", "offload", "send", "unpack"]


class Offloading(contextlib.ContextDecorator):
    """Offload what autograd saves while entered. Made by `offload`; may be entered repeatedly, one step at a time.

    What was sent can be fetched after the context is left, as long as its graph lives.
    """

    def __init__(self, model: nn.Module, settings: Offload, *, warn_if_no_head: bool) -> None:
        refuse_host_on_cpu(settings, model)
        self._model = weakref.ref(model)
        self._settings = settings
        self._offloader = make_offloader(settings, device_of(model))
        self._head = find_head(model)
        if self._head is None and warn_if_no_head:
            warnings.warn(
                f"no output head was found in {type(model).__name__}, so its activations are offloaded too, although "
                "backward needs them first. Say warn_if_no_head=False if that is meant.",
                stacklevel=3,
            )
        self._state: frozenset[int] = frozenset()
        self._past_head = False
        self._blocks = _blocks_of(model)
        self._entered: list[contextlib.ExitStack] = []
        self._finalizer = weakref.finalize(self, Offloader.close, self._offloader)

    @property
    def ledger(self) -> TransferCounts:
        """The bytes that went out, came back, and were dropped, so far."""
        return self._offloader.ledger

    def close(self) -> None:
        """Release the store, as soon as nothing is offloaded any more. Happens by itself when this object dies."""
        self._finalizer()

    def __enter__(self) -> Offloading:
        model = self._model()
        assert model is not None, "the model is gone"
        self._state = frozenset(storages_of([*model.parameters(), *model.buffers()]))
        self._past_head = False
        with contextlib.ExitStack() as stack:
            if self._head is not None:
                for handle in (
                    model.register_forward_pre_hook(self._begins),
                    self._head.register_forward_pre_hook(self._reaches_head),
                ):
                    stack.callback(handle.remove)
            for block in filter(None, (found() for found in self._blocks)):
                stack.callback(block.register_forward_pre_hook(self._begins_block).remove)
                stack.callback(block.register_forward_hook(self._ends_block, always_call=True).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, unpack))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def _begins(self, *_: Any) -> None:
        self._past_head = False

    def _reaches_head(self, *_: Any) -> None:
        self._past_head = True  # and so is the loss, which comes after

    def _begins_block(self, *_: Any) -> None:
        self._offloader.begin_block()

    def _ends_block(self, *_: Any) -> None:
        self._offloader.end_block()

    def _pack(self, tensor: Tensor) -> Any:
        stays = (
            self._past_head
            or not can_move(tensor, self._settings)
            or (tensor.is_leaf and tensor.requires_grad)
            or storage_key(tensor.untyped_storage()) in self._state
        )
        return KeptTensor(tensor) if stays else send(tensor, self._offloader)


class KeptTensor:
    """A saved tensor that stays where it is.

    Not the tensor itself: if the operator that saves it has made it, its graph would hold itself forever. And where
    there are hooks, autograd leaves it to them to notice that it was written to.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.grad_fn is None else alias(tensor)
        self.version = None if tensor.is_inference() else self.tensor._version

    def open(self) -> Tensor:
        """Return the tensor, if it is unchanged."""
        if self.version is not None and self.tensor._version != self.version:
            raise VersionError(
                f"a tensor of shape {tuple(self.tensor.shape)} was written to after autograd had saved it: it is at "
                f"version {self.tensor._version}, and {self.version} was expected. Do not write in place to what "
                "backward needs."
            )
        return self.tensor


class Sent:
    """What autograd holds instead of a saved tensor that was sent."""

    __slots__ = ("geometry", "ticket")

    def __init__(self, ticket: Ticket, seen_as: Any) -> None:
        self.ticket, self.geometry = ticket, seen_as


def _blocks_of(model: nn.Module) -> list[weakref.ref[nn.Module]]:
    """Return the blocks that bound what is in flight; none if the model has no repeating blocks."""
    try:
        return [weakref.ref(block.module) for block in find_blocks(model)]
    except StructureError:
        return []


def can_move(tensor: Tensor, settings: Offload) -> bool:
    """Return whether a saved tensor is large enough to be sent, of a kind that can be, and has somewhere to go."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.untyped_storage().nbytes() >= max(settings.min_bytes, 1)
        and settings.takes_from(tensor.device.type)
    )


def send(tensor: Tensor, offloader: Offloader) -> Sent:
    """Send a saved tensor; `unpack` of what is returned fetches it."""
    return Sent(offloader.send(without_bits(alias(tensor))), geometry(tensor))


def unpack(packed: KeptTensor | Sent) -> Tensor:
    """Return the saved tensor: the unpack hook of everything here."""
    if isinstance(packed, KeptTensor):
        return packed.open()
    with torch.no_grad():
        return see(packed.ticket.fetch_shared(), *packed.geometry)


def offload(
    model: nn.Module,
    *,
    to: Place = "host",
    warn_if_no_head: bool = True,
    **settings: Any,
) -> Offloading:
    """Return a context in which all that autograd saves is offloaded, except the output head and what follows it.

    Args:
        model: any module. It is not changed.
        to: "host" or "disk".
        warn_if_no_head: whether to warn where no output head is found.
        **settings: the other fields of `Offload`, such as min_bytes, in_flight_bytes, directory.

    >>> model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    >>> with offload(model, to="disk", min_bytes=1024, warn_if_no_head=False) as away:
    ...     model(torch.randn(16, 256)).square().sum().backward()
    >>> away.ledger.out_bytes == away.ledger.back_bytes > 0
    True
    >>> away.close()
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        raise ModeError(f"model = {model!r} is not a module. Write actmem.offload(model, to='disk').")
    make: Callable[..., Offload] = Offload
    try:
        given = make(to=to, **settings)
    except TypeError as error:
        raise ModeError(f"{error}. The settings are the fields of actmem.Offload.") from None
    return Offloading(model, given, warn_if_no_head=warn_if_no_head)
