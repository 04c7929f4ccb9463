"""The parallel model that is built from a layout trains as one process does, and takes what was predicted of it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import actmem
from actmem import Layout
from actmem.catalogue import build, example, tiny
from actmem.distributedcompat import forget_meshes
from actmem.layout import layers_of_stages
from actmem.parallelism import build_job, find_parts, profile_layout
from actmem.structure import find_blocks
from tests.distributed.ranks import step_bytes
from tests.flat_device import FLAT
from tests.patience import PATIENCE_SECONDS

_MODES: dict[str, Any] = {
    "plain": actmem.SaveEverything(),
    "full": actmem.Full(),
    "selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
}
_RUNS = ("trained", *_MODES, "fitted")
_TOLERANCE = 64
_MODELS = {
    "llama": replace(tiny("llama-3.1-8b"), num_layers=4),
    "qwen": replace(tiny("qwen3-8b"), num_layers=4),
    "latent": replace(tiny("deepseek-v3"), num_layers=4, experts=None, num_dense_layers=0),
    "hf": None,
}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make a small model, always with the same weights, and a batch for it."""
    torch.manual_seed(0)
    config = _MODELS[name]
    if config is not None:
        model = build(config, device="cpu", dtype=torch.float32)
        return model, example(config, batch=2, sequence=32, device="cpu")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    ids = torch.arange(64).reshape(2, 32) % 128
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def _worker(rank: int, world: int, cases: Sequence[tuple[str, Layout]], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number, (name, layout) in enumerate(cases):
        for mode in _RUNS:
            store = dist.FileStore(f"{folder}/{number}.{mode}.store", world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_SECONDS)
            )
            model, batch = made(name)
            paths = [block.path for block in find_blocks(model, None, None)]
            options: dict[str, Any] = {"optimizer": "sgd" if mode == "trained" else "adamw", "blocks": paths}
            job = build_job(find_parts(model), batch, layout, **options)
            if mode == "trained":
                job.step()
                whole = {n: _whole(p.detach()) for n, p in job.model.named_parameters()}
                torch.save(whole, f"{folder}/{number}.{rank}.pt")
            else:
                if mode != "plain":
                    fitted = actmem.FromPlan(f"{folder}/{number}.{rank}.plan.json")
                    actmem.apply(job.model, _MODES.get(mode, fitted))
                job.step()
                job.step()
                found = step_bytes(job.step, job.model, job.optimizer)
                Path(folder, f"{number}.{mode}.{rank}.json").write_text(json.dumps(found))
            dist.destroy_process_group()
            forget_meshes()


def _whole(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _name_in_model(name: str, layout: Layout, pp: int) -> str:
    """Return what a parameter of a stage is called in the whole model."""
    if layout.pp == 1:
        return name
    which, rest = name.split(".", 1) if layout.virtual > 1 else ("0", name)
    begin = sum(layers_of_stages(4, layout.num_stages)[: layout.stages_of(pp)[int(which)]])
    return re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + begin}", rest)


def predicted(cases: Sequence[tuple[str, Layout]], folder: Path) -> dict[tuple[int, str, int], int]:
    """Predict what each rank takes, under modes and under a plan, which is left in the folder."""
    found: dict[tuple[int, str, int], int] = {}
    for number, (name, layout) in enumerate(cases):
        model, batch = made(name)
        for rank in range(layout.world):
            seen = profile_layout(model, batch, layout, rank=rank)
            told = {mode: actmem.predict(seen, given, FLAT).tensor_bytes for mode, given in _MODES.items()}
            plan = actmem.fit(seen, budget=(told["full"] + told["plain"]) // 2, device=FLAT)
            plan.save(folder / f"{number}.{rank}.plan.json")
            told["fitted"] = actmem.predict(seen, plan, FLAT).tensor_bytes
            found |= {(number, mode, rank): num_bytes for mode, num_bytes in told.items()}
    return found


def compare(cases: Sequence[tuple[str, Layout]], folder: Path) -> None:
    """Train every layout on real ranks; compare each with one process, and with its prediction."""
    world = cases[0][1].world
    expected = predicted(cases, folder)
    torch.multiprocessing.spawn(_worker, args=(world, cases, str(folder)), nprocs=world)
    wrong: list[str] = []
    for number, (name, layout) in enumerate(cases):
        before, batch = made(name)
        model, _ = made(name)
        model(**batch).loss.backward()
        torch.optim.SGD(model.parameters()).step()
        start, after = dict(before.named_parameters()), dict(model.named_parameters())
        for rank in range(world):
            at = layout.rank_coordinates(rank)
            for mine, value in torch.load(f"{folder}/{number}.{rank}.pt").items():
                full = _name_in_model(mine, layout, at.pp)
                if not torch.allclose(value - start[full], after[full] - start[full], rtol=1e-3, atol=1e-7):
                    wrong.append(f"{name}, {layout}, rank {rank}: {full} is trained otherwise than by one process")
            for mode in _RUNS[1:]:
                real = json.loads((folder / f"{number}.{mode}.{rank}.json").read_text())
                told = expected[number, mode, rank]
                if abs(told - real) > _TOLERANCE:
                    wrong.append(f"{name}, {layout}, rank {rank}, {mode}: predicted {told}, measured {real}")
    assert not wrong, "\n".join(wrong)


def test_a_layout_trains_as_one_process_does_and_takes_what_was_predicted(tmp_path: Path) -> None:
    layouts = (Layout(tp=2, sequence_parallel=True), Layout(pp=2), Layout(cp=2))
    compare([("llama", layout) for layout in layouts], tmp_path)


TWO = [
    *(Layout(dp_shard=2), Layout(dp_shard=2, reshard_after_forward=False, microbatches=2), Layout(tp=2)),
    *(Layout(dp_replicate=2), Layout(pp=2, schedule="GPipe"), Layout(pp=2, schedule="Interleaved1F1B")),
]
FOUR = [
    *(Layout(dp_shard=2, dp_replicate=2), Layout(dp_shard=2, tp=2, sequence_parallel=True)),
    *(Layout(pp=2, dp_shard=2), Layout(pp=2, tp=2, sequence_parallel=True, schedule="ZBVZeroBubble")),
]

RINGS = [
    *(Layout(cp=4), Layout(cp=2, dp_shard=2), Layout(cp=2, pp=2)),
    Layout(cp=2, tp=2, sequence_parallel=True, reshard_after_forward=False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [("llama", layout) for layout in TWO],
        [("qwen", Layout(tp=2, sequence_parallel=True)), ("hf", Layout(pp=2)), ("hf", Layout(tp=2))],
        [("llama", layout) for layout in FOUR],
        [("llama", layout) for layout in RINGS],
        [("latent", Layout(cp=2)), ("qwen", Layout(cp=2, microbatches=2))],
        [("llama", Layout(pp=2, dp_shard=2, tp=2, sequence_parallel=True, reshard_after_forward=False))],
    ],
    ids=["two", "models", "four", "rings", "ring_models", "eight"],
)
def test_every_kind_of_layout_does(cases: list[tuple[str, Layout]], tmp_path: Path) -> None:
    compare(cases, tmp_path)
