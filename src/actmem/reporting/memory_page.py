"""Write a recording of CUDA memory as one offline page: curves, what is unusable, and the largest tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from actmem.allocator import DeviceRecording, Frame, Snapshot, compare_step
from actmem.plan import FitRecord
from actmem.reporting.page_writer import rendered, write_text
from actmem.units import size

__all__ = ["MemoryPage", "memory_page", "write_memory_page"]

_NUM_DRAWN = 4000


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Data):
    """A part of the reserved bytes."""

    name: str
    meaning: str
    num_bytes: int
    text: str


class Tensor(_Data):
    """Memory in use at the peak."""

    num_bytes: int
    text: str
    place: str
    stack: list[str]


class RecordedCurve(_Data):
    """Bytes after each drawn allocation of one device."""

    moments: list[int]
    allocated: list[int]
    reserved: list[int]


class PredictedCurve(_Data):
    """A predicted step, over each step of the recording."""

    moments: list[int]
    allocated: list[int]


class DeviceView(_Data):
    """One device, as the page shows it."""

    device: int
    settings: str
    allocations: int
    at_recorded_address: int
    device_requests: int
    device_requests_right: int
    releases: int
    releases_right: int
    is_exact: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_allocated: str
    peak_reserved: str
    unusable: str
    curve: RecordedCurve
    predicted: PredictedCurve
    parts: list[Part]
    largest: list[Tensor]


class MemoryPage(_Data):
    """The contents of the page. It computes no figures of its own."""

    name: str
    devices: list[DeviceView]
    predicted_bytes: int | None
    """The peak that a plan predicted."""
    budget_bytes: int | None
    predicted: list[int]
    """Bytes that a prediction has alive over the step, if the recording brings them and the plan has no curve."""


def write_memory_page(
    path: str | os.PathLike[str],
    name: str,
    snapshot: Snapshot,
    devices: Sequence[DeviceRecording],
    told: FitRecord | None,
) -> None:
    """Write a recording as one self-contained `.html` file, overwriting an existing file.

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
        ModeError: if the file cannot be written.
    """
    write_text(path, render_memory(memory_page(name, snapshot, devices, told)))


def render_memory(data: MemoryPage) -> str:
    """Return the page as HTML.

    Raises:
        ActmemError: if plotly or jinja2 is not installed.
    """
    return rendered("memory.html.jinja", data, ("formats.js", "memory.js"))


def memory_page(
    name: str, snapshot: Snapshot, devices: Sequence[DeviceRecording], told: FitRecord | None
) -> MemoryPage:
    """Return what the page of a recording shows."""
    return MemoryPage(
        name=name.replace("\\", "/").rpartition("/")[2],
        devices=[_view(each, () if told is None else told.curve) for each in devices],
        predicted_bytes=None if told is None else max(told.curve, default=told.peak_bytes),
        budget_bytes=None if told is None else told.budget_bytes,
        predicted=[] if told is not None and told.curve else _thinned(snapshot.attachment.timeline),
    )


def _view(found: DeviceRecording, predicted: Sequence[int]) -> DeviceView:
    return DeviceView(
        device=found.device,
        settings=found.settings.text or "the defaults",
        allocations=found.allocations,
        at_recorded_address=found.at_recorded_address,
        device_requests=found.device_requests,
        device_requests_right=found.device_requests_right,
        releases=found.releases,
        releases_right=found.releases_right,
        is_exact=found.is_exact,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        peak_allocated=size(found.peak_allocated_bytes),
        peak_reserved=size(found.peak_reserved_bytes),
        unusable=size(found.at_peak.unusable_bytes),
        curve=_curve(found.curve),
        predicted=_predicted(found, predicted),
        parts=[
            Part(name=name, meaning=meaning, num_bytes=num_bytes, text=size(num_bytes))
            for name, num_bytes, meaning in found.at_peak.parts
        ],
        largest=[
            Tensor(
                num_bytes=each.num_bytes,
                text=size(each.num_bytes),
                place="no stack was recorded" if each.place is None else _line(each.place),
                stack=[_line(frame) for frame in each.frames[:40]],
            )
            for each in found.largest
        ],
    )


def _line(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} {frame.function}" if frame.line else frame.function.partition("(")[0]


def _curve(curve: Sequence[tuple[int, int]]) -> RecordedCurve:
    """Return the drawn moments: all, or the highest and the lowest of each of many stretches."""
    stretch = -(-len(curve) // (_NUM_DRAWN // 2))
    drawn: list[int] = []
    for start in range(0, len(curve), max(stretch, 1)):
        places = range(start, min(start + max(stretch, 1), len(curve)))
        drawn += sorted({max(places, key=lambda at: curve[at]), min(places, key=lambda at: curve[at])})
    return RecordedCurve(
        moments=drawn, allocated=[curve[at][0] for at in drawn], reserved=[curve[at][1] for at in drawn]
    )


def _predicted(found: DeviceRecording, curve: Sequence[int]) -> PredictedCurve:
    """Return the predicted step at each step of the recording. The curve of a recording begins with its start."""
    compared = compare_step(found, curve)
    if compared is None:
        return PredictedCurve(moments=[], allocated=[])
    return PredictedCurve(
        moments=[1 + step.start + at for step in compared.steps for at in compared.moments],
        allocated=[*compared.predicted] * len(compared.steps),
    )


def _thinned(timeline: Sequence[int]) -> list[int]:
    stretch = -(-len(timeline) // _NUM_DRAWN)
    return [max(timeline[start : start + stretch]) for start in range(0, len(timeline), max(stretch, 1))]
