from typing import Any

import pytest
from torch import nn

from actmem.errors import StructureError
from actmem.structure import find_blocks
from tests.zoo import ZOO
from tests.zoo_shapes import SHAPES


def paths(model: nn.Module, *scope: str) -> list[str]:
    blocks = find_blocks(model, scope=scope)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert all(model.get_submodule(block.path) is block.module for block in blocks)
    return [block.path for block in blocks]


def layers(prefix: str, num_layers: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(num_layers)]


VISION, LANGUAGE = layers("model.vision_tower.encoder.layers", 2), layers("model.language_model.layers", 3)


def test_the_towers_of_a_vision_language_model() -> None:
    model = ZOO["vision_language"].build()
    assert paths(model, "vision") == VISION
    assert paths(model, "language") == LANGUAGE == [block.path for block in find_blocks(model)]
    assert paths(model, "language", "vision") == paths(model, "vision", "language") == VISION + LANGUAGE


def test_the_towers_of_an_audio_language_model() -> None:
    model = ZOO["audio_language"].build()
    assert paths(model, "audio") == layers("model.audio_tower.layers", 2)
    assert paths(model, "language") == LANGUAGE


def test_the_towers_of_a_model_that_hears_sees_and_reads() -> None:
    model = SHAPES["omni"]()
    audio, vision = layers("model.audio_tower.layers", 2), layers("model.visual.blocks", 2)
    language = layers("model.language_model.layers", 2)
    assert [paths(model, tower) for tower in ("audio", "vision", "language")] == [audio, vision, language]
    assert paths(model, "language", "vision", "audio") == audio + vision + language


def test_a_connector_belongs_to_the_tower_that_it_connects() -> None:
    model = SHAPES["blip2"]()
    assert len(paths(model, "vision")) == 39 + 12
    assert paths(model, "vision")[-1] == "qformer.encoder.layer.11"
    assert paths(model, "language") == layers("language_model.model.decoder.layers", 12)


@pytest.mark.parametrize(("name", "tower"), [("vit", "vision"), ("wav2vec2", "audio"), ("llama", "language")])
def test_a_model_of_one_tower_has_that_one(name: str, tower: str) -> None:
    model = ZOO[name].build() if name in ZOO else SHAPES[name]()
    assert paths(model, tower) == [block.path for block in find_blocks(model)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()


class Merger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)


def holder(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def test_two_towers_of_one_class_are_told_apart_by_their_names() -> None:
    model = holder(text_model=nn.ModuleList([Layer()]), vision_model=nn.ModuleList([Layer(), Layer()]))
    assert paths(model, "vision") == layers("vision_model", 2)
    assert paths(model, "language") == ["text_model.0"]


def test_the_name_nearest_to_the_blocks_counts() -> None:
    model = holder(speech_model=holder(language_model=nn.ModuleList([Layer()]), encoder=nn.ModuleList([Layer()])))
    assert paths(model, "language") == ["speech_model.language_model.0"]
    assert paths(model, "audio") == ["speech_model.encoder.0"]


def test_patch_mergers_beside_the_blocks_of_a_tower_are_no_blocks() -> None:
    visual = holder(blocks=nn.ModuleList([Layer(), Layer()]), mergers=nn.ModuleList([Merger(), Merger()]))
    assert paths(holder(visual=visual, layers=nn.ModuleList([Layer()])), "vision") == layers("visual.blocks", 2)


PERMITTED = "Permitted: a list of language, vision, audio"


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("vision", f"scope = 'vision' is not a list. {PERMITTED}, as in scope=[\"vision\"]."),
        ("eyes", f"scope = 'eyes' is not a list. {PERMITTED}, as in scope=[\"language\"]."),
        (
            ["visoin"],
            f"scope names 'visoin'. {PERMITTED}, as in scope=[\"language\", \"vision\"]. Did you mean 'vision'?",
        ),
        ([3], f'scope names 3. {PERMITTED}, as in scope=["language", "vision"].'),
        ([["vision"]], f'scope names [\'vision\']. {PERMITTED}, as in scope=["language", "vision"].'),
        ([], f'scope = [] names no tower. {PERMITTED}, as in scope=["language"].'),
        (
            ["vision", "audio"],
            (
                "scope names 'audio', but LlavaForConditionalGeneration has no audio blocks. Its towers: "
                'language, vision, as in scope=["language"]; or give the paths of the blocks, for example:\n'
                '  blocks="model.vision_tower.encoder.layers.*"  # 2 x CLIPEncoderLayer, 15,008 parameters\n'
                '  blocks="model.language_model.layers.*"  # 3 x LlamaDecoderLayer, 23,232 parameters'
            ),
        ),
    ],
)
def test_a_bad_scope_is_refused_with_what_is_permitted(scope: Any, expected: str) -> None:
    with pytest.raises(StructureError) as caught:
        find_blocks(ZOO["vision_language"].build(), scope=scope)
    assert str(caught.value) == expected


def test_a_pattern_and_a_scope_together_are_refused() -> None:
    with pytest.raises(StructureError) as caught:
        find_blocks(ZOO["llama"].build(), "model.layers.*", ["language"])
    assert str(caught.value) == (
        "blocks=\"model.layers.*\" and scope=['language'] cannot be combined: each selects the blocks on its own. "
        'Leave one of them out, for example: blocks="model.layers.*"'
    )
