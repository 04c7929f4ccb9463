"""The manager that axolotl and TRL call OffloadActivations, over `actmem.offload`."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from actmem.checking import device_of
from actmem.engine.calling import local
from actmem.errors import ModeError
from actmem.offloading import Ledger, Offloader, make_offloader
from actmem.sending import Kept, Offloading, Sent, can_move, send, unpack
from actmem.settings import Offload
from actmem.structure import find_head
from actmem.torchcompat import named_modules

__all__ = ["NoOpManager", "OffloadActivations", "Sender", "check_stash"]


class NoOpManager(torch.autograd.graph.saved_tensors_hooks):
    """Hold what autograd saves as it is: inside it, no manager around it sees anything.

    >>> with NoOpManager():
    ...     y = torch.ones(3, requires_grad=True).exp()
    >>> y.grad_fn._saved_result
    tensor([2.7183, 2.7183, 2.7183], grad_fn=<ExpBackward0>)
    """

    def __init__(self) -> None:
        super().__init__(Kept, Kept.open)


class Sender:
    """Send saved tensors away by an offloader that is made for the device of the first that can be sent."""

    def __init__(self, settings: Offload) -> None:
        self._settings = settings
        self._offloader: Offloader | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def ledger(self) -> Ledger:
        """The bytes that went out, came back, and were dropped, so far."""
        return Ledger() if self._offloader is None else self._offloader.ledger

    def send(self, tensor: Tensor) -> Sent:
        """Send a tensor for which `can_move` holds."""
        if self._offloader is None:
            self._offloader = make_offloader(self._settings, tensor.device)
            self._finalizer = weakref.finalize(self, Offloader.close, self._offloader)
        return send(tensor, self._offloader)

    def close(self) -> None:
        """Give up the store, as soon as nothing is away any more. Done by itself when this object dies."""
        if self._finalizer is not None:
            self._finalizer()
            self._offloader = self._finalizer = None


class OffloadActivations(contextlib.ContextDecorator):
    """Offload what autograd saves while entered. Also a decorator; may be entered again at each step.

    `attach`, which the functions of `actmem.compat.axolotl` call, names the model: its parameters, its buffers and its
    output head stay then, whatever they are wrapped in. Without one, what is a parameter, or a view of one, stays, and
    so does what `update_model_params` was told of.

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
        """Addresses of parameters, as `update_model_params` found them. Asked for only without a model."""
        self._sender = Sender(self._settings)
        self._manager: Offloading | None = None
        self._left_alone: list[nn.Module] = []
        self._entered: list[contextlib.ExitStack] = []
        self._is_attached = False

    def attach(self, model: nn.Module, *, warn_if_no_head: bool = True) -> OffloadActivations:
        """Offload the activations of this model. It is not changed; hooks are there only while entered."""
        self._is_attached = True
        self._left_alone = [m for path, m in named_modules(model) if "liger" in path.lower()]
        if warn_if_no_head and find_head(model) is None:
            _warn_of_no_head(model)
        nowhere = self._settings.to == "host" and not self._settings.copy_cpu
        if nowhere and device_of(model).type == "cpu":
            self._manager = None  # its activations are in host memory already
        else:
            self._manager = Offloading(model, self._settings, warn_if_no_head=False)
        self.update_model_params(model)
        return self

    def update_model_params(self, model: nn.Module) -> None:
        """Let the parameters of a model stay. They are named anew at each call, as after a change of the model."""
        self.param_storages = {local(p).untyped_storage().data_ptr() for p in model.parameters()} - {0}

    @property
    def ledger(self) -> Ledger:
        """The bytes that went out, came back, and were dropped, so far."""
        if self._is_attached:
            return Ledger() if self._manager is None else self._manager.ledger
        return self._sender.ledger

    def close(self) -> None:
        """Give up the store, as soon as nothing is away any more. Done by itself when this object dies."""
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

    def _pack(self, tensor: Tensor) -> Kept | Sent:
        stays = (
            not can_move(tensor, self._settings)
            or (tensor.is_leaf and tensor.requires_grad)
            or isinstance(tensor._base, nn.Parameter | nn.Buffer)
            or tensor.untyped_storage().data_ptr() in self.param_storages
        )
        return Kept(tensor) if stays else self._sender.send(tensor)


def check_stash(size: object) -> None:
    """Refuse a stash that could hold nothing."""
    if type(size) is not int or size < 1:
        raise ModeError(f"max_fwd_stash_size = {size!r} is not permitted. Expected an int of 1 or more; 5 is usual.")


def _leave_alone(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Hold what a fused module saves as it is, until the stack ends."""
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
        f"no output head was found in {type(model).__name__}, so there is none whose activations stay. Say "
        "warn_if_no_head=False if that is meant.",
        stacklevel=4,
    )
