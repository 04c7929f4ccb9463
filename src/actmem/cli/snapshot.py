"""`actmem snapshot`: what a memory snapshot of torch holds, compared with the allocator's simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from actmem.allocator import (
    AllocatorSettings,
    DeviceRecording,
    Frame,
    MemoryAtPeak,
    Snapshot,
    compare_step,
    place_of,
    read_snapshot,
    reenact,
)
from actmem.cli.commands import Snapshot as SnapshotCommand
from actmem.cli.failures import Mistakes
from actmem.cli.schema import Document, project
from actmem.cli.screen import Screen, table
from actmem.errors import ModeError
from actmem.plan import FitRecord, Plan
from actmem.units import size

__all__ = ["SnapshotShown", "run", "show"]


@dataclass(frozen=True, kw_only=True)
class TensorShown(Document):
    """Memory that was in use at the peak."""

    num_bytes: int
    """As requested."""
    stream: int
    is_older: bool
    """It was allocated before the recording began."""
    place: Frame | None
    """The innermost line of Python that is not torch's own; null if the recording has no stack."""
    frames: tuple[Frame, ...]
    """The whole stack, innermost first."""


@dataclass(frozen=True, kw_only=True)
class RecordedDeviceShown(Document):
    """One device of a snapshot."""

    device: int
    settings: AllocatorSettings
    """The settings that the simulation used: those of the recording, as far as it has them."""
    has_settings: bool
    """Whether the recording says which settings were in force. If not, torch's defaults are assumed."""
    num_events: int
    """Events in the trace; 0 if nothing but the end of the run was recorded."""
    allocations: int
    at_recorded_address: int
    """How many of the allocations the simulation puts where they were recorded."""
    device_requests: int
    """How often the driver was asked for memory."""
    device_requests_right: int
    """How many of these requests the simulation makes, at the same moment and of the same size."""
    releases: int
    """How often memory went back to the driver."""
    releases_right: int
    is_end_right: bool
    """Whether the simulation ends with the blocks that were recorded."""
    is_exact: bool
    """Whether every decision came out as recorded."""
    out_of_memory: int
    """How many requests failed."""
    peak_allocated_bytes: int
    """As `torch.cuda.max_memory_allocated` counts, from the start of the trace on."""
    peak_reserved_bytes: int
    """As `torch.cuda.max_memory_reserved` counts, from the start of the trace on."""
    peak_requested_bytes: int
    start_allocated_bytes: int
    start_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    at_peak: MemoryAtPeak
    """What the reserved bytes were when most were reserved."""
    unusable_bytes: int
    """Reserved then, and neither requested nor ready to be given back."""
    largest: tuple[TensorShown, ...]
    """What was in use when most was allocated, largest first."""


@dataclass(frozen=True, kw_only=True)
class StepShown(Document):
    """A predicted step over a recorded one. A step is divided into parts that each request equally many bytes."""

    num_steps: int
    """How many steps were found in the recording; the last of them is compared."""
    predicted: tuple[int, ...]
    """Allocated bytes in each part."""
    recorded: tuple[int, ...]
    parts_at: float | None
    """The fraction of the step at which they first differ by more than 2 % of the recorded peak; null if nowhere."""
    parts_by: int
    """Recorded less predicted bytes there."""
    place: Frame | None
    """The innermost line of Python that is not torch's own that allocated there, if the recording has it."""
    farthest_at: float
    """The fraction of the step at which they differ most."""
    farthest_by: int
    """Recorded less predicted bytes there."""


@dataclass(frozen=True, kw_only=True)
class PlannedShown(Document):
    """What a plan predicted, compared with what was recorded."""

    mode: str
    predicted_bytes: int
    """The peak that the plan predicted: allocated bytes if it is for a card, and bytes of tensors otherwise."""
    budget_bytes: int
    recorded_bytes: int
    """The recorded peak of the device that took most: allocated bytes."""
    predicted_reserved_bytes: int | None
    """The peak of reserved bytes that a plan for a card predicted."""
    recorded_reserved_bytes: int
    device: str
    """The device that the plan was made for."""
    step: StepShown | None
    """The predicted step over the recorded one; null if the plan has no curve, or the recording no trace."""


