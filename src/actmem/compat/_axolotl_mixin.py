"""The mixin that axolotl calls ActivationOffloadingMixin. Imported on first use: it derives from a Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from actmem.applying import Applied, apply, device_of
from actmem.compat._axolotl_checkpoints import CheckpointHiddenStatesOffload
from actmem.compat._axolotl_manager import OffloadActivations
from actmem.errors import ModeError
from actmem.modes import Full
from actmem.settings import Offload

if TYPE_CHECKING:

    class Trainer:
        """The part of transformers' Trainer that the mixin uses."""

        args: Any
        model: nn.Module

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...

else:
    from transformers import Trainer

__all__ = ["ActivationOffloadingMixin"]

_VALUES = (True, False, None, "legacy", "disk", "hidden_states")
_ARGUMENT = "activation_offloading"


class ActivationOffloadingMixin(Trainer):
    """Offload in each training step of a transformers Trainer: `class MyTrainer(ActivationOffloadingMixin, Trainer)`.

    `args.activation_offloading` selects how. True overlaps copies to host memory with computation, "legacy" does not;
    "disk" writes to a private file; "hidden_states" offloads the inputs of each block and recomputes the rest; False
    and None do nothing. TRL's trainers read the same argument: in front of one of them, the mixin takes it over, and
    TRL's own offloading stays off. Also read, if present: `args.activation_offloading_directory` for "disk", and
    `args.activation_offloading_copy_cpu`, which copies the values of a model on the CPU too, for tests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.activation_offload_applied: Applied | None = None
        self.activation_offload_context: AbstractContextManager[Any] = nullcontext()
        given = next((a for a in (*args, *kwargs.values()) if hasattr(a, _ARGUMENT)), None)
        value = cast(object, getattr(given, _ARGUMENT, None))
        if not any(value is known or (isinstance(known, str) and value == known) for known in _VALUES):
            raise ModeError(
                f"activation_offloading = {value!r} is not known. Permitted: True, 'legacy', 'disk', 'hidden_states', "
                "False."
            )
        with _hidden_from_others(given):
            super().__init__(*args, **kwargs)
        if not value:
            return
        self.args.activation_offloading = value  # a TRL trainer may have built its own arguments from these
        copy_cpu = bool(getattr(given, "activation_offloading_copy_cpu", False))
        if value != "hidden_states":
            manager = OffloadActivations(
                use_streams=value != "legacy",
                to="disk" if value == "disk" else "host",
                directory=getattr(given, "activation_offloading_directory", None),
                copy_cpu=copy_cpu,
            )
            self.activation_offload_context = manager.attach(self.model)
        elif self.args.gradient_checkpointing:  # the Trainer recomputes, and what it keeps of a layer is offloaded
            self.activation_offload_context = CheckpointHiddenStatesOffload(copy_cpu=copy_cpu)
        else:
            self.activation_offload_applied = _hidden_states(self.model, copy_cpu=copy_cpu)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the Trainer's own step with activations offloaded."""
        with self.activation_offload_context:
            return super().training_step(*args, **kwargs)


@contextlib.contextmanager
def _hidden_from_others(args: Any) -> Generator[None]:
    """Hide the argument while a trainer is created: two that offload the same saved tensors would undo each other."""
    value = getattr(args, _ARGUMENT, None)
    if not value:
        yield
        return
    setattr(args, _ARGUMENT, False)
    try:
        yield
    finally:
        setattr(args, _ARGUMENT, value)


def _hidden_states(model: nn.Module, *, copy_cpu: bool) -> Applied:
    """Recompute every block from its inputs, and offload those if there is somewhere to offload them to."""
    if device_of(model).type == "cpu" and not copy_cpu:
        return apply(model, Full())
    return apply(model, Full(offload_inputs=Offload(to="host", min_bytes=1024, copy_cpu=copy_cpu)))
