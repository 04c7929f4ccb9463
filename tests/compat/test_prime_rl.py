"""A user of prime-rl's targets changes an import, and gets the same words with the same meaning."""

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Full, ModeError, Rule, SaveEverything
from actmem.compat import prime_rl
from actmem.compat.prime_rl import (
    ActivationCheckpointConfig,
    apply_ac,
    get_supported_targets,
    set_selective_activation_checkpointing,
    supports_selective_activation_checkpointing,
)
from tests.compat.training import REQUIRED, assert_trains_the_same, gradients, layers_of, parameters_of
from tests.zoo import ZOO

OURS = ("keyword", "recompute")
# As read in prime-rl; the config's fields are those of its pydantic model.
UPSTREAM = {
    "apply_ac": {"model": ("any", REQUIRED), "ac_config": ("any", REQUIRED), "collectives": OURS},
    "get_supported_targets": {"layer": ("any", REQUIRED)},
    "set_selective_activation_checkpointing": {
        "layer": ("any", REQUIRED),
        "targets": ("any", REQUIRED),
        "collectives": OURS,
    },
    "get_activation_checkpoint_wrapper": {"config": ("any", REQUIRED)},
    "maybe_activation_offloading": {"config": ("any", REQUIRED), "model": ("any", None)},
    "ActivationOffloadingConfig": {"pin_memory": ("any", True), "max_inflight_activations": ("any", 5)},
    "supports_selective_activation_checkpointing": {"layer": ("any", REQUIRED)},
}
SUPPORTED = {
    "llama": [{"norm", "attn_proj", "mlp"}] * 3,
    "mixtral": [{"norm", "attn_proj", "routed_experts", "moe_act"}] * 3,
    "gemma3_sliding": [{"norm", "attn_proj", "mlp", "linear_attn"}, {"norm", "attn_proj", "mlp"}] * 2,
    "torchtitan_like": [{"norm", "attn_proj", "mlp"}] * 3,
}


def selective(*targets: str, freq: int = 1) -> ActivationCheckpointConfig:
    return ActivationCheckpointConfig(mode="selective", freq=freq, targets=list(targets))


@pytest.mark.parametrize("name", UPSTREAM)
def test_functions_take_what_they_take_in_prime_rl(name: str) -> None:
    assert parameters_of(getattr(prime_rl, name)) == UPSTREAM[name]


def test_a_config_without_arguments_is_full_for_every_layer() -> None:
    config = ActivationCheckpointConfig()
    assert (config.mode, config.freq, config.targets) == ("full", 1, ["norm"])
    assert config.resolved() == "mode = full, freq = 1, targets = norm"


def test_resolved_shows_mode_freq_and_targets_without_repeats() -> None:
    assert selective("mlp", "norm", "mlp", freq=2).resolved() == "mode = selective, freq = 2, targets = mlp, norm"


def test_none_changes_nothing() -> None:
    model = ZOO["llama"].build()
    kinds = [type(module) for module in model.modules()]
    assert apply_ac(model, None) is None
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "none"}, "for off, use None"),
        ({"freq": 0}, "freq = 0 is not permitted"),
        ({"freq": 1.5}, "freq = 1.5 is not permitted"),
        ({"mode": "selective", "targets": []}, "targets is empty"),
        ({"mode": "selective", "targets": "norm"}, "is not a list"),
    ],
)
def test_a_bad_config_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModeError, match=message):
        ActivationCheckpointConfig(**fields)


@pytest.mark.parametrize("name", SUPPORTED)
def test_targets_are_found_layer_by_layer(name: str) -> None:
    layers = layers_of(ZOO[name].build())
    assert [get_supported_targets(layer) for layer in layers] == SUPPORTED[name]
    assert all(supports_selective_activation_checkpointing(layer) for layer in layers)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", ActivationCheckpointConfig()),
        ("llama", ActivationCheckpointConfig(freq=2)),
        ("mixtral", selective("norm", "attn_proj", "routed_experts")),
        ("gemma3_sliding", selective("linear_attn", "attn_proj")),
        ("torchtitan_like", selective("norm", "mlp", freq=2)),
    ],
)
def test_gradients_are_those_of_plain_training(name: str, config: ActivationCheckpointConfig) -> None:
    applied = assert_trains_the_same(ZOO[name], lambda model: apply_ac(model, config))
    assert applied.report().recomputed_bytes > 0