@dataclass(frozen=True, kw_only=True)
class SnapshotShown(Document):
    """Output of `actmem snapshot`."""

    command: Literal["snapshot"] = "snapshot"
    file: str
    devices: tuple[RecordedDeviceShown, ...]
    """The devices that have memory or events."""
    plan: PlannedShown | None
    """Null if neither --plan nor the file itself has one."""
    versions: dict[str, str]
    """Versions that the file names; empty unless `actmem record` wrote it."""
    report: str | None
    """The page that was written."""


def run(asked: SnapshotCommand, screen: Screen) -> tuple[SnapshotShown, int]:
    """Read the snapshot, simulate every device of it, and write the page if asked."""
    mistakes = Mistakes()
    with mistakes.noted():
        if asked.largest < 0:
            raise ModeError(f"--largest {asked.largest} is not permitted. Expected a number of at least 0.")
    with mistakes.noted():
        if asked.report is not None and asked.report.suffix != ".html":
            raise ModeError(f"--report {asked.report} must end in .html.")
    if asked.report is not None:
        from actmem.reporting import check_installed

        with mistakes.noted():
            check_installed()
    plan: Plan | None = None
    with mistakes.noted():
        plan = None if asked.plan is None else _with_prediction(Plan.load(asked.plan), str(asked.plan))
    mistakes.raise_all()
    with screen.progress("reading the snapshot"):
        snapshot = read_snapshot(asked.file)
    if plan is None and snapshot.attachment.plan is not None:
        plan = Plan.from_json(snapshot.attachment.plan)
    with screen.progress("simulating the allocator"):
        found = [reenact(snapshot, device, num_largest=asked.largest) for device in snapshot.devices]
    planned = _planned(plan, found, snapshot)
    if asked.report is not None:
        from actmem.reporting import write_memory_page

        write_memory_page(asked.report, asked.file, snapshot, found, None if plan is None else plan.predicted)
    shown = SnapshotShown(
        file=asked.file,
        devices=tuple(_device(each, snapshot) for each in found),
        plan=planned,
        versions=dict(snapshot.attachment.versions),
        report=None if asked.report is None else str(asked.report),
    )
    return shown, 0


def _with_prediction(plan: Plan, name: str) -> Plan:
    if plan.predicted is None:
        raise ModeError(
            f"--plan {name} predicts no peak: it was not made for a budget. Write one that does with "
            "`actmem fit MODEL --budget AMOUNT --out plan.json`."
        )
    return plan


def _planned(plan: Plan | None, found: list[DeviceRecording], snapshot: Snapshot) -> PlannedShown | None:
    if plan is None or plan.predicted is None:
        return None
    told: FitRecord = plan.predicted
    most = max(found, key=lambda each: each.peak_allocated_bytes, default=None)
    return PlannedShown(
        mode=plan.mode,
        predicted_bytes=max(told.curve, default=told.peak_bytes),
        budget_bytes=told.budget_bytes,
        recorded_bytes=0 if most is None else most.peak_allocated_bytes,
        predicted_reserved_bytes=told.reserved_bytes,
        recorded_reserved_bytes=0 if most is None else most.peak_reserved_bytes,
        device=told.device,
        step=None if most is None else _step(most, told, snapshot),
    )


def _step(found: DeviceRecording, told: FitRecord, snapshot: Snapshot) -> StepShown | None:
    compared = compare_step(found, told.curve)
    if compared is None:
        return None
    num, at, farthest, by = len(compared.recorded), compared.parting, compared.farthest, compared.apart
    where = None if at is None else found.places[compared.steps[-1].start + compared.moments[at]]
    return StepShown(
        num_steps=len(compared.steps),
        predicted=compared.predicted,
        recorded=compared.recorded,
        parts_at=None if at is None else at / num,
        parts_by=0 if at is None else by[at],
        place=None if where is None else place_of(snapshot, found.device, where),
        farthest_at=farthest / num,
        farthest_by=by[farthest],
    )


def _device(found: DeviceRecording, snapshot: Snapshot) -> RecordedDeviceShown:
    return project(
        RecordedDeviceShown,
        found,
        has_settings=snapshot.has_settings,
        unusable_bytes=found.at_peak.unusable_bytes,
        largest=tuple(project(TensorShown, each) for each in found.largest),
    )


# ---------------------------------------------------------------- text


