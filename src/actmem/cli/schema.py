"""What each command prints with `--json`, as data. `actmem schema COMMAND` prints the form, docs/schema/ has it too."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "SCHEMAS",
    "Cause",
    "ConfigShown",
    "DemoRow",
    "DemoShown",
    "DeviceShown",
    "DevicesShown",
    "DoctorShown",
    "ExplainShown",
    "Failed",
    "Finding",
    "FitShown",
    "Group",
    "LargestShown",
    "MeasureShown",
    "Measured",
    "ModelShown",
    "Part",
    "Point",
    "Row",
    "ShowShown",
    "VerifyShown",
    "schema_of",
]


class Document(BaseModel):
    """Be frozen, and refuse what is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelShown(Document):
    """Which model, and which batch."""

    name: str
    """As it was typed."""
    source: Literal["built-in", "tiny", "config", "function"]
    num_parameters: int
    num_blocks: int
    shapes: tuple[str, ...]
    """The tensors of the batch, such as `input_ids int64 [1, 8192]`."""


class DeviceShown(Document):
    """What a device can do."""

    key: str
    name: str
    memory_bytes: int
    flops_per_second: dict[str, float]
    memory_bytes_per_second: float | None
    host_link_bytes_per_second: float | None
    nvme: str | None
    """The class of drives that its host is taken to have."""
    sources: dict[str, str]
    """Where each figure is from."""


class Part(Document):
    """What one category takes at the peak."""

    category: str
    num_bytes: int


class Point(Document):
    """A plan or a mode on the curve of memory against time."""

    name: str
    peak_bytes: int
    step_time_ratio: float
    """Seconds of forward and backward, over those with everything saved."""
    replayed_flops: int
    fits: bool
    """Whether it stays within the budget."""


class FitShown(Document):
    """What `actmem fit` prints."""

    command: Literal["fit"] = "fit"
    model: ModelShown
    device: DeviceShown
    asked_bytes: int
    """The budget as it was typed."""
    headroom: float
    """The part of it that is left to the allocator."""
    budget_bytes: int
    """What is left for tensors."""
    peak_bytes: int
    """The predicted peak of the plan."""
    peak_at: str
    peak_words: tuple[str, ...]
    """Where the peak is, what it consists of, and what would lower it: a sentence each."""
    parts: tuple[Part, ...]
    """What the peak is made of. The sum is `peak_bytes`."""
    step_seconds: float
    """Forward and backward with everything saved, by the device's roofline."""
    step_time_ratio: float
    bound: float
    """No plan within the budget has a smaller step time ratio than this."""
    gap: float
    replayed_flops: int
    modes: tuple[Point, ...]
    """The named modes."""
    frontier: tuple[Point, ...]
    """The best plans at several budgets, without offloading, from the smallest peak to saving everything."""
    plan: dict[str, Any]
    """The plan file."""
    written: dict[str, str]
    """The files that were written: plan, report, timeline."""


class Row(Document):
    """One operator of a block: what becomes of its result."""

    op: str
    module: str
    """Path inside the block; "" is the block itself."""
    num_bytes: int
    """Of what it makes."""
    dtype: str
    """What it computes in."""
    decision: Literal["save", "recompute", "offload", "given"]
    """What the rules say; `given` for what the block is called with."""
    outcome: Literal["held", "sent away", "replayed", "not needed"]
    """What then happens: `not needed` if backward needs neither it nor what is made from it."""
    held_bytes: int
    flops: int
    seconds: float | None
    """On the device, if one was named."""
    why: str | None
    """Why it cannot be replayed, if it cannot."""


class Group(Document):
    """Layers that do the same under the same decisions."""

    layers: tuple[str, ...]
    held_bytes: int
    """In each of them, until its backward."""
    replayed_flops: int
    rows: tuple[Row, ...]


class ShowShown(Document):
    """What `actmem show` prints."""

    command: Literal["show"] = "show"
    model: ModelShown
    mode: str
    device: str | None
    peak_bytes: int
    peak_at: str
    parts: tuple[Part, ...]
    saved_bytes: int
    """What is alive when backward begins, beyond what is alive between steps."""
    replayed_flops: int
    num_replayed: int
    sent_bytes: int
    step_time_ratio: float | None
    """On the device, if one was named."""
    groups: tuple[Group, ...]


