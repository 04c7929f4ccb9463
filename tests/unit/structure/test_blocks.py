import copy
from typing import Any

import pytest
import torch
from torch import nn

from actmem.errors import StructureError
from actmem.structure import find_blocks
from tests.zoo import ZOO


class Layer(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))


class OtherLayer(Layer):
    pass


class ExpertLayer(nn.Module):
    """A layer nearly all of whose parameters are in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.experts = nn.ModuleList(Layer() for _ in range(8))


def holder(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def layers(count: int = 2, cls: type[nn.Module] = Layer) -> nn.ModuleList:
    return nn.ModuleList(cls() for _ in range(count))


def paths(model: nn.Module, pattern: Any = None) -> list[str]:
    blocks = find_blocks(model, pattern)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert all(model.get_submodule(block.path) is block.module for block in blocks)
    return [block.path for block in blocks]


FOUND = {
    "decoder": (holder(model=holder(layers=layers())), ["model.layers.0", "model.layers.1"]),
    "one_layer": (holder(layers=layers(1)), ["layers.0"]),
    "module_dict": (holder(layers=nn.ModuleDict({"0": Layer(), "1": Layer()})), ["layers.0", "layers.1"]),
    "gpt_in_a_module_dict": (
        holder(transformer=nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": layers(), "ln_f": nn.LayerNorm(4)})),
        ["transformer.h.0", "transformer.h.1"],
    ),
    "sequential_with_stem_and_head": (nn.Sequential(nn.Embedding(4, 4), Layer(), Layer(), nn.Linear(4, 4)), ["1", "2"]),
    "encoder_decoder": (
        holder(
            encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 2),
            decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 4), 1),
        ),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
    ),
    "down_and_up": (
        holder(down_blocks=layers(2), mid=Layer(), up_blocks=layers(2, OtherLayer)),
        ["down_blocks.0", "down_blocks.1", "up_blocks.0", "up_blocks.1"],
    ),
    "stages_in_a_list": (
        nn.ModuleList([nn.Sequential(Layer(), Layer()), nn.Sequential(Layer())]),
        ["0.0", "0.1", "1.0"],
    ),
    "pairs_in_a_list": (
        nn.ModuleList([nn.ModuleList([Layer(), OtherLayer(), nn.LayerNorm(4)]) for _ in range(2)]),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "numbered_attributes": (
        holder(
            layer1=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            layer2=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            fc=nn.Linear(4, 4),
        ),
        ["layer1", "layer2"],
    ),
    "classes_mixed": (
        nn.ModuleList([Layer(), OtherLayer(), Layer(), ExpertLayer(), Layer()]),
        ["0", "1", "2", "3", "4"],
    ),
    "experts_stay_inside": (holder(layers=layers(2, ExpertLayer)), ["layers.0", "layers.1"]),
    "small_stack_beside": (holder(layers=layers(20), heads=layers(1, OtherLayer)), [f"layers.{i}" for i in range(20)]),
    "projections_beside": (
        holder(layers=layers(), projections=nn.ModuleList(nn.Linear(64, 64) for _ in range(4))),
        ["layers.0", "layers.1"],
    ),
    "leaves_if_nothing_else": (nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)]), ["0", "1"]),
    "language_beside_vision": (
        holder(vision_tower=holder(layers=layers(4, OtherLayer)), language_model=holder(layers=layers())),
        ["language_model.layers.0", "language_model.layers.1"],
    ),
    "vision_alone": (
        holder(vision_tower=holder(layers=layers())),
        ["vision_tower.layers.0", "vision_tower.layers.1"],
    ),
    "two_towers_of_one_class": (
        holder(text_model=layers(1), vision_model=layers(1)),
        ["text_model.0", "vision_model.0"],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found_without_being_told(name: str) -> None:
    model, expected = FOUND[name]
    assert paths(model) == expected


def test_a_stage_class_is_looked_through() -> None:
    class ConvStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.downsample = nn.Linear(4, 4)
            self.layers = layers(2)

    assert paths(nn.ModuleList([ConvStage(), ConvStage()])) == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]


def test_a_layer_that_is_used_twice_is_one_block_at_its_first_path() -> None:
    layer = Layer()
    model = holder(first=nn.ModuleList([layer, Layer(), layer]), second=nn.ModuleList([layer]))
    assert paths(model) == ["first.0", "first.1"]
    assert paths(model, "second.*") == ["first.0"]
    assert paths(holder(tied=layer, layers=nn.ModuleList([Layer(), layer]))) == ["tied", "layers.0"]
    sparse = ExpertLayer()
    assert paths(holder(tied=sparse, layers=nn.ModuleList([ExpertLayer(), sparse]))) == ["tied", "layers.0"]


def test_wrappers_are_looked_through_and_may_be_left_out_of_a_pattern() -> None:
    plain = holder(layers=layers())
    compiled = torch.compile(plain, backend="eager")
    assert paths(compiled) == ["_orig_mod.layers.0", "_orig_mod.layers.1"]
    assert paths(compiled, "layers.0") == paths(compiled, "_orig_mod.layers.0") == ["_orig_mod.layers.0"]
    assert paths(nn.DataParallel(plain), "layers.0") == ["module.layers.0"]


def test_a_block_that_is_compiled_by_itself_keeps_its_kind() -> None:
    plain = holder(layers=layers())
    half = holder(layers=nn.ModuleList([torch.compile(Layer(), backend="eager"), Layer()]))
    assert paths(half) == ["layers.0", "layers.1"]
    assert [block.kind for block in find_blocks(half)] == [block.kind for block in find_blocks(plain)]


def test_equal_structure_is_equal_kind() -> None:
    model = nn.ModuleList([Layer(), Layer(), Layer(8), OtherLayer(), copy.deepcopy(Layer()).double()])
    first, second, wide, other, double = (block.kind for block in find_blocks(model))
    assert first == second
    assert len({first, wide, other, double}) == 4
    assert first.startswith("Layer#")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.1", ["layers.1"]),
        ("layers.*.ff", ["layers.0.ff", "layers.1.ff"]),
        ("layers.1, head", ["layers.1", "head"]),
        ("head,layers.1", ["layers.1", "head"]),
        ("layers.[0]", ["layers.0"]),
        (".", [""]),
        (["head", "layers.1"], ["layers.1", "head"]),
        (("layers.0.ff, head", "layers.1"), ["layers.0.ff", "layers.1", "head"]),
    ],
)
def test_a_pattern_is_matched_name_by_name(pattern: str | list[str], expected: list[str]) -> None:
    assert paths(holder(layers=layers(), head=nn.Linear(4, 4)), pattern) == expected


def test_a_pattern_reaches_the_tower_that_was_not_chosen() -> None:
    model = ZOO["vision_language"].build()
    assert paths(model, "model.vision_tower.encoder.layers.*") == [
        "model.vision_tower.encoder.layers.0",
        "model.vision_tower.encoder.layers.1",
    ]


def message(model: nn.Module, pattern: str | None = None) -> str:
    with pytest.raises(StructureError) as caught:
        find_blocks(model, pattern)
    return str(caught.value)


def test_unrelated_stacks_are_ambiguous_and_each_line_of_the_message_works() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = layers(2)
            self.two = nn.Sequential(nn.Linear(4, 4), OtherLayer(), OtherLayer())

    text = message(Model())
    assert text == (
        "Model has 2 unrelated stacks of blocks, and actmem cannot tell which of them to use. "
        "Choose one:\n"
        '  blocks="one.*"  # 2 x Layer, 96 parameters\n'
        '  blocks="two.1,two.2"  # 2 x OtherLayer, 96 parameters\n'
        'or use them all: blocks="one.*,two.1,two.2"'
    )
    assert paths(Model(), "one.*") == ["one.0", "one.1"]
    assert paths(Model(), "two.1,two.2") == ["two.1", "two.2"]
    assert paths(Model(), "one.*,two.1,two.2") == ["one.0", "one.1", "two.1", "two.2"]


def test_no_stack_is_an_error_that_lists_what_could_be_chosen() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2)
            self.head = nn.Linear(4, 4)

    assert message(Tagger()) == (
        "no repeating blocks found in Tagger: it has no list of modules of one class. "
        "Say where the blocks are, for example:\n"
        '  blocks="lstm"  # LSTM, 320 parameters\n'
        '  blocks="head"  # Linear, 20 parameters\n'
        '  blocks="."  # the whole Tagger as one block'
    )
    assert paths(nn.LSTM(4, 4), ".") == [""]


def test_a_pattern_without_a_match_names_the_nearest_paths() -> None:
    assert message(nn.Sequential(Layer(), Layer()), "layer.*") == (
        'blocks="layer.*" matches no module of Sequential. Candidates:\n  blocks="*"  # 2 x Layer, 96 parameters'
    )
    assert "The closest module paths are layers.*," in message(holder(layers=layers()), "layer.*")
    assert 'blocks="nothing" matches no module' in message(holder(layers=layers()), "layers.*,nothing")


def test_blocks_inside_blocks_are_refused() -> None:
    assert message(holder(layers=layers()), "layers.*,layers.1.ff") == (
        "block layers.1.ff is inside block layers.1, but an activation can belong to only one block. "
        'Leave one of them out, for example: blocks="layers.1"'
    )


def test_a_list_is_never_called_and_so_no_block() -> None:
    assert message(holder(layers=layers()), "layers") == (
        "layers is a ModuleList, which is never called itself, so it cannot be a block. "
        'Use the modules in it: blocks="layers.*"'
    )


def test_a_model_without_parameters_is_refused() -> None:
    assert message(nn.Sequential(nn.ReLU())) == (
        "Sequential has no parameters, so there are no activations to decide on. "
        "Pass the module that holds the layers to train."
    )
