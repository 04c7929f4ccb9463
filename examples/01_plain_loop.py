"""Train in a plain loop under three modes: the losses are bitwise equal, the memory is not."""

import torch

import actmem
from actmem.catalogue import build, example, tiny

CONFIG = tiny("llama-3.1-8b")  # two small layers; yours is any nn.Module
batch = example(CONFIG, batch=4, sequence=128, device="cpu")


def train(mode: actmem.Full | actmem.Selective | None) -> tuple[list[float], int]:
    """Train five steps; return the losses and the peak of the last step in bytes."""
    torch.manual_seed(0)
    model = build(CONFIG, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []

    def step() -> None:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    applied = None if mode is None else actmem.apply(model, mode)  # the only line to add to a loop
    for _ in range(4):
        step()
    peak_bytes = actmem.measure(step, model=model, optimizer=optimizer).peak_bytes
    if applied is not None:
        applied.remove()
    return losses, peak_bytes


plain, plain_bytes = train(None)
print(f"{'plain':45} {plain_bytes / 2**20:6.2f} MiB   last loss {plain[-1]:.6f}")
for mode in (actmem.Selective(save=["attention", "matmul"]), actmem.Full()):
    losses, peak_bytes = train(mode)
    same = "the same losses" if losses == plain else "OTHER LOSSES"
    print(f"{mode!r:45} {peak_bytes / 2**20:6.2f} MiB   {same}")
    assert losses == plain
