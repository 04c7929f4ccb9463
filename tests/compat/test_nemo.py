"""A user of NeMo Automodel's activation checkpointing changes an import: names, data and side effects are the same."""

import contextlib
import functools
import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from actmem import ApplyError, ModeError, Rule
from actmem.compat import nemo
from tests.compat.training import REQUIRED, assert_trains_the_same, gradients, layers_of, parameters_of
from tests.zoo import ZOO

aten = torch.ops.aten
ANY = ("any", REQUIRED)
OURS = ("keyword", "recompute")
# As read in NeMo Automodel.
UPSTREAM: dict[str, dict[str, Any]] = {
    "apply_selective_checkpointing_to_layers": {
        "model": ANY,
        "layers": ANY,
        "has_kv_sharing": ANY,
        "enable_compile": ("keyword", False),
        "collectives": OURS,
    },
    "apply_selective_activation_checkpointing": {
        "model": ANY,
        "enable_compile": ("keyword", False),
        "activation_checkpointing_scope": ("keyword", "all"),
        "collectives": OURS,
    },
    "apply_full_layer_checkpointing_to_layers": {"model": ANY, "layers": ANY, "collectives": OURS},
    "apply_submodule_checkpointing": {
        "layers": ANY,
        "has_kv_sharing": ANY,
        "context_fn": ("keyword", nemo.sdpa_backend_snapshot_context_fn),
        "collectives": OURS,
    },
    "sdpa_backend_snapshot_context_fn": {},
    "transformer_engine_attention_backend_snapshot_context_fn": {"context_fn": ("any", None)},
    "ignore_sac_ops": {"ops": ANY},
    "ensure_fsdp_ops_sac_ignored": {},
    "ensure_profiler_ops_sac_ignored": {},
    "normalize_activation_checkpointing_scope": {"value": ANY},
    "_ffpa_forward_ops": {},
    "detect_kv_sharing_and_maybe_disable_cache": {"model": ANY},
    "is_selective_activation_checkpointing": {"activation_checkpointing": ANY},
    "make_selective_checkpoint_context_fn": {},
    "unwrap_checkpoint_wrapper": {"module": ANY},
    "_build_selective_ac_save_ops": {},
    "_default_compute_intensive_ops": {},
    "_disable_dynamo_lru_cache": {},
    "_existing_ops": {"ops": ("*", REQUIRED)},
    "_is_cuda_to_cpu_copy": {"func": ANY, "args": ANY, "kwargs": ANY},
    "_maybe_trace_selective_ac_decision": {
        "func": ANY,
        "decision": ANY,
        "is_alternating": ANY,
        "is_recompute": ("keyword", REQUIRED),
    },
    "_replace_child_module": {"root": ANY, "target": ANY, "replacement": ANY},
    "_resolve_op_attr": {"root": ANY, "dotted_path": ANY},
    "_resolve_torch_op": {"dotted_path": ANY, "name": ("any", None), "overload": ("any", "default")},
}


def selective(model: nn.Module, has_kv_sharing: bool = False) -> Any:
    return nemo.apply_selective_checkpointing_to_layers(model, layers_of(model), has_kv_sharing)


@pytest.mark.parametrize("name", UPSTREAM)
def test_functions_take_what_they_take_in_nemo(name: str) -> None:
    assert parameters_of(getattr(nemo, name)) == UPSTREAM[name]


