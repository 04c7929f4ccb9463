"""A plain loop and Accelerate need no integration: `apply` comes before `prepare`, and the losses stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.integrations.metrics import step_metrics
from tests.children import run
from tests.integrations.training import build_llama, build_lora, differing, train_loop, weights_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:accelerate")

MODES = {
    "full": actmem.Full(),
    "selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
}


def plain_loop(model: nn.Module) -> list[float]:
    """Train with AdamW, stepping after every second batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def step(model: nn.Module, batch: Any, n: int) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        if n % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train_loop(model, step)


def accelerated(model: nn.Module) -> list[float]:
    """Do the same the way Accelerate wants it, in bf16."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    prepared, optimizer = accelerator.prepare(model, made)

    def step(model: nn.Module, batch: Any, n: int) -> Tensor:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train_loop(model, step)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("build", [build_llama, build_lora])
@pytest.mark.parametrize("loop", [plain_loop, accelerated])
def test_losses_and_weights_are_those_of_the_plain_model(
    loop: Callable[[nn.Module], list[float]], build: Callable[[], nn.Module], mode: Any
) -> None:
    plain, model = build(), build()
    wanted = loop(plain)
    applied = actmem.apply(model, mode)
    assert loop(model) == wanted
    assert len(set(wanted)) == len(wanted)
    found = step_metrics(applied)
    assert found["recomputed_bytes"] > 0 and found["num_recomputed"] > 0 and found["num_replayed"] > 0
    assert found["saved_bytes"] == applied.report().saved_bytes
    assert found["held_bytes"] < found["plain_bytes"]
    applied.remove()
    assert differing(weights_of(plain), weights_of(model)) == []


def test_a_measured_step_adds_its_peak_by_category_and_the_seconds_of_replay() -> None:
    model = build_llama()
    applied = actmem.apply(model, actmem.Full())
    measured = actmem.measure(lambda: plain_loop(model), model=model)
    found = step_metrics(applied, measured)
    assert found["peak_bytes"] == measured.peak_bytes
    parts = {n: v for n, v in found.items() if n.startswith("peak_") and n != "peak_bytes"}
    assert sum(parts.values()) == measured.peak_bytes
    assert parts["peak_parameters_bytes"] == measured.by_category["parameters"] > 0
    assert found["replay_seconds"] == measured.replay_seconds > 0


LEAN = """
import importlib, sys
import actmem, actmem.integrations, actmem.integrations.metrics
named = ("transformers", "accelerate", "trl", "peft", "lightning", "pytorch_lightning", "datasets")
print([name for name in named if name in sys.modules])
for name in (*named, "lightning.pytorch"):
    sys.modules[name] = None
for name in ("transformers", "lightning"):
    try:
        importlib.import_module(f"actmem.integrations.{name}").ActmemCallback(actmem.Full())
    except ImportError as error:
        print(isinstance(error, actmem.ActmemError), error)
"""


def test_no_library_is_imported_unasked_and_a_missing_one_gives_the_line_that_installs_it(tmp_path: Path) -> None:
    done = run("-c", LEAN)
    assert done.returncode == 0, done.stderr
    none, *errors = done.stdout.splitlines()
    assert none == "[]"
    needs = {"transformers": "transformers accelerate", "lightning": "lightning"}
    for line, (name, packages) in zip(errors, needs.items(), strict=True):
        assert line == (
            f"True actmem.integrations.{name} needs {' and '.join(packages.split())}, which could not be imported. "
            f"Install what is missing: pip install {packages}"
        )
