"""Commands and their options: one small dataclass per command. Plain data, without torch.

`--help` shows the docstrings under the fields.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

__all__ = [
    "COMMANDS",
    "Adapting",
    "Command",
    "Common",
    "Demo",
    "Devices",
    "Doctor",
    "Explain",
    "Export",
    "Fit",
    "Frontier",
    "Largest",
    "Loading",
    "Measure",
    "Native",
    "Planning",
    "Ranks",
    "Schema",
    "Show",
    "Spread",
    "Stepping",
    "Verify",
]

Dtype = Literal["bfloat16", "float16", "float32"]
Optimizer = Literal["adamw", "adamw_fused", "adam", "sgd", "none"]
_Number = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
_Part = Annotated[float | None, arg(metavar="FRACTION", help_behavior_hint="")]
_Text = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
_Mode = Annotated[str | None, arg(metavar="MODE", help_behavior_hint="")]
_File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
_Dtype = Annotated[Dtype | None, arg(help_behavior_hint="")]
_Settings = Annotated[str, arg(metavar="SETTINGS", help_behavior_hint="")]
_Quant = Annotated[Literal["nf4", "int8"] | None, arg(help_behavior_hint="")]
_Pieces = Annotated[str | None, arg(metavar="NAME=N,...", help_behavior_hint="")]
_Flag = Annotated[bool, arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Common:
    """Options of every command."""

    _: KW_ONLY
    json: _Flag = False
    """Print one JSON document on stdout and nothing else; `actmem schema COMMAND` prints its schema."""
    traceback: _Flag = False
    """Show the full traceback of an error. ACTMEM_TRACEBACK=1 does the same."""


@dataclass(frozen=True)
class Loading(Common):
    """Options that name a model and the size of its batch."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """Built-in name, tiny:NAME, a transformers config.json, a cached Hub name, or package.module:function."""
    _: KW_ONLY
    sequence: _Number = None
    """Tokens per sequence. Default: 8192, or the model's maximum if that is shorter; 64 for tiny: models."""
    batch: _Number = None
    """Sequences or images per batch. Default: 1."""
    dtype: _Dtype = None
    """Parameter dtype. Default: as published; float32 for tiny: models; unchanged for a function's model."""
    blocks: _Text = None
    """Path of the blocks, such as model.layers. Default: found automatically."""


@dataclass(frozen=True)
class Adapting(Loading):
    """Options that prepare a model for fine-tuning."""

    _: KW_ONLY
    lora: _Number = None
    """Rank of adapters on every linear layer but heads and routers; all else is frozen. Default: train everything."""
    quant: _Quant = None
    """Bits of the frozen weights under the adapters, made wide for each product. Default: as they are."""


@dataclass(frozen=True)
class Stepping(Adapting):
    """Options that say what a training step does, and where."""

    _: KW_ONLY
    device: _Text = None
    """A name from `actmem devices`, such as h100-80gb, or `this` for this machine. Default: its accelerator, if any."""
    offload: Annotated[Literal["host", "disk"] | None, arg(help_behavior_hint="")] = None
    """Where activations may be offloaded. Default: no offloading."""
    optimizer: Optimizer = "adamw"
    """Optimizer whose state and step are counted."""
    optimizer_dtype: _Dtype = None
    """Dtype of the optimizer state. Default: that of the parameters."""
    microbatches: int = 1
    """Number of batches over which gradients are accumulated."""
    shard: int = 1
    """Ranks over which FSDP2 divides parameters, gradients and optimizer state."""
    fake: _Flag = True
    """Run and time one real step, not a fake one. For models whose control flow depends on tensor values."""
    chunked_loss: _Flag = False
    """Compute logits and loss in chunks of tokens. Sums over tokens are then added in another order."""
    split: _Pieces = None
    """What to compute in pieces of tokens, and in how many: loss=16,mlp=8. Sums are then added in another order."""


@dataclass(frozen=True)
class Planning(Stepping):
    """Options of the commands that plan for a budget."""

    _: KW_ONLY
    budget: Annotated[str, arg(metavar="AMOUNT")]
    """Memory for every live tensor of a step, such as 72GiB, or 0.9 for a fraction of the device's memory."""
    headroom: _Part = None
    """Fraction of the budget to leave free. Default: 0."""
    allow: Annotated[str, arg(metavar="MEASURES", help_behavior_hint="")] = ""
    """What the plan may use: split, optimizer_state, step_in_backward, offload, with commas between. Default: none."""
    allocator: _Settings = ""
    """On a card, what PYTORCH_CUDA_ALLOC_CONF will be, such as expandable_segments:True. Default: torch's defaults."""