def test_data_is_that_of_nemo() -> None:
    assert nemo.SELECTIVE_AC_WRAPPER_FLAG == "_nemo_selective_ac"
    assert {
        *(aten.mm.default, aten.linear.default, aten._grouped_mm.default, aten._scaled_grouped_mm.default),
    } == nemo._SELECTIVE_AC_MATMUL_OPS
    assert {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.topk.default, aten.max.default} <= (
        nemo._SELECTIVE_AC_MUST_SAVE_OPS
    )
    assert set(nemo._default_compute_intensive_ops()) <= nemo._SELECTIVE_AC_MUST_SAVE_OPS
    assert torch.ops.higher_order.flex_attention in nemo._SELECTIVE_AC_MUST_SAVE_OPS
    assert nemo._SELECTIVE_AC_TO_COPY_OP is aten._to_copy.default
    assert nemo._SELECTIVE_AC_TRACE is False
    assert nemo.logger.name == nemo.__name__


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3n_shared_kv", "torchtitan_like"])
def test_selective_gradients_are_those_of_plain_training(name: str) -> None:
    def change(model: nn.Module) -> Any:
        return selective(model, nemo.detect_kv_sharing_and_maybe_disable_cache(model))

    assert assert_trains_the_same(ZOO[name], change).report().recomputed_bytes > 0


@pytest.mark.parametrize("name", ["llama", "gemma3n_shared_kv", "torchtitan_like"])
def test_full_gradients_are_those_of_plain_training(name: str) -> None:
    applied = assert_trains_the_same(
        ZOO[name], lambda model: nemo.apply_full_layer_checkpointing_to_layers(model, layers_of(model))
    )
    assert applied.report().recomputed_bytes > 0


@pytest.mark.parametrize("name", ["llama", "gemma3n_shared_kv", "torchtitan_like"])
def test_sub_module_gradients_are_those_of_plain_training(name: str) -> None:
    handles = assert_trains_the_same(ZOO[name], lambda m: nemo.apply_submodule_checkpointing(layers_of(m), True))
    assert all(applied.report().recomputed_bytes > 0 for applied in handles)


def test_reports_of_layers_add_up_to_what_is_held_and_count_what_they_share_once() -> None:
    case = ZOO["llama"]
    model = case.build()
    batch = case.batch(model)
    handles = nemo.apply_submodule_checkpointing(layers_of(model), False)
    for _ in range(2):
        model(**batch).loss.backward()
    reports = [applied.report() for applied in handles]
    joint = sum(reports[1:], reports[0])
    tables = 2 * 384 + 2 * 12 * 12  # cosine, sine and the mask, read by every layer
    assert joint.held_bytes == sum(r.held_bytes for r in reports) - (len(reports) - 1) * tables
    assert joint.shared_bytes == (len(reports) - 1) * tables
    assert [kind.paths for kind in joint.kinds] == [("",)] * len(reports)


def test_kv_shared_layers_are_selective_and_not_done_by_sub_modules() -> None:
    plain = selective(ZOO["gemma3n_shared_kv"].build(), False).plan
    shared = selective(ZOO["gemma3n_shared_kv"].build(), True).plan
    assert shared.rules == plain.rules
    assert not any(rule.module for rule in shared.rules)


def test_sub_modules_are_attention_feed_forward_and_two_norms() -> None:
    model = ZOO["llama"].build()
    (applied, *_) = nemo.apply_submodule_checkpointing(layers_of(model), False)
    assert [rule.module for rule in applied.plan.rules] == [
        *("mlp", "self_attn", "input_layernorm", "post_attention_layernorm", None)
    ]


def test_the_list_keeps_its_layers_and_they_carry_the_flag_until_removed() -> None:
    model = ZOO["llama"].build()
    layers = layers_of(model)
    before = list(layers)
    applied = nemo.apply_selective_checkpointing_to_layers(model, layers, False)
    assert all(one is other for one, other in zip(layers, before, strict=True))
    assert all(getattr(layer, nemo.SELECTIVE_AC_WRAPPER_FLAG, False) for layer in layers)
    assert not any(nemo.SELECTIVE_AC_WRAPPER_FLAG in vars(layer) for layer in layers)
    assert all(nemo.unwrap_checkpoint_wrapper(layer) is layer for layer in layers)
    applied.remove()
    assert not any(hasattr(layer, nemo.SELECTIVE_AC_WRAPPER_FLAG) for layer in layers)


