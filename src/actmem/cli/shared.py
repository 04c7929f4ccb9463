"""What several commands share: the device, the model and its parts, and how a plan is saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from actmem.allocator import AllocatorSettings
from actmem.cli.commands import Planning, Stepping
from actmem.cli.failures import Mistakes
from actmem.cli.loaded_model import Loaded, check_model
from actmem.cli.schema import Document
from actmem.cli.tuning_options import asked_split
from actmem.devices import THIS_MACHINE, Device, device, known_devices
from actmem.errors import DeviceError, ModeError, PlanError
from actmem.modes import check_allowed
from actmem.plan import Plan
from actmem.profiles import Profile
from actmem.shapes import TensorShape
from actmem.simulation import NAMES, Ground, Simulated, resolved, walk
from actmem.units import parse_budget, size

__all__ = [
    "ModelShown",
    "Part",
    "check_file",
    "check_planning",
    "check_stepping",
    "chosen_device",
    "described",
    "document_of",
    "measured",
    "measures_of",
    "options_of",
    "parts_of",
    "parts_text",
    "save_plan",
    "toml_of",
]

_HERE = ("this", THIS_MACHINE, "cpu")


@dataclass(frozen=True, kw_only=True)
class ModelShown(Document):
    """A model and its batch."""

    name: str
    """As typed on the command line."""
    source: Literal["built-in", "tiny", "config", "function"]
    num_parameters: int
    num_blocks: int
    shapes: tuple[str, ...]
    """The tensors of the batch, such as `input_ids int64 [1, 8192]`."""


def chosen_device(asked: str | None) -> Device | None:
    """Resolve the --device option; None means this machine.

    >>> chosen_device("H100 80GB").key, chosen_device("this")
    ('h100-80gb', None)

    Raises:
        DeviceError: the device is not known, or none was named and there is no accelerator here.
    """
    if asked is None and not torch.accelerator.is_available():
        raise DeviceError(
            f"no device was named and this machine has no accelerator. Write --device h100-80gb, or another of: "
            f"{', '.join(known_devices())}; or --device this, for this machine's CPU."
        )
    return None if asked is None or asked.lower() in _HERE else device(asked)


def check_planning(asked: Planning, mistakes: Mistakes) -> Device | None:
    """Record mistakes in the model and the planning options before the work starts. Returns the chosen device.

    >>> mistakes = Mistakes()
    >>> check_planning(Planning("tiny:llama-3.1-8b", budget="90%", device="h100-80gb"), mistakes).key
    'h100-80gb'
    >>> mistakes.raise_all()
    """
    from actmem.planner import check_allocator  # its solver takes a while to import

    chosen = check_stepping(asked, mistakes)
    with mistakes.noted():
        parse_budget(asked.budget, device_bytes=chosen.memory_bytes if chosen else 2**40)
    with mistakes.noted():
        if asked.headroom is not None and not 0 <= asked.headroom < 1:
            raise ModeError(f"--headroom {asked.headroom} is not permitted. Expected a number from 0 to below 1: 0.05.")
    with mistakes.noted():
        settings = AllocatorSettings.parse(asked.allocator)
        if chosen is not None:
            check_allocator(settings, chosen)
    with mistakes.noted():
        check_allowed(measures_of(asked))
    return chosen


def check_stepping(asked: Stepping, mistakes: Mistakes) -> Device | None:
    """Record mistakes in the model and in what its step does. Returns the chosen device."""
    chosen = None
    with mistakes.noted():
        chosen = chosen_device(asked.device)
    for name, number in (("microbatches", asked.microbatches), ("shard", asked.shard)):
        with mistakes.noted():
            if number < 1:
                raise ModeError(f"--{name} {number} is not permitted. Expected a whole number of at least 1.")
    with mistakes.noted():
        asked_split(asked)
    check_model(asked, mistakes)
    return chosen


def check_file(option: str, path: Path, suffixes: Sequence[str], taken: dict[Path, str]) -> None:
    """Refuse an output file that could not be written, or that another option writes."""
    if path.suffix not in suffixes:
        raise ModeError(f"--{option} {path} must end in {' or '.join(suffixes)}, which selects the format.")
    if not path.resolve().parent.is_dir():
        raise ModeError(f"--{option} {path} is in a folder that does not exist. Run: mkdir -p {path.parent}")
    if (other := taken.setdefault(path.resolve(), option)) != option:
        raise ModeError(f"--{option} {path} is also the file of --{other}. Choose another name for one of them.")


def measured(chosen: Device | None, model: nn.Module) -> Device:
    """Return the chosen device; measure this machine, in the model's dtypes, if none was chosen."""
    return chosen or resolved(None, {str(p.dtype).removeprefix("torch.") for p in model.parameters()})


