"""Train with Accelerate, in bf16 and with gradient accumulation: apply first, then prepare."""

import torch
from accelerate import Accelerator

import actmem
from actmem.catalogue import build, example, tiny
from actmem.integrations.metrics import step_metrics

CONFIG = tiny("qwen3-8b")
tokens = example(CONFIG, batch=16, sequence=64, device="cpu")["input_ids"]
batches = [{"input_ids": ids, "labels": ids} for ids in tokens.split(2)]


def train(mode: actmem.Full | None) -> list[float]:
    """Train four steps of two batches; return the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = build(CONFIG, device="cpu", dtype=torch.float32)
    applied = None if mode is None else actmem.apply(model, mode)  # before prepare, which wraps the model
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if applied is not None:
        accelerator.print(step_metrics(applied))  # a plain dict for this rank
        applied.remove()
    return losses


plain, managed = train(None), train(actmem.Full())
print(f"the same losses: {managed == plain}")
assert managed == plain
