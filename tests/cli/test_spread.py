"""`actmem fit` with a layout: every rank is planned for as the library plans for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import actmem
from actmem.catalogue import build, example, tiny
from tests.cli.conftest import Run

TINY = ("fit", "tiny:llama-3.1-8b", "--device", "flat", "--frontier", "0", "--json")


def test_the_plan_of_a_rank_is_the_one_that_the_library_finds(run: Run) -> None:
    config = tiny("llama-3.1-8b")
    model, batch = build(config, dtype=torch.float32), example(config, sequence=64)
    layout = actmem.Layout(dp_shard=4)
    seen = actmem.profile_layout(model, batch, layout, together=True)
    plan = actmem.fit(seen, budget="1MiB", device="flat")
    asked = run(*TINY, "--budget", "1MiB", "--dp-shard", "4")
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    assert found["plan"] == json.loads(plan.to_json())
    assert found["layout"] == json.loads(layout.to_json())
    assert found["stages"] == []


def test_a_pipeline_has_a_plan_for_each_stage(run: Run, tmp_path: Path) -> None:
    files = ("--out", str(tmp_path / "plan.json"), "--report", str(tmp_path / "job.html"))
    asked = run(*TINY, "--budget", "4MiB", "--pp", "2", *files)
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    assert [(stage["rank"], stage["num_blocks"]) for stage in found["stages"]] == [(0, 1), (1, 1)]
    assert all(stage["peak_bytes"] <= 4 * 2**20 for stage in found["stages"])
    plans = [actmem.Plan.load(tmp_path / name) for name in ("plan.0.json", "plan.1.json")]
    assert plans[0].blocks == plans[1].blocks == ("model.layers.0",)
    assert actmem.Plan.load(tmp_path / "plan.json") in plans
    assert found["written"]["report"] == str(tmp_path / "job.html")
    assert 'data-place="1"' in (tmp_path / "job.html").read_text()


def test_a_layout_that_is_not_possible_is_refused_with_the_nearest(run: Run, tmp_path: Path) -> None:
    asked = run(*TINY, "--budget", "1MiB", "--tp", "3")
    assert asked.code == 2
    assert "tp = 3 is not possible: the model has 4 heads" in asked.out
    assert "The nearest possible layout: Layout(dp_shard=3)" in asked.out
    file = tmp_path / "layout.toml"
    file.write_text("pp = 3\n")
    asked = run(*TINY, "--budget", "1MiB", "--layout", str(file))
    assert "2 layers for 3 stages" in asked.out
    asked = run(*TINY, "--budget", "1MiB", "--layout", str(file), "--tp", "2")
    assert "--layout cannot be combined with --tp" in asked.out
    asked = run(*TINY, "--budget", "1MiB", "--dp-shard", "2", "--shard", "2")
    assert "--shard cannot be combined with a layout" in asked.out


def test_experts_are_spread_and_the_plan_names_the_hottest_rank(run: Run, tmp_path: Path) -> None:
    asked = ("fit", "tiny:mixtral-8x7b", "--device", "flat", "--frontier", "0", "--json", "--sequence", "32")
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([2, 2, 2, 2, 14, 14, 14, 14]))
    found = run(*asked, "--budget", "8MiB", "--dp-shard", "2", "--ep", "2", "--routing", str(counts))
    assert found.code == 0, found.err
    plan = actmem.Plan.from_json(json.dumps(json.loads(found.out)["plan"]))
    assert "rank 1 receives 112 rows, the most in its group of 2; rank 0, 16" in str(plan)
    found = run(*asked, "--budget", "8MiB", "--dp-shard", "2", "--ep", "2", "--routing", "99")
    assert found.code == 2
    assert "Quantile(99.0) is not permitted" in found.out
    found = run(*asked, "--budget", "8MiB", "--routing", "worst")
    assert "--routing worst needs a layout" in found.out
