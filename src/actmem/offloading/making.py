"""From settings to an offloader: which store, which lane."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

from actmem.errors import OffloadError
from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.device import TorchDevice
from actmem.offloading.disk import DiskStore
from actmem.offloading.host import HostStore, available_bytes
from actmem.offloading.lanes import Lane
from actmem.offloading.staged import StagedLane
from actmem.offloading.stores import Store, size
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
    # The store first: it may refuse, and no thread is to be left then.
    if offload.to == "host":
        _check_limit(offload, "in host memory", available_bytes())
        store: Store = HostStore(pin=offload.pin and not on_cpu, limit_bytes=offload.limit_bytes)
    else:
        directory = Path(tempfile.gettempdir() if offload.directory is None else offload.directory)
        if directory.is_dir():
            _check_limit(offload, f"in {str(directory)!r}", shutil.disk_usage(directory).free)
        store = DiskStore(None if offload.directory is None else directory, limit_bytes=offload.limit_bytes)
    lane: Lane = ThreadLane() if on_cpu else AcceleratorLane(TorchDevice(device), use_streams=offload.use_streams)
    if offload.to == "disk" and not on_cpu:
        lane = StagedLane(
            lane, ThreadLane(), HostStore(pin=offload.pin, limit_bytes=None), in_flight_bytes=offload.in_flight_bytes
        )
    return Offloader(
        store,
        lane,
        in_flight_bytes=offload.in_flight_bytes,
        max_in_flight=offload.max_in_flight,
        overlap=offload.use_streams,
    )


def _check_limit(offload: Offload, where: str, free_bytes: int | None) -> None:
    """Refuse a limit that could not be reached: training would fail on its way there."""
    limit_bytes = offload.limit_bytes
    if limit_bytes is not None and free_bytes is not None and limit_bytes > free_bytes:
        raise OffloadError(
            f"limit_bytes = {size(limit_bytes)}, but only {size(free_bytes)} are free {where}. Use a limit_bytes of at "
            "most that, or leave it out: then whatever is free may be used."
        )
