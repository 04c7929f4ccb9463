"""Plans of several models as one JSON document: `python -m tests.planner.planned`. Two runs print the same bytes."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import actmem
from actmem.catalogue import build, example, tiny
from benchmarks.models import UNetLike
from tests.flat_device import FLAT

DEVICE = FLAT


def peaks(model: nn.Module, batch: Any) -> tuple[int, int]:
    """Return the peaks of recomputing and of saving everything."""
    profile = actmem.profile(model, batch, optimizer=None)
    full, plain = (actmem.predict(profile, mode, DEVICE) for mode in (actmem.Full(), actmem.SaveEverything()))
    return full.peak_bytes, plain.peak_bytes


def plans() -> dict[str, str]:
    """Return plan files: a large model, a mixture of experts, a U-Net at three budgets, one that offloads."""
    found: dict[str, str] = {}
    large, batch = build("llama-3.1-8b"), example("llama-3.1-8b", sequence=8192)
    found["llama-3.1-8b"] = actmem.fit(large, batch, budget="72GiB", device=DEVICE).to_json()
    config = tiny("qwen3-235b-a22b")
    model, experts = build(config, dtype=torch.float32), example(config, sequence=64)
    full, plain = peaks(model, experts)
    for offload in (None, "disk"):
        plan = actmem.fit(
            model, experts, budget=(full + plain) // 2, device=DEVICE, optimizer=None, headroom=0, offload=offload
        )
        found[f"mixture of experts, offload={offload}"] = plan.to_json()
    unet, images = UNetLike(8), (torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))
    full, plain = peaks(unet, images)
    for part in (0.0, 0.3, 0.7):
        budget = int(full + part * (plain - full))
        plan = actmem.fit(unet, images, budget=budget, device=DEVICE, optimizer=None, headroom=0)
        found[f"U-Net, {part}"] = plan.to_json()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(plans()))
