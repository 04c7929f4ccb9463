"""Decide for parts of a layer: by target, by rule, or only in some layers. Print, save and load the plan."""

import tempfile
from pathlib import Path

import torch

import actmem
from actmem.catalogue import build, example, tiny

CONFIG = tiny("mixtral-8x7b")
model = build(CONFIG, device="cpu", dtype=torch.float32)
batch = example(CONFIG, batch=2, sequence=64, device="cpu")

MODES = {
    "two targets": actmem.Targets(["norm", "routed_experts"]),
    "every second layer": actmem.Targets(["norm", "routed_experts"], every=2),
    "own rules": actmem.Rules(
        [
            actmem.Rule("recompute", target="norm"),
            actmem.Rule("save", op="attention"),
            actmem.Rule("save", module="*.self_attn*", op="matmul"),
            actmem.Rule("recompute"),
        ]
    ),
}
for name, mode in MODES.items():
    with actmem.apply(model, mode) as applied:
        model(**batch).loss.backward()
        report = applied.report()
        print(f"{name:20} held {report.held_bytes:9,} bytes instead of {report.plain_bytes:9,}")
        assert report.recomputed_bytes > 0

print(f"\n{report}\n")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "plan.json")
    applied.plan.save(path)  # readable and editable
    print(path.read_text()[:600], "...")
    again = actmem.apply(model, actmem.FromPlan(path))
    assert again.plan.rules == applied.plan.rules
    again.remove()

try:
    actmem.apply(model, actmem.Targets(["shared_experts"]))
except actmem.ModeError as error:
    print(error)
