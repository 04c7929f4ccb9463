"""Logits and MLPs in pieces of tokens: what they take and how long, where the head is a third of the FLOPs.

Bytes are those of `actmem.measure`. Times are CPU seconds of whole steps on one thread, in turn, in an order that
reverses each time; a ratio is the median over pairs of neighbouring steps.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn

import actmem
from actmem.catalogue import DecoderConfig, build, example, tiny
from benchmarks.outcome import Bound, Outcome

CHUNKS = 16
TIME_LIMIT, BYTES_LIMIT = 1.10, 1 / 8
SPLITS: dict[str, actmem.Split | None] = {
    "plain": None,
    "loss in 16 chunks": actmem.Split(loss=CHUNKS),
    "loss in 16 chunks, gradients in backward": actmem.Split(loss=CHUNKS, gradients="backward"),
    "loss in 16 chunks, mlp in 8 pieces": actmem.Split(loss=CHUNKS, parts={"mlp": 8}),
}


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
        for name, (model, step) in steps.items():
            _measure(outcome, name, model, step, num_tokens)
        _time(outcome, steps, num_repetitions)
    finally:
        torch.set_num_threads(threads)
    return outcome


def _step(config: DecoderConfig, num_tokens: int, split: actmem.Split | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = build(config, device="cpu", dtype=torch.float32).train()
    batch = example(config, sequence=num_tokens, device="cpu")
    if split is not None:
        actmem.apply(model, actmem.SaveEverything(), split=split)

    def step() -> None:
        out = model(**batch)
        out.loss.backward()
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
        ratio = own / outcome.exact["plain"]["loss_bytes"]
        outcome.bounds.append(Bound(f"bytes of the loss, {name}, of plain's", ratio, BYTES_LIMIT))


def _time(outcome: Outcome, steps: dict[str, tuple[Any, Any]], num_repetitions: int) -> None:
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
    fastest = "loss in 16 chunks"
    outcome.bounds.append(
        Bound(f"time, {fastest}, of plain's", outcome.measured[fastest]["of_plain"], TIME_LIMIT, exact=False)
    )
