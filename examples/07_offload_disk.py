"""Offload activations to a disk and prefetch them in time: `python 07_offload_disk.py [directory on a disk]`."""

import sys

import torch

import actmem
from actmem.catalogue import build, example, tiny

CONFIG = tiny("llama-3.1-8b")
directory = sys.argv[1] if len(sys.argv) > 1 else None  # None: the directory for temporary files
batch = example(CONFIG, batch=4, sequence=256, device="cpu")
model = build(CONFIG, device="cpu", dtype=torch.float32)


def step() -> None:
    """Compute gradients."""
    model.zero_grad()
    model(**batch).loss.backward()


step()
plain = {name: p.grad.clone() for name, p in model.named_parameters()}
plain_bytes = actmem.measure(step, model=model).saved_bytes

for mode in (
    actmem.OffloadActivations(to="disk", min_bytes=0, in_flight_bytes=2**18, directory=directory),
    actmem.Full(offload_inputs=actmem.Offload(to="disk", min_bytes=0, directory=directory)),
):
    applied = actmem.apply(model, mode)
    step()
    saved_bytes = actmem.measure(step, model=model).saved_bytes
    moved = applied.report().moved
    same = all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())
    print(f"{type(mode).__name__}: {saved_bytes:,} bytes saved in memory instead of {plain_bytes:,}")
    print(
        f"  {moved.out_bytes:,} bytes copied out, {moved.back_bytes:,} fetched back, {moved.waiting_bytes} outstanding"
    )
    print(f"  the same gradients: {same}")
    assert same
    applied.remove()
