from typing import Any

import pytest
import torch

from actmem.decision_rules import Rule
from actmem.decisions import Decision
from actmem.engine.operators import describe
from actmem.engine.verdicts import Verdicts, resolve
from actmem.modes import Full, Selective, Targets, every_second

aten = torch.ops.aten
MODULES = {path: f"layers.1.{path}".rstrip(".") for path in ("", "attn", "attn.q", "mlp", "mlp.up", "norm")}
ROLES = {"attention": ("attn",), "mlp": ("mlp",), "norm": ("norm",)}


def verdicts(*rules: Rule, layer: int = 1) -> Verdicts:
    return resolve(rules, layer=layer, num_layers=4, modules=MODULES, roles=ROLES)


def kept(of: Verdicts, *calls: tuple[Any, str] | Any, size: int = 8) -> list[bool]:
    """Return the decisions for operators of one block call, in order, as the tape asks for them."""
    counts = of.new_counts()
    out = torch.empty(size, dtype=torch.uint8)
    decisions: list[bool] = []
    for call in calls:
        func, address = call if isinstance(call, tuple) else (call, "")
        known = of.known.get(func)
        fate = of.decide(describe(func), address, counts, out) if known is None else known
        assert fate in (Decision.SAVE, Decision.RECOMPUTE)
        decisions.append(fate is Decision.SAVE)
    return decisions


MM, BMM, ADD = aten.mm.default, aten.bmm.default, aten.add.Tensor


def test_the_first_rule_that_matches_wins() -> None:
    of = verdicts(Rule("recompute", op="aten.mm"), Rule("save", op="matmul"), Rule("recompute"))
    assert kept(of, MM, aten.addmm.default, ADD) == [False, True, False]
    assert of.matched == {0, 1, 2}


def test_a_decision_that_depends_on_nothing_is_asked_for_once() -> None:
    of = verdicts(Rule("save", op="matmul"), Rule("recompute"))
    kept(of, MM, ADD, MM)
    assert of.known == {describe(MM): Decision.SAVE, describe(ADD): Decision.RECOMPUTE}
    counted = verdicts(Rule("save", op="matmul", nth="::2"), Rule("recompute"))
    kept(counted, MM, ADD, MM)
    assert counted.known == {describe(ADD): Decision.RECOMPUTE}


def test_every_second_counts_the_whole_group_anew_in_each_call() -> None:
    of = verdicts(*Selective(save=[every_second("matmul")]).rules())
    products = (MM, aten.addmm.default, ADD, MM, MM)
    assert kept(of, *products) == [True, False, False, True, False]
    assert kept(of, *products) == [True, False, False, True, False]


def test_operators_that_an_earlier_rule_took_are_not_counted() -> None:
    of = verdicts(
        Rule("recompute", module="*.attn", op="matmul"), Rule("save", op="matmul", nth="::2"), Rule("recompute")
    )
    assert kept(of, MM, (MM, "attn.q"), MM, (MM, "attn"), MM) == [True, False, False, False, True]


def test_a_module_rule_covers_everything_below_and_no_namesake() -> None:
    of = verdicts(Rule("save", module="layers.*.mlp"), Rule("recompute"))
    assert of.follows_modules
    assert kept(of, (ADD, "mlp"), (ADD, "mlp.up"), (ADD, "mlp_norm"), (ADD, ""), (ADD, "attn")) == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_a_glob_for_a_module_above_the_block_covers_the_block() -> None:
    assert kept(verdicts(Rule("save", module="layers"), Rule("recompute")), (ADD, ""), (ADD, "mlp")) == [True, True]


def test_a_target_is_the_modules_in_that_role() -> None:
    of = verdicts(*Targets(["norm", "mlp"]).rules())
    assert kept(of, (ADD, "norm"), (ADD, "mlp.up"), (ADD, "attn"), (ADD, "")) == [False, False, True, True]


def test_a_target_and_a_module_must_both_match() -> None:
    of = verdicts(Rule("save", target="mlp", module="*.up"), Rule("recompute"))
    assert kept(of, (ADD, "mlp.up"), (ADD, "mlp"), (ADD, "attn")) == [True, False, False]


def test_rules_of_other_layers_are_left_out() -> None:
    rules = Full(every=2).rules()
    assert not verdicts(*rules, layer=0).keeps_everything
    assert verdicts(*rules, layer=1).keeps_everything
    assert kept(verdicts(Rule("save", layers="-1"), Rule("recompute"), layer=3), ADD) == [True]
    assert kept(verdicts(Rule("save", layers="-1"), Rule("recompute"), layer=2), ADD) == [False]


def test_a_role_that_the_block_has_not_leaves_the_rule_out() -> None:
    of = verdicts(Rule("recompute", target="router"), Rule("save"))
    assert of.keeps_everything and not of.follows_modules


def test_min_bytes_looks_at_all_that_a_call_makes() -> None:
    of = verdicts(Rule("save", min_bytes=16), Rule("recompute"))
    assert kept(of, ADD, size=15) == [False]
    assert kept(of, ADD, size=16) == [True]
    pair = [torch.empty(8, dtype=torch.uint8)] * 2
    assert of.decide(describe(ADD), "", of.new_counts(), pair) is Decision.SAVE


def test_fused_attention_is_attention_wherever_it_runs() -> None:
    of = verdicts(Rule("save", op="attention"), Rule("recompute"))
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert kept(of, fused, (fused, "mlp")) == [True, True]