class Measured(Document):
    """One measured step."""

    peak_bytes: int
    predicted_bytes: int
    """The peak that was predicted for it."""
    saved_bytes: int
    by_category: dict[str, int]
    peak_at: str
    forward_flops: int
    backward_flops: int
    replayed_flops: int
    num_replayed: int
    seconds: float
    """Of a whole step: the median of several, which were not watched."""


class MeasureShown(Document):
    """What `actmem measure` prints."""

    command: Literal["measure"] = "measure"
    model: ModelShown
    on: str
    """The device that it ran on."""
    mode: str | None
    plain: Measured
    under_mode: Measured | None


class VerifyShown(Document):
    """What `actmem verify` prints."""

    command: Literal["verify"] = "verify"
    model: ModelShown
    on: str
    mode: str
    equal: bool
    difference: str | None
    """The first thing that the mode changes."""
    irreproducible: tuple[str, ...]
    """What differs between two plain runs already."""
    notes: tuple[str, ...]
    saved_bytes: int
    num_replayed: int


class LargestShown(Document):
    """What `actmem largest` prints."""

    command: Literal["largest"] = "largest"
    model: ModelShown
    device: DeviceShown
    vary: Literal["sequence", "batch"]
    size: int
    refused: int | None
    """The smallest size that was tried and does not fit."""
    budget_bytes: int
    peak_bytes: int
    step_time_ratio: float
    plan: dict[str, Any]
    fit_command: str
    """The command that writes this plan, with every option that was given."""


class Finding(Document):
    """One thing that the doctor found."""

    check: str
    severity: Literal["problem", "warning", "note"]
    found: str
    why: str
    change: str
    """The line to change."""
    actmem: str
    """What actmem does about it."""


class ConfigShown(Document):
    """What a configuration of another system becomes here."""

    system: str
    """Whose it was recognised as."""
    said: dict[str, Any]
    """What it says about activations, by its own names."""
    becomes: str | None
    """The call that does the same here; null where nothing is to be applied."""
    notes: tuple[str, ...]
    """What is not as it was there, and what is not actmem's business."""


class DoctorShown(Document):
    """What `actmem doctor` prints."""

    command: Literal["doctor"] = "doctor"
    config: ConfigShown | None = None
    """With --config: what the file becomes here."""
    ok: bool
    """Whether there is no problem; warnings and notes may be there."""
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    """Checks that found nothing."""
    skipped: dict[str, str]
    """Checks that could not be made, and why."""


class Cause(Document):
    """One possible cause of a message."""

    name: str
    what: str
    """What happened."""
    fix: str
    actmem: str
    """What actmem does about it."""
    evidence: tuple[str, ...]
    """What was seen in the text."""
    reports: tuple[str, ...]
    """Public threads in which it was seen."""


class ExplainShown(Document):
    """What `actmem explain` prints."""

    command: Literal["explain"] = "explain"
    known: bool
    """Whether a cause was found."""
    causes: tuple[Cause, ...]
    """The likeliest first."""


class DevicesShown(Document):
    """What `actmem devices` prints."""

    command: Literal["devices"] = "devices"
    devices: tuple[DeviceShown, ...]


class DemoRow(Document):
    """Training under one mode."""

    name: str
    peak_bytes: int
    saved_bytes: int
    replayed_flops: int
    num_replayed: int
    time_ratio: float
    gradients_equal: bool
    loss_equal: bool


class DemoShown(Document):
    """What `actmem demo` prints."""

    command: Literal["demo"] = "demo"
    ok: bool
    rows: tuple[DemoRow, ...]
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    budget_equal: bool
    """The step under the budget has the bits of plain training's."""


class Failed(Document):
    """What any command prints when it fails."""

    error: str
    """The kind of error."""
    message: str
    exit_code: int = Field(ge=1)


SCHEMAS: dict[str, type[Document]] = {
    "fit": FitShown,
    "show": ShowShown,
    "measure": MeasureShown,
    "verify": VerifyShown,
    "largest": LargestShown,
    "doctor": DoctorShown,
    "explain": ExplainShown,
    "devices": DevicesShown,
    "demo": DemoShown,
    "error": Failed,
}
"""The form of each document by the name of its command."""


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints with `--json`.

    >>> sorted(schema_of("explain")["properties"])
    ['causes', 'command', 'known']
    """
    found = SCHEMAS[command].model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
