"""A user of torchtitan's policies changes an import: classes, function, options and defaults are the same."""

import contextlib
import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem import ApplyError, Full, ModeError, Rule, SaveEverything, SelfCheckError
from actmem.compat import torchtitan
from actmem.compat.torchtitan import (
    ActivationCheckpoint,
    CompilerBudget,
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
    apply_ac,
)
from actmem.compilercompat import compiler_budget
from actmem.decision_rules import Slices
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
    "collectives": ("keyword", "recompute"),  # ours
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
        assert list(inspect.signature(kind.apply).parameters) == ["self", "model", "collectives"]
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
        applied = apply_ac(TitanLike(), older(selective_ac_option=option))
        assert applied is not None
        return applied.plan.rules

    assert rules("2") == Full(every=2, first=1).rules()
    assert rules("1") == rules("0") == Full().rules()
    with pytest.warns(UserWarning, match=r"one in 4 layers of the whole model, and none of those is here \(0, 1, 2\)"):
        assert rules("4") == SaveEverything().rules()


def stage(*names: str) -> nn.Module:
    """A part of a model, as a pipeline splits it: the layers keep the names that are their numbers."""
    model = TitanLike()
    made = list(model.layers.values())
    model.layers = nn.ModuleDict({name: made[place] for place, name in enumerate(names)})
    return model


@pytest.mark.parametrize(
    ("names", "recomputed"), [(("1",), "0"), (("5",), "0"), (("3", "4", "5"), "0,2"), (("first", "second"), "1")]
)
def test_a_stage_counts_its_layers_by_their_numbers(names: tuple[str, ...], recomputed: str) -> None:
    applied = apply_ac(stage(*names), older())
    assert applied is not None
    first = applied.plan.rules[0]
    slices = Slices.parse(first.layers or ":")
    assert first.decision == "recompute"
    assert [i for i in range(len(names)) if slices.contains(i, len(names))] == list(map(int, recomputed.split(",")))


def test_a_stage_of_one_layer_that_is_not_chosen_saves_everything() -> None:
    with pytest.warns(UserWarning, match="everything is saved"):
        applied = apply_ac(stage("0"), older())
    assert applied is not None and applied.plan.rules == SaveEverything().rules()


@pytest.mark.parametrize(
    "change", [lambda m: apply_ac(m, older()), FullAC.Config().build().apply, SelectiveAC.Config().build().apply]
)
def test_a_stage_without_layers_is_left_alone(change: Any) -> None:
    assert change(stage()) is None


class Towers(nn.Module):
    """Layers of its own, and an encoder that has some too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = TitanLike()
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(8, 8), nn.GELU()) for i in range(2)})


def test_the_layers_of_a_tower_and_those_of_the_model_are_done_in_two_calls() -> None:
    model = Towers()
    first = FullAC.Config().build().apply(model.encoder)
    second = SelectiveAC.Config().build().apply(model)
    assert first is not None and second is not None and first.plan is second.plan
    assert second.plan.blocks == (*(f"encoder.layers.{i}" for i in range(3)), "layers.0", "layers.1")
    batch = ids_only(model.encoder)
    plain = Towers()
    for one in (plain, model):
        one.encoder(*batch if isinstance(batch, tuple) else (batch,)).square().mean().backward()
        out = torch.ones(4, 8)
        for layer in one.layers.values():
            out = layer(out)
        out.square().mean().backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None)
        assert want.grad is None or torch.equal(want.grad, got.grad)
    report = second.report()
    assert report.recomputed_bytes > 0 and str(first.report()) == str(report)
    first.remove()
    assert not any("_actmem_runners" in vars(type(m)) for m in model.modules())
    assert FullAC.Config().build().apply(model) is not None


def test_two_policies_for_the_same_layers_are_refused_and_the_first_stays() -> None:
    first = FullAC.Config().build().apply(model := TitanLike())
    assert first is not None
    with pytest.raises(ApplyError, match="applied to this model already"):
        SelectiveAC.Config().build().apply(model)
    again = FullAC.Config().build().apply(model)
    assert again is not None and again.plan is first.plan
    with pytest.raises(ApplyError, match="applied to this model already"):
        FullAC.Config().build().apply(model, collectives="save")


def test_what_actmem_applied_itself_is_not_taken_over() -> None:
    actmem.apply(model := Towers(), Full(), blocks="encoder.layers.*")
    with pytest.raises(ApplyError, match="applied to this model already"):
        FullAC.Config().build().apply(model)


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
    with pytest.raises(ModeError, match="is not an operator"):
        apply_ac(TitanLike(), older(selective_ac_option="op"), op_sac_save_list={torch.mm})


@pytest.mark.parametrize(
    "policy",
    [
        FullAC.Config(determinism_check="nothing"),
        MemoryBudgetAC.Config(visualize_memory_budget_pareto=True),
    ],
    ids=["determinism_check", "pareto"],
)
def test_an_option_that_cannot_be_done_is_refused(policy: Any) -> None:
    with pytest.raises(ModeError, match=r"is not known|has no meaning here"):
        policy.build().apply(TitanLike())


@pytest.mark.parametrize("policy", [FullAC.Config(determinism_check="none"), SelectiveAC.Config(debug=True)])
def test_the_checks_of_torchs_checkpoint_may_be_off_or_louder(policy: Any) -> None:
    assert assert_trains_the_same(DENSE, policy.build().apply).report().recomputed_bytes > 0


@pytest.mark.parametrize("debug", [False, True])
def test_debug_compares_every_replay_with_a_checksum(debug: bool) -> None:
    applied = FullAC.Config(debug=debug).build().apply(model := DENSE.build())
    assert applied is not None
    batch = DENSE.batch(model)
    DENSE.step(model, batch).backward()
    loss = DENSE.step(model, batch)
    held = next(p for name, p in model.named_parameters() if "wq" in name)
    held.data.mul_(2)  # no version counter moves: only a checksum can tell
    with pytest.raises(SelfCheckError) if debug else contextlib.nullcontext():
        loss.backward()


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
    assert (first.budget, compiler_budget()) == (CompilerBudget(0.25), 0.25)
    second = apply_ac(TitanLike(), older(mode="memory_budget", memory_budget=0.75), model_compile_enabled=True)
    assert (second.budget, compiler_budget()) == (CompilerBudget(0.75), 0.75)
    first.remove()
    assert compiler_budget() == 0.75
    second.remove()
    assert compiler_budget() == 1


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
    assert torchtitan._disable_dynamo_lru_cache is not None
    assert torchtitan.ActivationCheckpointConfig is ActivationCheckpoint
    assert isinstance(FullAC.Config(), torchtitan.ActivationCheckpointingConfig)
    assert isinstance(None, torchtitan.ActivationCheckpointingConfig)


def test_the_default_save_set_can_be_taken_and_changed() -> None:
    found = torchtitan._get_default_save_ops()
    found.discard(aten.mm.default)
    assert torchtitan._get_default_save_ops() - found == {aten.mm.default}
    assert torchtitan._get_default_save_ops() == SelectiveAC.Config().build().get_save_ops()
