import dataclasses
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from actmem import modes
from actmem.decision_rules import Rule, check_rules
from actmem.errors import ModeError
from actmem.modes import (
    TARGETS,
    FromPlan,
    Full,
    Rules,
    SaveEverything,
    Selective,
    Targets,
    every_second,
)
from actmem.plan import Plan

MODES = [
    SaveEverything(),
    Full(),
    Full(every=3, first=1),
    Full(layers="-2:"),
    Selective(
        save=["attention"],
        force_recompute=["moe.router.gate", "*.lora_*"],
        save_sliding_window=False,
        recompute_layer_types=["chunked_attention"],
        min_bytes=1024,
        every=2,
    ),
    Targets(["norm", "own:adapter"], layers=":4"),
    Selective(save=["attention", every_second("matmul"), "aten::mm", "*.mlp::aten.mm"]),
    Targets(["norm", "mlp"]),
    Rules([Rule("offload", module="*.mlp", op="matmul", layers="0:24"), Rule("save")]),
    FromPlan("plan.json"),
]


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_a_mode_prints_as_the_line_that_makes_it(mode: Any) -> None:
    assert eval(repr(mode)) == mode


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_modes_are_frozen_and_can_be_keys(mode: Any) -> None:
    assert {mode: 1}[eval(repr(mode))] == 1
    for field in dataclasses.fields(mode):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(mode, field.name, None)


@pytest.mark.parametrize("mode", MODES[:-1], ids=repr)
def test_the_rules_of_every_mode_make_a_plan_that_can_be_read_back(mode: Any) -> None:
    plan = Plan(check_rules(mode.rules()), ["layers.0"], "f", repr(mode))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("mode", MODES[1:], ids=repr)
def test_every_field_has_a_docstring_in_the_source(mode: Any) -> None:
    source = Path(modes.__file__).read_text()
    for field in dataclasses.fields(mode):
        after = source.split(f"class {type(mode).__name__}")[1].split(f"\n    {field.name}:")[1].split("\n", 1)[1]
        assert after.lstrip().startswith('"""'), field.name


def test_save_everything_is_one_rule() -> None:
    assert SaveEverything().rules() == (Rule("save"),)


def test_full_recomputes_the_layers_it_names_and_saves_the_others() -> None:
    assert Full().rules() == (Rule("recompute"),)
    assert Full(every=2).rules() == (Rule("recompute", layers="0::2"), Rule("save"))
    assert Full(first=2).rules() == (Rule("recompute", layers="2::1"), Rule("save"))
    assert Full(every=3, first=1).rules() == (Rule("recompute", layers="1::3"), Rule("save"))


def test_selective_saves_what_it_names_in_order_and_recomputes_the_rest() -> None:
    mode = Selective(
        save=[
            "attention",
            every_second("matmul"),
            "aten.mm",
            "aten::bmm",
            "*.mlp::matmul",
            every_second("*.attn::aten::mm"),
        ]
    )
    assert mode.rules() == (
        Rule("recompute", target="router", op="matmul"),
        Rule("save", op="attention"),
        Rule("save", op="matmul", nth="::2"),
        Rule("save", op="aten.mm"),
        Rule("save", op="aten::bmm"),
        Rule("save", module="*.mlp", op="matmul"),
        Rule("save", module="*.attn", op="aten::mm", nth="::2"),
        Rule("recompute"),
    )


def test_a_list_that_changes_later_does_not_change_the_mode() -> None:
    names: list[Any] = ["attention"]
    mode = Selective(save=names)
    names.append("matmul")
    assert mode == Selective(save=("attention",))


def test_targets_recompute_the_parts_they_name() -> None:
    assert Targets(["norm"]).rules() == (Rule("recompute", target="norm"), Rule("save"))
    assert len(Targets(TARGETS).rules()) == len(TARGETS) + 1


def test_rules_are_taken_as_they_are() -> None:
    listed = (Rule("recompute", target="norm"), Rule("save"))
    assert Rules(list(listed)).rules() == listed


def test_from_plan_holds_a_path_and_reads_nothing() -> None:
    assert FromPlan(Path("missing.toml")) == FromPlan("missing.toml")
    assert not hasattr(FromPlan("missing.toml"), "rules")


