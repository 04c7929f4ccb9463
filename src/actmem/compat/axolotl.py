"""Activation offloading under the names of axolotl and TRL.

There the manager is a pair of hooks with a table of tensors of its own. Here it is `actmem.offload`, and for
`"hidden_states"` a plan of actmem. See docs/compat_axolotl.md.

>>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
>>> manager = get_act_offloading_ctx_manager(model, warn_if_no_head=False)  # on a CPU there is nowhere to go
>>> with manager:
...     model(torch.randn(16, 64)).sum().backward()
>>> manager.ledger.out_bytes
0
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from actmem.applying import Applied, apply
from actmem.checking import device_of
from actmem.compat._axolotl_manager import NoOpManager, OffloadActivations
from actmem.errors import ModeError
from actmem.modes import Full
from actmem.settings import Offload

__all__ = [
    "ActivationOffloadingMixin",
    "NoOpManager",
    "OffloadActivations",
    "get_act_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
]

_VALUES = (True, False, None, "legacy", "disk", "hidden_states")


def get_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
    *,
    to: Literal["host", "disk"] = "host",
    directory: str | None = None,
    copy_cpu: bool = False,
) -> OffloadActivations:
    """Return a context in which the activations of a model are offloaded, but those of its output head and the loss.

    Args:
        model: any module; the head is found through wrappers.
        use_pin_memory: use page-locked host memory, where there is an accelerator.
        use_streams: copy beside the computation. False copies in its line and keeps fewer activations on the device.
        min_offload_size: smaller tensors stay, in bytes.
        max_fwd_stash_size: how many activations may be on their way out at once; at least 1.
        warn_if_no_head: whether to warn where no output head is found.
        to: "disk" sends to a private file instead. Not in the other systems' function.
        directory: where that file goes.
        copy_cpu: copy what is on the CPU to other host memory too. That saves nothing; a test may want it.

    Raises:
        ModeError: `max_fwd_stash_size` is below 1, or another argument has a value that is not permitted. It is a
            ValueError, as there.
    """
    theirs = (use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size)
    manager = OffloadActivations(*theirs, to=to, directory=directory, copy_cpu=copy_cpu)
    return manager.attach(model, warn_if_no_head=warn_if_no_head)


def get_lora_act_offloading_ctx_manager(
    model: nn.Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
) -> OffloadActivations:
    """Return the same for a model with adapters: `get_act_offloading_ctx_manager` makes no difference between them."""
    return get_act_offloading_ctx_manager(
        model, use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, warn_if_no_head
    )


if TYPE_CHECKING:

    class _Trainer:
        """What the mixin uses of transformers' Trainer."""

        args: Any
        model: nn.Module

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...

else:
    _Trainer = object


class ActivationOffloadingMixin(_Trainer):
    """Offload in each training step of a transformers Trainer: `class MyTrainer(ActivationOffloadingMixin, Trainer)`.

    `args.activation_offloading` says how. True copies to host memory beside the computation, "legacy" in its line;
    "disk" writes to a private file; "hidden_states" sends what each block is given and recomputes the rest of it;
    False and None do nothing. Read where they exist: `args.activation_offloading_directory` for "disk", and
    `args.activation_offloading_copy_cpu`, which has values of a model on the CPU copied too, for tests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation_offload_applied: Applied | None = None
        self.activation_offload_context: AbstractContextManager[Any] = nullcontext()
        value = cast(object, getattr(self.args, "activation_offloading", False))
        if not any(value is known or (isinstance(known, str) and value == known) for known in _VALUES):
            raise ModeError(
                f"activation_offloading = {value!r} is not known. Permitted: True, 'legacy', 'disk', 'hidden_states', "
                "False."
            )
        if not value:
            return
        copy_cpu = bool(getattr(self.args, "activation_offloading_copy_cpu", False))
        # Where the Trainer switches checkpointing on, what is left to send is what its regions keep: their inputs.
        if value == "hidden_states" and not getattr(self.args, "gradient_checkpointing", False):
            self.activation_offload_applied = _hidden_states(self.model, copy_cpu=copy_cpu)
        else:
            self.activation_offload_context = get_act_offloading_ctx_manager(
                self.model,
                use_streams=value != "legacy",
                to="disk" if value == "disk" else "host",
                directory=getattr(self.args, "activation_offloading_directory", None),
                copy_cpu=copy_cpu,
            )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the Trainer's own step with the activations away."""
        with self.activation_offload_context:
            return super().training_step(*args, **kwargs)


def _hidden_states(model: nn.Module, *, copy_cpu: bool) -> Applied:
    """Recompute every block from its inputs, and send those away where there is somewhere to go."""
    if device_of(model).type == "cpu" and not copy_cpu:
        return apply(model, Full())
    return apply(model, Full(offload_inputs=Offload(to="host", min_bytes=1024, copy_cpu=copy_cpu)))