def show(shown: SnapshotShown, screen: Screen) -> None:
    """Print each device: peaks, the simulation, what is unusable and why, and the largest tensors."""
    if not shown.devices:
        screen.out.print("The snapshot has no memory and no events of any device.")
    for each in shown.devices:
        _show_device(each, screen)
    if shown.plan is not None:
        _show_plan(shown.plan, screen)
    if shown.report is not None:
        screen.note(f"report: {shown.report}")


def _show_plan(told: PlannedShown, screen: Screen) -> None:
    out = screen.out
    out.print(f"plan of {told.mode}, for {told.device}", markup=False)
    out.print(
        f"predicted peak   {size(told.predicted_bytes)} of {size(told.budget_bytes)}; recorded "
        f"{size(told.recorded_bytes)}, {_by(told.recorded_bytes - told.predicted_bytes)}"
    )
    if told.predicted_reserved_bytes is not None:
        difference = told.recorded_reserved_bytes - told.predicted_reserved_bytes
        out.print(
            f"      reserved   {size(told.predicted_reserved_bytes)}; recorded {size(told.recorded_reserved_bytes)}, "
            f"{_by(difference)}"
        )
    step = told.step
    if step is not None:
        several = f"has {step.num_steps} equal steps, of which the last is compared"
        out.print(f"the recording    {several if step.num_steps > 1 else 'has no equal steps, and is compared as one'}")
        if step.parts_at is None:
            said = "the curves are within 2 % of the recorded peak of one another throughout"
        else:
            line = "" if step.place is None else f", at {_short(step.place)}"
            said = f"the curves part {step.parts_at:.0%} into the step{line}: recorded {_by(step.parts_by)}"
        out.print(f"over the step    {said}", markup=False)
        out.print(f"                 farthest {step.farthest_at:.0%} into it: recorded {_by(step.farthest_by)}")
    out.print()


def _by(num_bytes: int) -> str:
    return f"{'+' if num_bytes >= 0 else '-'}{size(abs(num_bytes))}"


def _show_device(each: RecordedDeviceShown, screen: Screen) -> None:
    out = screen.out
    settings = each.settings.text or "the defaults"
    assumed = "" if each.has_settings else " (assumed: the recording does not say)"
    out.print(f"[bold]device {each.device}[/], settings: {settings}{assumed}")
    out.print(f"peak allocated   {_exact(each.peak_allocated_bytes)}")
    out.print(f"peak reserved    {_exact(each.peak_reserved_bytes)}")
    if not each.num_events:
        out.print("recording        the end of a run, without a trace: these are its bytes, and nothing was simulated")
    else:
        out.print(
            f"recording        {each.num_events:,} events; it began with {size(each.start_allocated_bytes)} allocated"
            f" and ends with {size(each.final_allocated_bytes)}"
        )
        out.print(f"simulation       {_compared(each)}")
    if each.out_of_memory:
        out.print(f"out of memory    {each.out_of_memory} request{'' if each.out_of_memory == 1 else 's'} failed")
    made = table("What was reserved when most was", "part", "why", "bytes", num_texts=2)
    for name, num_bytes, meaning in each.at_peak.parts:
        made.add_row(name, meaning, size(num_bytes))
    out.print(made)
    if each.largest:
        made = table("The largest tensors when most was allocated", "allocated at", "number", "bytes each", num_texts=1)
        for (place, num_bytes), number in Counter(
            (_place(tensor), tensor.num_bytes) for tensor in each.largest
        ).items():
            made.add_row(place, str(number), size(num_bytes))
        out.print(made)


def _compared(each: RecordedDeviceShown) -> str:
    counts = (
        f"{each.at_recorded_address:,} of {each.allocations:,} allocations at the recorded address, "
        f"{each.device_requests_right:,} of {each.device_requests:,} requests to the driver and "
        f"{each.releases_right:,} of {each.releases:,} releases as recorded"
    )
    if each.is_exact:
        return counts
    return f"{counts}. The peaks are the simulation's, and may be off from where it differs"


def _place(tensor: TensorShown) -> str:
    if tensor.place is None:
        return "before the recording" if tensor.is_older else "no stack was recorded"
    return _short(tensor.place)


def _short(place: Frame) -> str:
    if not place.line:  # a line of C++ whose file is not known
        return place.function.partition("(")[0]
    short = "/".join(place.file.replace("\\", "/").split("/")[-3:])
    return f"{short}:{place.line} {place.function}"


def _exact(num_bytes: int) -> str:
    return f"{size(num_bytes)} ({num_bytes:,} bytes)"