def test_only_the_layers_of_the_list_are_changed() -> None:
    model = ZOO["llama"].build()
    layers = layers_of(model)[1:]
    applied = nemo.apply_full_layer_checkpointing_to_layers(model, layers)
    assert applied.plan.blocks == ("model.layers.1", "model.layers.2")
    assert nemo.apply_full_layer_checkpointing_to_layers(model, layers).plan is applied.plan


def test_other_layers_of_the_same_model_are_added() -> None:
    def change(model: nn.Module) -> Any:
        layers = layers_of(model)
        first = nemo.apply_full_layer_checkpointing_to_layers(model, layers[1:2])
        second = selective_of(model, [layers[2], layers[0]])
        assert first is not None and first.plan is second.plan
        return first

    applied = assert_trains_the_same(ZOO["llama"], change)
    assert applied.plan.blocks == tuple(f"model.layers.{i}" for i in range(3))
    assert applied.plan.rules[-3:] == (
        Rule("recompute", layers="1"),
        Rule("recompute", layers="0,2"),
        Rule("save"),
    )
    decided = {path: {row.decision for row in b.rows} for b in applied.trace().blocks for path in b.paths}
    assert decided["model.layers.1"] == {"recompute"}
    assert decided["model.layers.0"] == decided["model.layers.2"] == {"save", "recompute"}


def test_what_is_added_holds_what_one_call_each_would_hold() -> None:
    case, ways = ZOO["llama"], []
    for parts in ([[0, 1, 2]], [[0], [2], [1]]):
        model = case.build()
        layers = layers_of(model)
        for part in parts:
            applied = selective_of(model, [layers[i] for i in part])
        gradients(case, model)
        ways.append(applied.report().saved_bytes)
    assert ways[0] == ways[1] > 0


def test_handles_of_earlier_calls_stand_for_the_whole_plan_and_remove_it() -> None:
    model = ZOO["llama"].build()
    plain, layers = [type(m) for m in model.modules()], layers_of(model)
    first = nemo.apply_full_layer_checkpointing_to_layers(model, layers[:1])
    nemo.apply_full_layer_checkpointing_to_layers(model, layers[1:])
    again = nemo.apply_full_layer_checkpointing_to_layers(model, layers[:1])
    assert first is not None and again is not None and again.plan is first.plan and len(first.plan.blocks) == 3
    gradients(ZOO["llama"], model)
    assert first.report().recomputed_bytes == again.report().recomputed_bytes > 0
    first.remove()
    assert [type(m) for m in model.modules()] == plain
    again.remove()
    assert [type(m) for m in model.modules()] == plain
    assert selective(model) is not None


def test_a_call_that_contradicts_an_earlier_one_is_refused_and_changes_nothing() -> None:
    model = ZOO["llama"].build()
    layers = layers_of(model)
    first = nemo.apply_full_layer_checkpointing_to_layers(model, layers[1:])
    assert first is not None
    with pytest.raises(ApplyError, match="applied to this model already"):
        selective_of(model, layers)
    assert first.plan.blocks == ("model.layers.1", "model.layers.2")
    gradients(ZOO["llama"], model)
    assert first.report().recomputed_bytes > 0


def test_an_addition_that_cannot_be_applied_leaves_what_was_applied() -> None:
    model: Any = ZOO["llama"].build()
    layers = layers_of(model)
    first = nemo.apply_full_layer_checkpointing_to_layers(model, layers[1:])
    assert first is not None
    layers[0].forward = layers[0].forward  # as accelerate's hooks do, which hide the class's own
    with pytest.raises(ApplyError, match="has a forward of its own"):
        nemo.apply_full_layer_checkpointing_to_layers(model, layers[:1])
    del layers[0].forward
    gradients(ZOO["llama"], model)
    assert first.plan.blocks == ("model.layers.1", "model.layers.2") and first.report().recomputed_bytes > 0