REFUSED = {
    "Full(every=0)": lambda: Full(every=0),
    "Full(every=-2)": lambda: Full(every=-2),
    "Full(every=True)": lambda: Full(every=True),
    "Full(every=1.5)": lambda: Full(every=1.5),  # type: ignore[arg-type]
    "Full(first=-1)": lambda: Full(first=-1),
    "Selective(save=[])": lambda: Selective(save=[]),
    "Selective(save='attention')": lambda: Selective(save="attention"),
    "Selective(save=every_second('matmul'))": lambda: Selective(save=every_second("matmul")),  # type: ignore[arg-type]
    "Selective(save=None)": lambda: Selective(save=None),  # type: ignore[arg-type]
    "Selective(save=['attention', 3])": lambda: Selective(save=["attention", 3]),  # type: ignore[list-item]
    "Selective(save=['atention'])": lambda: Selective(save=["atention"]),
    "Selective(save=['mm'])": lambda: Selective(save=["mm"]),
    "Selective(save=[''])": lambda: Selective(save=[""]),
    "Selective(save=['*.mlp::matmull'])": lambda: Selective(save=["*.mlp::matmull"]),
    "every_second(2)": lambda: every_second(2),  # type: ignore[arg-type]
    "every_second('matmull')": lambda: every_second("matmull"),
    "Targets([])": lambda: Targets([]),
    "Targets('norm')": lambda: Targets("norm"),
    "Targets(['nrom'])": lambda: Targets(["nrom"]),
    "Targets([None])": lambda: Targets([None]),  # type: ignore[list-item]
    "Rules([])": lambda: Rules([]),
    "Rules(Rule('save'))": lambda: Rules(Rule("save")),  # type: ignore[arg-type]
    "Rules([Rule('save', op='matmul')])": lambda: Rules([Rule("save", op="matmul")]),
    "Full(layers='x')": lambda: Full(layers="x"),
    "Full(layers=3)": lambda: Full(layers=3),  # type: ignore[arg-type]
    "Full(every=2, layers=':4')": lambda: Full(every=2, layers=":4"),
    "Targets(['norm'], every=0)": lambda: Targets(["norm"], every=0),
    "Targets(['own:2'])": lambda: Targets(["own:2"]),
    "Selective(force_recompute='gate')": lambda: Selective(save=["matmul"], force_recompute="gate"),
    "Selective(force_recompute=[3])": lambda: Selective(save=["matmul"], force_recompute=[3]),  # type: ignore[list-item]
    "Selective(save_sliding_window='no')": lambda: Selective(save=["matmul"], save_sliding_window="no"),  # type: ignore[arg-type]
    "Selective(recompute_layer_types=[''])": lambda: Selective(save=["matmul"], recompute_layer_types=[""]),
    "Selective(min_bytes=-1)": lambda: Selective(save=["matmul"], min_bytes=-1),
    "FromPlan('')": lambda: FromPlan(""),
    "FromPlan(3)": lambda: FromPlan(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_permitted_is_refused_with_its_repair(line: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(ModeError) as caught:
        REFUSED[line]()
    assert str(caught.value) == snapshot


def test_modes_have_no_hidden_default_for_what_to_save() -> None:
    with pytest.raises(TypeError):
        Selective()  # type: ignore[call-arg]


def test_selective_options_become_rules_in_front_of_what_is_saved() -> None:
    mode = Selective(
        save=[every_second("matmul")],
        force_recompute=["moe.router.gate", "*.lora_A", "mlp"],
        save_sliding_window=False,
        recompute_layer_types=["chunked_attention"],
        min_bytes=1024,
        every=2,
    )
    assert mode.rules() == (
        Rule("recompute", layers="0::2", layer_type="chunked_attention"),
        Rule("recompute", layers="0::2", layer_type="sliding*", op="attention"),
        Rule("recompute", layers="0::2", module="*.moe.router.gate", op="matmul"),
        Rule("recompute", layers="0::2", module="*.lora_A", op="matmul"),
        Rule("recompute", layers="0::2", target="mlp", op="matmul"),
        Rule("save", layers="0::2", op="matmul", nth="::2", min_bytes=1024),
        Rule("recompute", layers="0::2"),
        Rule("save"),
    )


def test_a_target_named_twice_is_one() -> None:
    assert Targets(["norm", "mlp", "norm"]) == Targets(["norm", "mlp"])


def test_layers_that_are_not_chosen_save_everything() -> None:
    assert Full(layers="-4:").rules() == (Rule("recompute", layers="-4:"), Rule("save"))
    assert Targets(["norm"], layers=":2").rules() == (Rule("recompute", layers=":2", target="norm"), Rule("save"))
    assert Selective(save=["matmul"], force_recompute=[], layers="1").rules() == (
        Rule("save", layers="1", op="matmul"),
        Rule("recompute", layers="1"),
        Rule("save"),
    )
