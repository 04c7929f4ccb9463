"""What a measured step cost, as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

__all__ = ["CATEGORIES", "PHASES", "AllocatorCheck", "Measurement", "PeakOp", "Sample"]

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "temporary")
"""The keys of `Measurement.by_category`, in the order in which they are printed."""

PHASES = ("forward", "backward", "replay", "optimizer")
"""What an operator can be part of."""


class Sample(NamedTuple):
    """The live bytes right after one event of the step."""

    event: int
    """Position in the timeline, from 0."""
    phase: str
    """One of `PHASES`."""
    op: str
    """The operator, such as "aten.mm.default"; "storage.resize_" for a storage resized outside every operator."""
    live_bytes: int
    """Counted bytes on the measured device once the operator is done."""
    workspace_bytes: int = 0
    """Additional bytes that the operator allocated while it ran, and freed."""


@dataclasses.dataclass(frozen=True)
class PeakOp:
    """The operator whose results completed the peak."""

    op: str
    phase: str
    module: str | None
    """Path of the innermost module of `model` that was running; "" is the model itself; None where no module ran."""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.op} ({self.phase}){where}"


@dataclasses.dataclass(frozen=True)
class AllocatorCheck:
    """A measurement compared with torch's allocator, which saw the same step run again unobserved.

    >>> print(AllocatorCheck(allocated_bytes=4096, measured_bytes=4096))
    agrees with the allocator
    """

    allocated_bytes: int
    """Most bytes that the allocator had handed out at once above the state before the step."""
    measured_bytes: int
    """The same sum, as it was measured."""

    @property
    def agrees(self) -> bool:
        """Whether the two are within 64 bytes of each other."""
        return abs(self.measured_bytes - self.allocated_bytes) <= 64

    def __str__(self) -> str:
        if self.agrees:
            return "agrees with the allocator"
        return (
            f"DIFFERS from the allocator, which gave out {self.allocated_bytes:,} bytes where {self.measured_bytes:,} "
            f"were measured ({self.measured_bytes - self.allocated_bytes:+,})"
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one step cost. `actmem.measuring.measure` explains what is counted."""

    peak_bytes: int
    """Most bytes alive at once on the measured device: model, optimizer and everything the step allocated."""
    tensor_bytes: int
    """The same without what no operator returned (`unseen`): what a prediction predicts."""
    step_bytes: int
    """Most bytes alive at once of what the step itself allocated."""
    saved_bytes: int
    """Bytes that forward operators allocated and that are alive when backward begins; 0 without a backward."""
    external_bytes: int
    """Bytes that operators read but that are not counted: they existed before the step, outside model and optimizer."""
    device: str
    """The measured device."""
    by_category: dict[str, int]
    """`peak_bytes` divided into `CATEGORIES`."""
    unseen: dict[str, int]
    """Bytes of the peak that no operator returned, by the operator that allocated them or that they are held for: the
    workspace of a kernel, the state of a random generator, a number that autograd saves. They count as temporary."""
    by_device: dict[str, int]
    """The peak of every device that was touched, each at its own moment."""
    peak_op: PeakOp | None
    """The first operator after which the peak was reached; None if only the state before the step was that high."""
    timeline: tuple[Sample, ...]
    """One sample for each event, in order."""
    forward_flops: int
    backward_flops: int
    """Without what was replayed."""
    replayed_flops: int
    optimizer_flops: int
    forward_seconds: float
    backward_seconds: float
    """Without what was replayed."""
    replay_seconds: float
    optimizer_seconds: float
    num_ops: int
    """All operators that ran, replayed ones included."""
    num_replayed_ops: int
    check: AllocatorCheck | None = None
    """How the measurement compares with the allocator; None if that was not asked for."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Return all fields as JSON text; a sample is a list in the order of `Sample`'s fields."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in self.by_category.items() if size)
        others = ", ".join(f"{name} {_size(size)}" for name, size in self.by_device.items() if name != self.device)
        num_ops = f"{self.num_replayed_ops} of {self.num_ops} operators"
        lines = [
            f"peak      {_size(self.peak_bytes)} on {self.device}, at {self.peak_op or 'the start'}",
            f"  of it   {parts or 'nothing'}",
            f"step      {_size(self.step_bytes)} allocated at its peak, {_size(self.saved_bytes)} saved for backward",
            f"forward   {_flops(self.forward_flops)}, {self.forward_seconds:.3f} s",
            f"backward  {_flops(self.backward_flops)}, {self.backward_seconds:.3f} s",
            f"replay    {_flops(self.replayed_flops)}, {self.replay_seconds:.3f} s, {num_ops}",
        ]
        if self.optimizer_seconds:
            lines.append(f"optimizer {_flops(self.optimizer_flops)}, {self.optimizer_seconds:.3f} s")
        if others:
            lines.append(f"elsewhere {others}")
        if self.check is not None:
            lines.append(f"check     {self.check}")
        return "\n".join(lines)


def _size(num_bytes: int) -> str:
    """Format bytes, in GiB from one GiB on, else in MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB"


def _flops(flops: int) -> str:
    return f"{flops / 1e9:.3f} GFLOP"
