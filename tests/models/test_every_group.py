"""Every operator group, every way to name operators, modules, layers and towers: to the bit, and as it says."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem import Full, Rule, Rules, Selective, Targets, every_second, ops, torchcompat
from actmem.engine.verdicts import Traced
from actmem.modes import EverySecond, Mode
from tests.models.watching import Seen, watched, watched_case
from tests.zoo import ZOO, Case, ids_only, seeded, square_mean
from tests.zoo_titan import TitanLike


class Scaled(nn.Module):
    """A linear layer whose input is scaled by its largest entry and rounded, as training in 8 bits does."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax() / 127
        rounded = x + ((x / scale).round() * scale - x).detach()
        return F.silu(rounded @ self.weight) * x.detach().max(dim=-1, keepdim=True).values


class ScaledBlock(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(dim), Scaled(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.norm(x))


def scaled() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), *[ScaledBlock() for _ in range(3)])


SCALED = Case(
    "scaled",
    seeded(scaled),
    lambda _: (torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1)),),
    3,
    square_mean,
)
CASES = {**ZOO, "scaled": SCALED}

# Group -> the models that have such operators. Collectives and compiled functions have tests of their own.
GROUPS = {
    "attention": ["llama", "vit"],
    "matmul": ["gpt2_dropout", "qwen3_moe"],
    "batched_matmul": ["t5", "gpt_oss"],
    "grouped_matmul": ["qwen3_moe", "torchtitan_moe"],
    "convolution": ["resnet", "qwen3_next"],
    "routing": ["deepseek_v3", "torchtitan_moe"],
    "low_precision_scale": ["scaled"],
    "compute_intensive": ["qwen3", "unet"],
    "pointwise": ["llama_lora", "moe_topk"],
}


def covered(row: Traced, selector: str) -> bool:
    packet, _, overload = row.op.rpartition(".")
    return ops.matches(selector, packet, overload)


def group_cells() -> Iterator[Any]:
    for group, names in GROUPS.items():
        for place, name in enumerate(names):
            yield pytest.param(group, name, "fp32" if place else "bf16", marks=[pytest.mark.slow] if place else [])


def test_every_group_is_tried() -> None:
    assert {*GROUPS} == {*ops.GROUPS} - {"collective", "compiled"}


@pytest.mark.parametrize(("group", "name", "precision"), list(group_cells()))
def test_a_group_is_saved_and_all_else_recomputed(group: str, name: str, precision: str) -> None:
    seen = watched_case(CASES[name], Selective(save=[group], force_recompute=[]), precision=precision)
    assert any(covered(row, group) for _, row in seen.rows), "the model has such operators"
    assert all((row.decision == "save") == covered(row, group) for _, row in seen.rows)
    assert not [op for op in seen.replayed if ops.matches(group, op, "default")], "what is saved is not run again"
    seen.assert_it_did_something()


@pytest.mark.parametrize(("group", "name", "precision"), list(group_cells()))
def test_every_second_of_a_group_is_counted_in_order_and_anew_in_each_block(
    group: str, name: str, precision: str
) -> None:
    seen = watched_case(CASES[name], Selective(save=[every_second(group)], force_recompute=[]), precision=precision)
    for block in seen.trace.blocks:
        decisions = [row.decision for row in block.rows if covered(row, group)]
        assert decisions == [("save", "recompute")[i % 2] for i in range(len(decisions))]
        assert all(row.decision == "recompute" for row in block.rows if not covered(row, group))
    seen.assert_it_did_something()


@pytest.mark.parametrize("name", ["t5", "gpt_oss"])
def test_attention_that_runs_unfused_is_saved_by_its_result(name: str) -> None:
    seen = watched_case(CASES[name], Selective(save=["attention"]))
    saved = [row for _, row in seen.rows if row.decision == "save"]
    assert saved and {row.op for row in saved} == {"aten.bmm.default"}
    assert all(row.nth % 2 for row in saved), "the second product of each attention"
    full = watched_case(CASES[name], Full())
    assert seen.replayed["aten.bmm"] == full.replayed["aten.bmm"] / 2
    # A union with attention in it finds it too.
    union = watched_case(CASES[name], Rules([Rule("save", op="attention|aten.mm|aten.addmm"), Rule("recompute")]))
    assert union.decided("save", op="aten.bmm") == seen.decided("save")
    assert union.decided("save", op="aten.mm") | union.decided("save", op="aten.addmm")


# ---------------------------------------------------------------- names of operators


def decisions(seen: Seen) -> list[list[tuple[Any, ...]]]:
    return [[(row.address, row.decision) for row in block.rows] for block in seen.trace.blocks]


