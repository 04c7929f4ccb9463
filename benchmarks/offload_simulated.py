"""How well the accelerator lane hides its copies, simulated: `python -m benchmarks.offload_simulated`.

Every figure here is simulated. No clock is read and no device is used: the real lane runs on the virtual accelerator of
the tests, which adds up the seconds that kernels and copies would take and honours every event. So the figures show
what the lane's dependencies cost, and nothing about any hardware.

A step is `num_units` pieces of work. Each forward piece makes a tensor, which is offloaded; each backward piece needs
its tensor back. With f, b the seconds of a forward and a backward piece, l those of one copy, and a link that carries
both directions at once, no schedule that sends in order and fetches in reverse order is faster than

    f + (n - 1) max(f, l) + 2 l + (n - 1) max(b, l) + b

the greater of compute and link in both passes, plus the tail: the first piece before anything can leave, the last
tensor's way out and back, and the last piece after everything has arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmem.offloading.accelerator import AcceleratorLane
from actmem.offloading.lanes import Copy
from benchmarks.outcome import Bound, Outcome
from tests.offloading.programs import ArenaStore
from tests.offloading.virtual import CELL, Bytes, Event, VirtualDevice, Work

LINKS = (8, 16, 32, 64, 128, 256, 450, 900)
"""GB/s in each direction: PCIe 3 to NVLink-C2C."""
BLOCK_BYTES = (64 << 20, 512 << 20, 4 << 30)
PIECES = 8
"""Tensors that are sent in each block."""
COMPUTE_BYTES_PER_SECOND = 50e9
"""Bytes saved for each second of forward compute: links above it can be hidden in forward, half of it in backward."""
COPY_LATENCY_SECONDS = 10e-6


class TimedDevice(VirtualDevice):
    """A virtual accelerator whose work takes time. A cell of memory stands for one tensor of the model."""

    def __init__(self, tensor_bytes: int, link_bytes_per_second: float) -> None:
        super().__init__(eager=0.0, check=False)
        self.copy_seconds = COPY_LATENCY_SECONDS + tensor_bytes / link_bytes_per_second
        self.kernel_seconds = 0.0

    def seconds_of(self, work: Work) -> float:
        """Return the seconds of a copy, or of the kernel that is being launched."""
        return self.copy_seconds if work.is_copy else self.kernel_seconds

    def done(self, event: Event) -> bool:
        """Return whether the event lies in the host's past. The host is never slower than its device."""
        return event.seconds <= self.host_seconds

    def compute_for(self, seconds: float, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Run a kernel on the current stream."""
        self.kernel_seconds = seconds
        self.kernel("kernel", reads, writes, _nothing)


def _nothing(reads: list[Bytes], writes: list[Bytes]) -> None:
    pass


@dataclass(frozen=True)
class Point:
    """One simulated step."""

    link_gb_per_second: int
    block_bytes: int
    step_seconds: float
    bound_seconds: float
    compute_seconds: float
    peak_tensors: int
    """The most tensors that were on the device at once, of `num_units` that were made."""

    @property
    def over_bound(self) -> float:
        """Step time over the lower bound."""
        return self.step_seconds / self.bound_seconds


def simulate(
    link: int, block_bytes: int, *, num_blocks: int = 32, in_flight: int = 4, use_streams: bool = True
) -> Point:
    """Run one step through the lane and return its simulated time. `in_flight` tensors may be on their way."""
    tensor_bytes, num_units = block_bytes // PIECES, num_blocks * PIECES
    device = TimedDevice(tensor_bytes, link * 1e9)
    lane: AcceleratorLane[Any, Any] = AcceleratorLane(device, use_streams=use_streams)
    store = ArenaStore(device)
    forward = tensor_bytes / COMPUTE_BYTES_PER_SECOND
    backward, copy_seconds = 2 * forward, tensor_bytes / (link * 1e9)

    slots: list[Any] = []
    leaving: deque[Copy] = deque()
    for _ in range(num_units):
        if len(leaving) == in_flight:
            leaving.popleft().release()
        tensor = device.allocate(CELL)
        device.compute_for(forward, [], [tensor])
        slots.append(store.take(CELL))
        leaving.append(lane.out(tensor, store, slots[-1]))
        del tensor
    leaving.clear()
    coming: deque[tuple[Any, Tensor, Copy]] = deque()
    for _ in range(num_units):
        while slots and len(coming) < in_flight:
            slot, target = slots.pop(), device.allocate(CELL)
            coming.append((slot, target, lane.back(store, slot, target)))
        slot, target, copy = coming.popleft()
        copy.wait()
        device.compute_for(backward, [target], [])
        lane.give(store, slot)
        del target, copy
    step_seconds = device.compute.seconds
    lane.close()
    device.drain()
    assert store.used_bytes == 0
    assert device.live_bytes == 0
    rest = num_units - 1
    bound = forward + rest * max(forward, copy_seconds) + 2 * copy_seconds + rest * max(backward, copy_seconds)
    return Point(
        link,
        block_bytes,
        step_seconds,
        bound + backward,
        num_units * (forward + backward),
        device.peak_bytes // CELL,
    )


def curve(*, use_streams: bool = True, num_blocks: int = 32) -> list[Point]:
    """Return a simulated step for every link and every size of a block."""
    return [
        simulate(link, block_bytes, num_blocks=num_blocks, use_streams=use_streams)
        for block_bytes in BLOCK_BYTES
        for link in LINKS
    ]


def run(*, num_blocks: int = 32) -> Outcome:
    """Simulate the curve with streams and without."""
    points, without = curve(num_blocks=num_blocks), curve(num_blocks=num_blocks, use_streams=False)
    outcome = Outcome(
        "offload_simulated",
        {
            "simulated": True,
            "compute_bytes_per_second": COMPUTE_BYTES_PER_SECOND,
            "copy_latency_seconds": COPY_LATENCY_SECONDS,
            "tensors_per_block": PIECES,
            "num_blocks": num_blocks,
        },
    )
    for one, other in zip(points, without, strict=True):
        outcome.exact[f"simulated, {one.block_bytes >> 20} MiB blocks, {one.link_gb_per_second} GB/s"] = {
            "step_seconds": one.step_seconds,
            "bound_seconds": one.bound_seconds,
            "compute_seconds": one.compute_seconds,
            "step_over_bound": one.over_bound,
            "step_over_compute": one.step_seconds / one.compute_seconds,
            "without_streams_over_compute": other.step_seconds / one.compute_seconds,
            "peak_tensors": one.peak_tensors,
        }
    outcome.bounds.append(
        Bound("simulated step over max(compute, link) plus tail, worst", max(p.over_bound for p in points), 1.02)
    )
    return outcome


if __name__ == "__main__":
    for point in curve():
        print(
            f"simulated: {point.block_bytes >> 20:5d} MiB blocks, {point.link_gb_per_second:4d} GB/s: "
            f"step {point.step_seconds:8.4f} s, {point.over_bound:.4f} of the bound, "
            f"{point.step_seconds / point.compute_seconds:.3f} of compute, {point.peak_tensors} tensors at most"
        )
