"""What several commands do: choose a device, describe a model, write a plan."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import nn

from actmem.amounts import parse_budget
from actmem.cli.commands import Planning
from actmem.cli.failing import Mistakes
from actmem.cli.loading import check_model
from actmem.cli.schema import ModelShown
from actmem.devices import THIS_MACHINE, Device, device, known_devices
from actmem.errors import DeviceError, ModeError
from actmem.plan import Plan
from actmem.planner.choosing import resolved
from actmem.profiles import Profile

__all__ = ["check_planning", "chosen_device", "described", "document_of", "measured", "options_of"]

_HERE = ("this", THIS_MACHINE, "cpu")


def chosen_device(asked: str | None) -> Device | None:
    """Return the device that is meant; None for this machine.

    >>> chosen_device("H100 80GB").key, chosen_device("this")
    ('h100-80gb', None)

    Raises:
        DeviceError: none was named and there is no accelerator, or it is not known.
    """
    if asked is None and not torch.accelerator.is_available():
        raise DeviceError(
            f"no device was named, and there is no accelerator here. Write --device h100-80gb, or another of: "
            f"{', '.join(known_devices())}; or --device this, for this machine's CPU."
        )
    return None if asked is None or asked.lower() in _HERE else device(asked)


def check_planning(asked: Planning, mistakes: Mistakes) -> Device | None:
    """Note what is wrong with a model and its budget, before the work is done. Returns the device, as `chosen_device`.

    >>> mistakes = Mistakes()
    >>> check_planning(Planning("tiny:llama-3.1-8b", budget="90%", device="h100-80gb"), mistakes).key
    'h100-80gb'
    >>> mistakes.raise_all()
    """
    chosen = None
    with mistakes.noted():
        chosen = chosen_device(asked.device)
    with mistakes.noted():
        parse_budget(asked.budget, device_bytes=chosen.memory_bytes if chosen else 2**40)
    with mistakes.noted():
        if asked.headroom is not None and not 0 <= asked.headroom < 1:
            raise ModeError(f"--headroom {asked.headroom} is not permitted. Expected a number from 0 to below 1: 0.05.")
    for name, number in (("microbatches", asked.microbatches), ("shard", asked.shard)):
        with mistakes.noted():
            if number < 1:
                raise ModeError(f"--{name} {number} is not permitted. Expected a whole number of at least 1.")
    check_model(asked, mistakes)
    return chosen


def measured(chosen: Device | None, model: nn.Module) -> Device:
    """Return the device, this machine as it is measured in the dtypes of the model."""
    return chosen or resolved(None, {str(p.dtype).removeprefix("torch.") for p in model.parameters()})


def described(name: str, source: Any, model: nn.Module, profile: Profile) -> ModelShown:
    """Say which model it is."""
    return ModelShown(
        name=name,
        source=source,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_blocks=len(profile.blocks),
        shapes=profile.shapes,
    )


def document_of(plan: Plan) -> dict[str, Any]:
    """Return the plan file as data."""
    return cast(dict[str, Any], json.loads(plan.to_json()))


def options_of(asked: Planning) -> dict[str, Any]:
    """Return what a profile is made with."""
    return {
        "blocks": asked.blocks,
        "optimizer": None if asked.optimizer == "none" else asked.optimizer,
        "optimizer_dtype": None if asked.optimizer_dtype is None else getattr(torch, asked.optimizer_dtype),
        "microbatches": asked.microbatches,
        "shard": asked.shard,
        "fake": asked.fake,
    }