SPELLINGS = [
    *("aten.mm", "aten::mm", "torch.ops.aten.mm", "aten.mm.default", "aten::mm.default", "torch.ops.aten.mm.default"),
    *("aten.m?", "aten.mm*", "at*.mm", "aten.[lm]m", "aten.mm|aten.addmm", "aten::mm|matmul"),
]


@pytest.fixture(scope="module")
def by_matmul() -> list[list[tuple[Any, ...]]]:
    return decisions(watched_case(CASES["llama"], Selective(save=["matmul"])))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_operator_means_the_same_in_every_spelling(spelling: str, by_matmul: list[list[tuple[Any, ...]]]) -> None:
    seen = watched_case(CASES["llama"], Selective(save=[spelling]))
    seen.assert_it_did_something()
    assert decisions(seen) == by_matmul
    assert seen.replayed_products == {"aten._scaled_dot_product_flash_attention_for_cpu"}


def test_a_union_is_counted_as_one() -> None:
    """Qwen2 has products with and without a bias: `aten.addmm` and `aten.mm`."""
    case = CASES["audio_language"]
    union = watched_case(case, Selective(save=[every_second("aten.mm|aten.addmm")]))
    apart = watched_case(case, Selective(save=[every_second("aten.mm"), every_second("aten.addmm")]))
    group = watched_case(case, Selective(save=[every_second("matmul")]))
    assert decisions(union) == decisions(group) != decisions(apart)
    assert {op for _, op in union.decided("save")} == {"aten.mm.default", "aten.addmm.default"}
    for seen in (union, apart):
        seen.assert_it_did_something()


