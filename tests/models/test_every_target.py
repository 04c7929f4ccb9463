"""Every target that a model has: to the bit that of plain training, decided at its own addresses only, and worth it."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import Measurement, Targets, ops
from actmem.modes import Mode
from actmem.structure import find_blocks, find_roles
from tests.models.test_targets_found import TABLE
from tests.models.watching import watched, watched_case
from tests.zoo import EXPERTS, ZOO, Case, causal_lm, square_mean, tokens

MLA = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
}
# With values as wide as keys attention is fused, and reads the values where the up-projection wrote them.
FUSED_MLA = Case("deepseek_fused", causal_lm("deepseek_v3", **MLA, v_head_dim=16), tokens, 3)
CASES = {**ZOO, "deepseek_fused": FUSED_MLA}

# What these modules make is used up by the next operator outside them, and autograd saves nothing of it: to run them
# again frees nothing. Under autocast it is cast, and that copy is freed.
FREES_NOTHING = {
    ("deepseek_v3", "mla_up_proj"): "rotated, concatenated and copied before attention, which is unfused here",
    ("transformer_encoder", "mlp"): "the activation between the two halves belongs to the block, and saves its result",
    ("moe_topk", "router"): "the softmax behind it belongs to the mixture, and saves its result",
    ("gpt_oss", "router"): "in place of the result of its softmax what topk chose is held, which is as large",
}


def targets_of(name: str) -> list[str]:
    """List the targets of a model, as the table of what is found where has them."""
    of = {"llama_use_cache": "llama", "deepseek_fused": "deepseek_v3"}.get(name, name)
    rows = [
        row for line, (_, row) in TABLE.items() if line.split()[0] == of and not {"vision", "audio"} & {*line.split()}
    ]
    return sorted({target for row in rows for target in row})


def cells() -> Iterator[Any]:
    """List every model with every target and precision. Not slow: each model once, each target at least twice."""
    every = [(name, target) for name in CASES for target in targets_of(name)]
    taken: dict[str, list[str]] = {target: [] for _, target in every}
    for name in CASES:
        least = min(targets_of(name), key=lambda target: (len(taken[target]), taken[target]))
        taken[least].append(name)
    for name, target in reversed(every):
        if len(taken[target]) < 2 and name not in taken[target]:
            taken[target].append(name)
    for place, (name, target) in enumerate(every):
        for turn, precision in enumerate(("fp32", "bf16")):
            quick = name in taken[target] and place % 2 == turn
            yield pytest.param(name, target, precision, marks=[] if quick else [pytest.mark.slow])


def belongs(op: str, target: str) -> bool | None:
    """Tell whether an operator inside the modules of a target belongs to it; None where that depends on its place."""
    packet, _, overload = op.rpartition(".")
    if target == "moe_act":
        return ops.matches("pointwise", packet, overload)
    if target == "attn_proj":
        return False if ops.matches("attention", packet, overload) else None
    return True


@pytest.mark.parametrize(("name", "target", "precision"), list(cells()))
def test_training_is_plain_training_and_only_the_target_is_recomputed(name: str, target: str, precision: str) -> None:
    case = CASES[name]
    model = case.build()
    blocks = find_blocks(model)
    places = {block.path: its.get(target, ()) for block, its in zip(blocks, find_roles(model, blocks), strict=True)}
    seen = watched(model, case.batch(model), Targets([target]), loss=case.loss, precision=precision)
    assert not seen.report.unobserved
    assert seen.decided("recompute")
    for paths, row in seen.rows:
        for path in paths:
            inside = any(f"{row.module}.".startswith(f"{place}.") for place in places[path])
            expected = inside and belongs(row.op, target)
            if expected is not None:
                assert (row.decision == "recompute") == expected, (path, row)
    if precision == "fp32" and (name, target) in FREES_NOTHING:
        assert seen.report.held_bytes == seen.report.plain_bytes
    else:
        seen.assert_it_did_something()


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_target_of_every_model_is_tried(name: str) -> None:
    model = ZOO[name].build()
    assert {role for its in find_roles(model, find_blocks(model)) for role in its} == {*targets_of(name)}


# ---------------------------------------------------------------- the activation of routed experts

EXPERTS_FORMS: dict[str, Callable[[], Case]] = {
    "qwen3_moe, grouped": lambda: experts_case("qwen3_moe", "grouped_mm", num_experts=4, head_dim=8, **EXPERTS),
    "qwen3_moe, batched": lambda: experts_case("qwen3_moe", "batched_mm", num_experts=4, head_dim=8, **EXPERTS),
    "qwen3_moe, one by one": lambda: experts_case("qwen3_moe", "eager", num_experts=4, head_dim=8, **EXPERTS),
    "mixtral, one by one": lambda: experts_case("mixtral", "eager", num_local_experts=4, num_experts_per_tok=2),
    **{name: lambda name=name: ZOO[name] for name in ("gpt_oss", "nemotron_h", "moe_topk", "torchtitan_moe")},
}
PRODUCTS_OF_EXPERTS = {"grouped": "aten._grouped_mm", "batched": "aten.bmm", "one by one": "aten.mm"}


def experts_case(model_type: str, implementation: str, **config: Any) -> Case:
    build = causal_lm(model_type, **config, experts_implementation=implementation)
    return Case(model_type, build, tokens, 3)


@pytest.mark.parametrize("form", EXPERTS_FORMS)
def test_moe_act_runs_the_activation_of_the_experts_again_and_no_product(form: str) -> None:
    case = EXPERTS_FORMS[form]()
    seen = watched_case(case, Targets(["moe_act"]))
    seen.assert_it_did_something()
    views = {"aten.as_strided", "aten.view", "aten.slice", "aten.split"}
    assert {op for op in seen.replayed if not ops.matches("pointwise", op, "default")} <= views
    assert seen.replayed_products == set()
    assert all("experts" in module for module, _ in seen.decided("recompute"))
    if "," in form:
        product = PRODUCTS_OF_EXPERTS[form.partition(", ")[2]]
        assert any("experts" in module for module, _ in seen.decided("save", op=product)), "the form that was asked for"
    more = watched_case(case, Targets(["routed_experts"]))
    more.assert_it_did_something()
    assert more.report.held_bytes < seen.report.held_bytes


# ---------------------------------------------------------------- attention without its kernel


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [("qwen3", {"head_dim": 8}), ("llama", {}), ("gemma3_text", {"head_dim": 8}), ("deepseek_v3", MLA)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attn_proj_runs_all_of_attention_again_but_its_kernel(
    model_type: str, config: dict[str, Any], implementation: str
) -> None:
    build = causal_lm(
        model_type, **config, **({"v_head_dim": 16} if config is MLA else {}), attn_implementation=implementation
    )
    seen = watched_case(Case(model_type, build, tokens, 3), Targets(["attn_proj"]))
    seen.assert_it_did_something()
    assert seen.replayed_products == {"aten.mm"}
    assert "aten._softmax" not in seen.replayed
    assert {"aten.mul", "aten.neg", "aten.cat"} <= {*seen.replayed} or config is MLA, "rotated again"
    assert seen.replayed["aten.rsqrt"] == {"qwen3": 6, "gemma3_text": 6, "deepseek_v3": 6}.get(model_type, 0), (
        "norms inside attention"
    )
    assert not seen.decided("recompute", op="aten.bmm") | seen.decided("recompute", op="aten._softmax")
    kernel = {"sdpa": {"aten._scaled_dot_product_flash_attention_for_cpu"}, "eager": {"aten.bmm", "aten._softmax"}}
    saved = {op.rpartition(".")[0] for module, op in seen.decided("save") if module.startswith("self_attn")}
    assert kernel[implementation] <= saved
    if implementation == "sdpa":
        assert saved == kernel["sdpa"]
    every = watched_case(Case(model_type, build, tokens, 3), Targets(["attention"]))
    assert every.replayed_products > {"aten.mm"}
    assert every.report.held_bytes < seen.report.held_bytes


# ---------------------------------------------------------------- more targets, fewer bytes


def measured(case: Case, mode: Mode | None) -> Measurement:
    """Measure a step after two others, from which on all steps are alike."""
    model = case.build()
    batch = case.batch(model)

    def step() -> None:
        torch.manual_seed(3)
        case.step(model, batch).backward()
        model.zero_grad()

    applied = None if mode is None else actmem.apply(model, mode)
    step()
    step()
    found = actmem.measure(step, model=model)
    if applied is not None:
        applied.remove()
    return found


@cache
def plain(name: str) -> Measurement:
    return measured(CASES[name], None)


LADDERS = {
    "attention": [["norm"], ["norm", "attn_proj"], ["norm", "attention"]],
    "experts": [["moe_act"], ["routed_experts"], ["routed_experts", "norm"]],
    "mixers": [["norm"], ["norm", "linear_attn"], ["norm", "linear_attn", "routed_experts"]],
}
QUICK = {("llama", "attention"), ("qwen3_moe", "experts"), ("torchtitan_moe", "experts"), ("nemotron_h", "mixers")}


def ladders() -> Iterator[Any]:
    for name in CASES:
        for ladder, steps in LADDERS.items():
            if {target for step in steps for target in step} <= {*targets_of(name)}:
                marks = [] if (name, ladder) in QUICK else [pytest.mark.slow]
                yield pytest.param(name, ladder, marks=marks)


@pytest.mark.parametrize(("name", "ladder"), list(ladders()))
def test_the_more_the_targets_cover_the_less_is_saved_and_the_peak_is_never_above_plain(name: str, ladder: str) -> None:
    found = [plain(name), *(measured(CASES[name], Targets(targets)) for targets in LADDERS[ladder])]
    saved = [m.saved_bytes for m in found]
    assert all(more < fewer for fewer, more in itertools.pairwise(saved)), saved
    assert all(m.peak_bytes <= found[0].peak_bytes for m in found)
    assert all(m.num_replayed_ops > 0 for m in found[1:])
    replayed = {tuple(targets): m.replayed_flops for targets, m in zip(LADDERS[ladder], found[1:], strict=True)}
    assert replayed.get(("moe_act",), 0) == replayed.get(("norm",), 0) == 0, "no product is run again"


# ---------------------------------------------------------------- targets within targets


@pytest.mark.parametrize(
    ("name", "targets", "within"),
    [
        ("qwen3_moe", ["moe_act", "routed_experts"], {"moe_act": "routed_experts"}),
        ("torchtitan_moe", ["routed_experts", "moe_act"], {"moe_act": "routed_experts"}),
        ("qwen3", ["attn_proj", "attention"], {"attn_proj": "attention"}),
        ("deepseek_v3", ["mla_up_proj", "attn_proj"], {"mla_up_proj": "attn_proj"}),
        ("bert", ["attn_proj", "attention"], {}),  # its output projection lies beside the attention module
        ("qwen3", ["norm", "attn_proj"], {}),  # some norms are inside attention
        ("nemotron_h", ["linear_attn", "attn_proj"], {}),  # modules of different layers
        ("qwen3_next", ["linear_attn", "attn_proj", "norm", "router"], {}),
        ("llama", ["norm", "attention", "mlp"], {}),
    ],
)
def test_a_target_within_others_is_named_and_one_that_is_so_in_part_is_not(
    name: str, targets: list[str], within: dict[str, str]
) -> None:
    seen = watched_case(CASES[name], Targets(targets))
    lines = tuple(
        f"target {inner!r} adds nothing: everything it covers is also covered by {outer!r}."
        for inner, outer in within.items()
    )
    assert seen.trace.subsumed == lines
    assert [note for note in seen.report.notes if "adds nothing" in note] == [*lines]
    assert all(line in str(seen.report) and line in str(seen.trace) for line in lines)


# ---------------------------------------------------------------- a model's own targets


class Mixer(nn.Module):
    """A token mixer that a model calls both its attention's projections and its linear attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.into(x).chunk(2, -1)
        return self.out(torch.sigmoid(a) * b.cumsum(1))


