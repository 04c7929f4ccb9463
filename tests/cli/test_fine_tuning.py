"""Fine-tuning from the command line: adapters, narrow weights, pieces of tokens, Hub names; the frontier with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import actmem
from actmem.catalogue import AdaptedLinear, adapt, build, example, tiny
from actmem.catalogue.narrow_weights import QuantisedLinear
from tests.cli.conftest import Run

TINY = "tiny:llama-3.1-8b"
HERE = ("--device", "flat", "--budget", "3MiB", "--frontier", "0", "--sequence", "256")


def fitted(run: Run, *words: str) -> Any:
    asked = run("fit", TINY, *HERE, *words, "--json")
    assert asked.code == 0, asked.err
    return json.loads(asked.out)


def test_adapters_and_narrow_weights_take_less(run: Run) -> None:
    found = [fitted(run, *words) for words in ((), ("--lora", "4"), ("--lora", "4", "--quant", "nf4"))]
    parts = [{part["category"]: part["num_bytes"] for part in shown["parts"]} for shown in found]
    parameters, states = ([its[name] for its in parts] for name in ("parameters", "optimizer"))
    assert parameters[0] < parameters[1] and parameters[2] < 0.6 * parameters[1]
    assert states[1] == states[2] < states[0] / 2


def test_pieces_are_in_the_plan_and_lower_the_peak(run: Run, tmp_path: Path) -> None:
    plain = fitted(run, "--lora", "4")
    out = tmp_path / "plan.toml"
    found = fitted(run, "--lora", "4", "--split", "loss=16,mlp=4", "--out", str(out))
    assert found["plan"]["split"]["loss"] == 16 and found["peak_bytes"] < plain["peak_bytes"]
    assert actmem.Plan.load(out).split == actmem.Split(loss=16, parts={"mlp": 4})
    assert fitted(run, "--lora", "4", "--chunked-loss")["plan"]["split"]["loss"] == "auto"
    shown = run("fit", TINY, *HERE, "--chunked-loss")
    assert "in pieces of tokens: Split(loss='auto')" in shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--quant", "nf4"), "without adapters nothing is left to train"),
        (("--lora", "0"), "--lora 0 is not permitted"),
        (("--split", "mlp"), "Expected names and numbers of pieces"),
        (("--split", "loss=4,loss=8"), "each once"),
        (("--split", "loss=4", "--chunked-loss"), "both divide the loss"),
        (("--split", "router=4"), "no block of this model has that target"),
        (("--lora", "4", "--tp", "2"), "--lora cannot be combined with a layout"),
        (("--chunked-loss", "--dp-shard", "2"), "--chunked-loss cannot be combined with a layout"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(run: Run, words: tuple[str, ...], said: str) -> None:
    asked = run("fit", TINY, *HERE, *words)
    assert asked.code == 2
    assert said in " ".join(asked.err.split())


def test_a_hub_name_is_looked_up_in_the_local_cache_only(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    asked = run("fit", "someone/small-llama", *HERE)
    assert asked.code == 2
    said = " ".join(asked.err.split())
    assert "'someone/small-llama' is not in the local cache of the Hugging Face Hub, and nothing is downloaded" in said
    assert "llama-3.1-8b" in said and "Run: hf download someone/small-llama config.json" in said
    folder = tmp_path / "models--someone--small-llama"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1).save_pretrained(snapshot)
    asked = run("fit", "someone/small-llama", *HERE, "--lora", "4", "--json")
    assert asked.code == 0, asked.err
    assert json.loads(asked.out)["model"]["num_blocks"] == 2


def test_the_frontier_has_a_curve_for_each_thing_that_is_permitted(run: Run) -> None:
    words = ("--device", "flat", "--sequence", "256", "--points", "2", "--chunked-loss", "--offload", "host")
    asked = run("frontier", TINY, *words, "--json")
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    split = "Split(loss='auto')"
    assert found["curves"] == ["save or recompute", "offload to host", split, f"offload to host and {split}"]
    points = found["points"]
    assert [p["peak_bytes"] for p in points] == sorted(p["peak_bytes"] for p in points)
    assert min(p["peak_bytes"] for p in points if split in p["name"]) < min(
        p["peak_bytes"] for p in points if split not in p["name"]
    )
    best = [p["step_seconds"] for p in points if p["is_best"]]
    assert best == sorted(best, reverse=True)
    assert run("frontier", TINY, "--device", "flat", "--points", "1").code == 2
    assert "memory against time" in run("frontier", TINY, "--device", "flat", "--sequence", "32", "--points", "2").out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("quantisation", [None, "nf4", "int8"])
def test_steps_of_adapted_models_are_exact_and_predicted_to_the_byte(quantisation: Any, dtype: torch.dtype) -> None:
    config = tiny("llama-3.1-8b")
    torch.manual_seed(0)
    model = adapt(build(config, device="cpu", dtype=dtype), 4, quantisation=quantisation).train()
    batch = example(config, sequence=64, device="cpu")
    found = actmem.profile(model, batch, optimizer=None)

    def step() -> None:
        out = model(**batch)
        out.loss.backward()

    for mode in (actmem.SaveEverything(), actmem.Full()):
        assert actmem.verify(model, batch, mode).ok
        with actmem.apply(model, mode):
            step()
            model.zero_grad(set_to_none=True)
            measured = actmem.measure(step, model=model)
            model.zero_grad(set_to_none=True)
        assert abs(measured.tensor_bytes - actmem.predict(found, mode).tensor_bytes) <= 64


def test_adapters_take_what_pefts_take() -> None:
    from peft import LoraConfig, get_peft_model

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, dtype=torch.bfloat16)

    def peak(adapted: Any) -> int:
        ids = torch.zeros(2, 64, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        found = actmem.profile(adapted.train(), batch, optimizer="adamw")
        return actmem.predict(found, actmem.SaveEverything(), "h100-80gb").live_bytes

    def model() -> Any:
        return LlamaForCausalLM(config).to(torch.bfloat16)

    theirs = get_peft_model(model(), LoraConfig(r=4, target_modules="all-linear"))
    assert peak(adapt(model(), 4)) == peak(theirs)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_narrow_layer_computes_with_its_rounded_weight(kind: Any) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(96, 40)
    narrow = QuantisedLinear(plain, kind)
    x = torch.randn(5, 96, requires_grad=True)
    weight = narrow.wide(torch.float32)
    assert (weight - plain.weight).abs().max() < (0.02 if kind == "nf4" else 0.001)
    out = narrow(x)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, plain.bias))
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, -1))


def test_heads_and_routers_have_no_adapters() -> None:
    model = adapt(build(tiny("mixtral-8x7b"), device="meta"), 4)
    adapted = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    assert {"q_proj", "o_proj"} <= adapted
    assert not adapted & {"lm_head", "gate", "router"}