@dataclass(frozen=True)
class Spread:
    """Options that spread a job over ranks; the fields of `actmem.Layout`."""

    _: KW_ONLY
    layout: _File = None
    """Layout of a parallel job, as .json or .toml, instead of the options that follow."""
    dp_shard: int = 1
    """Ranks over which FSDP2 divides parameters, gradients and optimizer state, built and profiled as torch does."""
    dp_replicate: int = 1
    """Copies of these (HSDP)."""
    tp: int = 1
    """Ranks over which tensor parallel divides the matrices of each layer."""
    sequence_parallel: _Flag = False
    """Divide the sequence over the same ranks between the matrices."""
    cp: int = 1
    """Ranks over which context parallel divides the sequence: keys and values travel around a ring."""
    ep: int = 1
    """Ranks, among those of --dp-shard and --cp, over which expert parallel divides the experts."""
    routing: str = "balanced"
    """What to assume of routers: balanced, worst, a quantile such as 0.99, or a .json file of counts by expert."""
    pp: int = 1
    """Ranks over which a pipeline divides the layers. --microbatches then defaults to one for each stage."""
    schedule: _Text = None
    """Schedule of the pipeline, as torch names it. Default: 1F1B."""
    virtual: _Number = None
    """Stages of the pipeline on each rank. Default: as few as the schedule permits."""
    reshard_after_forward: _Flag = True
    """Keep what FSDP2 gathered after the forward pass, instead of gathering it again for backward."""


@dataclass(frozen=True)
class Fit(Spread, Planning):
    """Find the fastest plan within a memory budget and show what it costs. Nothing is trained."""

    _: KW_ONLY
    frontier: int = 6
    """Number of points on the memory-time frontier; 0 skips it."""
    out: _File = None
    """Write the plan to this .json or .toml file, for actmem.apply(model, actmem.FromPlan(...))."""
    report: _File = None
    """Write an interactive page to this .html file; it needs no network."""
    timeline: _File = None
    """Write the step's memory over time to this .json file, as a Chrome trace."""


@dataclass(frozen=True)
class _UnderMode(Adapting):
    _: KW_ONLY
    mode: _Mode = None
    """full, full:every=2, selective:attention,matmul, targets:norm,mlp, offload:disk or save-everything."""
    plan: _File = None
    """Plan file written by `actmem fit ... --out`, instead of a mode."""


@dataclass(frozen=True)
class Show(_UnderMode):
    """Show what a mode or plan does with each activation of each block. Nothing is run."""

    _: KW_ONLY
    device: _Text = None
    """Device whose speed gives each operator's time. Default: show FLOPs only."""
    optimizer: Optimizer = "adamw"
    """Optimizer whose state and step are counted."""
    min_bytes: int = 0
    """Hide smaller activations."""
    fake: _Flag = True
    """Run and time one real step, not a fake one. For models whose control flow depends on tensor values."""


@dataclass(frozen=True)
class Measure(_UnderMode):
    """Run real training steps, plain and under a mode or plan, and show what they cost."""

    _: KW_ONLY
    optimizer: Optimizer = "adamw"
    """Optimizer to train with."""
    on: _Text = None
    """Device to run on, such as cpu or cuda. Default: the accelerator if there is one."""


@dataclass(frozen=True)
class Verify(_UnderMode):
    """Check that a step under a mode or plan is bitwise equal to a plain one."""

    _: KW_ONLY
    seed: int = 0
    """Random seed of both steps."""
    on: _Text = None
    """Device to run on, such as cpu or cuda. Default: the accelerator if there is one."""


@dataclass(frozen=True)
class Export(_UnderMode):
    """Write a plan as the nearest settings of another system, with what they take there and what is lost."""

    _: KW_ONLY
    to: Literal["torchtitan", "megatron", "transformers", "deepspeed", "nemo", "axolotl"]
    """System to write settings for."""
    out: _File = None
    """Write the settings to this file. Default: only print them."""
    device: _Text = None
    """A name from `actmem devices`, such as h100-80gb, or `this` for this machine. Default: its accelerator, if any."""
    optimizer: Optimizer = "adamw"
    """Optimizer whose state and step are counted."""
    optimizer_dtype: _Dtype = None
    """Dtype of the optimizer state. Default: that of the parameters."""
    microbatches: int = 1
    """Number of batches over which gradients are accumulated."""
    shard: int = 1
    """Ranks over which FSDP2 divides parameters, gradients and optimizer state."""


@dataclass(frozen=True)
class Largest(Planning):
    """Find the longest sequence or the largest batch that fits a budget."""

    _: KW_ONLY
    vary: Literal["sequence", "batch"]
    """Dimension to grow."""
    multiple: _Number = None
    """Try only multiples of this. Default: 128 for sequences, 1 for batches."""
    most: int = 2**22
    """Largest size to try."""


@dataclass(frozen=True)
class Frontier(Stepping):
    """Show memory against time: the best plans at many budgets, also with offloading and pieces of tokens, if asked."""

    _: KW_ONLY
    points: int = 8
    """Number of plans on each curve."""