def test_freq_takes_the_layers_that_it_takes_in_prime_rl() -> None:
    full = apply_ac(ZOO["llama"].build(), ActivationCheckpointConfig(freq=2))
    some = apply_ac(ZOO["llama"].build(), selective("norm", freq=2))
    assert full is not None and full.plan.rules == Full(every=2).rules()
    assert some is not None and some.plan.rules[0] == Rule("recompute", layers="0::2", target="norm")


def saved_bytes(applied: Any, model: Any) -> int:
    gradients(ZOO["mixtral"], model)
    return applied.report().saved_bytes


def test_routed_experts_cover_moe_act() -> None:
    def saved(*targets: str) -> int:
        return saved_bytes(apply_ac(model := ZOO["mixtral"].build(), selective(*targets)), model)

    plain = saved_bytes(actmem.apply(model := ZOO["mixtral"].build(), SaveEverything()), model)
    assert saved("moe_act", "routed_experts") == saved("routed_experts") < saved("moe_act") < plain


def test_the_report_says_that_moe_act_adds_nothing_to_routed_experts() -> None:
    applied = apply_ac(model := ZOO["mixtral"].build(), selective("moe_act", "routed_experts"))
    gradients(ZOO["mixtral"], model)
    assert "target 'moe_act' adds nothing" in str(applied.report())  # type: ignore[union-attr]


def test_linear_attn_means_sliding_window_layers_too() -> None:
    applied = apply_ac(ZOO["gemma3_sliding"].build(), selective("linear_attn", freq=1))
    assert applied is not None
    assert Rule("recompute", layer_type="sliding_attention", target="attention") in applied.plan.rules
    assert not any(rule.target == "linear_attn" for rule in applied.plan.rules)


def test_one_layer_can_be_set_alone() -> None:
    def change(model: Any) -> Any:
        return [set_selective_activation_checkpointing(layer, ["mlp", "norm"]) for layer in layers_of(model)]

    for applied in assert_trains_the_same(ZOO["llama"], change):
        assert applied.report().recomputed_bytes > 0


def test_a_target_that_this_layer_has_not_is_passed_over() -> None:
    layer = layers_of(ZOO["mixtral"].build())[0]
    kind = type(layer)
    assert set_selective_activation_checkpointing(layer, ["mlp"]) is None
    assert type(layer) is kind


def test_the_same_call_again_does_nothing() -> None:
    layer = layers_of(ZOO["llama"].build())[0]
    plain = type(layer)
    first = set_selective_activation_checkpointing(layer, ["norm"])
    applied = type(layer)
    again = set_selective_activation_checkpointing(layer, ["norm", "norm"])
    assert first is not None and again is not None
    assert type(layer) is applied is not plain and again.plan is first.plan
    again.remove()
    assert type(layer) is plain


def test_other_targets_are_added_in_a_second_call() -> None:
    def saved(model: Any, *calls: list[str]) -> int:
        for targets in calls:
            handles = [set_selective_activation_checkpointing(layer, targets) for layer in layers_of(model)]
        gradients(ZOO["llama"], model)
        return sum(applied.report().saved_bytes for applied in handles if applied is not None)

    both = saved(ZOO["llama"].build(), ["norm", "mlp"])
    assert (
        saved(ZOO["llama"].build(), ["norm"], ["mlp"]) == saved(ZOO["llama"].build(), ["mlp", "norm"], ["norm"]) == both
    )
    assert both < saved(ZOO["llama"].build(), ["norm"])


def test_targets_are_added_to_one_layer_of_a_model_that_has_some() -> None:
    def change(model: Any) -> Any:
        first = apply_ac(model, selective("norm"))
        set_selective_activation_checkpointing(layers_of(model)[1], ["mlp"])
        return first

    applied = assert_trains_the_same(ZOO["llama"], change)
    assert applied.plan.rules == (
        Rule("recompute", target="norm"),
        Rule("recompute", layers="1", target="mlp"),
        Rule("save"),
    )


class Toy(nn.Module):
    """A layer without parameters, as prime-rl's own tests have them."""

    def __init__(self) -> None:
        super().__init__()
        self.mamba = Mamba()

    def forward(self, x: Tensor) -> Tensor:
        return self.mamba(x)


