"""What a reader with an accelerator can find out for us: `make gpu`. It has not run on hardware yet.

Five questions, one table each. *Bitwise*: is a step under each mode bitwise equal to the plain one? *Peaks*: what does
the device's own allocator see under torch's forms and actmem's, and does a budget hold? *Recording*: does the simulated
allocator make the decisions of the real one in a step, and is the predicted peak the recorded one? *Overhead*: how long
is a step? *Streams*: what does offloading to host memory cost relative to the time that the link needs, and are the
numbers right in every one of many steps? The figures are written to one JSON file, to be sent back with the recording.

Kernels that differ from run to run would hide everything else, so torch is asked for deterministic ones, and two plain
steps are compared first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import actmem
from actmem.allocator import read_snapshot, reenact
from actmem.catalogue import build, example, tiny
from actmem.cli.demo import LlamaLike, Size
from benchmarks.models import FORMS, train_step
from benchmarks.outcome import RESULTS, Bound, Outcome

SIZE = Size(dim=1024, num_layers=12, num_heads=16, num_kv_heads=4, ffn=2816, vocab=32000, batch=4, length=2048)
SMALL = Size(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn=64, vocab=64, batch=2, length=16)
ARCHITECTURES = ("llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b", "gemma-3-12b", "vit-l")
OFFLOADED = 2**16
"""Smaller values stay."""


def modes(device: torch.device, size: Size) -> dict[str, actmem.Full | Any]:
    """Return the modes that are compared with plain training."""
    found: dict[str, Any] = {
        "full": actmem.Full(),
        "selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
        "norms and attention": actmem.Targets(["norm", "attention"]),
    }
    where: dict[str, Any] = {"to": "host", "copy_cpu": device.type == "cpu", "min_bytes": _smallest(size)}
    found["offload everything"] = actmem.OffloadActivations(**where)
    found["offload block inputs"] = actmem.Full(offload_inputs=actmem.Offload(**where))
    return found


def _smallest(size: Size) -> int:
    return OFFLOADED if size.dim > SMALL.dim else 0


def llama(size: Size, device: torch.device, dtype: torch.dtype, form: str = "plain") -> LlamaLike:
    """Build the Llama-like model on a device, under one of the forms."""
    torch.manual_seed(0)
    model = LlamaLike(size).to(device, dtype)
    FORMS[form](model)
    return model


def batch_of(size: Size, device: torch.device) -> tuple[Tensor, ...]:
    """Draw a batch on a device."""
    return tuple(t.to(device) for t in size.tokens())


# ---------------------------------------------------------------- bitwise


def check_bits(outcome: Outcome, size: Size, device: torch.device) -> None:
    """Compare a step under every mode with the plain one, on Llama-like models and on small ones of the catalogue."""
    cases: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        f"Llama-like, {str(dtype).removeprefix('torch.')}{', dropout' if dropout else ''}": lambda d=dtype, p=dropout: (
            llama(replace(size, dropout=p), device, d),
            batch_of(size, device),
        )
        for dtype, dropout in ((torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.1))
    }
    for name in ARCHITECTURES:
        config = tiny(name)
        cases[f"tiny {name}"] = lambda config=config, name=name: (
            build(config, device=str(device)),
            example(config, sequence=None if name.startswith("vit") else 32, device=str(device)),
        )
    different = 0
    for name, make in cases.items():
        model, batch = make()
        repeats = _repeats(model, batch)
        row: dict[str, Any] = {"plain_again": "equal" if repeats else "differs by itself"}
        for mode_name, mode in modes(device, SMALL).items():
            found = actmem.verify(model, batch, mode)
            different += repeats and not found.ok
            row[mode_name.replace(" ", "_")] = _words(found)
        outcome.exact[name] = row
    outcome.bounds.append(Bound("steps that differ from plain training", different, 0))


def _repeats(model: nn.Module, batch: Any) -> bool:
    """Run two plain steps from one seed and return whether their gradients are equal."""
    found: list[list[Tensor]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
        (out if isinstance(out, Tensor) else out.loss).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _words(found: actmem.Verification) -> str:
    return "equal" if found.ok else f"differs: {found.difference}"


# ---------------------------------------------------------------- peaks


def see_peaks(outcome: Outcome, size: Size, device: torch.device, dtype: torch.dtype) -> None:
    """Ask the allocator for the peak of a step under torch's forms, actmem's, and fitted plans."""
    batch = batch_of(size, device)
    peaks: dict[str, int] = {}
    for form in FORMS:
        model = llama(size, device, dtype, form)
        peaks[form], counted = _peak(model, batch, device)
        outcome.exact[f"peak, {form}"] = {"allocated_bytes": peaks[form], "counted_bytes": counted}
    for share in (0.75, 0.5):
        model = llama(size, device, dtype)
        wanted = int(peaks["actmem full"] + share * (peaks["plain"] - peaks["actmem full"]))
        plan = actmem.fit(model, batch, budget=wanted, optimizer=None, headroom=0.0, device=_known(device))
        assert plan.predicted is not None
        with actmem.apply(model, plan):
            allocated, counted = _peak(model, batch, device)
        outcome.exact[f"plan at {share:.0%} of the way"] = {
            "budget_bytes": wanted,
            "predicted_bytes": plan.predicted.peak_bytes,
            "counted_bytes": counted,
            "allocated_bytes": allocated,
        }
        outcome.bounds.append(Bound(f"plan at {share:.0%}: counted / budget", counted / wanted, 1.0))
        outcome.bounds.append(Bound(f"plan at {share:.0%}: allocated / budget", allocated / wanted, 1.05))
    for who in ("full", "selective"):
        ratio = peaks[f"actmem {who}"] / peaks[f"torch {who}"]
        outcome.bounds.append(Bound(f"allocated, {who}: actmem / torch", ratio, 1.0))


def _known(device: torch.device) -> actmem.Device | None:
    """Return the device to plan for. On a CPU, one on which a budget is a bound on the bytes of tensors."""
    return actmem.device("h100-80gb").tensors_only() if device.type == "cpu" else None


def _peak(model: nn.Module, batch: Any, device: torch.device) -> tuple[int, int]:
    """Return the allocator's peak of a step, and the bytes that `measure` counts."""
    for _ in range(2):
        train_step(model, batch)
    model.zero_grad()
    counted = actmem.measure(lambda: train_step(model, batch), model=model).peak_bytes
    model.zero_grad()
    if device.type == "cpu":
        return counted, counted
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    train_step(model, batch)
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated(), counted


