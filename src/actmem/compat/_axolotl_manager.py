"""The manager that axolotl and TRL call OffloadActivations, built on `actmem.offload`."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from actmem.applying import KeptTensor, Offloading, Sent, can_move, device_of, local, send, unpack
from actmem.errors import ModeError
from actmem.offloading import Offloader, TransferCounts, make_offloader
from actmem.settings import Offload
from actmem.structure import find_head
from actmem.torchcompat import named_modules

__all__ = ["NoOpManager", "OffloadActivations", "Sender", "check_stash"]


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """A context in which saved tensors are held unchanged: an outer manager sees nothing inside it.

    >>> with NoOpManager():
    ...     y = torch.ones(3, requires_grad=True).exp()
    >>> y.grad_fn._saved_result
    tensor([2.7183, 2.7183, 2.7183], grad_fn=<ExpBackward0>)
    """

    def __init__(self) -> None:
        super().__init__(KeptTensor, KeptTensor.open)


class Sender:
    """Offload saved tensors, with an offloader created for the device of the first that can be offloaded."""

    def __init__(self, settings: Offload) -> None:
        self._settings = settings
        self._offloader: Offloader | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def ledger(self) -> TransferCounts:
        """The bytes offloaded, fetched and dropped so far."""
        return TransferCounts() if self._offloader is None else self._offloader.ledger

    def send(self, tensor: Tensor) -> Sent:
        """Offload a tensor for which `can_move` is true."""
        if self._offloader is None:
            self._offloader = make_offloader(self._settings, tensor.device)
            self._finalizer = weakref.finalize(self, Offloader.close, self._offloader)
        return send(tensor, self._offloader)

    def close(self) -> None:
        """Release the store, as soon as nothing is offloaded any more. Happens automatically when this object dies."""
        if self._finalizer is not None:
            self._finalizer()
            self._offloader = self._finalizer = None


class OffloadActivations(contextlib.ContextDecorator):
    """Offload the tensors that autograd saves while entered. Also a decorator; may be entered again at each step.

    `attach`, which the functions of `actmem.compat.axolotl` call, sets the model: its parameters, its buffers and its
    output head are then not offloaded, whatever wraps them. Without a model, parameters and views of parameters are not
    offloaded, nor are those that `update_model_params` was given.

    >>> with OffloadActivations(copy_cpu=True) as manager:
    ...     nn.Linear(64, 64)(torch.randn(16, 64)).tanh().sum().backward()
    >>> manager.ledger.out_bytes  # the input, and the result of tanh; the weight stays
    8192
    >>> manager.close()

    Raises:
        ModeError: an argument has a value that is not permitted.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        *,
        to: Literal["host", "disk"] = "host",
        directory: str | None = None,
        copy_cpu: bool = False,
    ) -> None:
        check_stash(max_fwd_stash_size)
        self._settings = Offload(
            to=to,
            pin=use_pin_memory,
            use_streams=use_streams,
            min_bytes=min_offload_size,
            max_in_flight=max_fwd_stash_size,
            directory=directory,
            copy_cpu=copy_cpu,
        )
        self.use_streams = use_streams
        self.param_storages: set[int] = set()
        """Addresses of parameters, as `update_model_params` found them. Used only without a model."""
        self._sender = Sender(self._settings)
        self._manager: Offloading | None = None
        self._left_alone: list[nn.Module] = []
        self._entered: list[contextlib.ExitStack] = []
        self._is_attached = False

    def attach(self, model: nn.Module, *, warn_if_no_head: bool = True) -> OffloadActivations:
        """Offload the activations of this model. The model is not changed; hooks exist only while entered."""
        self._is_attached = True
        self._left_alone = [m for path, m in named_modules(model) if "liger" in path.lower()]
        if warn_if_no_head and find_head(model) is None:
            _warn_of_no_head(model)
        nowhere = not self._settings.takes_from("cpu")
        if nowhere and device_of(model).type == "cpu":
            self._manager = None  # its activations are in host memory already
        else:
            self._manager = Offloading(model, self._settings, warn_if_no_head=False)
        self.update_model_params(model)
        return self

    def update_model_params(self, model: nn.Module) -> None:
        """Do not offload the parameters of a model. Each call replaces the earlier ones, as after the model changed."""
        self.param_storages = {local(p).untyped_storage().data_ptr() for p in model.parameters()} - {0}

    @property
    def ledger(self) -> TransferCounts:
        """The bytes offloaded, fetched and dropped so far."""
        if self._is_attached:
            return TransferCounts() if self._manager is None else self._manager.ledger
        return self._sender.ledger

    def close(self) -> None:
        """Release the store, as soon as nothing is offloaded any more. Happens automatically when this object dies."""
        self._sender.close()
        if self._manager is not None:
            self._manager.close()

    def __enter__(self) -> OffloadActivations:
        with contextlib.ExitStack() as stack:
            if self._manager is not None:
                stack.enter_context(self._manager)
                for module in self._left_alone:
                    _leave_alone(module, stack)
            elif not self._is_attached:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, unpack))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> KeptTensor | Sent:
        stays = (
            not can_move(tensor, self._settings)
            or (tensor.is_leaf and tensor.requires_grad)
            or isinstance(tensor._base, nn.Parameter | nn.Buffer)
            or tensor.untyped_storage().data_ptr() in self.param_storages
        )
        return KeptTensor(tensor) if stays else self._sender.send(tensor)


def check_stash(size: object) -> None:
    """Refuse a stash that cannot hold anything."""
    if type(size) is not int or size < 1:
        raise ModeError(f"max_fwd_stash_size = {size!r} is not permitted. Expected an int of 1 or more; 5 is usual.")


def _leave_alone(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Hold what a fused module saves unchanged, until the stack exits."""
    inside: list[NoOpManager] = []

    def begins(*_: Any) -> None:
        inside.append(NoOpManager())
        inside[-1].__enter__()

    def ends(*_: Any) -> None:
        if inside:
            inside.pop().__exit__()

    for handle in (
        module.register_forward_pre_hook(begins),
        module.register_forward_hook(ends, always_call=True),
    ):
        stack.callback(handle.remove)


def _warn_of_no_head(model: nn.Module) -> None:
    warnings.warn(
        f"no output head was found in {type(model).__name__}, so no head is excluded from offloading. Write "
        "warn_if_no_head=False if that is intended.",
        stacklevel=4,
    )