class OwnBlock(nn.Module):
    actmem_targets: ClassVar = {
        "norm": ("ln_*",),
        "linear_attn": ("mix",),
        "attn_proj": ("mix",),
        "own:adapter": ("down", "up"),
        "own:bottleneck": ("down",),
    }

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(dim), nn.Softmax(-1)
        self.mix = Mixer(dim)
        self.down, self.up = nn.Sequential(nn.Linear(dim, 8), nn.GELU()), nn.Sequential(nn.Linear(8, dim), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.ln_a(x))
        return x + self.up(self.down(self.ln_b(x)))


def own_case() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*[OwnBlock() for _ in range(3)]), (torch.randn(2, 6, 16),)


@pytest.mark.parametrize(
    ("target", "modules"),
    [
        ("own:adapter", {"down.0", "down.1", "up.0", "up.1"}),
        ("own:bottleneck", {"down.0", "down.1"}),
        ("norm", {"ln_a", "ln_b"}),
        ("linear_attn", {"mix", "mix.into", "mix.out"}),
    ],
)
def test_a_model_names_targets_itself(target: str, modules: set[str]) -> None:
    model, batch = own_case()
    seen = watched(model, batch, Targets([target]), loss=square_mean)
    seen.assert_it_did_something()
    assert {module for module, _ in seen.decided("recompute")} == modules
    assert not {module for module, _ in seen.decided("save")} & modules