@pytest.mark.parametrize(
    ("save", "modules"),
    [
        ("*.mlp::matmul", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        ("*.mlp::aten::mm", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        ("*.self_attn.q_proj::aten.mm.default", {"self_attn.q_proj"}),
        ("*.[qk]_proj::aten.m?", {"self_attn.q_proj", "self_attn.k_proj"}),
        ("model.layers.*.mlp.up_proj::aten.mm|aten.addmm", {"mlp.up_proj"}),
        (every_second("*.mlp::matmul"), {"mlp.gate_proj", "mlp.down_proj"}),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, EverySecond)) else "",
)
def test_an_operator_may_be_named_within_modules(save: Any, modules: set[str]) -> None:
    seen = watched_case(CASES["llama"], Selective(save=[save]))
    assert {module for module, _ in seen.decided("save")} == modules
    assert {op for _, op in seen.decided("save")} == {"aten.mm.default"}
    seen.assert_it_did_something()


def test_the_module_of_one_layer_is_that_of_one_layer() -> None:
    seen = watched_case(CASES["llama"], Selective(save=["model.layers.1.mlp::matmul"]))
    saved = {(paths, row.module) for paths, row in seen.rows if row.decision == "save"}
    assert saved == {(("model.layers.1",), f"mlp.{name}_proj") for name in ("gate", "up", "down")}


# ---------------------------------------------------------------- what is never saved


def saved_products(seen: Seen) -> list[str]:
    """List the modules of one block whose products are saved, in order."""
    (block,) = [block for block in seen.trace.blocks if block.paths[-1] == "layers.2"]
    return [row.module for row in block.rows if row.decision == "save" and covered(row, "matmul")]


ALL_OF_TITAN = [f"attention.w{x}" for x in "qkvo"] + ["moe.router.gate"] + [f"moe.shared_experts.w{x}" for x in "132"]


@pytest.mark.parametrize(
    ("force", "excluded"),
    [
        (None, "moe.router.gate"),  # as it is left
        (["router"], "moe.router.gate"),
        (["moe.router.gate"], "moe.router.gate"),
        (["gate"], "moe.router.gate"),
        (["*.router"], "moe.router.gate"),
        (["shared_experts"], "moe.shared_experts"),
        (["attention"], "attention"),
        (["wk"], "attention.wk"),
        (["w1", "gate"], "moe.shared_experts.w1 moe.router.gate"),
        ([], ""),
    ],
    ids=str,
)
def test_forced_modules_are_recomputed_and_not_counted(force: list[str] | None, excluded: str) -> None:
    options = {} if force is None else {"force_recompute": force}
    counted = [
        module for module in ALL_OF_TITAN if not any(f"{module}.".startswith(f"{top}.") for top in excluded.split())
    ]
    case = CASES["torchtitan_moe"]
    seen = watched_case(case, Selective(save=[every_second("matmul")], **options))
    assert saved_products(seen) == counted[::2]
    seen.assert_it_did_something()
    every = watched_case(case, Selective(save=["matmul"], **options))
    assert saved_products(every) == counted
    every.assert_it_did_something()


def test_a_model_without_routers_needs_none() -> None:
    seen = watched_case(CASES["llama"], Selective(save=["matmul"]))
    assert seen.report.plan.rules == (Rule("save", op="matmul"), Rule("recompute"))


def test_forced_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(actmem.ModeError, match=r"module = '\*\.gaet' matches no module"):
        actmem.apply(CASES["torchtitan_moe"].build(), Selective(save=["matmul"], force_recompute=["gaet"]))


# ---------------------------------------------------------------- layers


def of_blocks(seen: Seen, wanted: Callable[[Traced], bool]) -> set[int]:
    """Return the indices of the blocks in which there is such a decision."""
    return {int(path.rpartition(".")[2]) for paths, row in seen.rows for path in paths if wanted(row)}


def recomputed(row: Traced) -> bool:
    return row.decision == "recompute"


def attends(row: Traced) -> bool:
    return covered(row, "attention")


# Gemma-3 in the zoo: sliding, full, sliding, full.
def test_attention_over_a_sliding_window_can_be_left_out_of_what_is_saved() -> None:
    seen = watched_case(CASES["gemma3_sliding"], Selective(save=["attention", "matmul"], save_sliding_window=False))
    assert of_blocks(seen, lambda row: attends(row) and row.decision == "save") == {1, 3}
    assert of_blocks(seen, lambda row: attends(row) and recomputed(row)) == {0, 2}
    assert of_blocks(seen, lambda row: covered(row, "matmul") and row.decision == "save") == {0, 1, 2, 3}
    assert seen.replayed["aten._scaled_dot_product_flash_attention_for_cpu"] == 2
    seen.assert_it_did_something()


@pytest.mark.parametrize(("kinds", "whole"), [(["sliding_attention"], {0, 2}), (["full_*"], {1, 3})])
def test_layers_of_a_type_can_be_recomputed_whole(kinds: list[str], whole: set[int]) -> None:
    seen = watched_case(CASES["gemma3_sliding"], Selective(save=["attention", "matmul"], recompute_layer_types=kinds))
    assert of_blocks(seen, lambda row: row.decision == "save") == {0, 1, 2, 3} - whole
    assert of_blocks(seen, lambda row: attends(row) and recomputed(row)) == whole
    seen.assert_it_did_something()


def test_a_type_of_layer_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(actmem.ModeError, match="full_attention, sliding_attention"):
        actmem.apply(
            CASES["gemma3_sliding"].build(), Selective(save=["matmul"], recompute_layer_types=["chunked_attention"])
        )


def test_only_large_values_are_saved() -> None:
    """Of a Llama's products those of the feed-forward layer are wider, and those of keys and values narrower."""
    case = CASES["llama"]
    every = watched_case(case, Selective(save=["matmul"]))
    sizes = {row.num_bytes for _, row in every.rows if covered(row, "matmul")}
    assert len(sizes) == 3
    for least in sorted(sizes):
        seen = watched_case(case, Selective(save=["matmul"], min_bytes=least))
        assert all(
            (row.decision == "save") == (covered(row, "matmul") and row.num_bytes >= least) for _, row in seen.rows
        )
        seen.assert_it_did_something()
    assert len(seen.decided("save")) == 2, "gate and up"


def deep() -> nn.Module:
    return TitanLike(layers=6)


DEEP = Case("deep", seeded(deep), ids_only, 6, square_mean)
LAYERS: list[tuple[Mode, set[int]]] = [
    (Full(every=2), {0, 2, 4}),
    (Full(every=2, first=1), {1, 3, 5}),
    (Full(layers="1:4"), {1, 2, 3}),
    (Full(layers=":2"), {0, 1}),
    (Full(layers="-2:"), {4, 5}),
    (Full(layers="0,3:5,-1"), {0, 3, 4, 5}),
    (Selective(save=["matmul"], every=3), {0, 3}),
    (Selective(save=["attention", every_second("matmul")], layers=":-1"), {0, 1, 2, 3, 4}),
    (Selective(save=["pointwise"], layers="2"), {2}),
    (Targets(["norm"], every=2), {0, 2, 4}),
    (Targets(["mlp", "attn_proj"], layers="-3:"), {3, 4, 5}),
    (Rules([Rule("save", op="matmul", layers="4:"), Rule("recompute", layers="2:"), Rule("save")]), {2, 3, 4, 5}),
]


@pytest.mark.parametrize(
    ("mode", "expected"), LAYERS, ids=lambda value: repr(value) if not isinstance(value, set) else ""
)
def test_only_the_chosen_layers_recompute_and_the_others_save_everything(mode: Mode, expected: set[int]) -> None:
    seen = watched_case(DEEP, mode)
    assert of_blocks(seen, recomputed) == expected
    for block in seen.trace.blocks:
        if not expected & {int(path.rpartition(".")[2]) for path in block.paths}:
            assert all(row.decision == "save" for row in block.rows)
    for kind in seen.report.kinds:
        idle = not expected & {int(path.rpartition(".")[2]) for path in kind.paths}
        assert (kind.bytes_of("recompute") == 0) == idle
    seen.assert_it_did_something()


# ---------------------------------------------------------------- towers

TOWERS = {
    "vision_language": {"vision": "model.vision_tower", "language": "model.language_model"},
    "audio_language": {"audio": "audio_tower", "language": "language_model"},
}


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("vision_language", ["vision"]),
        ("vision_language", ["language", "vision"]),
        ("vision_language", None),
        ("audio_language", ["audio"]),
        ("audio_language", ["language"]),
        ("audio_language", ["audio", "language"]),
    ],
)
@pytest.mark.parametrize(
    "mode",
    [
        Selective(save=["matmul"]),
        *(pytest.param(m, marks=pytest.mark.slow) for m in (Full(), Targets(["norm", "mlp"]))),
    ],
    ids=repr,
)
def test_a_scope_chooses_towers(name: str, scope: list[str] | None, mode: Mode) -> None:
    seen = watched_case(CASES[name], mode, scope=scope)
    blocks = seen.report.plan.blocks
    for tower, place in TOWERS[name].items():
        assert any(place in path for path in blocks) == (tower in (scope or ["language"])), blocks
    assert not seen.report.unobserved
    seen.assert_it_did_something()


