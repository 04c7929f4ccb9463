"""Experts that a layout spreads over ranks train as those of one process, and take what was predicted of them."""

from __future__ import annotations

import json
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
from actmem import ExpertCounts, Layout
from actmem.catalogue import build, example, tiny
from actmem.distributedcompat import forget_meshes
from actmem.layout import layers_of_stages
from actmem.parallelism import build_job, find_parts, profile_layout, profile_stages
from actmem.structure import find_blocks
from tests.distributed.ranks import step_bytes
from tests.flat_device import FLAT
from tests.patience import PATIENCE_SECONDS

Case = tuple[str, Layout]
_MODES: dict[str, Any] = {
    "plain": actmem.SaveEverything(),
    "full": actmem.Full(),
    "selective": actmem.Selective(save=["attention", actmem.every_second("matmul")]),
}
_RUNS = ("trained", *_MODES, "fitted")
_TOLERANCE = 64


def made(name: str) -> nn.Module:
    """Make a small model, always with the same weights, whose routers prefer some experts."""
    torch.manual_seed(0)
    model = build(tiny(name), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "Router":
                module.weight.mul_(20)  # pyright: ignore[reportCallIssue]
    return model


def batch_of(name: str, index: int) -> dict[str, Tensor]:
    """Return the batch of one rank of `dp_shard`."""
    batch = example(tiny(name), batch=2, sequence=16, device="cpu")
    ids = (batch["input_ids"] * (index + 1) + index) % 128
    return {"input_ids": ids, "labels": ids}


def chosen_in(model: nn.Module, batch: dict[str, Tensor]) -> list[list[int]]:
    """Return how many tokens choose each expert, by layer."""
    found: list[list[int]] = []
    hooks = [
        m.register_forward_hook(lambda _, __, out: found.append(torch.bincount(out[1].flatten(), minlength=8).tolist()))
        for m in model.modules()
        if type(m).__name__ == "Router"
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return found


def counts_for(name: str, layout: Layout, rank: int) -> ExpertCounts:
    """Return what the ranks send that this rank shares the experts with."""
    first = layout.rank_coordinates(rank).dp_shard // layout.ep * layout.ep
    seen = [chosen_in(made(name), batch_of(name, first + n)) for n in range(layout.ep)]
    return ExpertCounts([[layers[n] for layers in seen] for n in range(len(seen[0]))])


def _worker(rank: int, world: int, cases: Sequence[Case], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for number, (name, layout) in enumerate(cases):
        for mode in _RUNS:
            store = dist.FileStore(f"{folder}/{number}.{mode}.store", world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_SECONDS)
            )
            model, batch = made(name), batch_of(name, layout.rank_coordinates(rank).dp_shard)
            options: dict[str, Any] = {"blocks": [block.path for block in find_blocks(model, None, None)]}
            options["optimizer"] = "sgd" if mode == "trained" else "adamw"
            job = build_job(find_parts(model), batch, layout, **options)
            assert job.optimizer is not None
            if mode == "trained":
                job.step()
                whole = {n: _whole(p.detach()) for n, p in job.model.named_parameters()}
                torch.save(whole, f"{folder}/{number}.{rank}.pt")
            else:
                for group in job.optimizer.param_groups:
                    group["lr"] = 0.0  # so that every step routes alike
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


def predicted(cases: Sequence[Case], folder: Path) -> dict[tuple[int, str, int], int]:
    """Predict what each rank takes, under modes and under a plan, which is left in the folder."""
    found: dict[tuple[int, str, int], int] = {}
    for number, (name, layout) in enumerate(cases):
        model = made(name)
        for rank in range(layout.world):
            batch = batch_of(name, layout.rank_coordinates(rank).dp_shard)
            routing = counts_for(name, layout, rank)
            seen = profile_layout(model, batch, layout, rank=rank, routing=routing)
            told = {mode: actmem.predict(seen, given, FLAT).tensor_bytes for mode, given in _MODES.items()}
            plan = actmem.fit(seen, budget=(told["full"] + told["plain"]) // 2, device=FLAT)
            plan.save(folder / f"{number}.{rank}.plan.json")
            told["fitted"] = actmem.predict(seen, plan, FLAT).tensor_bytes
            found |= {(number, mode, rank): num_bytes for mode, num_bytes in told.items()}
    return found


def trained_by_one(name: str, layout: Layout) -> dict[str, Tensor]:
    """Train one process on the batches of all ranks. Return what its step changed."""
    model = made(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = [model(**batch_of(name, n)).loss for n in range(layout.dp_shard)]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters()).step()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def compare(cases: Sequence[Case], folder: Path) -> None:
    """Train every layout on real ranks; compare each with one process, and with its prediction."""
    world = cases[0][1].world
    expected = predicted(cases, folder)
    torch.multiprocessing.spawn(_worker, args=(world, cases, str(folder)), nprocs=world)
    wrong: list[str] = []
    for number, (name, layout) in enumerate(cases):
        before, wanted = dict(made(name).named_parameters()), trained_by_one(name, layout)
        for rank in range(world):
            at = layout.rank_coordinates(rank)
            for mine, value in torch.load(f"{folder}/{number}.{rank}.pt").items():
                begin = sum(layers_of_stages(tiny(name).num_layers, layout.num_stages)[: at.pp])
                parts = mine.split(".")
                full = ".".join([*parts[:2], str(int(parts[2]) + begin), *parts[3:]]) if "layers" in mine else mine
                start, change = before[full].detach(), wanted[full]
                if ".experts." in full:
                    start, change = (t.chunk(layout.ep)[at.ep] for t in (start, change))
                # Grouped products are of bfloat16, and round what they add up.
                if not torch.allclose(value - start, change, rtol=0.03, atol=0.03 * float(change.abs().max()) + 1e-9):
                    wrong.append(f"{name}, {layout}, rank {rank}: {full} is trained otherwise than by one process")
            for mode in _RUNS[1:]:
                real = json.loads((folder / f"{number}.{mode}.{rank}.json").read_text())
                told = expected[number, mode, rank]
                if abs(told - real) > _TOLERANCE:
                    wrong.append(f"{name}, {layout}, rank {rank}, {mode}: predicted {told}, measured {real}")
    assert not wrong, "\n".join(wrong)


def test_experts_of_a_layout_train_as_one_process_does_and_take_what_was_predicted(tmp_path: Path) -> None:
    compare([("mixtral-8x7b", Layout(dp_shard=2, ep=2))], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [
            ("deepseek-v3", Layout(dp_shard=2, ep=2)),
            ("gpt-oss-20b", Layout(dp_shard=2, ep=2, reshard_after_forward=False)),
            ("qwen3-235b-a22b", Layout(dp_shard=2, ep=2, microbatches=2)),
        ],
        [
            ("mixtral-8x7b", Layout(dp_shard=4, ep=2)),
            ("deepseek-v3", Layout(dp_shard=4, ep=4)),
            ("deepseek-v3", Layout(dp_shard=2, ep=2, pp=2)),
            ("qwen3-235b-a22b", Layout(dp_shard=2, ep=2, pp=2, schedule="GPipe")),
        ],
    ],
    ids=["two", "four"],
)
def test_every_kind_of_spread_experts_does(cases: list[Case], tmp_path: Path) -> None:
    compare(cases, tmp_path)


def test_a_stage_is_profiled_on_its_hottest_rank_and_names_it() -> None:
    config = replace(tiny("mixtral-8x7b"), num_layers=4)
    model, batch = build(config, dtype=torch.float32), example(config, batch=2, sequence=16)
    # Two experts for each of 32 tokens; those of the second rank get most of them.
    counts = ExpertCounts([[2, 2, 2, 2, 14, 14, 14, 14]])
    stages = profile_stages(model, batch, Layout(dp_shard=2, ep=2, pp=2), routing=counts)
    assert [stage.rank for stage in stages] == [1, 3]
    told = [str(stage.profile.expert_loads) for stage in stages]
    assert told == [f"rank {2 * n + 1} receives 112 rows, the most in its group of 2; rank {2 * n}, 16" for n in (0, 1)]


def test_a_stage_takes_the_counts_of_its_own_layers() -> None:
    config = tiny("deepseek-v3")  # one dense layer, two with experts
    model, batch = build(config, dtype=torch.float32), example(config, batch=2, sequence=16)
    first, second = [8] * 8, [2, 2, 2, 2, 14, 14, 14, 14]
    layout = Layout(dp_shard=2, ep=2, pp=2)
    counts = ExpertCounts([[first, first], [second, second]])
    seen = [profile_layout(model, batch, layout, rank=layout.rank_of(pp=n), routing=counts) for n in (0, 1)]
    assert [s.expert_loads.rows for s in seen if s.expert_loads] == [(64, 64), (16, 112)]
    with pytest.raises(actmem.ModeError, match="counts are of 3 layers, but the model has 2 layers with experts"):
        profile_layout(model, batch, layout, routing=ExpertCounts([[first, first]] * 3))
