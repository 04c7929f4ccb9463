"""Recorded training steps, predicted end to end from fake tensors: a section of `benchmarks/validation.py`.

Taken are the recordings of whole training steps (forward, backward, optimizer) whose model, step and optimizer are
fully known, that start from an empty allocator or run long enough to be steady, and whose process did nothing else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem.devices import device
from actmem.profiling import card_autocast
from actmem.simulation import card_memory, plan_of
from benchmarks.outcome import Bound, Outcome
from benchmarks.recorded_models import Decoder, OwnAdamW, cross_entropy
from benchmarks.table import rows

__all__ = ["STEPS", "Predicted", "RecordedStep", "predicted", "run", "tables"]

LEAST_EXACT = 8
"""So many steps must come out with the allocated peak equal to the byte."""


def _torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


@dataclass(frozen=True)
class RecordedStep:
    """A step, as its recording and its public script tell it."""

    file: str
    """How the recording's file name begins."""
    card: str
    """A card with the same cuBLAS workspace."""
    num_layers: int
    width: int
    inner: int
    num_heads: int
    sequence: int
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: int = 4
    vocab: int = 10_000
    autocast: str = ""
    """"" for none, "forward" for the model alone, "loss" for the loss, too."""
    zero: str = "first"
    """Where the gradients are set to None: "first", or "last"."""
    gathers: bool = True
    """Whether rotary positions allocate a tensor for rows of their table. A recording has the line of each request."""
    keeps: bool = False
    """Whether logits and loss stay in variables of the loop until the next step fills them again."""
    further: tuple[int, ...] = ()
    """Bytes of other tensors that the script has on the card: batches for several steps."""
    num_steps: int = 3
    """1 for a recording of the first step; else the steady state."""


def _medium(file: str, card: str, sequence: int, **more: Any) -> RecordedStep:
    return RecordedStep(file, card, 24, 1024, 4096, 16, sequence, **more)


def _xl(file: str, card: str, sequence: int, **more: Any) -> RecordedStep:
    return RecordedStep(file, card, 32, 2560, 10240, 32, sequence, **more)


_COURSE: dict[str, Any] = {"loss": cross_entropy, "optimizer": OwnAdamW}
_TORCH: dict[str, Any] = {"loss": _torch_loss, "optimizer": _foreach_adamw}

STEPS = (
    _medium("Wuyh11+assignment2-systems__memory_medium_training_ctx128", "a100-80gb", 128, keeps=True, **_TORCH),
    _medium(
        "CliffKai+assignment2-systems__memory_snapshot_medium_bwd", "h100-80gb", 128, zero="last", num_steps=1, **_TORCH
    ),
    RecordedStep(
        "CliffKai+assignment2-systems__memory_snapshot_large_bwd",
        *("h100-80gb", 36, 1280, 5120, 20, 128),
        zero="last",
        num_steps=1,
        **_TORCH,
    ),
    _medium(
        "Wedsonlin+assignment2-systems__medium_128_training",
        "a100-80gb",
        128,
        further=(20480,) * 2,
        gathers=False,
        **_COURSE,
    ),
    _medium(
        "Wedsonlin+assignment2-systems__medium_256_training",
        "a100-80gb",
        256,
        further=(40960,) * 2,
        gathers=False,
        **_COURSE,
    ),
    _xl("LINYUNLinYun+CS336-assignment2-systems__xl_ctx128_full_step_none", "a100-80gb", 128, gathers=False, **_TORCH),
    _xl("LINYUNLinYun+CS336-assignment2-systems__xl_ctx512_full_step_none", "a100-80gb", 512, gathers=False, **_TORCH),
    _xl(
        "LINYUNLinYun+CS336-assignment2-systems__xl_ctx128_full_step_bf16",
        "a100-80gb",
        128,
        autocast="forward",
        gathers=False,
        **_TORCH,
    ),
    RecordedStep(
        "mark2huang+stanford-cs336-assignment2-systems__memory_snapshot",
        *("a100-80gb", 12, 768, 3072, 12, 512),
        loss=lambda logits, _: logits.sum(),
        optimizer=_foreach_adamw,
        autocast="loss",
    ),
)
"""In the order in which they are shown."""


