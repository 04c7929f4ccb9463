"""`actmem fit`, `show` and `largest`: the same numbers as the library gives, for every way to name a model."""

import base64
import gzip
import importlib
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import actmem
from actmem.planner import work
from tests.cli.conftest import Run

MINE = ("mine:make", "--device", "flat")


def document(run: Run, *words: str, code: int = 0) -> dict[str, Any]:
    asked = run(*words, "--json")
    assert asked.code == code, asked.err
    return json.loads(asked.out)


def mine(batch: int) -> tuple[nn.Module, tuple[Any, ...], Any]:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module("mine").make(batch)  # the module that the fixture wrote


def test_the_numbers_are_those_that_fit_gives(run: Run) -> None:
    found = document(run, "fit", *MINE, "--budget", "700KiB", "--microbatches", "2", "--frontier", "3")
    model, batch, loss = mine(256)
    plan = actmem.fit(model, batch, loss=loss, budget="700KiB", device="flat", microbatches=2)
    assert plan.predicted is not None
    for name in ("peak_bytes", "budget_bytes", "step_time_ratio", "bound", "gap", "replayed_flops", "peak_at"):
        assert found[name] == getattr(plan.predicted, name), name
    assert found["plan"] == json.loads(plan.to_json())
    profile = actmem.profile(model, batch, loss=loss, microbatches=2)
    curve = actmem.frontier(profile, "flat", num_points=3)
    assert [p["peak_bytes"] for p in found["frontier"]] == [p.peak_bytes for p in curve.points]
    assert [(p["name"], p["peak_bytes"]) for p in found["modes"]] == [(p.name, p.peak_bytes) for p in curve.modes]


def test_a_search_that_the_time_limit_stopped_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("fit", *MINE, "--budget", "700KiB", "--frontier", "0")
    assert document(run, *words)["time_limit_hit"] is False
    assert "time limit" not in run(*words).out
    ticks = itertools.count(0, 1000)
    monkeypatch.setattr(work, "perf_counter", lambda: next(ticks))
    assert document(run, *words)["time_limit_hit"] is True
    assert "stopped by the time limit before the search was done" in run(*words).out


@pytest.mark.parametrize("options", [(), ("--shard", "2"), ("--offload", "disk"), ("--optimizer", "none")])
def test_the_parts_add_up_to_the_peak(run: Run, options: tuple[str, ...]) -> None:
    found = document(run, "fit", *MINE, "--budget", "700KiB", "--frontier", "0", *options)
    assert sum(part["num_bytes"] for part in found["parts"]) == found["peak_bytes"] <= found["budget_bytes"]
    assert min(part["num_bytes"] for part in found["parts"]) >= 0
    assert found["frontier"] == []
    assert len(found["modes"]) == 6


def test_a_function_of_the_users_names_a_model_and_its_prints_stay_out_of_the_document(run: Run) -> None:
    found = document(run, "fit", *MINE, "--batch", "512", "--budget", "1100KiB", "--frontier", "0")
    model, batch, loss = mine(512)
    plan = actmem.fit(model, batch, loss=loss, budget="1100KiB", device="flat")
    assert plan.predicted is not None
    assert found["peak_bytes"] == plan.predicted.peak_bytes
    assert found["model"]["source"] == "function"
    assert found["model"]["shapes"] == ["0 float32 [512, 64]"]


