"""All that a page shows, as plain data. The page embeds it as JSON and computes nothing that is not in it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "PAGE_VERSION",
    "BlockGroup",
    "BlockKind",
    "BlockOperator",
    "Curve",
    "Label",
    "MeasuredRow",
    "ModeView",
    "PageData",
    "PlanView",
]

PAGE_VERSION = 2
"""The version of the embedded data's form."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Label(_Data):
    """What runs at a moment."""

    op: str
    block: str
    """Path of the block; "" outside the blocks."""
    module: str
    """Path of the module inside the block; "" for the block itself, or where the log leaves it open."""
    phase: Literal["forward", "backward", "replay", "optimizer"]


class Curve(_Data):
    """Bytes alive over a step. The lists have one item for each drawn moment."""

    num_moments: int
    """How many operators run in the step, replayed ones included."""
    bucket: int
    """Of so many moments in a row the highest and the lowest are drawn; 1 if all are."""
    moments: list[int]
    """Which moments are drawn, in order."""
    labels: list[int]
    """What runs: indices into `PageData.labels`."""
    series: dict[str, list[int]]
    """Bytes by category, for those that are ever above 0."""
    peak: int
    """Index, in these lists, of the first moment at which most bytes are alive."""
    backward: int
    """The first moment of backward."""
    end: int
    """The first moment after it."""
    seconds: list[float]
    """When the operators of the drawn moments have run, by the device's roofline, from the beginning of the step."""
    backward_seconds: float
    """When backward begins."""
    end_seconds: float
    """When it has ended."""
    total_seconds: float
    """When the step has ended."""


class BlockOperator(_Data):
    """One operator of a block that makes something, or what the block is given."""

    op: str
    module: str
    num_bytes: int
    """What it makes."""
    flops: int
    seconds: float
    """What running it takes once."""


class BlockKind(_Data):
    """Layers that run the same operators on the same shapes."""

    name: str
    num_layers: int
    num_views: int
    """Operators that make nothing, such as views: not drawn."""
    operators: list[BlockOperator]


class BlockGroup(_Data):
    """Layers of one kind for which a plan says the same."""

    kind: int
    """Index into `PageData.kinds`."""
    layers: str
    """Which, as slice text over all layers."""
    num_layers: int
    decisions: str
    """A letter for each operator: `s`ave, `r`ecompute, `o`ffload, or `-` where backward needs nothing of it."""
    saved_bytes: int
    """What one layer saves of what it makes."""
    sent_bytes: int
    """What one layer sends away."""
    replay_seconds: float
    """What one layer's replays take."""


class PlanView(_Data):
    """One solved plan, and all that is shown of it."""

    asked: bool
    """Whether it is the plan that was asked for."""
    budget_bytes: int
    """What it was solved for."""
    headroom: float
    """The part of the budget that was taken off before, for the allocator."""
    peak_bytes: int
    peak_at: str
    peak_words: list[str]
    """Where the peak is, what it consists of and what would lower it: a sentence each."""
    step_time_ratio: float
    """Against saving everything."""
    bound: float
    """No plan within the budget has a smaller ratio."""
    gap: float
    replayed_flops: int
    num_replayed: int
    replay_seconds: float
    saved_bytes: int
    """What is alive when backward begins, beyond what is alive between steps."""
    sent_bytes: int
    curve: Curve
    groups: list[BlockGroup]
    plan_json: str
    """The plan file."""


class ModeView(_Data):
    """A named mode, beside the frontier."""

    name: str
    peak_bytes: int
    step_time_ratio: float
    replayed_flops: int


class MeasuredRow(_Data):
    """One figure of the plan that was asked for, foretold and measured."""

    name: str
    unit: Literal["bytes", "flops", "count"]
    predicted: int
    measured: int


class PageData(_Data):
    """All that a page shows. Made by `build`."""

    version: int = PAGE_VERSION
    name: str
    """What the model is called."""
    device: str
    device_name: str
    device_bytes: int
    asked_bytes: int
    """The budget as it was asked for, headroom included."""
    shapes: list[str]
    optimizer: str
    microbatches: int
    shard: int
    routing: str
    offload: str
    """Where values may be sent, "" if nowhere."""
    num_layers: int
    step_seconds: float
    """Forward and backward with everything saved, by the device's roofline."""
    constant_bytes: dict[str, int]
    """Categories that are the same all through the step, for every plan."""
    num_wanted: int
    """How many different plans were looked for."""
    exhausted: bool
    """Whether there are fewer because no other budget gives another plan."""
    plans: list[PlanView]
    """Different solved plans, from the smallest peak to the largest."""
    modes: list[ModeView]
    kinds: list[BlockKind]
    labels: list[Label]
    measured: list[MeasuredRow] | None = None
    """None if nothing was measured."""
