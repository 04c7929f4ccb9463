"""FSDP2 on two real ranks on gloo, through the trainers: losses are those of the plain ranks, and less is held."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

import actmem
from tests.distributed.ranks import local, run

NUM_STEPS = 3


def set_up(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: the group is there already
    warnings.simplefilter("ignore")


def sharded_as_on_cards() -> None:
    """Let accelerate shard on CPUs: it takes the plugin for FSDP only if its state says that there are cards."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # pyright: ignore[reportPrivateUsage]


def forget_state() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # pyright: ignore[reportPrivateUsage]
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def check(plain: list[float], managed: list[float], report: actmem.Report) -> None:
    assert managed == plain
    assert len(set(plain)) == NUM_STEPS
    assert report.num_replayed > 0
    assert report.held_bytes < report.plain_bytes / 2


# -------------------------------------------------------------------- transformers


def transformers_trainer(rank: int) -> None:
    set_up(rank)
    from transformers import Trainer

    from actmem.integrations.transformers import ActmemCallback
    from tests.integrations.training import Sentences, arguments, build_llama, losses_of

    def train(callback: Any) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(
                Path(folder), fsdp=True, fsdp_config={"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
            )
            assert args.device.type == "cpu"
            sharded_as_on_cards()
            callbacks = None if callback is None else [callback]
            trainer = Trainer(model=build_llama(), args=args, train_dataset=Sentences(), callbacks=callbacks)
            trainer.train()
            assert isinstance(trainer.model.model.layers[0], FSDPModule)
        forget_state()
        every: list[Any] = [None, None]
        dist.all_gather_object(every, losses_of(trainer))
        return every[0]  # a trainer logs on its first rank only

    plain = train(None)
    callback = ActmemCallback(actmem.Full())
    managed = train(callback)
    assert callback.applied is not None
    check(plain, managed, callback.applied.report())


# -------------------------------------------------------------------- accelerate


def accelerate_loop(rank: int) -> None:
    set_up(rank)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tests.integrations.training import build_llama, train_loop

    def train(mode: Any) -> tuple[list[float], Any]:
        sharded_as_on_cards()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = build_llama()
        applied = None if mode is None else actmem.apply(model, mode)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        assert isinstance(model.model.layers[0], FSDPModule)

        def step(model: Any, batch: Any, n: int) -> Any:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = train_loop(model, step, NUM_STEPS)
        forget_state()
        return losses, applied

    (plain, _), (managed, applied) = train(None), train(actmem.Full())
    check(plain, managed, applied.report())


# -------------------------------------------------------------------- Lightning


def lightning_strategy(rank: int) -> None:
    set_up(rank)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    from actmem.integrations.lightning import ActmemCallback
    from tests.integrations.training import Sentences, build_llama, padded

    class Writer(LightningModule):
        """A module that shards its model as Lightning asks for it, and keeps the losses."""

        def __init__(self) -> None:
            super().__init__()
            self.model = build_llama()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(callback: Any) -> list[Any]:
        module = Writer()
        trainer = Trainer(
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            accelerator="cpu",
            devices=2,
            max_steps=NUM_STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=None if callback is None else [callback],
        )
        torch.manual_seed(8)
        trainer.fit(module, DataLoader(Sentences(), batch_size=2, collate_fn=padded))
        assert isinstance(module.model.model.layers[0], FSDPModule)
        return [module.losses, [local(p.detach()).clone() for p in module.parameters()]]

    (plain, weights), callback = train(None), ActmemCallback(actmem.Full())
    managed, managed_weights = train(callback)
    assert callback.applied is not None
    check(plain, managed, callback.applied.report())
    assert all(torch.equal(a, b) for a, b in zip(weights, managed_weights, strict=True))


# -------------------------------------------------------------------- DeepSpeed


def zero(rank: int, stage: int, *, whole_layers: bool = True) -> None:
    set_up(rank)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    from tests.integrations.training import build_llama, train_loop

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }

    def train(mode: Any) -> tuple[list[float], Any]:
        model = build_llama()
        applied = None if mode is None else actmem.apply(model, mode)
        if stage == 3 and whole_layers:
            set_z3_leaf_modules(model, [type(model.model.layers[0])])
        engine, *_ = deepspeed.initialize(model=model, config=config)

        def step(engine: Any, batch: Any, n: int) -> Any:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            return loss

        return train_loop(engine, step, NUM_STEPS), applied

    (plain, _), (managed, applied) = train(None), train(actmem.Full())
    check(plain, managed, applied.report())


def zero_2(rank: int) -> None:
    zero(rank, 2)


def zero_3(rank: int) -> None:
    zero(rank, 3)


def zero_3_by_module(rank: int) -> None:
    with pytest.raises(actmem.FreedStorageError, match="Shard whole blocks"):
        zero(rank, 3, whole_layers=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", [zero_2, zero_3, zero_3_by_module])
def test_deepspeed_shards_whole_layers_or_is_refused(case: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="not installed: it compiles its own extension on first use")
    outcomes = run([case], tmp_path)
    assert outcomes == {case.__name__: ["", ""]}, "\n".join(outcomes[case.__name__])


@pytest.mark.slow
@pytest.mark.parametrize("case", [transformers_trainer, accelerate_loop, lightning_strategy])
def test_sharded_ranks_train_as_they_do_without_and_hold_less(case: Any, tmp_path: Path) -> None:
    outcomes = run([case], tmp_path)
    assert outcomes == {case.__name__: ["", ""]}, "\n".join(outcomes[case.__name__])
