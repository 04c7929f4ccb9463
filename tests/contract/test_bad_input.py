"""What cannot be done is said clearly, with what would work; and the model is as it was."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import actmem
from actmem import (
    ActmemError,
    ApplyError,
    FromPlan,
    Full,
    ModeError,
    Plan,
    PlanError,
    Rule,
    Rules,
    Selective,
    StructureError,
    Targets,
    every_second,
)
from tests.zoo import TitanLike

Refused = Callable[[nn.Module], Any]


def titan() -> nn.Module:
    torch.manual_seed(0)
    return TitanLike()


def plan_text(model: nn.Module) -> dict[str, Any]:
    with actmem.apply(model, Full(every=2)) as applied:
        return json.loads(applied.plan.to_json())


def from_file(content: str, name: str = "plan.json") -> Refused:
    def refused(model: nn.Module) -> Any:
        Path(name).write_text(content)
        return actmem.apply(model, FromPlan(name))

    return refused


def changed(**fields: Any) -> Refused:
    def refused(model: nn.Module) -> Any:
        return from_file(json.dumps({**plan_text(titan()), **fields}))(model)

    return refused


def cut_off(model: nn.Module) -> Any:
    return from_file(json.dumps(plan_text(titan()), indent=2)[:-30])(model)


@dataclass(frozen=True)
class Bad:
    refused: Refused
    error: type[ActmemError]


def mode(make: Callable[[], Any], error: type[ActmemError] = ModeError, **options: Any) -> Bad:
    return Bad(lambda model: actmem.apply(model, make(), **options), error)


CASES: dict[str, Bad] = {
    # modes
    "every_is_zero": mode(lambda: Full(every=0)),
    "every_is_a_fraction": mode(lambda: Full(every=1.5)),
    "first_beyond_the_last_layer": mode(lambda: Full(every=2, first=7)),
    "save_is_empty": mode(lambda: Selective(save=[])),
    "save_is_one_text": mode(lambda: Selective(save="attention")),
    "targets_are_empty": mode(lambda: Targets([])),
    "target_unknown": mode(lambda: Targets(["nrom"])),
    "target_not_in_this_model": mode(lambda: Targets(["router", "moe_act"])),
    "operator_unknown": mode(lambda: Selective(save=["aten.mmm"])),
    "operator_of_no_library": mode(lambda: Selective(save=["flsh_attn.fwd"])),
    "operator_glob_matches_none": mode(lambda: Selective(save=["aten.*matmull*"])),
    "group_unknown": mode(lambda: Selective(save=[every_second("matmull")])),
    "module_unknown": mode(lambda: Selective(save=["*.feed_foward::matmul"])),
    "module_of_a_rule_unknown": mode(lambda: Rules([Rule("save", module="layers.*.atention"), Rule("recompute")])),
    "layers_beyond_the_last": mode(lambda: Rules([Rule("recompute", layers="5:"), Rule("save")])),
    "no_default_rule": mode(lambda: Rules([Rule("recompute", target="norm")])),
    "offload": mode(lambda: Rules([Rule("offload", op="matmul"), Rule("recompute")])),
    "decision_unknown": mode(lambda: Rules([Rule("drop")])),
    # apply
    "a_mode_class_and_no_mode": mode(lambda: Full),
    "a_text_and_no_mode": mode(lambda: "full"),
    "none_and_no_mode": mode(lambda: None),
    "collectives_twice_where_nothing_is": mode(Full, engine="checkpoint", collectives="recompute"),
    "collectives_unknown": mode(Full, collectives="recomputed"),
    "scope_unknown": mode(Full, StructureError, scope=["visoin"]),
    "scope_not_in_this_model": mode(Full, StructureError, scope=["audio"]),
    "scope_beside_blocks": mode(Full, StructureError, scope=["language"], blocks="layers.*"),
    "layer_type_not_in_this_model": mode(
        lambda: Selective(save=["matmul"], recompute_layer_types=["sliding_attention"])
    ),
    "forced_module_not_in_this_model": mode(lambda: Selective(save=["matmul"], force_recompute=["moe.gate"])),
    "own_target_that_nobody_declares": mode(lambda: Targets(["own:adapter"])),
    "engine_unknown": mode(Full, engine="tap"),
    "example_for_a_mode_that_needs_none": mode(Full, example=(1,)),
    "blocks_match_nothing": mode(Full, StructureError, blocks="layers.*.attn"),
    "blocks_in_an_empty_list": mode(Full, StructureError, blocks=[]),
    "blocks_by_number": mode(Full, StructureError, blocks=[0, 1]),
    "a_number_for_the_model": Bad(lambda _: actmem.apply(5, Full()), ModeError),  # type: ignore[arg-type]
    "model_and_mode_exchanged": Bad(lambda model: actmem.apply(Full(), model), ModeError),  # type: ignore[arg-type]
    "blocks_of_a_list": mode(Full, StructureError, blocks="layers"),
    # plans
    "plan_missing": mode(lambda: FromPlan("nowhere.json"), PlanError),
    "plan_cut_off": Bad(cut_off, PlanError),
    "plan_empty": Bad(from_file(""), PlanError),
    "plan_of_a_newer_version": Bad(changed(version=2), PlanError),
    "plan_with_an_unknown_key": Bad(changed(budget=3), PlanError),
    "plan_with_an_unknown_decision": Bad(changed(rules=[{"decision": "drop"}]), PlanError),
    "plan_of_another_size": Bad(lambda model: actmem.apply(model, Plan.from_json(wider())), PlanError),
    "plan_of_another_model": Bad(changed(blocks=["encoder.0", "encoder.1"]), PlanError),
    "plan_and_blocks": Bad(
        lambda model: actmem.apply(model, Plan.from_json(json.dumps(plan_text(model))), blocks="layers.*"), ModeError
    ),
    "plan_that_is_no_plan": Bad(from_file("[1, 2]"), PlanError),
    "plan_in_yaml": Bad(from_file("version: 1", "plan.yaml"), PlanError),
}


def wider() -> str:
    return json.dumps(plan_text(TitanLike(ffn=64)))


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.arange(24).view(2, 12)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_and_the_model_is_untouched(
    name: str, snapshot: SnapshotAssertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # so that messages name the same paths everywhere
    model = titan()
    expected, classes = gradients(model), [type(m) for m in model.modules()]
    with pytest.raises(ActmemError) as caught:
        CASES[name].refused(model)
    assert type(caught.value) is CASES[name].error
    assert str(caught.value) == snapshot
    assert [type(m) for m in model.modules()] == classes
    assert all(map(torch.equal, gradients(model), expected))
    assert actmem.verify(model, (torch.arange(24).view(2, 12),), Full(), loss=torch.sum).ok


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def two_stacks() -> nn.Module:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return nn.ModuleDict(
        {name: nn.ModuleList(kind(8, 2, 8) for _ in range(2)) for name, kind in zip("ab", kinds, strict=True)}
    )


def wrapped(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    return model


def with_forward(model: nn.Module) -> nn.Module:
    model.layers["1"].forward = model.layers["1"].forward
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], type[ActmemError]]] = {
    "no_parameters": (lambda: nn.Sequential(Empty(), Empty()), StructureError),
    "no_blocks": (lambda: nn.Linear(3, 3), StructureError),
    "two_stacks": (two_stacks, StructureError),
    "torchs_checkpoint_wrapper": (lambda: wrapped(titan()), ApplyError),
    "forward_in_the_instance": (lambda: with_forward(titan()), ApplyError),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_applied_to_is_refused(name: str, snapshot: SnapshotAssertion) -> None:
    make, error = MODELS[name]
    model = make()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ActmemError) as caught:
        actmem.apply(model, Full())
    assert type(caught.value) is error
    assert str(caught.value) == snapshot
    assert [type(m) for m in model.modules()] == classes


def test_a_mode_none_of_whose_names_matches_is_refused_at_the_first_step(snapshot: SnapshotAssertion) -> None:
    model = titan()
    expected = gradients(model)
    with actmem.apply(model, Selective(save=["convolution", "aten.bmm"])):
        with pytest.raises(ModeError) as caught:
            gradients(model)
        assert str(caught.value) == snapshot
    assert all(map(torch.equal, gradients(model), expected))


def test_a_name_that_matches_nothing_beside_one_that_does_is_a_line_in_the_report() -> None:
    model = titan()
    with actmem.apply(model, Selective(save=["convolution", "matmul"])) as applied:
        gradients(model)
        report = applied.report()
    assert report.unmatched == ("Rule('save', op='convolution')",)
    assert "matched nothing in this model: Rule('save', op='convolution')" in str(report)


def test_there_is_no_default_mode() -> None:
    with pytest.raises(TypeError, match="mode"):
        actmem.apply(titan())