def described(loaded: Loaded, blocks: Sequence[str], shapes: Sequence[TensorShape]) -> ModelShown:
    """Summarise the model and its batch for output."""
    return ModelShown(
        name=loaded.name,
        source=loaded.source,
        num_parameters=sum(p.numel() for p in loaded.model.parameters()),
        num_blocks=len(blocks),
        shapes=tuple(map(str, shapes)),
    )


def document_of(plan: Plan) -> dict[str, Any]:
    """Return the contents of the plan file as a JSON object."""
    return cast(dict[str, Any], json.loads(plan.to_json()))


def measures_of(asked: Planning) -> tuple[str, ...]:
    """Return what a plan may use beyond decisions about blocks.

    >>> measures_of(Planning("tiny:llama-3.1-8b", budget="90%", allow="split, offload"))
    ('split', 'offload')
    """
    return tuple(name.strip() for name in asked.allow.split(",") if name.strip())


def options_of(asked: Stepping) -> dict[str, Any]:
    """Translate command-line options to arguments of `actmem.profile`."""
    return {
        "blocks": asked.blocks,
        "optimizer": None if asked.optimizer == "none" else asked.optimizer,
        "optimizer_dtype": None if asked.optimizer_dtype is None else getattr(torch, asked.optimizer_dtype),
        "microbatches": asked.microbatches,
        "shard": asked.shard,
        "fake": asked.fake,
        "split": asked_split(asked),
    }


@dataclass(frozen=True, kw_only=True)
class Part(Document):
    """Bytes of one category at the peak."""

    category: str
    num_bytes: int


def parts_of(profile: Profile, plan: Plan) -> tuple[tuple[Part, ...], Simulated]:
    """Break down the predicted peak of a step under a plan. The parts add up to the peak.

    Returns:
        The parts and the simulated step.

    >>> from actmem.decision_rules import Rule
    >>> parts_of(Profile(), Plan([Rule("save")], [], "", "SaveEverything()"))[0]
    ()
    """
    moments, simulated = walk(Ground(profile), plan)
    if moments.peak < 0:
        return (), simulated
    found = moments.constant_bytes | {c: series[moments.peak] for c, series in moments.by_category.items()}
    return tuple(Part(category=c, num_bytes=found[c]) for c in NAMES), simulated


def parts_text(parts: tuple[Part, ...]) -> str:
    """Format the parts on one line, without those of zero bytes.

    >>> parts_text((Part(category="saved", num_bytes=2048), Part(category="buffers", num_bytes=0)))
    'saved activations 2.0 KiB'
    """
    return ", ".join(f"{NAMES[part.category]} {size(part.num_bytes)}" for part in parts if part.num_bytes)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan as TOML if the file name ends in .toml, else as JSON. `Plan.load` reads both.

    Raises:
        PlanError: the file cannot be written.
    """
    if path.suffix != ".toml":
        plan.save(path)
        return
    try:
        path.write_text(toml_of(json.loads(plan.to_json())), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the plan file {str(path)!r}: {error.strerror}. Name another file.") from error


def toml_of(document: dict[str, Any]) -> str:
    """Format a plan document as TOML, omitting fields that are None.

    >>> print(toml_of({"version": 1, "blocks": ["a"], "rules": [{"decision": "save"}], "offload": {"to": "disk"}}))
    version = 1
    blocks = [
      "a",
    ]
    <BLANKLINE>
    [offload]
    to = "disk"
    <BLANKLINE>
    [[rules]]
    decision = "save"
    <BLANKLINE>
    """
    lines: list[str] = []
    tables: list[str] = []
    for key, value in document.items():
        if isinstance(value, dict):
            tables += ["", f"[{key}]", *_pairs(cast(dict[str, Any], value))]
        elif key != "rules":
            lines += _pairs({key: value})
    for rule in cast(list[dict[str, Any]], document["rules"]):
        tables += ["", "[[rules]]", *_pairs(rule)]
    return "\n".join([*lines, *tables]) + "\n"


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k)} = {_value(v)}" for k, v in cast(dict[str, Any], value).items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, list):
        return "\n".join(["[", *(f"  {_value(entry)}," for entry in cast(list[Any], value)), "]"])
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are written alike in JSON and TOML
