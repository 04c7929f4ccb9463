"""What offloading to disk costs: the store's speed relative to raw I/O, and a training step relative to recomputation.

The memory of a step comes from the allocator, for two sizes of a model, each form in its own process: see
`allocator.py`. How much is in flight depends on the bound `in_flight_bytes`: the default, what two blocks send, and a
small one are measured.

One compute thread. All variants run in turn in one process. The disk store leaves nothing in the page cache, so what it
takes off a step's memory is really gone. torch's `save_on_cpu` copies nothing where the tensors are on the CPU already;
it is listed as it is. What it does for a model on an accelerator, a synchronous copy of every saved tensor on the way
out and on the way back, is done here by hooks of the same form that really copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem.cli.demo import LlamaLike, Size
from benchmarks import allocator, disk_ways
from benchmarks.outcome import Bound, Outcome

STEP = Size(dim=512, num_layers=6, num_heads=8, num_kv_heads=2, ffn=1408, vocab=2000, batch=4, length=512)
SMALL = Size(dim=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn=704, vocab=2000, batch=2, length=256)
IN_FLIGHT_BYTES = 8 * 2**20
BLOCK_MIB = (4, 16, 64)
RAW_SHARE = 0.8
MOST_OF_PLAIN = {"disk": 0.7, "disk, 8 MiB in flight": 0.6}
NUM_ATTEMPTS = 3


def run(
    size: Size = STEP,
    *,
    small: Size | None = SMALL,
    num_repetitions: int = 3,
    block_mib: tuple[int, ...] = BLOCK_MIB,
    directory: str | None = None,
    min_bytes: int = 2**16,
    in_flight_bytes: int | None = None,
) -> Outcome:
    """Measure everything, and compare it with the bounds. A smaller size needs smaller `min_bytes`."""
    outcome = Outcome("offload", {**dataclasses.asdict(size), "num_repetitions": num_repetitions})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if block_mib:
            _throughput(outcome, block_mib, Path(directory or tempfile.gettempdir()))
        rest = {"min_bytes": min_bytes, "in_flight_bytes": in_flight_bytes}
        _training(outcome, size, num_repetitions, _forms(size, {"directory": directory, **rest}, rest))
        for name, one in {"small": small, "large": size}.items():
            if one is not None:
                _allocated(outcome, name, one, {"directory": directory, "min_bytes": min_bytes})
    finally:
        torch.set_num_threads(threads)
    return outcome


def _throughput(outcome: Outcome, block_mib: tuple[int, ...], directory: Path) -> None:
    """Compare the disk store with raw sequential I/O of the same sizes. A share below its bound is measured again."""
    for num_mib in block_mib:
        best: dict[str, float] = {}
        for _ in range(NUM_ATTEMPTS):
            ways = disk_ways.compare(directory, num_mib * 2**20, num_rounds=3)
            store = next(way for name, way in ways.items() if name.startswith("DiskStore"))
            shares = {what: store[what] / ways["raw"][what] for what in ("write", "read")}
            if not best or min(shares.values()) > min(best["write_share"], best["read_share"]):
                best = {
                    "raw_write_mib_per_second": ways["raw"]["write"],
                    "store_write_mib_per_second": store["write"],
                    "raw_read_mib_per_second": ways["raw"]["read"],
                    "store_read_mib_per_second": store["read"],
                    "write_share": shares["write"],
                    "read_share": shares["read"],
                    "left_in_page_cache_mib": store["cached"],
                }
            if min(best["write_share"], best["read_share"]) >= RAW_SHARE:
                break
        outcome.measured[f"disk store, blocks of {num_mib} MiB"] = best
        for what in ("write", "read"):
            slower = 1 / best[f"{what}_share"]
            name = f"disk store, {num_mib} MiB: time to {what} / raw"
            outcome.bounds.append(Bound(name, slower, 1 / RAW_SHARE, exact=False))


def _training(outcome: Outcome, size: Size, num_repetitions: int, forms: dict[str, Form]) -> None:
    """Time a step, and measure its peak, plain, recomputed and offloaded."""
    for name, (model, around, applied) in forms.items():
        _step(model, size, around)
        before = _out_bytes(applied)
        m = actmem.measure(lambda model=model, around=around: _step(model, size, around), model=model)
        outcome.exact[name] = {
            "step_bytes": m.step_bytes,
            "peak_bytes": m.peak_bytes,
            "saved_bytes": m.saved_bytes,
            "out_bytes": _out_bytes(applied) - before,
            "replayed_operators": m.num_replayed_ops,
        }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(num_repetitions):
        for name in list(forms)[:: 1 if turn % 2 else -1]:
            model, around, _ = forms[name]
            began = perf_counter()
            _step(model, size, around)
            seconds[name].append(perf_counter() - began)
    for name, times in seconds.items():
        outcome.measured[name] = {
            "step_seconds": median(times),
            "to_plain": median(a / b for a, b in zip(times, seconds["plain"], strict=True)),
        }
    for _, _, applied in forms.values():
        if applied is not None:
            applied.remove()
    ratio = _ratio(seconds["disk"], seconds["full"])
    outcome.bounds.append(Bound("everything to disk: time / full recomputation", ratio, 1.0, exact=False))
    ratio = _ratio(seconds["copied in host memory"], seconds["copied by hooks"])
    outcome.bounds.append(Bound("copied in host memory: time / copied by hooks", ratio, 1.0, exact=False))


def _allocated(outcome: Outcome, name: str, size: Size, offload: dict[str, Any]) -> None:
    """Ask the allocator for the memory of a step: plain, recomputed, and offloaded to disk under two bounds."""
    few = {**offload, "in_flight_bytes": IN_FLIGHT_BYTES}
    asked = {
        "plain": ("plain", {}),
        "full": ("full", {}),
        "disk": ("disk", offload),
        "disk, 8 MiB in flight": ("disk", few),
    }
    found = {form: allocator.in_fresh_process(kind, size, options) for form, (kind, options) in asked.items()}
    for form, figures in found.items():
        outcome.measured[f"{name}, in a process of its own: {form}"] = {
            **figures,
            "peak_to_plain": figures["allocator_bytes"] / found["plain"]["allocator_bytes"],
        }
    for form, most in MOST_OF_PLAIN.items():
        ratio = found[form]["allocator_bytes"] / found["plain"]["allocator_bytes"]
        promise = f"{name}, everything to {form}: peak of the allocator / plain"
        outcome.bounds.append(Bound(promise, ratio, most, exact=False))


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _out_bytes(applied: actmem.Applied | None) -> int:
    """Return how much has been offloaded so far."""
    moved = None if applied is None else applied.report().moved
    return 0 if moved is None else moved.out_bytes


Around = Callable[[], contextlib.AbstractContextManager[Any]]
Form = tuple[nn.Module, Around, actmem.Applied | None]


def _forms(size: Size, disk: dict[str, Any], host: dict[str, Any]) -> dict[str, Form]:
    """Build a model for each form, with the context to enter around a forward. `disk` and `host` say how to offload."""

    def applied(mode: Any) -> Form:
        model = LlamaLike(size)
        return model, contextlib.nullcontext, actmem.apply(model, mode)

    def on_cpu() -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu(pin_memory=False)

    def copying() -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(_cloned, _cloned)

    disk, host = {"to": "disk", **disk}, {"to": "host", "copy_cpu": True, **host}
    return {
        "plain": (LlamaLike(size), contextlib.nullcontext, None),
        "full": applied(actmem.Full()),
        "disk": applied(actmem.OffloadActivations(**disk)),
        "block inputs to disk": applied(actmem.Full(offload_inputs=actmem.Offload(**disk))),
        "copied in host memory": applied(actmem.OffloadActivations(**host)),
        "copied by hooks": (LlamaLike(size), copying, None),
        "torch save_on_cpu": (LlamaLike(size), on_cpu, None),
    }


def _cloned(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.clone()


def _step(model: nn.Module, size: Size, around: Around) -> Tensor:
    torch.manual_seed(0)
    model.zero_grad()
    with around():
        loss = model(*size.tokens())
    loss.backward()
    return loss.detach()
