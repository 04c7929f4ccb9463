"""The catalogue has the published numbers, is built without weights at once, and needs torch alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actmem import ModeError
from actmem.catalogue import DecoderConfig, build, example, find, names, tiny
from actmem.catalogue.model_configs import scaled
from tests.children import run

# As the files of the published weights have them. Gemma is the language model alone, as keras-hub counts it, without
# the vision tower; DeepSeek-V3 is without the module for multi-token prediction; ViT is as torchvision counts it.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-3-12b": 11_765_788_416,
    "mixtral-8x7b": 46_702_792_704,
    "vit-l": 304_326_632,
}
# In billions, as the authors print them. DeepSeek and OpenAI do not count the embedding.
ACTIVE = {"qwen3-235b-a22b": "22", "deepseek-v3": "36.6", "gpt-oss-20b": "3.6", "mixtral-8x7b": "12.9"}


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def decoder(name: str) -> DecoderConfig:
    config = find(name)
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize("name", names())
def test_a_model_has_exactly_the_published_number_of_parameters(name: str) -> None:
    model = build(name)
    # The balancing bias of DeepSeek's routers lies in the files too, but no gradient reaches it.
    held = [*model.parameters(), *model.buffers()]
    assert sum(tensor.numel() for tensor in held) == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_passes_the_published_number_of_parameters(name: str) -> None:
    model, config = build(name), decoder(name)
    assert config.experts is not None
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    routed = sum(size for path, size in sizes.items() if ".experts." in path)
    active = sum(sizes.values()) - routed + routed * config.experts.num_chosen / config.experts.num_experts
    if name in ("deepseek-v3", "gpt-oss-20b"):
        active -= config.vocab_size * config.hidden_size
    num_digits = len(ACTIVE[name].partition(".")[2])
    assert f"{active / 1e9:.{num_digits}f}" == ACTIVE[name]


@pytest.mark.parametrize("name", names())
def test_every_config_says_where_its_numbers_come_from(name: str) -> None:
    assert find(name).name == name
    assert len(find(name).source) > 20


@pytest.mark.parametrize("name", names())
def test_no_weight_is_drawn_on_the_meta_device(name: str) -> None:
    before = torch.random.get_rng_state()
    with Recorded() as recorded:
        model = build(name)
    # torch's own LayerNorm starts at one and zero, and nothing else is written.
    assert recorded.operators <= {"aten::empty", "aten::detach", "aten::fill_", "aten::zero_"}
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", [name for name in names() if name not in ("llama-3.1-70b", "llama-3.1-405b")])
def test_a_full_size_step_runs_on_fake_tensors_without_scores_of_all_pairs(name: str) -> None:
    config = find(name)
    num_layers = config.num_dense_layers + 2 if isinstance(config, DecoderConfig) else 2
    # A data-dependent shape would raise here.
    with FakeTensorMode():
        model = build(name, layers=num_layers, device="cpu")
        batch = example(name, device="cpu")
        with Recorded() as recorded:
            model(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in recorded.operators
    assert "aten::_safe_softmax" not in recorded.operators


@pytest.mark.parametrize("name", names())
def test_a_narrower_model_takes_the_same_example(name: str) -> None:
    small = scaled(find(name), 1 / 8)
    assert small.num_layers == find(name).num_layers
    with FakeTensorMode():
        model = build(name, layers=1, scale=1 / 8, device="cpu")
        output = model(**example(name, device="cpu"))
    total, narrow = (sum(p.numel() for p in build(name, layers=1, scale=s).parameters()) for s in (None, 1 / 8))
    assert output.loss.dtype == torch.float32
    assert narrow < total / 4


def test_examples_are_the_same_each_time_and_labels_are_no_alias() -> None:
    first, second = (example("qwen3-8b", batch=2, sequence=5, device="cpu") for _ in range(2))
    assert first["input_ids"].shape == (2, 5)
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert first["labels"].data_ptr() != first["input_ids"].data_ptr()
    assert int(first["input_ids"].max()) < 151936


def test_a_label_of_minus_100_is_left_out_of_the_loss() -> None:
    config = tiny("qwen3-8b")
    model, batch = build(config, device="cpu"), example(config, sequence=6, device="cpu")

    def loss(labels: Tensor) -> Tensor:
        return model(batch["input_ids"], labels).loss

    left_out = batch["labels"].clone()
    left_out[:, 4:] = -100
    assert torch.equal(loss(left_out), model(batch["input_ids"][:, :4], batch["labels"][:, :4]).loss)
    assert model(batch["input_ids"]).loss is None


BAD: dict[str, tuple[Any, str]] = {
    "name": (
        lambda: build("llama-3.1-8B-instruct"),
        (
            "the catalogue has no model 'llama-3.1-8B-instruct'. It has: llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, "
            "qwen3-8b, qwen3-235b-a22b, deepseek-v3, gpt-oss-20b, gemma-3-12b, mixtral-8x7b, vit-l. Did you mean "
            "'llama-3.1-8b'?"
        ),
    ),
    "layers": (lambda: build("qwen3-8b", layers=37), "layers = 37 is more than qwen3-8b has: 36."),
    "no layers": (
        lambda: build("qwen3-8b", layers=0),
        "layers = 0 is not permitted. Expected a whole number of at least 1.",
    ),
    "scale": (
        lambda: build("qwen3-8b", scale=2.0),
        "scale = 2.0 is not permitted. Expected a factor above 0 and at most 1, such as 0.25.",
    ),
    "batch": (
        lambda: example("qwen3-8b", batch=0),
        "batch = 0 is not permitted. Expected a whole number of at least 1.",
    ),
    "sequence": (
        lambda: example("vit-l", sequence=8192),
        "sequence = 8192 was given for vit-l, which reads images of 224 x 224. Leave sequence out.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_built_is_said(case: str) -> None:
    act, message = BAD[case]
    with pytest.raises(ModeError) as raised:
        act()
    assert str(raised.value) == message


PROGRAM = """
import sys
sys.modules["transformers"] = None
import actmem
assert not [name for name in sys.modules if name.startswith("actmem.catalogue")]
from actmem.catalogue import build, example, names
for name in names():
    build(name, layers=1)
"""


def test_importing_actmem_leaves_the_catalogue_out_and_the_catalogue_needs_torch_alone() -> None:
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr
