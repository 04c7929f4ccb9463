"""Exact bytes of a training step: the peak, what is held for backward, and what is left after many steps.

All figures come from `actmem.measure`, which watches tensor storages and treats torch's forms and actmem's alike. None
depends on the machine.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem.cli.demo import Size
from actmem.engine import tape, values
from benchmarks.models import llama, quantised, train_step
from benchmarks.outcome import Bound, Outcome

LLAMA = Size(dim=512, num_layers=4, num_heads=8, num_kv_heads=2, ffn=1408, vocab=2000, batch=2, length=512)
TINY = Size(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn=64, vocab=64, batch=1, length=8)
QUANTISED = {"dim": 1024, "num_layers": 4, "num_weights": 4, "num_rows": 128}


def run(
    size: Size = LLAMA,
    *,
    quantised_size: dict[str, int] | None = None,
    leak_size: Size = TINY,
    num_leak_steps: int = 200,
) -> Outcome:
    """Measure everything, and compare it with the bounds."""
    quantised_size = quantised_size or QUANTISED
    settings = {"llama": dataclasses.asdict(size), "dropout": 0.1, "quantised": quantised_size}
    outcome = Outcome("memory", {**settings, "leak": dataclasses.asdict(leak_size), "num_leak_steps": num_leak_steps})
    _llama(outcome, size)
    _quantised(outcome, **quantised_size)
    _leaks(outcome, leak_size, num_leak_steps)
    return outcome


def _llama(outcome: Outcome, size: Size) -> None:
    """Compare peaks and replayed work on the Llama-like model, without and with dropout."""
    forms = ("plain", "torch full", "actmem full", "torch selective", "actmem selective")
    found = {form: _figures(llama(size, form), size.tokens()) for form in forms}
    random = dataclasses.replace(size, dropout=0.1)
    for form in ("plain", "torch full", "actmem full"):
        found[f"{form}, dropout"] = _figures(llama(random, form), random.tokens())
    outcome.exact.update(found)
    for what, limit in (("selective", 0.90), ("full", 1.0), ("full, dropout", 1.02)):
        ours, theirs = found[f"actmem {what}"], found[f"torch {what}"]
        for figure, where in (("step_bytes", ""), ("accumulating_bytes", ", accumulating")):
            ratio = ours[figure] / theirs[figure]
            outcome.bounds.append(Bound(f"actmem {what}: step peak / torch's{where}", ratio, limit))
        work = ours["replayed_flops"] / theirs["replayed_flops"]
        outcome.bounds.append(Bound(f"actmem {what}: replayed FLOPs / torch's", work, 1.0))


def _figures(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Measure the second and third step: the first under actmem is observed and checked.

    The second creates its gradients. The third adds to existing gradients, so that its peak is one of activations.
    """
    train_step(model, batch)
    model.zero_grad()
    m = actmem.measure(lambda: train_step(model, batch), model=model)
    again = actmem.measure(lambda: train_step(model, batch, accumulate=True), model=model)
    return {
        "accumulating_bytes": again.step_bytes,
        "step_bytes": m.step_bytes,
        "peak_bytes": m.peak_bytes,
        "saved_bytes": m.saved_bytes,
        "gradient_bytes": m.by_category["gradients"],
        "forward_flops": m.forward_flops,
        "replayed_flops": m.replayed_flops,
        "replayed_operators": m.num_replayed_ops,
        "peak_at": str(m.peak_op),
    }


def _quantised(outcome: Outcome, *, dim: int, num_layers: int, num_weights: int, num_rows: int) -> None:
    """Check that no weight made by an unseen kernel is held: at most what plain autograd holds, plus layer inputs."""
    x = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(1))
    shown = ("accumulating_bytes", "saved_bytes", "replayed_operators")
    found: dict[str, dict[str, Any]] = {}
    for form in ("plain", "torch full", "actmem full"):
        figures = _figures(quantised(dim, num_layers, num_weights, form), (x,))
        found[f"{form}, quantised"] = {k: figures[k] for k in shown}
    outcome.exact.update(found)
    allowed = found["plain, quantised"]["saved_bytes"] + num_layers * x.nbytes
    held = found["actmem full, quantised"]["saved_bytes"]
    outcome.bounds.append(Bound("actmem full, quantised: held / (plain + layer inputs)", held / allowed, 1.0))


def _leaks(outcome: Outcome, size: Size, num_steps: int) -> None:
    """Check that nothing is left behind: without garbage collection, as much is alive after many steps as after two."""
    for form in ("actmem full", "actmem selective"):
        for dropping in (False, True):
            name = f"{form}, every second graph dropped" if dropping else form
            early, early_objects = _alive_after(llama(size, form), size, 2, dropping)
            late, late_objects = _alive_after(llama(size, form), size, num_steps, dropping)
            outcome.exact[f"{name}, {num_steps} steps"] = {
                "alive_after_2_bytes": early,
                "alive_after_all_bytes": late,
                "engine_objects": late_objects,
            }
            outcome.bounds.append(Bound(f"{name}: bytes alive after {num_steps} steps - after 2", late - early, 0))
            grown = late_objects - early_objects
            outcome.bounds.append(Bound(f"{name}: engine objects after {num_steps} steps - after 2", grown, 0))


def _alive_after(model: nn.Module, size: Size, num_steps: int, dropping: bool) -> tuple[int, int]:
    """Train, and return the bytes and the number of engine objects alive afterwards."""
    batch = size.tokens()

    def steps() -> None:
        for index in range(num_steps):
            if dropping and index % 2 == 0:
                model(*batch)
            else:
                train_step(model, batch)
        model.zero_grad()
        torch.zeros(0)  # an operator without bytes: the last sample is taken here

    collecting = gc.isenabled()
    gc.collect()
    before = _num_engine_objects()
    gc.disable()
    try:
        m = actmem.measure(steps)
        return m.timeline[-1].live_bytes, _num_engine_objects() - before
    finally:
        if collecting:
            gc.enable()


def _num_engine_objects() -> int:
    """Count tapes, values, nodes and handles, which must die with the graph."""
    kinds = {kind for room in (tape, values) for kind in vars(room).values() if isinstance(kind, type)}
    kinds = {kind for kind in kinds if kind.__module__ in (tape.__name__, values.__name__)}
    return sum(type(each) in kinds for each in gc.get_objects())