def test_a_config_of_transformers_names_a_model(run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    LlamaConfig(**sizes, **heads).save_pretrained(tmp_path)
    words = ("--device", "flat", "--budget", "4MiB", "--dtype", "float32", "--frontier", "0")
    found = document(run, "fit", "config.json", *words)
    model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, use_cache=False))
    ids = torch.zeros(1, 96, dtype=torch.int64)
    plan = actmem.fit(model.train(), {"input_ids": ids, "labels": ids}, budget="4MiB", device="flat")
    assert plan.predicted is not None
    assert found["peak_bytes"] == plan.predicted.peak_bytes
    assert found["model"]["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert found["model"]["shapes"] == ["input_ids int64 [1, 96]", "labels int64 [1, 96]"]


def test_more_positions_than_a_model_has_are_refused(run: Run, tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=48, eos_token_id=0).save_pretrained(tmp_path)
    words = ("config.json", "--device", "h100-80gb", "--optimizer", "adamw_fused", "--budget", "72GiB")
    assert run("fit", *words, "--sequence", "48", "--frontier", "0").code == 0
    for refused in (run("fit", *words, "--sequence", "49"), run("largest", *words, "--vary", "sequence")):
        assert refused.code == 2
        assert "exceeds the 48 positions of config.json" in refused.err


def test_a_batch_with_other_names_than_forward_takes_is_said_to_be_that(run: Run) -> None:
    refused = run("fit", "mine:wrong_batch", "--device", "flat", "--budget", "1GiB")
    assert refused.code == 3
    assert "forward, takes other arguments" in refused.err and "report this" not in refused.err


def test_a_plan_is_written_as_json_or_toml_and_can_be_shown_and_verified(run: Run) -> None:
    words = ("fit", *MINE, "--budget", "700KiB", "--offload", "disk", "--frontier", "0")
    found = document(run, *words, "--out", "plan.json")
    assert run(*words, "--out", "plan.toml").code == 0
    plan = actmem.Plan.load("plan.json")
    assert plan == actmem.Plan.load("plan.toml")
    shown = document(run, "show", *MINE, "--plan", "plan.toml")
    assert shown["peak_bytes"] == found["peak_bytes"]
    assert document(run, "verify", "mine:make", "--plan", "plan.json", "--on", "cpu")["equal"]


def test_the_allocators_settings_are_an_option_that_the_plan_keeps_and_show_prints(run: Run) -> None:
    settings = ("--allocator", "expandable_segments:True")
    card = ("--device", "h100-80gb", "--budget", "2GiB", "--frontier", "0")
    found = document(run, "fit", "mine:make", *card, *settings, "--out", "plan.json")
    assert found["allocator"] == found["plan"]["predicted"]["allocator"] == "expandable_segments:True"
    assert "(allocator: expandable_segments:True)" in run("fit", "mine:make", *card, *settings).out
    assert document(run, "show", "mine:make", "--mode", "full")["planned_for"] is None
    shown = run("show", "mine:make", "--plan", "plan.json").out
    assert "planned for     NVIDIA H100 SXM 80 GB, allocator: expandable_segments:True" in shown


def test_a_page_and_a_timeline_are_written(run: Run, tmp_path: Path) -> None:
    words = ("fit", *MINE, "--budget", "700KiB", "--frontier", "0")
    found = document(run, *words, "--report", "page.html", "--timeline", "trace.json")
    assert found["written"] == {"report": "page.html", "timeline": "trace.json"}
    assert "<html" in (tmp_path / "page.html").read_text()
    trace = json.loads((tmp_path / "trace.json").read_text())
    counters = [sum(e["args"].values()) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(counters) == found["peak_bytes"]


def test_the_frontier_that_is_printed_is_also_that_of_the_page_and_is_solved_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actmem.reporting.page_frontier.frontier", lambda *_, **__: pytest.fail("it is solved again"))
    found = document(run, "fit", *MINE, "--budget", "700KiB", "--frontier", "3", "--report", "page.html")
    packed = re.search(r'id="data">(.*?)<', (tmp_path / "page.html").read_text())
    assert packed is not None
    page = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert {point["peak_bytes"] for point in found["frontier"]} <= {plan["peak_bytes"] for plan in page["plans"]}


def test_show_tells_what_becomes_of_every_value_and_folds_equal_layers(run: Run) -> None:
    found = document(run, "show", "tiny:llama-3.1-8b", "--mode", "selective:attention")
    (group,) = found["groups"]
    assert group["layers"] == ["model.layers.0", "model.layers.1"]
    held = [row["op"] for row in group["rows"] if row["outcome"] == "held"]
    assert any("attention" in op for op in held)
    assert all(row["outcome"] != "replayed" for row in group["rows"] if row["decision"] == "save")
    assert len([r for r in group["rows"] if r["outcome"] == "replayed"]) * 2 == found["num_replayed"]
    assert group["replayed_flops"] * 2 == found["replayed_flops"]
    everything = document(run, "show", "tiny:llama-3.1-8b", "--mode", "save-everything")
    assert everything["num_replayed"] == 0
    assert everything["peak_bytes"] > found["peak_bytes"]


def test_values_that_are_offloaded_are_shown_as_offloaded(run: Run) -> None:
    found = document(run, "show", "tiny:llama-3.1-8b", "--mode", "offload:disk,min_bytes=1024")
    rows = [row for group in found["groups"] for row in group["rows"]]
    assert any(row["op"] == "input" and row["outcome"] == "offloaded" and row["held_bytes"] == 0 for row in rows)
    sent = [
        (row["num_bytes"] - row["held_bytes"]) * len(group["layers"])
        for group in found["groups"]
        for row in group["rows"]
        if row["outcome"] == "offloaded"
    ]
    assert sum(sent) == found["sent_bytes"] > 0


def test_two_files_of_one_name_are_refused(run: Run) -> None:
    asked = run("fit", *MINE, "--budget", "700KiB", "--out", "a.json", "--timeline", "./a.json")
    assert asked.code == 2
    assert "--timeline a.json is also the file of --out" in asked.err


def test_names_with_brackets_are_shown_as_they_are(run: Run, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.parts = nn.ModuleDict({'[/x]': nn.Linear(8, 8), 'a[0]': nn.Linear(8, 8)})\n\n"
        "    def forward(self, x):\n"
        "        for part in self.parts.values():\n"
        "            x = nn.functional.gelu(part(x))\n"
        "        return x\n\n\n"
        "def make():\n"
        "    return nn.Sequential(*[Odd() for _ in range(4)]), (torch.randn(64, 8),), torch.sum\n"
    )
    assert "parts.[/x]" in run("show", "odd:make", "--mode", "full").out
    budget = ("--device", "flat", "--budget", "32KiB", "--frontier", "0", "--optimizer", "none")
    assert document(run, "fit", "odd:make", *budget)["plan"]["rules"]


@pytest.mark.parametrize("name", [":make", "..mine:make", "./mine.py:make"])
def test_what_is_no_name_of_a_module_is_a_wrong_command(run: Run, name: str) -> None:
    asked = run("show", name, "--mode", "full")
    assert asked.code == 2
    assert "Write package.module:function" in asked.err


def test_a_config_never_runs_code_that_came_with_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked"))
    asked = run("show", "config.json", "--mode", "full")
    assert asked.code == 2
    assert "custom code" in asked.err


def test_largest_finds_the_size_that_the_library_finds(run: Run) -> None:
    options = ("--budget", "700KiB", "--multiple", "64", "--most", "512")
    found = document(run, "largest", *MINE, "--vary", "batch", *options)
    model, _, loss = mine(1)
    best = actmem.largest(
        model,
        lambda n: mine(n)[1],
        budget="700KiB",
        device="flat",
        vary="batch",
        multiple=64,
        most=512,
        loss=loss,
    )
    assert (found["size"], found["refused"]) == (best.size, best.refused) == (320, 384)
    assert found["model"]["shapes"] == ["0 float32 [320, 64]"]
    assert found["plan"] == json.loads(best.plan.to_json())


def test_largest_prints_the_command_that_writes_its_plan_with_every_option_that_was_given(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--budget", "700KiB", "--shard", "2", "--optimizer-dtype", "float32", "--microbatches", "2")
    search = ("--vary", "batch", "--multiple", "64", "--most", "512")
    found = document(run, "largest", "mine:make", "--device", "FLAT", *options, *search)
    printed = run("largest", "mine:make", "--device", "FLAT", *options, *search).out
    line = found["fit_command"]
    assert line in printed.splitlines()[-1] and "..." not in line
    words = shlex.split(line)
    assert words[:2] == ["actmem", "fit"] and set(options) < set(words) and "FLAT" in words
    again = document(run, *words[1:], "--frontier", "0")
    assert again["peak_bytes"] == found["peak_bytes"]
    assert again["plan"] == found["plan"]


def test_a_reader_gets_tables(run: Run) -> None:
    asked = run("fit", *MINE, "--budget", "700KiB", "--frontier", "2")
    assert asked.code == 0
    for text in ("predicted peak", "optimizer state", "no plan in this budget is below", "save everything", "fits"):
        assert text in asked.out
    shown = run("show", "tiny:qwen3-8b", "--mode", "full")
    assert "2 equal layers, model.layers.0 ... model.layers.1" in shown.out
    assert "replayed" in shown.out


@pytest.mark.slow
def test_llama_8b_is_planned_for_one_h100(run: Run) -> None:
    words = (
        "fit",
        "llama-3.1-8b",
        "--sequence",
        "8192",
        "--device",
        "h100-80gb",
        "--optimizer",
        "adamw_fused",
        "--budget",
        "72GiB",
    )
    found = document(run, *words)
    assert found["peak_bytes"] <= found["reserved_bytes"] <= 72 * 2**30 - found["outside_bytes"]
    assert found["gap"] < 0.05  # nearly all of it is what fragmentation costs: the bound is for tensors without gaps
    assert sum(part["num_bytes"] for part in found["parts"]) == found["peak_bytes"]
    assert len(found["frontier"]) == 6
