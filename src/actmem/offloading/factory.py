"""From settings to an offloader: which store, which lane."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actmem.errors import OffloadError
from actmem.offloading.accelerator import AcceleratorLane, TorchDevice
from actmem.offloading.disk import DiskStore
from actmem.offloading.host import HostStore, available_bytes
from actmem.offloading.lanes import Lane
from actmem.offloading.routed import RoutedLane
from actmem.offloading.staged import StagedLane
from actmem.offloading.stores import Store
from actmem.offloading.threads import ThreadLane
from actmem.offloading.transfer import Offloader
from actmem.offloading.window import Window
from actmem.settings import Offload, Place
from actmem.units import size

__all__ = ["MAKERS", "make"]


def make(offload: Offload, device: torch.device) -> Offloader:
    """Make an offloader for tensors of a device, and of others that the model may be spread over.

    Raises:
        OffloadError: the directory cannot be used, or there is no room.
    """
    on_cpu = device.type == "cpu"
    window = Window[Any](offload.in_flight_bytes, offload.max_in_flight)
    store = MAKERS[offload.to](offload, on_cpu)  # first: it may refuse, and must not leave a thread behind

    def lane_of(its_device: torch.device) -> Lane:
        if its_device.type == "cpu":
            return ThreadLane()
        direct = AcceleratorLane(TorchDevice(its_device), use_streams=offload.use_streams)
        if isinstance(store, HostStore):
            return direct
        staging = HostStore(pin=offload.pin, limit_bytes=None)  # an accelerator copies to host memory only
        return StagedLane(direct, ThreadLane(), staging, window=window)

    lane = lane_of(device) if on_cpu else RoutedLane(lane_of)
    return Offloader(store, lane, window=window, overlap=offload.use_streams)


def _make_host(offload: Offload, on_cpu: bool) -> Store:
    _check_limit(offload, "in host memory", available_bytes())
    return HostStore(pin=offload.pin and not on_cpu, limit_bytes=offload.limit_bytes)


def _make_disk(offload: Offload, on_cpu: bool) -> Store:  # noqa: ARG001 - a file is a file on any device
    directory = Path(tempfile.gettempdir() if offload.directory is None else offload.directory)
    if directory.is_dir():
        _check_limit(offload, f"in {str(directory)!r}", shutil.disk_usage(directory).free)
    return DiskStore(None if offload.directory is None else directory, limit_bytes=offload.limit_bytes)


MAKERS: dict[Place, Callable[[Offload, bool], Store]] = {"host": _make_host, "disk": _make_disk}
"""How to build each store of the table in the settings, for a model on the CPU or elsewhere."""


def _check_limit(offload: Offload, where: str, free_bytes: int | None) -> None:
    """Refuse a limit that could not be reached: training would fail before it got there."""
    limit_bytes = offload.limit_bytes
    if limit_bytes is not None and free_bytes is not None and limit_bytes > free_bytes:
        raise OffloadError(
            f"limit_bytes = {size(limit_bytes)}, but only {size(free_bytes)} are free {where}. Use a limit_bytes of at "
            "most that, or omit it to use whatever is free."
        )
