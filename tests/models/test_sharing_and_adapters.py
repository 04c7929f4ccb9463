"""Blocks that share keys and values, that fill a cache, and whose adapters add in place, train as without actmem."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, Report, Selective, Targets, every_second
from actmem.modes import Mode
from tests.zoo import SEQ, ZOO, awakened, causal_lm, padded_tokens, seeded

NUM_STEPS = 2  # the first is observed and checked, the second is as all others


def replayed(report: Report) -> Counter[str]:
    """Count the values of each operator that were made again."""
    found: Counter[str] = Counter()
    for kind in report.kinds:
        for row in kind.rows:
            found[row.op.rpartition(".")[0]] += row.replayed * kind.num_blocks
    return +found


def assert_same_bits(plain: dict[str, Tensor], managed: dict[str, Tensor]) -> None:
    assert plain.keys() == managed.keys()
    assert [name for name in plain if not torch.equal(plain[name], managed[name])] == []


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -------------------------------------------------------------------- shared keys and values

SHARING = ["gemma3n_shared_kv", "gemma4_shared_kv"]
NUM_SHARED, NUM_LAYERS = 2, 4
SHARING_MODES: dict[str, Mode] = {
    "full": Full(),
    "selective": Selective(save=["attention", every_second("matmul")]),
    "matmul": Selective(save=["matmul"]),
    "attention": Targets(["attention"]),
    "norm and mlp": Targets(["norm", "mlp"]),
}


def cached_step(model: nn.Module, use_cache: bool | None) -> tuple[dict[str, Tensor], Any]:
    """Train once; return loss and gradients, and the cache. None leaves the cache to the model's config."""
    model.zero_grad()
    batch = padded_tokens(model)
    out = model(**batch) if use_cache is None else model(**batch, use_cache=use_cache)
    out.loss.backward()
    return {"loss": out.loss.detach(), **gradients(model)}, out.past_key_values


def contents(cache: Any) -> dict[str, Tensor]:
    found = {"length": torch.tensor(cache.get_seq_length())}
    for index, layer in enumerate(cache.layers):
        if layer.keys is not None:
            found |= {f"{index} keys": layer.keys.detach(), f"{index} values": layer.values.detach()}
    return found


@pytest.mark.parametrize(
    "use_cache",
    [True, False, pytest.param(None, marks=pytest.mark.slow)],
    ids=["cache", "no cache", "as configured"],
)
@pytest.mark.parametrize(
    "mode", ["full", "selective", pytest.param("matmul", marks=pytest.mark.slow), "attention", "norm and mlp"]
)
@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_keys_and_values_train_as_in_plain_training_with_a_cache_and_without(
    name: str, mode: str, use_cache: bool | None
) -> None:
    model = ZOO[name].build()
    config = model.config
    assert config.num_kv_shared_layers == NUM_SHARED and config.use_cache is True
    plain, plain_cache = cached_step(model, use_cache)
    assert (plain_cache is None) == (use_cache is False)
    with actmem.apply(model, SHARING_MODES[mode]) as applied:
        for _ in range(NUM_STEPS):
            managed, cache = cached_step(model, use_cache)
            assert_same_bits(plain, managed)
            if plain_cache is None:
                assert cache is None
            else:  # after the backward pass: no replay has written to it
                assert cache.get_seq_length() == SEQ
                assert_same_bits(contents(plain_cache), contents(cache))
            assert config.use_cache is True, "the model's config is left alone"
        report = applied.report()
    assert config.use_cache is True
    assert not report.unobserved and report.num_replayed > 0 and report.held_bytes < report.plain_bytes
    assert sum(kind.num_blocks for kind in report.kinds) == NUM_LAYERS, "no block was left out"


