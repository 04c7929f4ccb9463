from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actmem.structure import find_blocks, layer_type
from tests.zoo import ZOO


class Attention(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2)
        vars(self).update(attributes)


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(2, 2), nn.Linear(2, 2)


def block(*mixers: nn.Module, **attributes: Any) -> nn.Module:
    made = nn.Module()
    for index, mixer in enumerate(mixers):
        made.add_module(f"mixer_{index}", mixer)
    vars(made).update(attributes)
    return made


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


TYPES = ["chunked_attention", "full_attention"]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (block(attention_type="chunked_attention"), "chunked_attention"),
        (block(Attention(is_sliding=True), layer_type="full_attention"), "full_attention"),
        (block(block_type="mamba"), "linear_attention"),
        (block(block_type=3), None),
        (block(Attention(layer_type="sliding_attention")), "sliding_attention"),
        (block(Attention(attention_type="global")), "full_attention"),
        (block(Attention(is_sliding=True)), "sliding_attention"),
        (block(Attention(sliding_window=128)), "sliding_attention"),
        (block(Attention(sliding_window=128, is_sliding=False)), None),
        (block(Attention(sliding_window=None, config=config())), "full_attention"),
        (block(Attention(layer_idx=0, config=config(layer_types=TYPES))), "chunked_attention"),
        (block(Attention(layer_idx=1, config=config(layer_types=TYPES))), "full_attention"),
        (block(Attention(layer_idx=2, config=config(layer_types=TYPES))), "full_attention"),
        (block(Attention(config=config(sliding_window=4096))), "sliding_attention"),
        (block(Attention(config=config(sliding_window=4096, use_sliding_window=False))), "full_attention"),
        (block(Attention(config=config(fullatt_block_indexes=[7]))), None),
        (block(Attention(config=config(window_size=112))), None),
        (block(Attention()), None),
        (block(Mamba()), "linear_attention"),
        (block(Attention(), Mamba()), "hybrid"),
        (block(nn.Linear(2, 2)), None),
    ],
)
def test_the_layer_type_is_what_the_block_its_mixers_or_their_config_say(made: nn.Module, expected: str | None) -> None:
    assert layer_type(made) == expected


@pytest.mark.parametrize("case", ["gemma3_sliding", "gpt_oss", "qwen3_next", "gemma4_shared_kv"])
def test_the_layer_types_of_a_model_are_those_of_its_config(case: str) -> None:
    model = ZOO[case].build()
    assert [layer_type(each.module) for each in find_blocks(model)] == list(model.config.layer_types)


def test_a_wrapper_hides_no_layer_type() -> None:
    compiled = torch.compile(block(Attention(is_sliding=True)), backend="eager")
    assert layer_type(compiled) == "sliding_attention"