def frozen(model: nn.Module, place: str) -> nn.Module:
    for path, parameter in model.named_parameters():
        if place in path:
            parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_through_which_no_gradient_flows_is_skipped_and_reported(name: str) -> None:
    tower, place = next(iter(TOWERS[name].items()))
    model = frozen(CASES[name].build(), place)
    seen = watched(model, CASES[name].batch(model), Full(), scope=[tower, "language"])
    assert all(place not in path for paths, _ in seen.rows for path in paths)
    (note,) = [note for note in seen.report.notes if "no gradient flows" in note]
    assert note.startswith("skipped, because no gradient flows through: ") and place in note
    assert note in str(seen.report)
    seen.assert_it_did_something()


@pytest.mark.parametrize("name", TOWERS)
def test_a_frozen_tower_through_which_gradient_flows_is_not_skipped(name: str) -> None:
    model = frozen(CASES[name].build(), TOWERS[name]["language"])
    seen = watched(model, CASES[name].batch(model), Full(), scope=["language"])
    assert not [note for note in seen.report.notes if "no gradient flows" in note]
    assert len(seen.report.plan.blocks) == 3 and not seen.report.unobserved
    assert of_blocks(seen, recomputed) == {0, 1, 2}
    seen.assert_it_did_something()


# ---------------------------------------------------------------- what torch holds to be dear


def test_compute_intensive_is_torchs_own_list() -> None:
    from torch._functorch.partitioners import get_default_op_list

    listed = {str(op) for op in get_default_op_list().compute_intensive_ops}
    assert torchcompat.compute_intensive() == listed
    seen = watched_case(CASES["gpt2_dropout"], Selective(save=["compute_intensive"]))
    assert all((row.decision == "save") == (row.op.rpartition(".")[0] in listed) for _, row in seen.rows)
    assert seen.decided("save")
    seen.assert_it_did_something()


@pytest.mark.parametrize("absent", ["the module", "the list"])
def test_compute_intensive_falls_back_to_a_list_of_its_own(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = watched_case(CASES["qwen3"], Selective(save=["compute_intensive"]))
    if absent == "the module":
        monkeypatch.setitem(sys.modules, "torch._functorch.partitioners", None)
    else:
        monkeypatch.delattr("torch._functorch.partitioners.get_default_op_list")
    torchcompat.compute_intensive.cache_clear()
    try:
        assert torchcompat.compute_intensive() is None
        seen = watched_case(CASES["qwen3"], Selective(save=["compute_intensive"]))
    finally:
        torchcompat.compute_intensive.cache_clear()
    assert decisions(seen) == decisions(expected)
    seen.assert_it_did_something()