@pytest.mark.parametrize(
    ("targets", "covered"),
    [
        (["own:adapter", "own:bottleneck"], "own:bottleneck"),
        (["own:bottleneck", "own:adapter"], "own:bottleneck"),
        (["linear_attn", "attn_proj"], "attn_proj"),
        (["attn_proj", "linear_attn"], "linear_attn"),
    ],
)
def test_targets_of_one_module_are_told_apart_by_what_they_cover(targets: list[str], covered: str) -> None:
    model, batch = own_case()
    seen = watched(model, batch, Targets(targets), loss=square_mean)
    (line,) = seen.trace.subsumed
    assert line.startswith(f"target {covered!r} adds nothing")
    assert line in seen.report.notes
    fewer = watched(*own_case(), Targets([t for t in targets if t != covered]), loss=square_mean)
    assert fewer.report.held_bytes == seen.report.held_bytes


def test_a_target_that_the_model_has_not_is_refused_and_its_own_are_listed() -> None:
    model, _ = own_case()
    with pytest.raises(actmem.ModeError, match=r"Targets that would match: .*own:adapter, own:bottleneck"):
        actmem.apply(model, Targets(["mlp"]))
    with pytest.raises(actmem.ModeError, match=r"own:sidecar.*own:adapter"):
        actmem.apply(model, Targets(["own:sidecar"]))
