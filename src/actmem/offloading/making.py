"""From settings to an offloader: which store, which lane."""

from __future__ import annotations

from pathlib import Path

import torch

from actmem.errors import ModeError
from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.device import TorchDevice
from actmem.offloading.disk import DiskStore
from actmem.offloading.host import HostStore
from actmem.offloading.threads import ThreadLane
from actmem.offloading.transfer import Offloader
from actmem.settings import Offload

__all__ = ["make"]


def make(offload: Offload, device: torch.device) -> Offloader:
    """Make an offloader for tensors of a device.

    Raises:
        OffloadError: the directory cannot be used, or there is no room.
    """
    on_cpu = device.type == "cpu"
    if offload.to == "disk" and not on_cpu:
        raise ModeError(
            f"to = 'disk' for a model on {device} is not carried out by this version: values would have to pass through "
            "host memory first. Write to='host'."
        )
    if offload.to == "disk":
        directory = None if offload.directory is None else Path(offload.directory)
        return _with(offload, DiskStore(directory, limit_bytes=offload.limit_bytes), ThreadLane())
    store = HostStore(pin=offload.pin and not on_cpu, limit_bytes=offload.limit_bytes)
    lane = ThreadLane() if on_cpu else AcceleratorLane(TorchDevice(device), use_streams=offload.use_streams)
    return _with(offload, store, lane)


def _with(offload: Offload, store: DiskStore | HostStore, lane: ThreadLane | AcceleratorLane) -> Offloader:
    return Offloader(
        store,
        lane,
        in_flight_bytes=offload.in_flight_bytes,
        max_in_flight=offload.max_in_flight,
        overlap=offload.use_streams,
    )
