"""Activation offloading under the names of axolotl and TRL.

In those systems the manager is a pair of hooks with its own table of tensors. Here it is `actmem.offload`, and an
actmem plan for `"hidden_states"`. Only the mixin imports transformers, on first use. See docs/compat_axolotl.md.

>>> import torch
>>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
>>> manager = get_act_offloading_ctx_manager(model, warn_if_no_head=False)  # on a CPU there is nowhere to offload to
>>> with manager:
...     model(torch.randn(16, 64)).sum().backward()
>>> manager.ledger.out_bytes
0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from actmem.compat._axolotl_checkpoints import (
    CheckpointActivationOffloadStats,
    CheckpointHiddenStatesOffload,
    ac_wrap_hf_model,
    apply_selective_checkpointing,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from actmem.compat._axolotl_manager import NoOpManager, OffloadActivations
from actmem.compat.configs import FromConfig, read_config

if TYPE_CHECKING:
    from actmem.compat._axolotl_mixin import ActivationOffloadingMixin

__all__ = [
    "ActivationOffloadingMixin",
    "CheckpointActivationOffloadStats",
    "CheckpointHiddenStatesOffload",
    "FromConfig",
    "NoOpManager",
    "OffloadActivations",
    "ac_wrap_hf_model",
    "apply_selective_checkpointing",
    "from_config",
    "get_act_offloading_ctx_manager",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
]


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
    """Return a context in which a model's activations are offloaded, except those of its output head and the loss.

    Args:
        model: any module; the head is found through wrappers.
        use_pin_memory: use page-locked host memory, if there is an accelerator.
        use_streams: overlap copies with computation. False does not, and keeps fewer activations on the device.
        min_offload_size: size in bytes below which tensors are not offloaded.
        max_fwd_stash_size: maximum number of activations in flight at once; at least 1.
        warn_if_no_head: whether to warn if no output head is found.
        to: "disk" offloads to a private file instead. Not in the other systems' function.
        directory: directory of that file.
        copy_cpu: copy tensors on the CPU to other host memory too. That saves nothing, but is useful in tests.

    Raises:
        ModeError: `max_fwd_stash_size` is below 1, or another argument has a value that is not permitted. It is a
            ValueError, as in TRL.
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
    """Do the same for a model with adapters: `get_act_offloading_ctx_manager` treats both alike."""
    return get_act_offloading_ctx_manager(
        model, use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, warn_if_no_head
    )


def __getattr__(name: str) -> Any:
    """Import the mixin on first use: it derives from transformers' Trainer, which is large and may not be installed."""
    if name != "ActivationOffloadingMixin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from actmem.compat import _axolotl_mixin
    except ImportError as error:
        raise ImportError(f"{name} derives from transformers' Trainer: pip install transformers ({error}).") from error
    globals()[name] = _axolotl_mixin.ActivationOffloadingMixin
    return globals()[name]


def from_config(path: str | Path) -> FromConfig:
    """Read what an axolotl configuration file says about checkpointing and offloading activations.

    Returns:
        The translation: `mode` and `options` for `actmem.apply`, and notes. Print it.

    Raises:
        ModeError: the file cannot be read, or contains something unknown.
    """
    return read_config(path, "axolotl")
