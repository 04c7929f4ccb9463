import re

import pytest
import torch
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen

from actmem.ops import GROUPS, NAMESPACES, did_you_mean, is_glob, matches, nearest, packet_name, split_selector

TORCH_PACKETS = {schema.name.replace("::", ".") for schema in torch._C._jit_get_all_schemas()}


@pytest.mark.parametrize("text", ["aten.mm", "aten::mm", "torch.ops.aten.mm"])
def test_all_spellings_of_a_packet_are_one(text: str) -> None:
    assert packet_name(text) == ("aten.mm", None)


@pytest.mark.parametrize("text", ["aten.mm.default", "aten::mm.default", "torch.ops.aten.mm.default"])
def test_an_overload_is_kept(text: str) -> None:
    assert packet_name(text) == ("aten.mm", "default")


def test_names_that_torch_prints_are_understood() -> None:
    overload = torch.ops.aten.mm.default
    assert packet_name(str(overload)) == packet_name(overload.name() + ".default") == ("aten.mm", "default")
    assert packet_name(str(torch.ops.aten.mm)) == ("aten.mm", None)


@pytest.mark.parametrize("text", ["", "mm", "aten.", ".mm", "aten..mm", "a.b.c.d"])
def test_what_is_no_operator_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        packet_name(text)


@pytest.mark.parametrize(
    ("selector", "packet", "overload", "expected"),
    [
        ("matmul", "aten.mm", "default", True),
        ("matmul", "aten.addmm", "out", True),
        ("matmul", "aten.bmm", "default", False),
        ("matmul", "aten.matmul", "default", False),
        ("attention", "aten._scaled_dot_product_flash_attention_for_cpu", "default", True),
        ("attention", "aten._scaled_dot_product_flash_attention_for_cpu_backward", "default", False),
        ("attention", "higher_order.flex_attention", "", True),
        ("collective", "_c10d_functional.all_reduce", "default", True),
        ("collective", "c10d.allreduce_", "default", True),
        ("collective", "aten.all", "default", False),
        ("routing", "aten.topk", "default", True),
        ("aten.mm", "aten.mm", "out", True),
        ("aten::mm", "aten.mm", "default", True),
        ("torch.ops.aten.mm", "aten.mm", "default", True),
        ("aten.mm", "aten.mmm", "default", False),
        ("aten.mm.default", "aten.mm", "default", True),
        ("aten.mm.default", "aten.mm", "out", False),
        ("aten.*mm", "aten.addmm", "default", True),
        ("aten::*mm", "aten.addmm", "default", True),
        ("*mm", "aten.bmm", "default", True),
        ("aten.mm.*", "aten.mm", "out", True),
        ("aten.?mm", "aten.mm", "default", False),
        ("Aten.mm", "aten.mm", "default", False),
    ],
)
def test_selectors_match_groups_names_and_globs(selector: str, packet: str, overload: str, expected: bool) -> None:
    assert matches(selector, packet, overload) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("matmul", (None, "matmul")),
        ("aten.mm", (None, "aten.mm")),
        ("aten::mm", (None, "aten::mm")),
        ("aten::mm.default", (None, "aten::mm.default")),
        ("aten::convolution", (None, "aten::convolution")),
        ("aten::*mm", (None, "aten::*mm")),
        ("torch.ops.aten::mm", (None, "torch.ops.aten::mm")),
        ("flash_attn::_flash_attn_forward", (None, "flash_attn::_flash_attn_forward")),
        ("*.mlp::matmul", ("*.mlp", "matmul")),
        ("mlp::matmul", ("mlp", "matmul")),
        ("mlp::aten.mm", ("mlp", "aten.mm")),
        ("mlp::aten::mm", ("mlp", "aten::mm")),
        ("layers.0.attn::mylib::myop", ("layers.0.attn", "mylib::myop")),
    ],
)
def test_a_module_in_front_is_told_from_a_namespace(text: str, expected: tuple[str | None, str]) -> None:
    assert split_selector(text) == expected


def test_groups_hold_operators_that_torch_has() -> None:
    members = {member for group in GROUPS.values() for member in group if not is_glob(member)}
    missing = members - TORCH_PACKETS
    assert all(name.startswith("higher_order.") for name in missing)
    for name in missing:  # higher-order operators are in no list, but can be had by name
        assert getattr(torch.ops.higher_order, name.partition(".")[2]).name() == name.partition(".")[2]


def test_the_attention_group_holds_every_forward_attention_operator_of_torch() -> None:
    forward = {
        name
        for name in TORCH_PACKETS
        if re.match(r"(aten|torch_attn)\..*(attention|attn)", name) and "backward" not in name
    }
    assert forward | {"higher_order.flex_attention"} == GROUPS["attention"]


def test_the_convolution_group_holds_every_forward_convolution_of_torch() -> None:
    # Left out: what only packs weights, and quantised operators, which do not train.
    found = {
        name
        for name in TORCH_PACKETS
        if re.match(r"(aten|mkldnn)\.(?!.*(backward|reorder|convert)).*conv(\d|olution|_)", name)
    }
    assert found == GROUPS["convolution"]


def test_every_matrix_product_of_plain_layers_is_in_a_group() -> None:
    assert {"aten.mm", "aten.addmm", "aten.linear", "aten._scaled_mm"} <= GROUPS["matmul"]
    assert {"aten.bmm", "aten.baddbmm"} == GROUPS["batched_matmul"]
    assert {"aten._grouped_mm", "aten._scaled_grouped_mm"} <= GROUPS["grouped_matmul"]


def test_every_collective_of_torch_is_in_the_collective_group() -> None:
    collectives = {name for name in TORCH_PACKETS if "c10d" in name.partition(".")[0]}
    assert collectives
    assert all(matches("collective", name, "default") for name in collectives)


def test_no_operator_is_in_two_groups() -> None:
    kinds = {name: group for name, group in GROUPS.items() if name != "compute_intensive"}  # that one goes by cost
    members = [member for group in kinds.values() for member in group]
    assert len(members) == len(set(members))


def test_known_namespaces_hold_every_member_of_a_group() -> None:
    assert {member.partition(".")[0] for group in GROUPS.values() for member in group} <= set(NAMESPACES)


def test_nearest_names_come_best_first() -> None:
    assert nearest("mm", ["aten.add", "aten.mm"]) == ["aten.mm"]
    assert nearest("ATENTION", GROUPS)[0] == "attention"
    assert nearest("zzz", GROUPS) == []
    assert did_you_mean("zzz", GROUPS) == ""
