"""What can be typed: one small class for each command, and its options. Plain data, without torch.

The texts under the fields are what `--help` shows.
"""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

__all__ = [
    "COMMANDS",
    "Command",
    "Common",
    "Demo",
    "Devices",
    "Doctor",
    "Explain",
    "Fit",
    "Largest",
    "Loading",
    "Measure",
    "Planning",
    "Schema",
    "Show",
    "Verify",
]

Dtype = Literal["bfloat16", "float16", "float32"]
Optimizer = Literal["adamw", "adam", "sgd", "none"]
_Number = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
_Part = Annotated[float | None, arg(metavar="PART", help_behavior_hint="")]
_Text = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
_Mode = Annotated[str | None, arg(metavar="MODE", help_behavior_hint="")]
_File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
_Dtype = Annotated[Dtype | None, arg(help_behavior_hint="")]
_Flag = Annotated[bool, arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Common:
    """What every command takes."""

    _: KW_ONLY
    json: _Flag = False
    """Print one JSON document on stdout and nothing else; `actmem schema COMMAND` has its form."""
    traceback: _Flag = False
    """Show the whole traceback of an error. So does ACTMEM_TRACEBACK=1."""


@dataclass(frozen=True)
class Loading(Common):
    """Which model, and which batch."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """Built-in name (llama-3.1-8b), tiny:NAME, config.json of transformers, or package.module:function."""
    _: KW_ONLY
    sequence: _Number = None
    """Tokens in a sequence. Left out: 8192, or what the model was made for if that is less; 64 for tiny: models."""
    batch: _Number = None
    """Sequences or images in a batch. Left out: 1."""
    dtype: _Dtype = None
    """Of the parameters. Left out: as published; float32 for tiny: models; a function's model is left as it is."""
    blocks: _Text = None
    """Where the blocks are, such as model.layers. Left out: they are found."""


@dataclass(frozen=True)
class Planning(Loading):
    """What a budget is made for."""

    _: KW_ONLY
    budget: Annotated[str, arg(metavar="AMOUNT")]
    """Such as 72GiB, or 0.9 for a fraction of the device's memory. It counts every live tensor of a step."""
    device: _Text = None
    """Such as h100-80gb (see `actmem devices`), or `this` for this machine. Required where no accelerator is."""
    offload: Annotated[Literal["host", "disk"] | None, arg(help_behavior_hint="")] = None
    """Where values may be sent, if they may."""
    optimizer: Optimizer = "adamw"
    """Whose state and step are counted."""
    optimizer_dtype: _Dtype = None
    """Of the optimizer's state. Left out: that of the parameters."""
    microbatches: int = 1
    """Batches that gradients are accumulated over."""
    shard: int = 1
    """Ranks over which FSDP2 divides parameters, gradients and optimizer state."""
    headroom: _Part = None
    """Part of the budget that is left to the allocator. Left out: 0.05 on an accelerator, else 0."""
    fake: _Flag = True
    """Run one real step instead of one on tensors without bytes. For models that look at numbers."""


@dataclass(frozen=True)
class Fit(Planning):
    """Find the fastest plan within a memory budget, and say what it costs. Nothing is trained."""

    _: KW_ONLY
    frontier: int = 6
    """Points of the curve of memory against time; 0 leaves it out."""
    out: _File = None
    """Write the plan here: a .json or .toml file, for actmem.apply(model, actmem.FromPlan(...))."""
    report: _File = None
    """Write a page with pictures here: one .html file that needs no network."""
    timeline: _File = None
    """Write the memory of the step over time here, as a Chrome trace (.json)."""


@dataclass(frozen=True)
class _UnderMode(Loading):
    _: KW_ONLY
    mode: _Mode = None
    """full, full:every=2, selective:attention,matmul, targets:norm,mlp, offload:disk or save-everything."""
    plan: _File = None
    """A plan file, as `actmem fit ... --out` writes it, instead of a mode."""


@dataclass(frozen=True)
class Show(_UnderMode):
    """Show what a mode or a plan does to each value of each block. Nothing is run."""

    _: KW_ONLY
    device: _Text = None
    """Whose speed to take for the seconds of each operator. Left out: FLOPs only."""
    optimizer: Optimizer = "adamw"
    """Whose state and step are counted."""
    min_bytes: int = 0
    """Leave out values that are smaller."""
    fake: _Flag = True
    """Run one real step instead of one on tensors without bytes. For models that look at numbers."""


@dataclass(frozen=True)
class Measure(_UnderMode):
    """Run real training steps, plain and under a mode or a plan, and say what they cost."""

    _: KW_ONLY
    optimizer: Optimizer = "adamw"
    """What steps."""
    on: _Text = None
    """Where to run, such as cpu or cuda. Left out: on the accelerator if there is one."""


@dataclass(frozen=True)
class Verify(_UnderMode):
    """Compare a step under a mode or a plan with a plain one, to the bit."""

    _: KW_ONLY
    seed: int = 0
    """For the random operators of both steps."""
    on: _Text = None
    """Where to run, such as cpu or cuda. Left out: on the accelerator if there is one."""


@dataclass(frozen=True)
class Largest(Planning):
    """Find the longest sequence, or the largest batch, that fits a budget."""

    _: KW_ONLY
    vary: Literal["sequence", "batch"]
    """What is made larger."""
    step: _Number = None
    """Only multiples of this are tried. Left out: 128 for sequences, 1 for batches."""
    most: int = 2**22
    """Nothing above this is tried."""


@dataclass(frozen=True)
class Doctor(Common):
    """Look for mistakes in a model and in the settings of its training that cost memory or change results."""

    _: KW_ONLY
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None
    """As for `actmem fit`. Left out: only settings are looked at."""
    trainer_args: _File = None
    """Training arguments of transformers or TRL, as JSON or YAML."""
    accelerate: _File = None
    """A configuration of accelerate."""
    deepspeed: _File = None
    """A configuration of DeepSpeed."""
    config: _File = None
    """A configuration of axolotl, NeMo Automodel, prime-rl or torchtitan: says what it becomes here."""
    mode: _Mode = None
    """A mode to check with, as for `actmem show`."""
    blocks: _Text = None
    """As for `actmem fit`."""
    run: _Flag = False
    """Run a few real steps too: determinism, gradients, buffers, memory. For models that fit this machine."""
    sequence: _Number = None
    """As for `actmem fit`."""
    batch: _Number = None
    """As for `actmem fit`."""
    dtype: _Dtype = None
    """As for `actmem fit`."""


@dataclass(frozen=True)
class Explain(Common):
    """Name the cause of an error message, and what repairs it."""

    file: Annotated[Positional[str], arg(metavar="[FILE]", help_behavior_hint="")] = "-"
    """A file with the message, the traceback or the log; - reads stdin."""


@dataclass(frozen=True)
class Devices(Common):
    """List the known devices, with the sources of their figures."""

    name: Annotated[Positional[str | None], arg(metavar="[NAME]", help_behavior_hint="")] = None
    """One device, with every figure and its source. Left out: all, in a table."""


@dataclass(frozen=True)
class Demo(Common):
    """Train a small model under several modes, and plan a large one. Takes about half a minute."""


@dataclass(frozen=True)
class Schema(Common):
    """Print the JSON schema of what a command prints with --json."""

    command: Annotated[Positional[str], arg(metavar="COMMAND", help_behavior_hint="")]
    """A command, or `error` for what is printed when one fails."""


Command = Fit | Show | Measure | Verify | Largest | Doctor | Explain | Devices | Demo | Schema

COMMANDS: dict[str, type[Command]] = {
    "fit": Fit,
    "show": Show,
    "measure": Measure,
    "verify": Verify,
    "largest": Largest,
    "doctor": Doctor,
    "explain": Explain,
    "devices": Devices,
    "demo": Demo,
    "schema": Schema,
}
"""The commands by name, in the order of the help."""
