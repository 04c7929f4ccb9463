"""What axolotl does around checkpointed layers: their inputs are sent, and nothing else; saving by operator."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GradientCheckpointingLayer, Trainer

from actmem import ApplyError, ModeError
from actmem.compat.axolotl import (
    ActivationOffloadingMixin,
    CheckpointHiddenStatesOffload,
    ac_wrap_hf_model,
    apply_selective_checkpointing,
    get_act_offloading_ctx_manager,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from tests.compat.training import assert_trains_the_same, parameters_of
from tests.integrations.training import (
    Sentences,
    arguments,
    build_llama,
    build_lora,
    differing,
    losses_of,
    make_trainer,
    weights_of,
)
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:accelerate", "ignore::UserWarning:torch.utils.data")

HIDDEN_BYTES = 2 * 12 * 32 * 4  # two sentences of twelve tokens
NUM_FORWARDS = 3 * 2


# ---------------------------------------------------------------- the inputs of layers


def checkpointed(reentrant: bool) -> nn.Module:
    model = build_llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def gradients(model: nn.Module, around: Any = None) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    torch.manual_seed(1)
    if around is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        with around:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_only_the_inputs_of_checkpointed_layers_are_sent_and_come_back(reentrant: bool) -> None:
    model = checkpointed(reentrant)
    wanted = gradients(model)
    manager = CheckpointHiddenStatesOffload(copy_cpu=True)
    for _ in range(2):
        assert differing(wanted, gradients(model, manager)) == []
        assert manager.stats.marked_tensors == manager.stats.offloaded_tensors == manager.stats.restored_tensors == 2
        assert manager.stats.offloaded_bytes == manager.stats.restored_bytes == 2 * HIDDEN_BYTES
        assert manager.stats.saved_tensors_seen > 2 and manager.stats.skipped_marked_tensors == 0
    assert manager.ledger.out_bytes == 2 * 2 * HIDDEN_BYTES
    manager.close()


def test_without_an_accelerator_inputs_are_seen_and_stay() -> None:
    model = checkpointed(False)
    manager = get_checkpoint_hidden_states_offloading_ctx_manager()
    assert differing(gradients(model), gradients(model, manager)) == []
    assert (manager.stats.marked_tensors, manager.stats.skipped_marked_tensors) == (2, 2)
    assert manager.ledger.out_bytes == 0


def test_a_model_that_checkpoints_nothing_has_nothing_sent() -> None:
    manager = CheckpointHiddenStatesOffload(copy_cpu=True)
    gradients(build_llama().train(), manager)
    assert manager.stats.marked_tensors == 0 == manager.ledger.out_bytes


class Layer(GradientCheckpointingLayer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.sum() > 1e6:
            raise RuntimeError("too large")
        return hidden_states.sin()


def test_the_class_of_layers_is_as_it_was_after_the_context_also_after_an_error() -> None:
    before = GradientCheckpointingLayer.__call__
    layer = Layer().train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    with CheckpointHiddenStatesOffload() as manager:
        assert GradientCheckpointingLayer.__call__ is not before
    with pytest.raises(RuntimeError, match="too large"), manager:
        layer(torch.full((4, 8), 1e6, requires_grad=True))
    assert GradientCheckpointingLayer.__call__ is before
    assert manager.stats.marked_tensors == 1


def test_the_parameters_are_those_of_axolotl() -> None:
    wanted = {
        "use_pin_memory": ("any", True),
        "use_streams": ("any", True),
        "min_offload_size": ("any", 1024),
        "max_fwd_stash_size": ("any", 2),
        "max_cpu_buffer_pool_size": ("any", 64),
    }
    assert parameters_of(get_checkpoint_hidden_states_offloading_ctx_manager) == wanted
    assert {n: p for n, p in parameters_of(CheckpointHiddenStatesOffload).items() if p[0] == "any"} == wanted


@pytest.mark.parametrize("bad", [{"max_fwd_stash_size": 0}, {"max_cpu_buffer_pool_size": -1}, {"use_streams": 3}])
def test_a_value_that_is_not_permitted_is_refused(bad: Any) -> None:
    with pytest.raises(ModeError, match="is not permitted"):
        CheckpointHiddenStatesOffload(**bad)


# ---------------------------------------------------------------- full fine-tuning


class Offloading(ActivationOffloadingMixin, Trainer):
    pass


def offloading(folder: Path, model: nn.Module, **given: Any) -> Any:
    args = arguments(folder, **given)
    args.activation_offloading, args.activation_offloading_copy_cpu = True, True
    return Offloading(model=model, args=args, train_dataset=Sentences())


def test_a_wrapped_model_recomputes_and_only_what_its_layers_are_given_is_sent(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path, build_llama())
    plain.train()
    whole = offloading(tmp_path, build_llama())
    whole.train()
    model = build_llama()
    names = list(model.state_dict())
    applied = ac_wrap_hf_model(model)
    trainer = offloading(tmp_path, model)
    trainer.train()
    assert losses_of(trainer) == losses_of(whole) == losses_of(plain)
    assert differing(weights_of(plain.model), weights_of(trainer.model)) == []
    assert list(model.state_dict()) == names, "no wrapper is in the names"
    assert applied.report().recomputed_bytes > 0
    sent = trainer.activation_offload_context.ledger.out_bytes
    assert NUM_FORWARDS * 2 * HIDDEN_BYTES <= sent <= NUM_FORWARDS * 8 * HIDDEN_BYTES
    assert whole.activation_offload_context.ledger.out_bytes > 5 * sent


def test_wrapping_again_changes_nothing_and_arguments_of_the_wrapper_are_refused() -> None:
    model = build_llama()
    first = ac_wrap_hf_model(model)
    assert ac_wrap_hf_model(model).plan == first.plan
    with pytest.raises(ModeError, match=r"checkpoint_wrapper_fn: has no meaning here"):
        ac_wrap_hf_model(build_llama(), checkpoint_wrapper_fn=checkpoint)


# ---------------------------------------------------------------- by operator


def fused_llama() -> nn.Module:
    """Without dropout, so that attention is one operator on a CPU too."""
    model = build_llama()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"save": ["attention", "aten::mm"]},
        {"save_modules": ["down_proj", "*.self_attn.o_proj"]},
    ],
    ids=str,
)
def test_selective_checkpointing_saves_what_is_named_once_the_trainer_switches_it_on(
    given: dict[str, Any], tmp_path: Path
) -> None:
    plain = make_trainer(tmp_path, fused_llama())
    plain.train()
    model = fused_llama()
    apply_selective_checkpointing(model, **given)
    trainer = make_trainer(tmp_path, model, gradient_checkpointing=True)
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert differing(weights_of(plain.model), weights_of(model)) == []
    rows = model._actmem_selective_applied.trace().blocks[0].rows
    saved = {row.op for row in rows if row.decision == "save"}
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules()), "transformers' own stays off"
    assert any("scaled_dot_product" in op for op in saved)
    assert any(op.startswith("aten.mm") for op in saved) is bool(given)


def test_it_can_be_switched_off_and_a_copy_of_the_model_has_its_own() -> None:
    model = build_llama()
    apply_selective_checkpointing(model)
    enable = model.gradient_checkpointing_enable
    apply_selective_checkpointing(model)
    assert model.gradient_checkpointing_enable == enable, "a second call changes nothing"
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable()
    assert "_actmem_selective_applied" not in vars(model)
    wanted = gradients(model.train())
    assert differing(wanted, gradients(twin.train())) == []
    twin.gradient_checkpointing_disable()
    assert "_actmem_selective_applied" not in vars(twin)
    assert differing(wanted, gradients(twin)) == []


@pytest.mark.parametrize("windowed", [False, True])
def test_layers_with_a_window_are_recomputed_whole_unless_asked(windowed: bool) -> None:
    case = ZOO["gemma3_sliding"]

    def change(model: nn.Module) -> Any:
        apply_selective_checkpointing(model, save_sliding_window=windowed)
        model.gradient_checkpointing_enable()
        return model._actmem_selective_applied

    kinds = {rule.layer_type for rule in assert_trains_the_same(case, change).plan.rules}
    assert ("sliding_attention" in kinds) is not windowed


def test_the_modules_of_adapters_are_not_meant() -> None:
    model = build_lora()
    apply_selective_checkpointing(model, save_modules=["q_proj"])
    model.gradient_checkpointing_enable()
    assert model._actmem_selective_applied.plan.rules[0].module == "*.q_proj.base_layer"
    assert differing(gradients(build_lora().train()), gradients(model.train())) == []


def test_a_rule_that_has_no_counterpart_is_refused() -> None:
    with pytest.raises(ModeError, match=r"save_matmul_min_k = 256 .* save_modules=\['down_proj'\]"):
        apply_selective_checkpointing(build_llama(), save_matmul_min_k=256)


def test_what_is_saved_goes_to_host_memory_if_asked_which_a_cpu_refuses() -> None:
    model = build_llama()
    apply_selective_checkpointing(model, offload=True)
    with pytest.raises((ModeError, ApplyError), match="CPU"):
        model.gradient_checkpointing_enable()


def test_what_is_left_of_the_manager_around_a_wrapped_model_is_its_head() -> None:
    model = build_llama().train()
    ac_wrap_hf_model(model)
    manager = get_act_offloading_ctx_manager(model, copy_cpu=True)
    gradients(model, manager)
    assert manager.ledger.out_bytes < 8 * HIDDEN_BYTES
    manager.close()