def test_unfused_attention_is_the_second_product_in_an_attention_module() -> None:
    of = verdicts(Rule("save", op="attention"), Rule("recompute"))
    assert kept(of, (BMM, "attn"), (BMM, "attn"), (BMM, "mlp"), (BMM, "mlp"), (MM, "attn.q")) == [
        False, True, False, False, False,
    ]  # fmt: skip
    assert of.unfused and of.follows_modules


def test_an_operator_may_be_named_by_group_packet_overload_or_glob() -> None:
    for name in ("matmul", "aten.mm", "aten::mm", "aten.mm.default", "aten.m?"):
        assert kept(verdicts(Rule("save", op=name), Rule("recompute")), MM, ADD) == [True, False], name


# ---------------------------------------------------------------- parts of modules


SOFTMAX, FLASH = aten._softmax.default, aten._scaled_dot_product_flash_attention_for_cpu.default
EVERY_ROLE = {**ROLES, "attn_proj": ("attn",), "moe_act": ("mlp",), "routed_experts": ("mlp",)}


def parts(*rules: Rule, layer_type: str | None = None) -> Verdicts:
    return resolve(rules, layer=1, num_layers=4, modules=MODULES, roles=EVERY_ROLE, layer_type=layer_type)


UNFUSED = ((MM, "attn.q"), (ADD, "attn"), (BMM, "attn"), (SOFTMAX, "attn"), (BMM, "attn"), (MM, "attn"), (ADD, "attn"))


def test_attn_proj_is_attention_without_a_fused_kernel() -> None:
    of = parts(*Targets(["attn_proj"]).rules())
    assert kept(of, (MM, "attn.q"), (FLASH, "attn"), (ADD, "attn"), (MM, "mlp")) == [False, True, False, True]


def test_attn_proj_is_attention_without_what_lies_between_two_batched_products() -> None:
    of = parts(*Targets(["attn_proj"]).rules())
    for _ in range(2):
        assert kept(of, *UNFUSED) == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("op", ["batched_matmul", "aten.bmm", "attention|aten.bmm"])
def test_the_kernel_is_left_out_whatever_an_earlier_rule_says_of_its_products(op: str) -> None:
    of = parts(Rule("save", op=op), *Targets(["attn_proj"]).rules())
    for _ in range(2):
        assert kept(of, *UNFUSED) == [False, False, True, True, True, False, False]


def test_the_result_of_attention_is_found_behind_products_that_an_earlier_rule_took() -> None:
    """Some models add a bias to the scores: `baddbmm` makes them, `bmm` the result."""
    of = parts(Rule("recompute", op="aten.baddbmm"), Rule("save", op="attention"), Rule("recompute"))
    for _ in range(2):
        assert kept(of, (aten.baddbmm.default, "attn"), (SOFTMAX, "attn"), (BMM, "attn")) == [False, False, True]


def test_attention_in_a_union_is_found_unfused_too() -> None:
    of = parts(Rule("save", op="attention|aten.add"), Rule("recompute"))
    assert kept(of, *UNFUSED) == [False, True, False, False, True, False, True]


def test_moe_act_is_the_pointwise_operators_of_routed_experts() -> None:
    of = parts(*Targets(["moe_act"]).rules())
    grouped, silu = aten._grouped_mm.default, aten.silu.default
    calls = ((grouped, "mlp"), (silu, "mlp"), (aten.mul.Tensor, "mlp.up"), (grouped, "mlp"), (silu, "attn"))
    assert kept(of, *calls) == [True, False, False, True, True]


def test_targets_say_what_they_cover_whichever_rule_decided() -> None:
    of = parts(Rule("save", op="matmul"), *Targets(["attn_proj", "attention", "moe_act"]).rules())
    counts, out = of.new_counts(), torch.empty(1)
    covered: list[tuple[int, ...]] = []
    for func, address in (*UNFUSED, (aten.silu.default, "mlp"), (ADD, "")):
        of.decide(describe(func), address, counts, out)
        covered.append(of.targets_of(describe(func), address, counts))
    assert covered == [(1, 2), (1, 2), (2,), (2,), (2,), (1, 2), (1, 2), (3,), ()]


def test_a_layer_type_is_a_glob_and_a_block_without_one_matches_none() -> None:
    rules = (Rule("recompute", layer_type="sliding*"), Rule("save"))
    assert kept(parts(*rules, layer_type="sliding_attention"), ADD) == [False]
    assert kept(parts(*rules, layer_type="full_attention"), ADD) == [True]
    assert kept(parts(*rules), ADD) == [True]


def test_compute_intensive_is_found_alone_and_in_a_union() -> None:
    for op in ("compute_intensive", "compute_intensive|aten.topk", "aten.topk|compute_intensive"):
        of = parts(Rule("save", op=op), Rule("recompute"))
        assert kept(of, MM, BMM, ADD, aten.topk.default) == [True, True, False, op != "compute_intensive"]


def test_blocks_for_which_the_plan_says_the_same_share_a_key() -> None:
    rules = (Rule("recompute", layers="::2", target="attn_proj"), Rule("save"))
    keys = [resolve(rules, layer=i, num_layers=4, modules=MODULES, roles=EVERY_ROLE).key for i in range(4)]
    assert keys[0] == keys[2] != keys[1] == keys[3]
