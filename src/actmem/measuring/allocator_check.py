"""Compare a measurement with what torch's allocator reports for the same step, unobserved."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from actmem.errors import UnsupportedError
from actmem.measuring.measurement import AllocatorCheck
from actmem.torchcompat import log_allocations, logged_allocations

__all__ = ["allocated_bytes", "checked"]


def checked(fn: Callable[[], object], device: torch.device, *, step_bytes: int, rise_bytes: int) -> AllocatorCheck:
    """Run `fn` with nothing but the allocator watching.

    Args:
        fn: the step that was measured.
        device: the device whose allocator to ask.
        step_bytes: the measured peak of the memory that the step allocated.
        rise_bytes: how far the peak was above the state before the step.
    """
    if device.type == "cpu":
        return AllocatorCheck(allocated_bytes(fn), step_bytes)
    before = _statistic(device, "current")
    torch.accelerator.reset_peak_memory_stats(device)
    fn()
    torch.accelerator.synchronize(device)
    return AllocatorCheck(_statistic(device, "peak") - before, rise_bytes)


def allocated_bytes(fn: Callable[[], object]) -> int:
    """Run `fn` and return the peak of the CPU memory that it allocated.

    >>> allocated_bytes(lambda: torch.ones(256))
    1024
    """
    if not log_allocations():
        raise UnsupportedError(
            "another profiler is running in this thread, so torch's allocator cannot be asked. Omit check=True, or "
            "measure outside the profiler."
        )
    changes: list[int | str] = []
    try:
        fn()
    finally:
        changes = logged_allocations()
    return _most_bytes([change for change in changes if isinstance(change, int)])


def _most_bytes(changes: Sequence[int]) -> int:
    """Add up changes, ignoring releases of earlier memory: the log has some of them, but not all."""
    held: Counter[int] = Counter()
    live = most = 0
    for change in changes:
        if change < 0 and not held[-change]:
            continue
        held[abs(change)] += 1 if change > 0 else -1
        live += change
        most = max(most, live)
    return most


def _statistic(device: torch.device, which: str) -> int:
    """Return bytes as tensors requested them if the allocator reports that, else as it rounds them."""
    statistics: Mapping[str, Any] = {}
    with contextlib.suppress(RuntimeError):  # not every backend has an allocator that counts
        statistics = torch.accelerator.memory_stats(device)
    for name in ("requested_bytes", "allocated_bytes"):
        if (found := statistics.get(f"{name}.all.{which}")) is not None:
            return int(found)
    raise UnsupportedError(
        f"the allocator of {device.type!r} devices does not say how much it has allocated, so a measurement cannot be "
        "compared with it. Omit check=True."
    )
