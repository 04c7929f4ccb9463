"""The contents of a page, as plain data. The page embeds this as JSON and computes no figures of its own."""

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
"""Version of the embedded data's format."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Label(_Data):
    """The operator that runs at a moment, and where."""

    op: str
    block: str
    """Path of the block; "" outside the blocks."""
    module: str
    """Path of the module inside the block; "" for the block itself, or if the log does not record it."""
    phase: Literal["forward", "backward", "replay", "optimizer"]


class Curve(_Data):
    """Bytes alive over a step. The lists have one item for each drawn moment."""

    num_moments: int
    """Number of operators that run in the step, including replayed ones."""
    bucket: int
    """Number of consecutive moments of which only the highest and lowest are drawn; 1 if all are drawn."""
    moments: list[int]
    """Which moments are drawn, in order."""
    labels: list[int]
    """What runs: indices into `PageData.labels`."""
    series: dict[str, list[int]]
    """Bytes by category, for categories that are ever above 0."""
    peak: int
    """Index, in these lists, of the first moment of the peak."""
    backward: int
    """The first moment of the backward pass."""
    end: int
    """The first moment after the backward pass."""
    seconds: list[float]
    """When each drawn operator finishes, as measured or by the device's roofline, from the start of the step."""
    backward_seconds: float
    """When the backward pass begins."""
    end_seconds: float
    """When the backward pass ends."""
    total_seconds: float
    """When the step ends."""


class BlockOperator(_Data):
    """One operator of a block that produces a tensor, or the block's inputs."""

    op: str
    module: str
    num_bytes: int
    """Bytes of its results."""
    flops: int
    seconds: float
    """Time to run it once."""


class BlockKind(_Data):
    """Layers that run the same operators on the same shapes."""

    name: str
    num_layers: int
    num_views: int
    """Operators that produce no new storage, such as views: not drawn."""
    operators: list[BlockOperator]


class BlockGroup(_Data):
    """Layers of one kind with the same decisions."""

    kind: int
    """Index into `PageData.kinds`."""
    layers: str
    """The layers, as slices over all layers."""
    num_layers: int
    decisions: str
    """A letter for each operator: `s`ave, `r`ecompute, `o`ffload, or `-` if backward does not need its results."""
    saved_bytes: int
    """Bytes of its own results that one layer saves."""
    sent_bytes: int
    """Bytes that one layer offloads."""
    replay_seconds: float
    """Time that one layer's replays take."""


class PlanView(_Data):
    """One solved plan with everything that the page shows about it."""

    asked: bool
    """Whether it is the requested plan."""
    budget_bytes: int
    """The budget it was solved for."""
    headroom: float
    """The fraction of the requested budget that stays free."""
    peak_bytes: int
    peak_at: str
    peak_words: list[str]
    """Where the peak is, what it consists of and what would lower it: one sentence each."""
    step_time_ratio: float
    """Step time relative to saving everything."""
    bound: float
    """Lower bound on the ratio within the budget."""
    gap: float
    replayed_flops: int
    num_replayed: int
    replay_seconds: float
    saved_bytes: int
    """Bytes alive when the backward pass begins, beyond those alive between steps."""
    sent_bytes: int
    curve: Curve
    groups: list[BlockGroup]
    plan_json: str
    """The plan file."""


class ModeView(_Data):
    """A named mode, for comparison with the frontier."""

    name: str
    peak_bytes: int
    step_time_ratio: float
    replayed_flops: int


class MeasuredRow(_Data):
    """One figure of the requested plan, predicted and measured."""

    name: str
    unit: Literal["bytes", "flops", "count"]
    predicted: int
    measured: int


class PageData(_Data):
    """The contents of a page. Made by `build`."""

    version: int = PAGE_VERSION
    name: str
    """The model's name."""
    device: str
    device_name: str
    device_bytes: int
    asked_bytes: int
    """The budget as requested, including headroom."""
    shapes: list[str]
    optimizer: str
    microbatches: int
    shard: int
    routing: str
    offload: str
    """Where activations may be offloaded to; "" if offloading is off."""
    num_layers: int
    step_seconds: float
    """Time of forward and backward with everything saved, as measured or by the device's roofline."""
    constant_bytes: dict[str, int]
    """Categories that stay constant throughout the step, for every plan."""
    num_wanted: int
    """How many different plans were searched for."""
    exhausted: bool
    """Whether there are fewer because no other budget yields another plan."""
    plans: list[PlanView]
    """Different solved plans, from the smallest peak to the largest."""
    modes: list[ModeView]
    kinds: list[BlockKind]
    labels: list[Label]
    measured: list[MeasuredRow] | None = None
    """None if nothing was measured."""
