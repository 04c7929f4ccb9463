"""Train a LightningModule: pass the callback to Lightning's Trainer."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import actmem
from actmem.catalogue import build, example, tiny
from actmem.integrations.lightning import ActmemCallback

CONFIG = tiny("qwen3-8b")


class Writer(pl.LightningModule):
    """A language model to train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build(CONFIG, device="cpu", dtype=torch.float32)
        self.losses: list[float] = []

    def training_step(self, batch: dict) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(callbacks: list[ActmemCallback]) -> list[float]:
    """Train four steps; return the losses."""
    rows = example(CONFIG, batch=16, sequence=64, device="cpu")
    data = [{name: rows[name][i] for name in rows} for i in range(16)]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_steps=4, accelerator="cpu", callbacks=callbacks, **quiet)
    module = Writer()
    trainer.fit(module, DataLoader(data, batch_size=4))
    return module.losses


metrics: list[dict] = []
plain = fit([])
managed = fit([ActmemCallback(actmem.Targets(["norm", "mlp"]), on_metrics=metrics.append)])
print(f"the same losses: {managed == plain}")
for row in metrics:
    print(f"step {row['step']}: {row['recomputed_bytes']:,} bytes recomputed, {row['held_bytes']:,} held")
assert managed == plain