def record_step(outcome: Outcome, size: Size, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Record a step under full recomputation, and compare the recording with its prediction and its simulation."""
    if device.type != "cuda":
        return  # only CUDA's allocator keeps a record
    model, batch = llama(size, device, dtype), batch_of(size, device)
    path = folder / "gpu_step.pickle.xz"
    profile = actmem.profile(model, batch, optimizer=None)
    predicted = actmem.predict(profile, actmem.Full())
    with actmem.apply(model, actmem.Full()) as applied:
        for _ in range(2):
            train_step(model, batch)
        model.zero_grad()
        with actmem.record(path, plan=applied.plan, prediction=predicted):
            train_step(model, batch)
    snapshot = read_snapshot(path)
    found = reenact(snapshot, device.index or 0)
    outcome.exact["recording"] = {
        "predicted_bytes": predicted.peak_bytes,
        "allocated_bytes": found.peak_allocated_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "allocations": found.allocations,
        "at_recorded_address": found.at_recorded_address,
    }
    wrong = found.allocations - found.at_recorded_address
    outcome.bounds.append(Bound("allocations that the simulation puts elsewhere", wrong, 0))


# ---------------------------------------------------------------- time


def see_times(outcome: Outcome, size: Size, device: torch.device, dtype: torch.dtype, num_repetitions: int) -> None:
    """Time a step under every form, in turn, and offloading relative to what the link needs."""
    batch = batch_of(size, device)
    models: dict[str, nn.Module] = {form: llama(size, device, dtype, form) for form in FORMS}
    models["actmem offload"] = llama(size, device, dtype)
    applied = actmem.apply(models["actmem offload"], modes(device, size)["offload everything"])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for index in range(num_repetitions + 3):
        for name in models if index % 2 else reversed(models):
            took = _timed(models[name], batch, device)
            if index >= 3:
                seconds[name].append(took)
    plain = seconds["plain"]
    for name, took in seconds.items():
        ratio = median(a / b for a, b in zip(took, plain, strict=True))
        outcome.measured[f"step, {name}"] = {"step_seconds": median(took), "to_plain": ratio}
    ledger = applied.report().moved
    moved = 0 if ledger is None else ledger.out_bytes // (num_repetitions + 3)
    extra = median(seconds["actmem offload"]) - median(plain)
    outcome.measured["offload to host memory"] = {
        "moved_bytes": moved,
        "extra_seconds": extra,
        "copy_seconds": _copy_seconds(moved, device),
    }


def _timed(model: nn.Module, batch: Any, device: torch.device) -> float:
    model.zero_grad()
    _wait(device)
    started = perf_counter()
    model(*batch).backward()
    _wait(device)
    return perf_counter() - started


def _copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Time one copy of so many bytes to pinned memory and back, with nothing else running."""
    pinned = device.type != "cpu"
    here = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
    there = torch.empty(here.shape, dtype=torch.uint8, pin_memory=pinned)
    there.copy_(here)
    _wait(device)
    started = perf_counter()
    there.copy_(here, non_blocking=pinned)
    here.copy_(there, non_blocking=pinned)
    _wait(device)
    return perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def stress_streams(outcome: Outcome, size: Size, device: torch.device, num_steps: int) -> None:
    """Train with offloading next to a plain twin, on batches of changing size, and compare each step bit for bit."""
    plain, sent = (llama(size, device, torch.float32) for _ in range(2))
    wrong = 0
    with actmem.apply(sent, modes(device, size)["offload everything"]) as applied:
        for step in range(num_steps):
            batch = batch_of(replace(size, batch=1 + step % 5), device)
            losses = [train_step(model, batch) for model in (plain, sent)]
            same = torch.equal(*losses) and all(
                a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
                for a, b in zip(plain.parameters(), sent.parameters(), strict=True)
            )
            wrong += not same
        ledger = applied.report().moved
    moved = 0 if ledger is None else ledger.out_bytes
    outcome.exact["streams"] = {"steps": num_steps, "steps_that_differ": wrong, "moved_bytes": moved}
    outcome.bounds.append(Bound("steps with offloading that differ from plain", wrong, 0))


# ---------------------------------------------------------------- all of it


def run(
    device: torch.device,
    size: Size = SIZE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    repetitions: int = 20,
    steps: int = 200,
    folder: Path = RESULTS,
) -> Outcome:
    """Answer all questions on a device; a recording of one step goes into the folder."""
    outcome = Outcome("gpu", {**vars(size), "device": _name(device), "dtype": str(dtype)})
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check_bits(outcome, SMALL, device)
        stress_streams(outcome, SMALL, device, steps)
    finally:
        torch.use_deterministic_algorithms(before)
    see_peaks(outcome, size, device, dtype)
    record_step(outcome, size, device, dtype, folder)
    see_times(outcome, size, device, dtype, repetitions)
    return outcome


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main(argv: list[str] | None = None) -> int:
    """Run, print, write. Return 1 if a bound is broken, 2 if there is no accelerator."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="such as cuda:0; default: the accelerator that torch finds")
    parser.add_argument("--small", action="store_true", help="small models only: tries the script, measures nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder to write gpu.json into")
    given = parser.parse_args(argv)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if given.device is None and found is None:
        print(
            "There is no accelerator that torch can use here, so there is nothing to measure. On a machine with one, "
            "install a torch build for it and run `make gpu` again.",
            file=sys.stderr,
        )
        return 2
    device = torch.device(given.device) if given.device else found
    assert device is not None
    small: dict[str, Any] = {"size": SMALL, "dtype": torch.float32, "repetitions": 3, "steps": 4} if given.small else {}
    outcome = run(device, folder=given.out, **small)
    outcome.print(Console(width=None if sys.stdout.isatty() else 200))
    print(f"written: {outcome.write(given.out)}\nPlease send it, and gpu_step.pickle.xz next to it, with an issue.")
    return 0 if all(b.kept for b in outcome.bounds) else 1


if __name__ == "__main__":
    sys.exit(main())