class Mamba(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp().sin()


def test_a_layer_without_parameters_is_done_too() -> None:
    layer, x = Toy(), torch.ones(3, requires_grad=True)
    assert get_supported_targets(layer) == {"norm", "linear_attn"}  # norm is listed by every layer, as there
    applied = set_selective_activation_checkpointing(layer, ["linear_attn"])
    assert applied is not None
    layer(x).sum().backward()
    assert x.grad is not None and applied.report().recomputed_bytes == x.nbytes


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp().sin()


class Half(nn.Module):
    """Layers of which every second has no part that has a name."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), Bare()] * 2
        self.layers = nn.ModuleList(copy.deepcopy(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_without_targets_is_recomputed_as_a_whole_and_said() -> None:
    with pytest.warns(UserWarning, match=r"2 of 4 selected layers \(Bare\) have none of prime-rl's targets"):
        applied = apply_ac(Half(), selective("norm"))
    assert applied is not None
    assert applied.plan.rules[0] == Rule("recompute", layers="1,3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_ac(Half(), selective("norm", freq=2))


def test_targets_that_name_operators_are_saved_as_in_the_newest_prime_rl() -> None:
    config = ActivationCheckpointConfig(mode="selective", targets=["aten::mm", "_c10d_functional"])
    applied = assert_trains_the_same(ZOO["llama"], lambda model: apply_ac(model, config))
    assert {r.op for r in applied.plan.rules if r.decision == "save"} == {"aten.mm", "_c10d_functional.*"}
    default = ActivationCheckpointConfig(mode="selective", targets=None)
    assert default.resolved() == "mode = selective, freq = 1, targets = default operators"
    applied = assert_trains_the_same(ZOO["mixtral"], lambda model: apply_ac(model, default))
    saved = {r.op for r in applied.plan.rules if r.decision == "save"}
    assert {"aten.mm", "aten._grouped_mm", "_c10d_functional.*"} <= saved and "flash_attn.*" not in saved
    assert "aten.silu" not in saved


@pytest.mark.parametrize("targets", [["aten::no_such"], ["norm", "aten::mm"]])
def test_operators_that_are_not_there_or_mixed_with_parts_are_refused(targets: list[str]) -> None:
    with pytest.raises(ModeError, match=r"torch has no such operator|Use only one kind"):
        apply_ac(ZOO["llama"].build(), selective(*targets))


@pytest.mark.parametrize("targets", [None, ["norm"], ["aten::mm"]])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_the_wrapper_changes_one_layer_and_returns_it(mode: Any, targets: Any) -> None:
    def change(model: Any) -> None:
        wrap = prime_rl.get_activation_checkpoint_wrapper(ActivationCheckpointConfig(mode=mode, targets=targets))
        for layer in layers_of(model):
            plain = type(layer)
            assert wrap(layer) is layer and type(layer) is not plain

    assert_trains_the_same(ZOO["llama"], change)


def test_offloading_is_off_for_none_and_needs_the_model() -> None:
    with prime_rl.maybe_activation_offloading(None):
        pass
    config = prime_rl.ActivationOffloadingConfig(pin_memory=False)
    with pytest.raises(ModeError, match=r"maybe_activation_offloading\(config, model\)"):
        prime_rl.maybe_activation_offloading(config)
    model = ZOO["llama"].build()
    with prime_rl.maybe_activation_offloading(config, model):
        ZOO["llama"].step(model, ZOO["llama"].batch(model)).backward()
    with pytest.raises(ModeError, match="max_inflight_activations = 0 is not permitted"):
        prime_rl.ActivationOffloadingConfig(max_inflight_activations=0)


def test_a_model_can_be_done_again_after_it_was_removed() -> None:
    model = ZOO["llama"].build()
    first = apply_ac(model, ActivationCheckpointConfig())
    assert first is not None
    first.remove()
    second = apply_ac(model, ActivationCheckpointConfig())
    assert second is not None and second.plan is not first.plan


def test_a_dropped_model_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = ZOO["torchtitan_like"].build()
        layer = weakref.ref(layers_of(model)[0])
        apply_ac(model, ActivationCheckpointConfig())
        gradients(ZOO["torchtitan_like"], model)
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_a_target_that_no_selected_layer_has_names_those_that_they_have() -> None:
    model = ZOO["llama"].build()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"routed_experts.*Those layers have: attn_proj, mlp, norm"):
        apply_ac(model, selective("norm", "routed_experts"))
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("call", [lambda m: apply_ac(m, selective("nrom")), None])
def test_an_unknown_target_is_refused_with_the_nearest(call: Any) -> None:
    model = ZOO["llama"].build()
    call = call or (lambda m: set_selective_activation_checkpointing(layers_of(m)[0], ["nrom"]))
    with pytest.raises(ValueError, match="Did you mean 'norm'"):
        call(model)
