"""Logits and MLPs in pieces of tokens: what they take and how long, where the head is a third of the FLOPs.

Bytes are those of `actmem.measure`. Times are CPU seconds of whole steps on one thread, in turn, in an order that
reverses each time; a ratio is the median over pairs of neighbouring steps.

Next to it are torch's `linear_cross_entropy` called by hand, which is also what `Split(loss=16)` runs for this head,
and Liger's fused loss, if it is installed. Liger's kernel runs in Triton's interpreter here: its bytes are its own, but
of its seconds only those outside the kernel say anything.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import actmem
from actmem.catalogue import DecoderConfig, build, example, tiny
from actmem.catalogue.decoder import following_tokens
from benchmarks.outcome import Bound, Outcome

CHUNKS = 16
TIME_LIMIT, BYTES_LIMIT = 1.10, 1 / 8
IN_CHUNKS = "loss in 16 chunks"
SPLITS: dict[str, actmem.Split | None] = {
    "plain": None,
    IN_CHUNKS: actmem.Split(loss=CHUNKS),
    "loss in 16 chunks, gradients in backward": actmem.Split(loss=CHUNKS, gradients="backward"),
    "loss in 16 chunks, mlp in 8 pieces": actmem.Split(loss=CHUNKS, parts={"mlp": 8}),
}


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states, the head's weight, and labels."""
TORCHS, LIGERS = "torch's linear_cross_entropy in 16 chunks", "Liger's fused loss"


def _torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=-(-len(hidden) // CHUNKS), chunking_method=None)
    return functional.linear_cross_entropy(hidden, weight, labels, options=options)


@dataclass
class Liger:
    """Liger's fused loss, and the seconds that its kernel takes in Triton's interpreter."""

    module: Any
    kernel: Any
    seconds: list[float] = field(default_factory=list)

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of hidden states."""
        self.module.liger_cross_entropy_kernel = self
        self.seconds.append(0.0)
        return self.module.LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launched(**arguments: Any) -> None:
            begin = process_time()
            self.kernel[grid](**arguments)
            self.seconds[-1] += process_time() - begin

        return launched


def beside_liger(num_tokens: int, num_repetitions: int) -> dict[str, dict[str, Any]]:
    """Measure and time a plain step and one with Liger's loss, in a process whose Triton interprets."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    ligers = Liger(module, module.liger_cross_entropy_kernel)
    torch.set_num_threads(1)
    config, outcome = _config(), Outcome("liger", {})
    steps = {"plain": _step(config, num_tokens, None), LIGERS: _step(config, num_tokens, None, ligers)}
    for name, (model, step) in steps.items():
        _measure(outcome, name, model, step, num_tokens)
    seconds = _time(outcome, steps, num_repetitions)
    outside = [a - b for a, b in zip(seconds[LIGERS], ligers.seconds[-num_repetitions:], strict=True)]
    ratio = median(a / b for a, b in zip(outside, seconds["plain"], strict=True))
    outcome.measured[LIGERS]["of_plain_without_its_kernel"] = ratio
    return {"exact": outcome.exact[LIGERS], "measured": outcome.measured[LIGERS]}


def _add_liger(outcome: Outcome, num_tokens: int, num_repetitions: int) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return
    command = [sys.executable, "-m", "benchmarks.pieces", str(num_tokens), str(num_repetitions)]
    interpreting = {**os.environ, "TRITON_INTERPRET": "1"}
    printed = subprocess.run(command, env=interpreting, check=True, capture_output=True, text=True).stdout
    rows = json.loads(printed.splitlines()[-1])
    outcome.exact[LIGERS], outcome.measured[LIGERS] = rows["exact"], rows["measured"]


def _config() -> DecoderConfig:
    """Return a decoder whose head has a third of the products."""
    base = tiny("llama-3.1-8b")
    assert isinstance(base, DecoderConfig)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_layers": 3, "vocab_size": 8192}
    return replace(base, **sizes, num_heads=4, num_kv_heads=4, head_dim=64)


def run(*, num_tokens: int = 1024, num_repetitions: int = 9) -> Outcome:
    """Measure and time the same step, plain and in pieces."""
    config = _config()
    outcome = Outcome("pieces", {"num_tokens": num_tokens, "num_repetitions": num_repetitions, "chunks": CHUNKS})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = {name: _step(config, num_tokens, split) for name, split in SPLITS.items()}
        steps[TORCHS] = _step(config, num_tokens, None, _torchs)
        for name, (model, step) in steps.items():
            _measure(outcome, name, model, step, num_tokens)
        _time(outcome, steps, num_repetitions)
        ratio = outcome.measured[IN_CHUNKS]["of_plain"]
        outcome.bounds.append(Bound(f"time, {IN_CHUNKS}, of plain's", ratio, TIME_LIMIT, exact=False))
        _add_liger(outcome, num_tokens, num_repetitions)
    finally:
        torch.set_num_threads(threads)
    return outcome


def _step(
    config: DecoderConfig, num_tokens: int, split: actmem.Split | None, fused: Loss | None = None
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = build(config, device="cpu", dtype=torch.float32).train()
    batch = example(config, sequence=num_tokens, device="cpu")
    if split is not None:
        actmem.apply(model, actmem.SaveEverything(), split=split)

    def loss() -> Tensor:
        if fused is None:
            return model(**batch).loss
        hidden, labels = model.model(batch["input_ids"]), following_tokens(batch["labels"])
        return fused(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())

    def step() -> None:
        found = loss()
        found.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    return model, step


def _measure(outcome: Outcome, name: str, model: Any, step: Any, num_tokens: int) -> None:
    found = actmem.measure(step, model=model)
    kept: list[Any] = []
    ids = torch.zeros(1, num_tokens, dtype=torch.long)
    before = actmem.measure(lambda: kept.append(model.model(ids)), model=model).timeline[-1].live_bytes
    flops = found.forward_flops + found.backward_flops + found.replayed_flops
    head: nn.Linear = model.lm_head
    row: dict[str, Any] = {"peak_bytes": found.peak_bytes, "loss_bytes": found.peak_bytes - before, "flops": flops}
    outcome.exact[name] = row
    if name == "plain":
        row["head_share"] = 6 * head.weight.numel() * num_tokens / flops
    else:
        own = row["loss_bytes"] - head.weight.nbytes  # without the gradient of its weight
        row["of_plain"] = ratio = own / outcome.exact["plain"]["loss_bytes"]
        if name in SPLITS:
            outcome.bounds.append(Bound(f"bytes of the loss, {name}, of plain's", ratio, BYTES_LIMIT))


def _time(outcome: Outcome, steps: dict[str, tuple[Any, Any]], num_repetitions: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    try:
        for nth in range(num_repetitions):
            for name in list(steps) if nth % 2 else list(steps)[::-1]:
                begin = process_time()
                steps[name][1]()
                seconds[name].append(process_time() - begin)
    finally:
        gc.enable()
    for name, taken in seconds.items():
        ratio = median(a / b for a, b in zip(taken, seconds["plain"], strict=True))
        outcome.measured[name] = {"cpu_seconds": median(taken), "of_plain": ratio}
    return seconds


if __name__ == "__main__":
    print(json.dumps(beside_liger(*map(int, sys.argv[1:]))))