@pytest.mark.parametrize("name", SHARING)
def test_keys_and_values_that_later_layers_read_are_projected_once_and_replayed_once(name: str) -> None:
    """The layers that share project no keys and values. Those they read belong to another block: they are held."""
    model = ZOO[name].build()
    with actmem.apply(model, Full()) as applied:
        cached_step(model, False)
        report = applied.report()
    paths = {path: kind for kind in report.kinds for path in kind.paths}
    for index in range(NUM_LAYERS - NUM_SHARED, NUM_LAYERS):
        kind = next(kind for path, kind in paths.items() if path.endswith(f"layers.{index}"))
        made = {row.module for row in kind.rows if row.replayed}
        assert not {m for m in made if m.endswith(("k_proj", "v_proj"))}
        assert any(row.decision == "input" and len(row.shape) == 4 for row in kind.rows), "shared keys and values"


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_cache_that_the_caller_passes_in_grows_by_one_step_for_each_step(mode: str) -> None:
    from transformers import DynamicCache

    def two_steps(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Train on a text in two halves, the second with the cache of the first."""
        model.zero_grad()
        ids = padded_tokens(model)["input_ids"]
        cache = DynamicCache(config=model.config)
        first = model(input_ids=ids[:, :7], labels=ids[:, :7], past_key_values=cache).loss
        assert cache.get_seq_length() == 7
        second = model(input_ids=ids[:, 7:], labels=ids[:, 7:], past_key_values=cache).loss
        (first + second).backward()
        return {"first": first.detach(), "second": second.detach(), **gradients(model)}, contents(cache)

    model = causal_lm("llama")()
    plain, plain_cache = two_steps(model)
    with actmem.apply(model, SHARING_MODES[mode]) as applied:
        for _ in range(NUM_STEPS):
            managed, cache = two_steps(model)
            assert_same_bits(plain, managed)
            assert_same_bits(plain_cache, cache)
            assert int(cache["length"]) == SEQ
        assert applied.report().num_replayed > 0


# -------------------------------------------------------------------- adapters that add in place

TARGET_MODULES = ["q_proj", "v_proj", "gate_proj", "down_proj"]


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(causal_lm("llama")(), LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGET_MODULES))


def lora_in_place() -> nn.Module:
    """PEFT's LoRA, its result added in place, as its own AdaLoRA and earlier versions of it do."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    class InPlace(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = self.base_layer(x, *args, **kwargs)
            for name in self.active_adapters:
                lora_a, lora_b = self.lora_A[name], self.lora_B[name]
                result += lora_b(lora_a(self.lora_dropout[name](x))) * self.scaling[name]
            return result

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGET_MODULES)
    config._register_custom_module({nn.Linear: InPlace})
    return get_peft_model(causal_lm("llama")(), config)


def adalora() -> nn.Module:
    from peft import AdaLoraConfig, get_peft_model

    config = AdaLoraConfig(init_r=4, target_r=2, lora_dropout=0.1, target_modules=TARGET_MODULES, total_step=9)
    return get_peft_model(causal_lm("llama")(), config)


ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": seeded(lora),
    "lora in place": seeded(lora_in_place),
    "adalora": seeded(adalora),
}
ADAPTER_MODES: dict[str, Mode] = {
    "full": Full(),
    "matmul": Selective(save=["matmul"]),
    "every second": Selective(save=[every_second("matmul")]),
    "attention and every second": Selective(save=["attention", every_second("matmul")]),
    "mlp": Targets(["mlp"]),
}


def adapter_step(model: nn.Module, seed: int) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**padded_tokens(model), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("mode", ADAPTER_MODES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_saving_matmuls_works_although_an_adapter_adds_to_them_in_place(name: str, mode: str) -> None:
    model = awakened(ADAPTERS[name]())
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    plain = [adapter_step(model, seed) for seed in range(NUM_STEPS)]
    assert plain[0]["loss"] != plain[1]["loss"], "the dropout drew"
    with actmem.apply(model, ADAPTER_MODES[mode]) as applied:
        for seed in range(NUM_STEPS):
            assert_same_bits(plain[seed], adapter_step(model, seed))
        report = applied.report()
    assert report.num_replayed > 0 and report.recomputed_bytes > 0
    assert report.held_bytes < report.plain_bytes
    if mode == "full":
        assert ("aten.add_" in replayed(report)) == (name != "lora"), "it adds in place"
    if mode == "matmul":
        assert replayed(report)["aten.mm"] == 0, "what was asked to be saved is saved, although it was written over"
