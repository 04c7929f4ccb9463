"""Train under torch.compile: the same mode, implemented by the compiler's partitioner."""

import torch

import actmem
from actmem.catalogue import build, example, tiny

CONFIG = tiny("llama-3.1-8b")
batch = example(CONFIG, batch=2, sequence=64, device="cpu")


def train(mode: actmem.Full | actmem.Selective | None) -> tuple[list[float], actmem.Report | None]:
    """Train three steps with every layer compiled; return the losses and the report."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = build(CONFIG, device="cpu", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    applied = None if mode is None else actmem.apply(model, mode)  # before or after compile
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")  # in your code: the default, inductor
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, None if applied is None else applied.report()


plain, _ = train(None)
for mode in (actmem.Full(), actmem.Selective(save=["attention", actmem.every_second("matmul")])):
    losses, report = train(mode)
    graph = report.compiled[0]
    serves = ", ".join((*graph.blocks, *graph.shared_with))
    print(f"{mode!r}\n  the same losses as compiled plain training: {losses == plain}")
    print(f"  one graph for {serves}: asked {dict(graph.num_asked)}, saves {graph.saved_bytes:,} bytes")
    assert losses == plain