@dataclass(frozen=True)
class Ranks(Loading):
    """Find how many cards a training job needs, and the best ways to spread it over them. Nothing is trained."""

    _: KW_ONLY
    tokens_per_step: Annotated[int, arg(metavar="N", help_behavior_hint="")]
    """Tokens of a step, over all cards and microbatches: a multiple of the tokens of a sequence."""
    device: Annotated[str, arg(metavar="NAME", help_behavior_hint="")]
    """A name from `actmem devices`, such as h100-80gb."""
    budget: Annotated[str, arg(metavar="AMOUNT")] = "0.95"
    """Memory for each card, such as 72GiB, or a fraction of the device's memory."""
    cards: _Number = None
    """Number of cards to find layouts for. Default: the smallest that is enough."""
    optimizer: Optimizer = "adamw"
    """Optimizer whose state and step are counted."""
    layouts: int = 3
    """Number of layouts to build and profile for each number of cards."""
    most: int = 4096
    """Largest number of cards to try."""
    report: _File = None
    """Write the stages of the fastest layout, side by side, to this .html file; it needs no network."""


@dataclass(frozen=True)
class Doctor(Common):
    """Check a model and its training settings for mistakes that cost memory or change results."""

    _: KW_ONLY
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """As for `actmem fit`. Default: check only the settings."""
    trainer_args: _File = None
    """Training arguments of transformers or TRL, as JSON or YAML."""
    accelerate: _File = None
    """Configuration file of accelerate."""
    deepspeed: _File = None
    """Configuration file of DeepSpeed."""
    config: _File = None
    """Configuration file of axolotl, NeMo Automodel, prime-rl or torchtitan; also shows its actmem equivalent."""
    mode: _Mode = None
    """Mode to check with, as for `actmem show`."""
    blocks: _Text = None
    """As for `actmem fit`."""
    run: _Flag = False
    """Also run a few real steps: determinism, gradients, buffers, memory. The model must fit on this machine."""
    sequence: _Number = None
    """As for `actmem fit`."""
    batch: _Number = None
    """As for `actmem fit`."""
    dtype: _Dtype = None
    """As for `actmem fit`."""


@dataclass(frozen=True)
class Explain(Common):
    """Find the cause of an error message, and the fix."""

    file: Annotated[Positional[str], arg(metavar="[FILE]", help_behavior_hint="")] = "-"
    """File with the message, traceback or log; - reads stdin."""
    _: KW_ONLY
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """For an out-of-memory error: a built-in name, whose tensors are compared with the one that did not fit."""
    sequence: _Number = None
    """Tokens per sequence, for the same."""
    batch: _Number = None
    """Sequences per batch, for the same. Default: 1."""


@dataclass(frozen=True)
class Snapshot(Common):
    """Show what a memory snapshot of torch holds: peaks, unusable memory, the largest tensors. Nothing in it is run."""

    file: Annotated[Positional[str], arg(metavar="FILE", help_behavior_hint="")]
    """File that torch.cuda.memory._dump_snapshot or `actmem record` wrote: .pickle or .pickle.xz."""
    _: KW_ONLY
    plan: _File = None
    """Plan file to compare the recording with. Default: the plan in the file, if `actmem record` wrote it."""
    report: _File = None
    """Write an interactive page to this .html file; it needs no network."""
    largest: int = 10
    """Number of tensors at the peak to list."""


@dataclass(frozen=True)
class Record(_UnderMode):
    """Train a few steps on a CUDA device and record one, with plan and prediction, in a file to look into or send."""

    _: KW_ONLY
    out: Annotated[Path, arg(metavar="FILE", help_behavior_hint="")] = Path("step.pickle.xz")
    """File to write. Default: step.pickle.xz."""
    optimizer: Optimizer = "adamw"
    """Optimizer to train with."""


@dataclass(frozen=True)
class Devices(Common):
    """List the known devices and the sources of their figures."""

    name: Annotated[Positional[str | None], arg(metavar="[NAME]", help_behavior_hint="")] = None
    """Device to show with every figure and its source. Default: a table of all devices."""


@dataclass(frozen=True)
class Native(Common):
    """Build the native core of the tape with this machine's C++ compiler, check it, and keep it for native=True."""

    action: Annotated[Positional[Literal["build"]], arg(help_behavior_hint="")]
    """What to do: build."""
    _: KW_ONLY
    again: _Flag = False
    """Build it even if it was built before for this torch, this Python and this version of actmem."""


@dataclass(frozen=True)
class Demo(Common):
    """Train a small model under several modes and plan a large one. Takes about half a minute."""


@dataclass(frozen=True)
class Schema(Common):
    """Print the JSON schema of a command's --json output."""

    command: Annotated[Positional[str], arg(metavar="COMMAND", help_behavior_hint="")]
    """A command, or `error` for the output of a command that fails."""


Command = (
    Fit
    | Show
    | Measure
    | Verify
    | Largest
    | Frontier
    | Ranks
    | Export
    | Doctor
    | Explain
    | Snapshot
    | Record
    | Devices
    | Native
    | Demo
    | Schema
)

COMMANDS: dict[str, type[Command]] = {
    "fit": Fit,
    "show": Show,
    "measure": Measure,
    "verify": Verify,
    "largest": Largest,
    "frontier": Frontier,
    "ranks": Ranks,
    "export": Export,
    "doctor": Doctor,
    "explain": Explain,
    "snapshot": Snapshot,
    "record": Record,
    "devices": Devices,
    "native": Native,
    "demo": Demo,
    "schema": Schema,
}
"""The commands by name, in the order in which the help lists them."""
