from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from actmem.errors import StructureError
from actmem.structure import find_blocks, find_roles, roles
from tests.zoo import ZOO


class Block(nn.Module):
    """A block whose names say little."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_a = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.down = nn.Linear(4, 2)
        self.up = nn.Linear(2, 4)


def stacked(targets: Any = None, num_blocks: int = 2) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    if targets is not None:
        model.actmem_targets = targets
    return model


def found(model: nn.Module) -> list[dict[str, tuple[str, ...]]]:
    return find_roles(model, find_blocks(model))


def test_a_model_names_targets_for_all_its_blocks() -> None:
    model = stacked({"attention": ("mix",), "own:adapter": ("down", "up")})
    expected = {"norm": ("ln_a",), "attention": ("mix",), "attn_proj": ("mix",), "own:adapter": ("down", "up")}
    assert found(model) == [expected, expected]


def test_a_class_of_blocks_names_targets_for_its_own() -> None:
    class Adapted(Block):
        actmem_targets: ClassVar = {"own:adapter": ["down", "up"]}

    model = nn.ModuleList([Block(), Adapted(), Block(), Adapted()])
    assert ["own:adapter" in its for its in found(model)] == [False, True, False, True]
    assert roles(Adapted())["own:adapter"] == ("down", "up")


def test_an_instance_comes_before_the_model_and_the_model_before_what_is_found() -> None:
    model = stacked({"norm": ("mix",), "mlp": ("up",)})
    model[1].actmem_targets = {"norm": ("ln_*",)}
    assert found(model) == [{"norm": ("mix",), "mlp": ("up",)}, {"norm": ("ln_a",), "mlp": ("up",)}]


def test_what_is_declared_replaces_what_would_be_found() -> None:
    model = ZOO["mixtral"].build()
    plain = found(model)[0]
    model.actmem_targets = {"routed_experts": ("mlp",), "norm": ()}
    declared = found(model)[0]
    assert declared["routed_experts"] == declared["moe_act"] == ("mlp",)
    assert "norm" not in declared
    assert declared["attention"] == plain["attention"] and declared["router"] == plain["router"]
    model.actmem_targets = {"moe_act": ("mlp.experts.act_fn",)}
    assert found(model)[0]["moe_act"] == ("mlp.experts.act_fn",)
    assert found(model)[0]["routed_experts"] == plain["routed_experts"]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("layers.*", ("layers.0", "layers.1")),
        ("*.0", ("layers.0",)),
        ("*", ("layers",)),
        (".", ("",)),
        ("layers.[1]", ("layers.1",)),
        ("*.inner", ("layers.1.inner",)),
    ],
)
def test_a_glob_is_matched_against_whole_paths_and_covers_what_is_below(glob: str, expected: tuple[str, ...]) -> None:
    block = nn.Module()
    block.layers = nn.ModuleList([nn.Linear(2, 2), nn.Module()])
    block.layers[1].inner = nn.Linear(2, 2)
    assert roles(block, declared={"own:part": (glob,)})["own:part"] == expected


def test_wrappers_hide_no_declaration() -> None:
    model = stacked({"own:adapter": ("down", "up")})
    model[0] = torch.compile(model[0], backend="eager")
    expected = [("_orig_mod.down", "_orig_mod.up"), ("down", "up")]
    assert [its["own:adapter"] for its in found(model)] == expected
    assert [its["own:adapter"] for its in found(nn.DataParallel(model))] == expected


def test_adapters_hide_no_declaration() -> None:
    from peft import LoraConfig, get_peft_model

    model = ZOO["llama"].build()
    model.actmem_targets = {"own:query": ("self_attn.q_proj",)}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert found(adapted)[0]["own:query"] == ("self_attn.q_proj",)
    model.actmem_targets = {"own:adapter": ("*.lora_A", "*.lora_B")}
    assert found(adapted)[0]["own:adapter"] == ("self_attn.q_proj.lora_A", "self_attn.q_proj.lora_B")


def message(model: nn.Module) -> str:
    with pytest.raises(StructureError) as caught:
        found(model)
    return str(caught.value)


KNOWN = "norm, attn_proj, attention, mlp, mla_up_proj, routed_experts, shared_experts, router, linear_attn, moe_act"
EXAMPLE = 'actmem_targets = {"norm": ("ln_*",)}'


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            ["norm"],
            (
                "Sequential.actmem_targets = ['norm'] is not a dict. Expected target -> tuple of globs over module "
                f"paths inside a block: {EXAMPLE}"
            ),
        ),
        (
            {"norm": "ln_*"},
            (
                "Sequential.actmem_targets['norm'] = 'ln_*' is not a tuple of globs over module paths inside a block. "
                "Write: actmem_targets = {\"norm\": ('ln_*',)}"
            ),
        ),
        (
            {"norm": (3,)},
            (
                "Sequential.actmem_targets['norm'] = (3,) is not a tuple of globs over module paths inside a block. "
                f"Write: {EXAMPLE}"
            ),
        ),
        (
            {"norm": None},
            (
                "Sequential.actmem_targets['norm'] = None is not a tuple of globs over module paths inside a block. "
                f"Write: {EXAMPLE}"
            ),
        ),
        (
            {"nrom": ("ln_a",)},
            (
                f"Sequential.actmem_targets: target 'nrom' is not known. Permitted: {KNOWN}; or own:NAME, for a part "
                "that the model names in its attribute actmem_targets. Did you mean 'norm'? "
                f"Write, for example: {EXAMPLE}"
            ),
        ),
        (
            {"own:my adapter": ("up",)},
            (
                f"Sequential.actmem_targets: target 'own:my adapter' is not known. Permitted: {KNOWN}; or own:NAME, "
                f"for a part that the model names in its attribute actmem_targets. Write, for example: {EXAMPLE}"
            ),
        ),
        (
            {"norm": ("ln_a",), "mlp": ("up", "donw")},
            (
                "Sequential.actmem_targets['mlp'] names 'donw', which matches no module in any block that it applies "
                "to. Did you mean 'down'? Module paths inside 0: ln_a, mix, down, up. Remove it, or name one of these: "
                'actmem_targets = {"mlp": ("down",)}'
            ),
        ),
    ],
)
def test_a_bad_attribute_is_refused_with_the_line_that_repairs_it(targets: Any, expected: str) -> None:
    assert message(stacked(targets)) == expected


def test_a_glob_that_matches_in_one_block_is_no_error_and_one_that_matches_in_none_is() -> None:
    model = stacked({"own:extra": ("extra",)})
    assert "'extra', which matches no module" in message(model)
    model[1].extra = nn.Linear(2, 2)
    assert [its.get("own:extra") for its in found(model)] == [None, ("extra",)]


def test_a_glob_on_a_class_of_blocks_must_match_in_a_block_of_that_class() -> None:
    class Adapted(Block):
        actmem_targets: ClassVar = {"own:extra": ("extra",)}

    model = nn.ModuleList([Block(), Adapted(), Block(), Adapted()])
    model[0].extra = nn.Linear(2, 2)
    text = message(model)
    assert text.startswith("Adapted.actmem_targets['own:extra'] names 'extra'") and "inside 1:" in text
    model[3].extra = nn.Linear(2, 2)
    assert found(model)[3]["own:extra"] == ("extra",)