@dataclass(frozen=True)
class Predicted:
    """What a step takes."""

    allocated_bytes: int
    reserved_bytes: int


def predicted(step: RecordedStep) -> Predicted:
    """Predict what a step takes, from fake tensors."""
    with torch.device("meta"):
        sizes = (step.num_layers, step.width, step.inner, step.num_heads, step.sequence, step.vocab)
        model = Decoder(*sizes, gathers=step.gathers)
        tokens = torch.zeros(step.batch, step.sequence, dtype=torch.long)
        targets = torch.zeros(step.batch, step.sequence, dtype=torch.long)
    optimizer = step.optimizer(model.parameters())
    kept: list[Tensor] = []
    cast = card_autocast if step.autocast else contextlib.nullcontext

    def train() -> None:
        if step.zero == "first":
            optimizer.zero_grad(set_to_none=True)
        with cast():
            logits = model(tokens)
            loss = step.loss(logits, targets) if step.autocast == "loss" else None
        if loss is None:
            loss = step.loss(logits.float(), targets)
        if step.keeps:
            kept[:] = [logits, loss]
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()
        if step.zero == "last":
            optimizer.zero_grad(set_to_none=True)

    found = actmem.profile(model, step=train)
    plan = plan_of(found, actmem.SaveEverything())
    memory, _ = card_memory(found, plan, device(step.card), num_steps=step.num_steps, further=step.further)
    return Predicted(memory.allocated_bytes, memory.reserved_bytes)


def run(shared: Path) -> Outcome:
    """Predict every step, and compare it with its recording."""
    index = json.loads((shared / "recordings" / "index.json").read_text())
    outcome = Outcome("steps", {"steps": len(STEPS)})
    for step in STEPS:
        record = next(each for each in index if each["file"].startswith(step.file))
        seen = record["devices"][0]
        found = predicted(step)
        outcome.exact[f"{record['repo']} {record['path']}"] = {
            "model": f"{step.num_layers} layers, {step.width} wide, {step.batch} x {step.sequence}",
            "precision": "bf16 autocast" if step.autocast else "fp32",
            "optimizer": "by hand" if step.optimizer is OwnAdamW else "torch.optim.AdamW",
            "recorded_allocated_bytes": seen["peak_allocated"],
            "predicted_allocated_bytes": found.allocated_bytes,
            "recorded_reserved_bytes": seen["peak_reserved"],
            "predicted_reserved_bytes": found.reserved_bytes,
        }
    figures = list(outcome.exact.values())
    inexact = sum(each["recorded_allocated_bytes"] != each["predicted_allocated_bytes"] for each in figures)
    outcome.bounds = [
        Bound("steps whose allocated peak is not equal to the byte", inexact, len(STEPS) - LEAST_EXACT),
        Bound("allocated peak, largest error", max(abs(_off(each, "allocated")) for each in figures), 0.01),
        Bound("reserved peak, largest error", max(abs(_off(each, "reserved")) for each in figures), 0.01),
    ]
    return outcome


def _off(figures: dict[str, Any], kind: str) -> float:
    return figures[f"predicted_{kind}_bytes"] / figures[f"recorded_{kind}_bytes"] - 1


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Yield the section's lines for the page."""
    yield from rows(
        ["recording", "step", "allocated: recorded", "predicted", "off", "reserved: recorded", "predicted", "off"],
        [
            [
                name,
                f"{each['model']}, {each['precision']}, {each['optimizer']}",
                f"{each['recorded_allocated_bytes']:,}",
                f"{each['predicted_allocated_bytes']:,}",
                "equal" if not _off(each, "allocated") else f"{_off(each, 'allocated'):+.3%}",
                f"{each['recorded_reserved_bytes']:,}",
                f"{each['predicted_reserved_bytes']:,}",
                "equal" if not _off(each, "reserved") else f"{_off(each, 'reserved'):+.3%}",
            ]
            for name, each in result["exact"].items()
        ],
    )
