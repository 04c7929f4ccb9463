"""From settings to an offloader: which store, which lane."""

from __future__ import annotations

from pathlib import Path

import torch

from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.device import TorchDevice
from actmem.offloading.disk import DiskStore
from actmem.offloading.host import HostStore
from actmem.offloading.lanes import Lane
from actmem.offloading.staged import StagedLane
from actmem.offloading.stores import Store
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
    lane: Lane = ThreadLane() if on_cpu else AcceleratorLane(TorchDevice(device), use_streams=offload.use_streams)
    if offload.to == "host":
        store: Store = HostStore(pin=offload.pin and not on_cpu, limit_bytes=offload.limit_bytes)
    else:
        directory = None if offload.directory is None else Path(offload.directory)
        store = DiskStore(directory, limit_bytes=offload.limit_bytes)
        if not on_cpu:
            lane = StagedLane(lane, ThreadLane(), HostStore(pin=offload.pin, limit_bytes=None))
    return Offloader(
        store,
        lane,
        in_flight_bytes=offload.in_flight_bytes,
        max_in_flight=offload.max_in_flight,
        overlap=offload.use_streams,
    )
