"""Two real ranks on gloo, through `Trainer` and DDP: the losses are those of the plain ranks, and each rank reports."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

import actmem
from tests.distributed.ranks import run

pytestmark = pytest.mark.usefixtures("flat_device")


def _train(callback: Any) -> list[float]:
    from tests.integrations.training import build_llama, losses_of, make_trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), build_llama(), callback)
        assert trainer.args.world_size == 2
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return losses_of(trainer)


def two_ranks(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: the group is there already
    warnings.simplefilter("ignore", UserWarning)
    from actmem.integrations.transformers import ActmemCallback

    wanted = _train(None)
    if rank == 0:  # a trainer logs on its first rank only
        assert len(set(wanted)) == 3
    budget = actmem.Budget("500KiB", device="flat")
    for mode in (actmem.Full(), budget):
        sent: list[dict[str, Any]] = []
        assert _train(ActmemCallback(mode, on_metrics=sent.append)) == wanted
        assert [m["step"] for m in sent] == [1, 2, 3]
        assert all(m["rank"] == rank and m["recomputed_bytes"] > 0 for m in sent)


@pytest.mark.slow
def test_two_ranks_train_as_they_do_without_and_each_sends_its_own_metrics(tmp_path: Path) -> None:
    outcomes = run([two_ranks], tmp_path)
    assert outcomes == {"two_ranks": ["", ""]}, "\n".join(outcomes["two_ranks"])
