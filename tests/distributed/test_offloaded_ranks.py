"""Offloading on real ranks, sharded and in pipelines: bitwise plain training, and never more bytes than predicted."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import actmem
from actmem.distributedcompat import forget_meshes
from tests.distributed import layouts
from tests.distributed.ranks import bits, step_bytes
from tests.distributed.test_rank_profiles import Make, builds
from tests.flat_device import FLAT
from tests.patience import PATIENCE_SECONDS

WORLD = 2


def modes(folder: str) -> dict[str, Any]:
    """Return what is compared: everything to disk, and block inputs only, with all else recomputed."""
    to = actmem.Offload(to="disk", directory=folder, min_bytes=0)
    return {
        "plain": actmem.SaveEverything(),
        "everything": actmem.OffloadActivations(to="disk", directory=folder, min_bytes=0),
        "inputs": actmem.Full(offload_inputs=to),
    }


def _worker(rank: int, names: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in names:
        for mode, asked in modes(folder).items():
            store = dist.FileStore(f"{folder}/{name}.{mode}.store", WORLD)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=PATIENCE_SECONDS)
            )
            job: layouts.Job = getattr(layouts, name)()
            applied = actmem.apply(job.model, asked)
            job.step()
            job.step()
            found = {
                "bytes": step_bytes(job.step, job.model, job.optimizer),
                "sent": applied.report().offloaded_bytes,
                "parameters": [bits(p) for p in job.model.parameters()],
            }
            Path(folder, f"{name}.{mode}.{rank}.json").write_text(json.dumps(found))
            applied.remove()
            dist.destroy_process_group()
            forget_meshes()


def compare(makes: Sequence[Make], folder: Path) -> None:
    """Run every job on real ranks, and compare each with plain training and with its prediction."""
    names = [make.__name__ for make in makes]
    torch.multiprocessing.spawn(_worker, args=(names, str(folder)), nprocs=WORLD)
    for make, name in zip(makes, names, strict=True):
        for rank in range(WORLD):
            profile = actmem.profile_rank(builds(make), world=WORLD, rank=rank)
            asked_for = modes(str(folder))
            real = {mode: json.loads((folder / f"{name}.{mode}.{rank}.json").read_text()) for mode in asked_for}
            for mode, asked in asked_for.items():
                said = f"{name}, rank {rank}, {mode}"
                predicted = actmem.predict(profile, asked, FLAT).tensor_bytes
                assert real[mode]["bytes"] <= predicted + 64, f"{said}: measured {real[mode]['bytes']} > {predicted}"
                assert real[mode]["parameters"] == real["plain"]["parameters"], f"{said}: trained otherwise than plain"
                assert mode == "plain" or real[mode]["sent"] > 0, f"{said}: nothing was offloaded"
            assert real["everything"]["bytes"] <= real["plain"]["bytes"]


@pytest.mark.slow
def test_what_a_sharded_rank_or_a_stage_offloads_comes_back_bit_for_bit_and_within_the_bound(tmp_path: Path) -> None:
    compare((layouts.fsdp, layouts.pipeline_1f1b), tmp_path)


@pytest.mark.slow
def test_every_way_to_shard_and_every_schedule_offloads(tmp_path: Path) -> None:
    compare((*layouts.TWO[1:], *layouts.PIPELINES[1:]), tmp_path)
