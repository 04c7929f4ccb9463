"""Speak to a real accelerator through `torch.accelerator`, `torch.Stream` and `torch.Event`.

Not yet run on hardware. The order of the calls is tested on a backend in Python, which has streams but no kernels; the
lane above is tested on a simulated device.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

__all__ = ["TorchDevice"]


class TorchDevice:
    """Be the `Device` of an `AcceleratorLane` for one device of `torch.accelerator`. Not yet run on hardware.

    Args:
        device: the device whose tensors are copied, such as `torch.device("cuda", 0)`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> torch.Stream:
        """Return the stream that the calling thread computes on now."""
        return torch.accelerator.current_stream(self._device)

    def new_stream(self) -> torch.Stream:
        """Return a stream that runs beside the others."""
        return torch.Stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Return an event that is done when all that `stream` was given so far is done."""
        event = torch.Event(self._device)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Have everything that `stream` is given from now on wait for the event."""
        stream.wait_event(event)

    def synchronise(self, event: torch.Event, timeout_seconds: float) -> bool:
        """Block until the event is done; tell whether it was in time. Polls, because torch's own wait has no limit."""
        deadline = time.monotonic() + timeout_seconds
        pause_seconds = 1e-5
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 1e-3)
        return True

    def done(self, event: torch.Event) -> bool:
        """Tell whether the event is done."""
        return event.query()

    def copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> None:
        """Give `stream` the copy of `source` to `target`. Pinned host memory makes it run beside the host."""
        with stream, torch.no_grad():
            target.copy_(source, non_blocking=True)

    def keep_alive(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the memory of `tensor`."""
        tensor.record_stream(stream)