def test_sub_modules_of_a_layer_and_whole_other_layers_are_one_plan() -> None:
    def change(model: nn.Module) -> Any:
        layers = layers_of(model)
        (parts,) = nemo.apply_submodule_checkpointing(layers[:1], False)
        whole = nemo.apply_full_layer_checkpointing_to_layers(model, layers[1:])
        assert whole is not None and whole.plan is parts.plan
        return whole

    applied = assert_trains_the_same(ZOO["llama"], change)
    assert applied.plan.rules[0] == Rule("recompute", layers="0", module="model.layers.0.mlp")
    assert applied.report().recomputed_bytes > 0


def test_an_empty_list_changes_nothing() -> None:
    assert selective_of(ZOO["llama"].build(), []) is None


def selective_of(model: nn.Module, layers: list[nn.Module]) -> Any:
    return nemo.apply_selective_checkpointing_to_layers(model, layers, False)


def test_products_alternate_with_one_count_over_plain_and_grouped_ones() -> None:
    applied = selective(model := ZOO["mixtral"].build())
    gradients(ZOO["mixtral"], model)
    counted = {str(op) for op in nemo._SELECTIVE_AC_MATMUL_OPS}
    rows = [row for row in applied.trace().blocks[0].rows if row.op in counted]
    assert len({row.op for row in rows}) > 1
    assert [row.decision for row in rows] == [("save", "recompute")[i % 2] for i in range(len(rows))]


# Dynamo looks at `.grad` of the blocks' inputs, and is warned for it, with or without actmem.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_train_as_compiled_plain_ones() -> None:
    def compiled(model: nn.Module) -> Any:
        for layer in layers_of(model):
            layer.compile(backend="aot_eager")
        return gradients(ZOO["torchtitan_like"], model, num_steps=1)

    expected, model = compiled(ZOO["torchtitan_like"].build()), ZOO["torchtitan_like"].build()
    try:
        applied = nemo.apply_selective_checkpointing_to_layers(model, layers_of(model), False, enable_compile=True)
        (want,), (got,) = expected, compiled(model)
        assert all(torch.equal(want[name], got[name]) for name in want)
        assert "compiled" in {block.engine for block in applied.trace().blocks}
    finally:
        torch._C._dynamo.eval_frame._set_lru_cache(True)
        torch._dynamo.reset()


def test_a_layer_of_another_model_is_refused() -> None:
    model, other = ZOO["llama"].build(), ZOO["llama"].build()
    layers = [layers_of(model)[0], layers_of(other)[1]]
    with pytest.raises(ApplyError, match=r"layers \[1\] are not in this LlamaForCausalLM"):
        nemo.apply_full_layer_checkpointing_to_layers(model, layers)
    with pytest.raises(ApplyError, match=r"layers \[1\] are not in this LlamaForCausalLM"):
        nemo.apply_selective_checkpointing_to_layers(model, layers, False)


def test_a_layer_without_parts_of_a_known_name_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    model = ZOO["llama"].build()
    layers = [nn.Linear(2, 2), layers_of(model)[0]]
    (applied,) = nemo.apply_submodule_checkpointing(layers, False)
    assert type(layers[0]) is nn.Linear and applied.plan.rules[0].module == "mlp"
    assert "Linear has no part with a known name" in caplog.text


