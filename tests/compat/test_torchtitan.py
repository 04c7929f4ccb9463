"""A user of torchtitan's policies changes an import: classes, function, options and defaults are the same."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem import Full, ModeError, Rule
from actmem.compat import torchtitan
from actmem.compat.torchtitan import ActivationCheckpoint, FullAC, MemoryBudgetAC, SelectiveAC, apply_ac
from tests.compat.training import REQUIRED, assert_trains_the_same, gradients, parameters_of
from tests.zoo import ZOO, Case, TitanLike, ids_only, seeded, square_mean

aten = torch.ops.aten
SHARED = {"preserve_rng_state": True, "determinism_check": "default", "debug": False}
GATE = ["moe.router.gate"]
# As read in torchtitan: the policy classes of 2026, the function and the config of September 2025.
CONFIGS: dict[Any, dict[str, Any]] = {
    FullAC.Config: SHARED,
    SelectiveAC.Config: {**SHARED, "force_recompute_mm_shapes_by_fqns": GATE},
    MemoryBudgetAC.Config: {**SHARED, "memory_budget": 0.5, "visualize_memory_budget_pareto": False},
    ActivationCheckpoint: {
        "mode": "selective",
        "selective_ac_option": "2",
        "per_op_sac_force_recompute_mm_shapes_by_fqns": GATE,
        "early_stop": False,
        "memory_budget": 0.5,
        "visualize_memory_budget_pareto": False,
        "preserve_rng_state": False,
        "determinism_check": "default",
        "debug": False,
    },
}
APPLY_AC = {
    "model": ("any", REQUIRED),
    "ac_config": ("any", REQUIRED),
    "model_compile_enabled": ("keyword", False),
    "use_flex_attn": ("keyword", False),
    "op_sac_save_list": ("keyword", None),
    "base_folder": ("keyword", ""),
}
SAVE_LIST = {aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default, aten.max.default}


class Router(nn.Module):
    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.topk(1, dim=-1)
        return torch.zeros_like(scores).scatter(-1, chosen.indices, chosen.values)


class Mixture(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = Router(dim, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim, bias=False), nn.SiLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.Linear(dim, dim, bias=False)
        self.moe = Mixture(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.silu(self.attention(x))
        return x + self.moe(x)


class TitanMoE(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(64, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(2)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return x


MOE = Case("titan_moe", seeded(TitanMoE), ids_only, 2, loss=square_mean)
DENSE = ZOO["torchtitan_like"]


def older(**options: Any) -> ActivationCheckpoint:
    return ActivationCheckpoint(**options)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda kind: kind.__qualname__)
def test_options_and_their_defaults_are_those_of_torchtitan(config: Any) -> None:
    assert {field.name: getattr(config(), field.name) for field in fields(config)} == CONFIGS[config]


def test_functions_take_what_they_take_in_torchtitan() -> None:
    assert parameters_of(apply_ac) == APPLY_AC
    for kind in (FullAC, SelectiveAC, MemoryBudgetAC):
        assert parameters_of(kind) == {"config": ("any", REQUIRED), "dump_folder": ("any", "")}
        assert list(inspect.signature(kind.apply).parameters) == ["self", "model"]
    assert list(inspect.signature(SelectiveAC.get_save_ops).parameters) == ["self"]


def test_configs_are_keyword_only_and_build_their_policy() -> None:
    with pytest.raises(TypeError):
        FullAC.Config(True)  # type: ignore[misc]
    policy = MemoryBudgetAC.Config(memory_budget=0.25).build(dump_folder="out")
    assert type(policy) is MemoryBudgetAC and policy.dump_folder == "out"
    assert policy.config.to_dict()["memory_budget"] == 0.25


@pytest.mark.parametrize("case", [DENSE, MOE, ZOO["llama"]], ids=lambda case: case.name)
@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_gradients_are_those_of_plain_training(policy: Any, case: Case) -> None:
    applied = assert_trains_the_same(case, policy.Config().build().apply)
    assert applied.report().recomputed_bytes > 0


@pytest.mark.parametrize(
    "options",
    [{"mode": "full"}, {"selective_ac_option": "op"}, {"selective_ac_option": "2"}],
    ids=["full", "op", "every_second_layer"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_the_older_function_are_those_of_plain_training(options: dict[str, Any], compiled: bool) -> None:
    def change(model: nn.Module) -> Any:
        flags = {"model_compile_enabled": compiled, "use_flex_attn": compiled}
        return apply_ac(model, older(**options), op_sac_save_list=SAVE_LIST, **flags)

    assert assert_trains_the_same(DENSE, change).report().recomputed_bytes > 0


def test_an_integer_option_takes_the_layers_that_it_takes_in_torchtitan() -> None:
    def rules(option: str) -> Any:
        return apply_ac(TitanLike(), older(selective_ac_option=option)).plan.rules

    assert rules("2") == Full(every=2, first=1).rules()
    assert rules("1") == rules("0") == Full().rules()
    with pytest.raises(ModeError, match="selects none of the 3 blocks"):
        rules("4")


def test_without_a_save_list_nothing_is_saved() -> None:
    assert apply_ac(TitanLike(), older(selective_ac_option="op")).plan.rules == Full().rules()


def test_every_second_product_is_saved_and_the_gate_is_not_counted() -> None:
    applied = SelectiveAC.Config().build().apply(MOE.build())
    assert applied.plan.rules[0] == Rule("recompute", module="*moe.router.gate*", op="matmul")
    assert Rule("save", op="aten.mm|aten.linear", nth="::2") in applied.plan.rules
    assert Rule("save", op="aten.addmm") in applied.plan.rules
    assert applied.plan.rules[-1] == Rule("recompute")


def decided(applied: Any, op: str = "aten.mm.default") -> list[tuple[str, str]]:
    """Where the operator ran in the first block, and what was decided, in order."""
    return [(row.module, row.decision) for row in applied.trace().blocks[0].rows if row.op == op]


def test_products_alternate_as_they_do_in_torchtitan() -> None:
    applied = SelectiveAC.Config().build().apply(model := DENSE.build())
    gradients(DENSE, model)
    names = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    names += [f"feed_forward.{name}" for name in ("w1", "w3", "w2")]
    assert decided(applied) == list(zip(names, ["save", "recompute"] * 4, strict=False))
    applied = SelectiveAC.Config().build().apply(model := MOE.build())
    gradients(MOE, model)
    assert decided(applied) == [
        ("attention", "save"),
        ("moe.router.gate", "recompute"),
        ("moe.experts.0.0", "recompute"),
        ("moe.experts.1.0", "save"),
    ]


def test_what_is_recomputed_differs_with_the_gate() -> None:
    def saved(names: list[str]) -> int:
        applied = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=names).build().apply(model := MOE.build())
        gradients(MOE, model)
        return applied.report().saved_bytes

    assert saved(["moe"]) < saved([])


def test_a_name_that_no_module_has_is_said() -> None:
    with pytest.warns(UserWarning, match=r"'moe\.gate' is in no module path"):
        SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["moe.gate"]).build().apply(TitanLike())


class EverythingDear(SelectiveAC):
    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() - {aten.mm.default} | {"matmul", "attention", torch.ops.aten.silu}


def test_the_save_set_can_be_overridden_with_operators_and_selectors() -> None:
    policy = EverythingDear.Config().build()
    assert type(policy) is EverythingDear
    applied = assert_trains_the_same(DENSE, policy.apply)
    saved = {rule.op for rule in applied.plan.rules if rule.decision == "save"}
    assert {"matmul", "attention", "aten.silu", "higher_order.flex_attention", "compiled"} <= saved
    assert [rule.op for rule in applied.plan.rules if rule.nth] == ["aten.linear"]


def test_the_default_save_set_is_made_of_operators_that_exist() -> None:
    found = SelectiveAC.Config().build().get_save_ops()
    assert {aten.mm.default, aten.addmm.default, aten.linear.default, aten.topk.default, aten.max.default} <= found
    assert torch.ops.higher_order.flex_attention in found
    assert not any("deepep" in str(op) for op in found)


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(ModeError, match="is no operator"):
        apply_ac(TitanLike(), older(selective_ac_option="op"), op_sac_save_list={torch.mm})


@pytest.mark.parametrize(
    "policy",
    [
        FullAC.Config(determinism_check="none"),
        SelectiveAC.Config(debug=True),
        MemoryBudgetAC.Config(visualize_memory_budget_pareto=True),
    ],
    ids=["determinism_check", "debug", "pareto"],
)
def test_an_option_that_would_do_nothing_is_refused(policy: Any) -> None:
    with pytest.raises(ModeError, match="has no meaning here"):
        policy.build().apply(TitanLike())


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({"mode": "none"}, False),
        ({"mode": "memory_budget"}, False),
        ({"selective_ac_option": "ops"}, False),
        ({"selective_ac_option": "-1"}, True),
    ],
)
def test_a_mode_that_torchtitan_refuses_is_refused(options: dict[str, Any], compiled: bool) -> None:
    with pytest.raises(ValueError, match="is not permitted"):
        apply_ac(TitanLike(), older(**options), model_compile_enabled=compiled)


def test_a_memory_budget_is_the_compilers() -> None:
    first = MemoryBudgetAC.Config(memory_budget=0.25).build().apply(TitanLike())
    assert first.plan.mode == "CompilerBudget(fraction=0.25)"
    first.remove()
    second = apply_ac(TitanLike(), older(mode="memory_budget", memory_budget=0.75), model_compile_enabled=True)
    assert second.plan.mode == "CompilerBudget(fraction=0.75)"
    second.remove()


def test_a_second_call_does_nothing() -> None:
    model = TitanLike()
    first = FullAC.Config().build().apply(model)
    kinds = [type(module) for module in model.modules()]
    assert FullAC.Config().build().apply(model).plan is first.plan
    assert [type(module) for module in model.modules()] == kinds


def test_torchtitans_own_config_object_is_read() -> None:
    class Foreign:
        mode, selective_ac_option = "selective", "2"

    assert apply_ac(TitanLike(), Foreign()).plan.rules == Full(every=2, first=1).rules()  # type: ignore[arg-type]


def test_all_names_are_there() -> None:
    assert all(hasattr(torchtitan, name) for name in torchtitan.__all__)
