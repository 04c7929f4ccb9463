"""Lightning's callback, under both names of the package: what is trained is what is trained without it, to the bit."""

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import actmem
from tests.integrations.training import Sentences, build_llama, differing, padded, weights_of

pytestmark = [
    pytest.mark.usefixtures("flat_device"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*treespec.*:FutureWarning"),
]


def make_module(package: Any) -> Any:
    class Writer(package.LightningModule):
        """A module that trains the model, keeps the losses, and evaluates."""

        def __init__(self) -> None:
            super().__init__()
            self.model = build_llama()
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(self.model(**batch).loss))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Writer()


def fit(
    package: Any, folder: Path, callback: Any = None, *, module: Any = None, max_steps: int = 3, resume: Any = None
) -> Any:
    module = make_module(package) if module is None else module
    trainer = package.Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=2,
        accelerator="cpu",
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        val_check_interval=2,
        callbacks=None if callback is None else [callback],
    )
    loader = DataLoader(Sentences(), batch_size=2, collate_fn=padded)
    torch.manual_seed(8)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_losses_evaluation_and_checkpoints_are_those_of_plain_training(name: str, tmp_path: Path) -> None:
    from actmem.integrations.lightning import ActmemCallback

    package = import_module(name)
    plain = fit(package, tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    sent: list[dict[str, Any]] = []
    callback = ActmemCallback(actmem.Full(), on_metrics=sent.append)
    assert isinstance(callback, package.Callback) and isinstance(callback, ActmemCallback)
    assert isinstance(pickle.loads(pickle.dumps(ActmemCallback(actmem.Full()))), package.Callback)
    managed = fit(package, tmp_path, callback)
    assert managed.losses == plain.losses
    assert len(set(plain.losses)) == len(plain.losses) >= 6
    assert differing(weights_of(plain), weights_of(managed)) == []
    assert [type(m) for m in managed.modules()][1:] == [type(m) for m in plain.modules()][1:], "changed back"
    again = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert again.keys() == saved.keys()
    assert list(again["state_dict"]) == list(saved["state_dict"])
    assert [m["step"] for m in sent] == [1, 2, 3], "one for each step of the optimizer"
    assert all(m["recomputed_bytes"] > 0 and m["num_replayed"] > 0 for m in sent)


def test_a_fit_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    import lightning.pytorch as package

    from actmem.integrations.lightning import ActmemCallback

    first = fit(package, tmp_path, max_steps=2)
    plain = fit(package, tmp_path / "plain", resume=tmp_path / "last.ckpt")
    callback = ActmemCallback(actmem.Full())
    managed = fit(package, tmp_path / "managed", callback, resume=tmp_path / "last.ckpt")
    assert managed.losses == plain.losses
    assert managed.losses[0] not in first.losses
    assert differing(weights_of(plain), weights_of(managed)) == []
    assert callback.applied is not None and callback.applied.report().recomputed_bytes > 0


@pytest.mark.slow
def test_a_budget_is_planned_for_the_part_that_is_named(tmp_path: Path) -> None:
    import lightning.pytorch as package

    from actmem.integrations.lightning import ActmemCallback

    plain, data = fit(package, tmp_path), Sentences()
    budget = actmem.Budget("480KiB", device="flat")
    callback = ActmemCallback(budget, module="model", example=padded([data[0], data[1]]))
    managed = fit(package, tmp_path, callback)
    assert managed.losses == plain.losses
    assert callback.applied is not None and callback.applied.plan.predicted is not None
    assert callback.applied.plan.predicted.microbatches == 2, "as many as the trainer accumulates over"
    assert callback.applied.report().recomputed_bytes > 0


def test_a_fit_that_breaks_off_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    import lightning.pytorch as package

    from actmem.integrations.lightning import ActmemCallback

    def fail(_: Any) -> None:
        raise KeyError("stop")

    module = make_module(package)
    kinds = [type(m) for m in module.modules()]
    callback = ActmemCallback(actmem.Full(), on_metrics=fail)
    with pytest.raises(KeyError, match="stop"):
        fit(package, tmp_path, callback, module=module)
    assert callback.applied is not None and callback.applied.report().recomputed_bytes > 0
    assert [type(m) for m in module.modules()] == kinds


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    import lightning.pytorch as package

    from actmem.integrations.lightning import ActmemCallback

    with pytest.raises(actmem.ModeError, match=r"needs a batch to plan for.*module='model', example=batch"):
        ActmemCallback(actmem.Budget("1GiB"))
    with pytest.raises(actmem.ModeError, match=r"example is for a Budget.*Full is not"):
        ActmemCallback(actmem.Full(), example=())
    with pytest.raises(
        actmem.ModeError, match=r"a Budget runs forward, and Writer does not define it.*Its parts: model"
    ):
        fit(package, tmp_path, ActmemCallback(actmem.Budget("1GiB"), example=()))
    with pytest.raises(actmem.ModeError, match=r"on_metrics = 'wandb' is not a function"):
        ActmemCallback(actmem.Full(), on_metrics="wandb")
    with pytest.raises(actmem.StructureError, match=r"module = 'net' is not a part of Writer. Its parts: model."):
        fit(package, tmp_path, ActmemCallback(actmem.Full(), module="net"))