class Aliased(nn.Module):
    """Feed-forward and attention are two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Linear(4, 4)

    mlp = property(lambda self: self.mixer)
    self_attn = property(lambda self: self.mixer)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x).sin()


def test_two_names_of_one_module_are_one_part() -> None:
    (applied,) = nemo.apply_submodule_checkpointing([layer := Aliased()], False)
    assert [rule.module for rule in applied.plan.rules] == ["mixer", None]
    assert list(layer.state_dict()) == ["mixer.weight", "mixer.bias"]


def test_snapshots_are_accepted_and_other_contexts_are_refused() -> None:
    both = functools.partial(
        nemo.transformer_engine_attention_backend_snapshot_context_fn, nemo.sdpa_backend_snapshot_context_fn
    )
    for context_fn in (None, nemo.sdpa_backend_snapshot_context_fn, both):
        assert nemo.apply_submodule_checkpointing([], False, context_fn=context_fn) == []
    with pytest.raises(ModeError, match="no code runs twice"):
        nemo.apply_submodule_checkpointing([], False, context_fn=nemo.make_selective_checkpoint_context_fn())


def test_attention_is_replayed_by_the_back_end_of_the_forward_pass() -> None:
    model = ZOO["torchtitan_like"].build()
    nemo.apply_submodule_checkpointing(layers_of(model), False)
    expected = ZOO["torchtitan_like"].build()
    for one in (model, expected):
        for _ in range(2):
            one.zero_grad()
            with sdpa_kernel([SDPBackend.MATH]):
                loss = ZOO["torchtitan_like"].step(one, ZOO["torchtitan_like"].batch(one))
            loss.backward()
    for want, got in zip(expected.parameters(), model.parameters(), strict=True):
        assert want.grad is not None and got.grad is not None and torch.equal(want.grad, got.grad)


@pytest.mark.parametrize(
    ("scope", "blocks"),
    [
        ("all", {"language_model", "vision_tower"}),
        (None, {"language_model", "vision_tower"}),
        ("language", {"language_model"}),
        (["vision"], {"vision_tower"}),
        ("Multimodal", {"vision_tower"}),
    ],
)
def test_a_scope_says_whose_layers_are_meant(scope: Any, blocks: set[str]) -> None:
    model = ZOO["vision_language"].build()
    applied = nemo.apply_selective_activation_checkpointing(model, activation_checkpointing_scope=scope)
    assert applied is not None
    assert {path.split(".")[1] for path in applied.plan.blocks} == blocks


def test_frozen_layers_are_left_out_of_a_scope() -> None:
    model: Any = ZOO["vision_language"].build()
    model.model.vision_tower.requires_grad_(False)
    applied = nemo.apply_selective_activation_checkpointing(model)
    assert applied is not None and not any("vision" in path for path in applied.plan.blocks)
    assert nemo.apply_selective_activation_checkpointing(model, activation_checkpointing_scope="vision") is None


@pytest.mark.parametrize("scope", ["visoin", ["all", "vision"], 3, [3]])
def test_a_scope_that_nemo_refuses_is_refused(scope: Any) -> None:
    with pytest.raises(ValueError, match="activation_checkpointing_scope"):
        nemo.normalize_activation_checkpointing_scope(scope)


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize("value", ["selective", "Selective", "SELECTIVE"])
def test_selective_is_a_text_in_any_case(value: str) -> None:
    assert nemo.is_selective_activation_checkpointing(value)


@pytest.mark.parametrize("value", [True, False, None, "full", "true", "selective-ish", 1])
def test_nothing_else_is_selective(value: object) -> None:
    assert not nemo.is_selective_activation_checkpointing(value)


def test_shared_keys_and_values_keep_their_cache() -> None:
    model: Any = ZOO["gemma3n_shared_kv"].build()
    before = model.config.use_cache
    assert nemo.detect_kv_sharing_and_maybe_disable_cache(model) is True
    assert model.config.use_cache == before
    wrapped = SimpleNamespace(
        config=SimpleNamespace(text_config=SimpleNamespace(num_kv_shared_layers=1), use_cache=True)
    )
    assert nemo.detect_kv_sharing_and_maybe_disable_cache(wrapped) is True  # type: ignore[arg-type]
    assert wrapped.config.use_cache is True


def test_other_models_have_the_cache_switched_off_in_config_and_sub_configs() -> None:
    model: Any = ZOO["vision_language"].build()
    model.config.use_cache = model.config.text_config.use_cache = True
    has_vision_cache = hasattr(model.config.vision_config, "use_cache")
    assert nemo.detect_kv_sharing_and_maybe_disable_cache(model) is False
    assert model.config.use_cache is False and model.config.text_config.use_cache is False
    assert hasattr(model.config.vision_config, "use_cache") == has_vision_cache


def test_a_model_without_config_shares_nothing() -> None:
    assert nemo.detect_kv_sharing_and_maybe_disable_cache(nn.Linear(2, 2)) is False


# ---------------------------------------------------------------- operators and the policy for torch's checkpoint


def test_operators_of_back_ends_that_are_not_installed_are_left_out() -> None:
    assert nemo._resolve_op_attr(torch.ops, "deepep.dispatch.default") is None
    assert nemo._resolve_torch_op("aten", "no_such_operator") is None
    assert nemo._resolve_torch_op("aten.mm") is nemo._resolve_torch_op("aten", "mm") is aten.mm.default
    assert nemo._resolve_torch_op("aten.cat.out") is aten.cat.out
    assert nemo._resolve_torch_op("no_such.operator") is None
    assert nemo._ffpa_forward_ops() == ()
    assert nemo._existing_ops(aten.mm.default, None) == {aten.mm.default}
    assert None not in nemo._build_selective_ac_save_ops()


def test_operators_of_back_ends_that_are_installed_are_saved() -> None:
    library = torch.library.Library("hybridep", "DEF")
    library.define("dispatch(Tensor x) -> Tensor")
    try:
        assert torch.ops.hybridep.dispatch.default in nemo._build_selective_ac_save_ops()
    finally:
        library._destroy()


def test_operators_that_must_be_imported_first_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo, "_ffpa_forward_ops", lambda: (aten.sin.default,))
    assert aten.sin.default in nemo._build_selective_ac_save_ops()


def test_a_torch_without_the_switch_for_graphs_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_set_lru_cache")
    nemo._disable_dynamo_lru_cache()


def test_operators_are_left_out_of_torchs_count(ignored: set[Any]) -> None:
    nemo.ignore_sac_ops([aten.sin.default, None])
    assert aten.sin.default in ignored and None not in ignored
    nemo.ensure_profiler_ops_sac_ignored()
    assert torch.ops.profiler._record_function_enter_new.default in ignored
    nemo.ensure_fsdp_ops_sac_ignored()
    assert {torch.ops.fsdp.all_gather_copy_in.default, aten.cat.out, aten.split.Tensor} <= ignored


def test_making_a_policy_leaves_profiler_and_fsdp_out_of_torchs_count(ignored: set[Any]) -> None:
    nemo.make_selective_checkpoint_context_fn()
    assert torch.ops.profiler._record_function_enter_new.default in ignored
    assert torch.ops.fsdp.copy_.default in ignored


def test_a_snapshot_brings_the_back_ends_and_the_function_of_attention_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: Any, **__: Any) -> Any:
        raise AssertionError

    usual = F.scaled_dot_product_attention
    with sdpa_kernel([SDPBackend.MATH]):
        first, second = nemo.sdpa_backend_snapshot_context_fn()
    monkeypatch.setattr(F, "scaled_dot_product_attention", other)
    with first:
        assert F.scaled_dot_product_attention is other
    before = torch.backends.cuda.flash_sdp_enabled()
    with second:
        assert F.scaled_dot_product_attention is usual
        assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    assert F.scaled_dot_product_attention is other and torch.backends.cuda.flash_sdp_enabled() is before


def test_a_snapshot_brings_transformer_engines_choice_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nemo._get_transformer_engine_attention_backend_cache() is None  # not installed here
    cache: dict[str, Any] = {"backend": "flash"}
    monkeypatch.setattr(nemo, "_get_transformer_engine_attention_backend_cache", lambda: cache)
    entered: list[str] = []

    @contextlib.contextmanager
    def inner() -> Any:
        entered.append(cache["backend"])
        yield

    _, second = nemo.transformer_engine_attention_backend_snapshot_context_fn(lambda: (inner(), inner()))
    cache.update(backend="fused", more=1)
    with second:
        assert cache == {"backend": "flash"}
    assert cache == {"backend": "fused", "more": 1} and entered == ["flash"]
    monkeypatch.setattr(nemo, "_get_transformer_engine_attention_backend_cache", lambda: None)
    first, second = nemo.transformer_engine_attention_backend_snapshot_context_fn()
    with first, second:
        pass


def test_copies_to_the_host_are_told_from_others() -> None:
    on_gpu = (SimpleNamespace(device=torch.device("cuda")),)
    copy = aten._to_copy.default
    assert nemo._is_cuda_to_cpu_copy(copy, on_gpu, {"device": "cpu"})
    assert nemo._is_cuda_to_cpu_copy(copy, on_gpu, {"device": torch.device("cpu")})
    assert not nemo._is_cuda_to_cpu_copy(copy, on_gpu, {"device": "cuda"})
    assert not nemo._is_cuda_to_cpu_copy(copy, on_gpu, {"device": "nowhere"})
    assert not nemo._is_cuda_to_cpu_copy(copy, on_gpu, {})
    assert not nemo._is_cuda_to_cpu_copy(copy, (torch.ones(1),), {"device": "cpu"})
    assert not nemo._is_cuda_to_cpu_copy(aten.mm.default, on_gpu, {"device": "cpu"})


def test_the_context_function_serves_torchs_own_checkpoint() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]

    def forward(x: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    def backward(run: Any) -> tuple[list[Tensor], int]:
        out = run(torch.ones(2, 4, requires_grad=True)).sum()
        with Counting() as counting:
            grads = torch.autograd.grad(out, weights)
        return list(grads), counting.num_products

    plain, num_plain = backward(forward)
    context_fn = nemo.make_selective_checkpoint_context_fn()
    got, num_got = backward(lambda x: checkpoint(forward, x, use_reentrant=False, context_fn=context_fn))
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    assert num_got == num_plain + 1  # of three products the second is not saved


def test_decisions_are_those_that_the_policy_takes_under_torchs_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO["mixtral"]
    model = case.build()
    applied = selective(model)
    calls: list[Any] = []
    layers_of(model)[0].register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    gradients(case, model)
    applied.remove()
    asked: list[tuple[str, str]] = []

    def note(func: Any, decision: Any, _: bool, *, is_recompute: bool) -> None:
        asked.append((str(func), "save" if decision == CheckpointPolicy.MUST_SAVE else "recompute"))

    monkeypatch.setattr(nemo, "_maybe_trace_selective_ac_decision", note)
    args, kwargs = calls[0]
    context_fn = nemo.make_selective_checkpoint_context_fn()
    checkpoint(layers_of(model)[0], *args, use_reentrant=False, context_fn=context_fn, **kwargs)
    dear = {str(op) for op in nemo._SELECTIVE_AC_MUST_SAVE_OPS | nemo._SELECTIVE_AC_MATMUL_OPS}
    ours = [(row.op, row.decision) for row in applied.trace().blocks[0].rows]
    assert [pair for pair in ours if pair[0] in dear] == [pair for pair in asked if pair[0] in dear]
    assert sum(op in dear for op, _ in ours) > 5
    recomputed = {op for op, decision in asked if decision == "recompute"} - dear
    assert all(decision == "recompute" for op, decision in ours if op in recomputed)


class Counting(TorchDispatchMode):
    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func is aten.mm.default
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- the trace


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    monkeypatch.setattr(nemo, "_SELECTIVE_AC_TRACE", True)
    nemo._SELECTIVE_AC_TRACE_SEEN.clear()
    decisions = logging.getLogger("actmem.decisions")
    level, filters = decisions.level, list(decisions.filters)
    with caplog.at_level(logging.INFO, logger=nemo.logger.name):
        yield caplog
    decisions.filters[:] = filters
    decisions.setLevel(level)
    nemo._SELECTIVE_AC_TRACE_SEEN.clear()


def test_the_trace_says_each_operators_decision_once(traced: pytest.LogCaptureFixture) -> None:
    model = ZOO["mixtral"].build()
    selective(model)
    gradients(ZOO["mixtral"], model)
    lines = [record.getMessage() for record in traced.records if record.name == nemo.logger.name]
    assert len(lines) == len(set(lines)) > 5
    assert "[selective-ac] aten.mm.default -> ALTERNATE (every second is saved)" in lines
    assert "[selective-ac] aten.silu.default -> RECOMPUTE" in lines
    assert any("attention" in line and line.endswith("SAVE") for line in lines)
    assert not [record for record in traced.records if record.name == "actmem.decisions"], "each decision is one line"


class SortingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().sum(-1).sort().indices
        return self.linear(x[order]).sin() * torch.bincount(order, minlength=len(x))[:, None]


def test_the_trace_says_that_routing_is_never_replayed(traced: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(SortingLayer(), SortingLayer())
    selective_of(model, list(model))
    model(torch.randn(3, 4)).sum().backward()
    lines = [record.getMessage() for record in traced.records if record.name == nemo.logger.name]
    verdicts = dict(line.removeprefix("[selective-ac] ").split(" -> ") for line in lines)
    assert len(verdicts) == len(lines)
    assert verdicts["aten.sort.default"] == "SAVE where needed (never replayed)"
    assert verdicts["aten.bincount.default"] == "RECOMPUTE"  # which gives the same bits on a CPU
    assert "[selective-ac] aten.sin.default -> RECOMPUTE" in lines


@pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds
@pytest.mark.parametrize("how", ["blocks", "parts"])
def test_the_trace_says_of_compiled_layers_what_it_says_of_eager_ones(
    how: str, traced: pytest.LogCaptureFixture
) -> None:
    def lines(*, compiled: bool) -> set[str]:
        torch._dynamo.reset()
        model = ZOO["llama"].build()
        selective(model)
        for layer in model.model.layers if compiled else ():
            for part in [layer] if how == "blocks" else [layer.self_attn, layer.mlp]:
                part.compile(backend="aot_eager")
        gradients(ZOO["llama"], model)
        found = {record.getMessage() for record in traced.records if record.name == nemo.logger.name}
        traced.clear()
        nemo._SELECTIVE_AC_TRACE_SEEN.clear()
        return found

    eager, compiled = lines(compiled=False), lines(compiled=True)
    assert len(eager) > 5
    assert compiled >= {line for line in eager if "mm." in line or "attention" in line or "silu" in line}
    assert all(line.startswith("[selective-ac] ") for line in compiled)


def test_the_trace_speaks_of_the_forward_pass_only_and_only_when_on(
    traced: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = nemo._maybe_trace_selective_ac_decision
    trace(aten.bmm.default, CheckpointPolicy.MUST_SAVE, False, is_recompute=True)
    assert not traced.records
    trace(aten.bmm.default, CheckpointPolicy.MUST_SAVE, False, is_recompute=False)
    trace(aten.bmm.default, CheckpointPolicy.MUST_SAVE, False, is_recompute=False)
    assert [record.getMessage() for record in traced.records] == ["[selective-ac] aten.bmm.default -> SAVE"]
    monkeypatch.setattr(nemo, "_SELECTIVE_AC_TRACE", False)
    trace(aten.relu.default, CheckpointPolicy.PREFER_RECOMPUTE, False, is_recompute=False)
    assert len(traced.records) == 1


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), ("No", False)])
def test_the_trace_is_switched_by_an_environment_variable(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_SELECTIVE_AC_TRACE", value)
    spec = importlib.util.spec_from_file_location("nemo_again", nemo.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again._SELECTIVE_AC_TRACE is on


# ---------------------------------------------------------------- small parts


def test_a_child_is_replaced_wherever_it_is() -> None:
    inner, other = nn.Linear(2, 2), nn.Linear(2, 2)
    root = nn.ModuleDict({"a": nn.Sequential(nn.ModuleList([nn.ReLU(), inner]))})
    assert nemo._replace_child_module(root, inner, other)
    assert root["a"][0][1] is other
    assert not nemo._replace_child_module(root, inner, other)


def test_a_wrapper_of_torch_is_unwrapped() -> None:
    module = nn.Linear(2, 2)
    assert nemo.unwrap_checkpoint_wrapper(checkpoint_wrapper(module)) is module
    assert nemo.unwrap_checkpoint_wrapper(module) is module
