"""What is known to go wrong is found before it does, and a healthy training is left in peace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import nn

import actmem
from actmem.diagnosis import doctor
from actmem.diagnosis.examination import CHECKS, STEPS
from actmem.diagnosis.setups import read_setup
from tests.diagnosis.patients import (
    DS_BLOCK,
    ON,
    PATIENTS,
    REENTRANT,
    BadKernel,
    Block,
    Counted,
    CutOff,
    Flipping,
    Hoarding,
    Noisy,
    Remembering,
    Stack,
    batch,
    wrapped,
)
from tests.zoo import ZOO


@pytest.mark.parametrize("name", PATIENTS)
def test_a_known_hazard_is_found_and_a_healthy_case_is_not_blamed(name: str, snapshot: SnapshotAssertion) -> None:
    check, severity, sick, healthy = PATIENTS[name]
    visit = sick()
    found = [f for f in visit.findings if f.check == check]
    assert [f.severity for f in found] == [severity]
    assert visit.ok is all(f.severity != "problem" for f in visit.findings)
    assert found[0].found in " ".join(str(visit).split())
    assert found[0] == snapshot
    assert check in healthy().passed


def test_every_check_has_a_patient() -> None:
    assert {check for check, *_ in PATIENTS.values()} == set(CHECKS)


def test_a_healthy_training_passes_every_check() -> None:
    visit = doctor(Stack(), batch(), mode=actmem.Full(), trainer_args={"bf16": False})
    assert visit.ok
    assert visit.findings == visit.skipped == ()
    assert set(visit.passed) == set(CHECKS | STEPS)
    assert str(visit) == "nothing found; 30 checks passed, 0 could not be run"


def test_a_report_is_readable_and_plain_data(snapshot: SnapshotAssertion) -> None:
    model = Stack(lambda: Block(nn.BatchNorm1d(8)), use_cache=True)
    visit = doctor(model, trainer_args={**REENTRANT, "deepspeed": "not_there.json"})
    assert not visit.ok
    assert not visit
    assert str(visit) == snapshot
    assert json.loads(json.dumps(visit.to_dict()))["ok"] is False


def test_settings_alone_can_be_checked_and_what_needs_a_model_is_said() -> None:
    visit = doctor(None, trainer_args={**ON, "fsdp": True, "fsdp_config": {"fsdp_activation_checkpointing": "true"}})
    assert [f.check for f in visit.findings] == ["recomputing-twice"]
    assert {s.check for s in visit.skipped} >= {"batch-norm", "routing", "saved-tensors-twice"}
    assert {s.reason for s in visit.skipped} == {"no model was given"}


def test_a_check_that_cannot_be_made_says_why() -> None:
    visit = doctor(nn.Linear(2, 2))
    assert "batch-norm" in {s.check for s in visit.skipped}
    assert "the blocks were not found" in str(visit)


def test_a_model_without_memory_gets_the_checks_that_run_nothing() -> None:
    with torch.device("meta"):
        model = Stack()
    visit = doctor(model, batch())
    assert {s.check for s in visit.skipped} == set(STEPS)
    assert "meta device" in str(visit)


# ---------------------------------------------------------------- settings in all their forms


def test_settings_are_read_from_training_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "bf16": False, "use_cpu": True}
    setup = read_setup(TrainingArguments(str(tmp_path), gradient_checkpointing=True, **options))
    assert (setup.use_cache, setup.autocast) == (False, None)
    assert setup.checkpointing and setup.reentrant
    assert read_setup(TrainingArguments(str(tmp_path), use_cpu=True)).checkpointing is None


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
dynamo_config:
  dynamo_mode: reduce-overhead
"""


def test_settings_are_read_from_files_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    (tmp_path / "ds.json").write_text(json.dumps({**DS_BLOCK, "zero_optimization": {"stage": 3}}))
    (tmp_path / "args.json").write_text(json.dumps({**REENTRANT, "deepspeed": "ds.json"}))
    by_accelerate = read_setup(accelerate=tmp_path / "accelerate.yaml")
    assert by_accelerate == read_setup(str(tmp_path / "accelerate.yaml"))  # the file says what it is
    assert by_accelerate.fsdp_checkpointing and by_accelerate.autocast
    assert by_accelerate.compile_mode == "reduce-overhead"
    by_trainer = read_setup(str(tmp_path / "args.json"))
    assert (by_trainer.zero_stage, by_trainer.unread) == (3, ())
    assert by_trainer.deepspeed_block and by_trainer.reentrant


@pytest.mark.parametrize("content", [None, "{not json", "[1, 2]"])
def test_a_file_that_cannot_be_read_is_an_error_that_says_so(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("args.json").write_text(content)
    with pytest.raises(actmem.ModeError) as raised:
        doctor(None, trainer_args="args.json")
    assert str(raised.value) == snapshot


# ---------------------------------------------------------------- steps


def visited(model: nn.Module, check: str, **options: Any) -> Any:
    """Return the findings of one check that runs a step."""
    return [f for f in doctor(model, batch(), **options).findings if f.check == check]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Flipping, "aten.cos.default instead of aten.sin.default"),
        (Noisy, "differs bitwise from aten.mul.Tensor on"),
        (Counted, "changes blocks.0.parts.0.num_seen"),
        (lambda: nn.BatchNorm1d(8), "blocks.0.parts.0.running_mean"),
    ],
)
def test_a_block_that_is_not_the_same_the_second_time_is_named(part: Any, says: str) -> None:
    found = visited(Stack(lambda: Block(part())), "repeatable")
    assert says in found[0].found
    assert found[0].severity in ("note", "warning")
    under_checkpoint = visited(wrapped(Stack(lambda: Block(part()))), "repeatable")
    assert {f.severity for f in under_checkpoint} == {"problem"}


def test_dropout_and_what_is_pure_are_the_same_the_second_time() -> None:
    assert visited(Stack(lambda: Block(nn.Dropout(0.5), nn.LayerNorm(8))), "repeatable") == []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_adapters_that_get_no_gradient_are_counted() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

    model = wrapped(Stack(), checkpoint_impl=CheckpointImpl.REENTRANT)
    model.embed.requires_grad_(False)
    model.head = nn.Parameter(torch.ones(()))
    plain = model.forward
    model.forward = lambda x: plain(x) * model.head
    (found,) = visited(model, "gradients")
    assert found.severity == "problem"
    assert found.found.startswith("6 of 7 trained parameters have no gradient")


def test_a_part_that_is_cut_off_from_the_loss_is_named() -> None:
    (found,) = visited(Stack(lambda: Block(CutOff())), "gradients")
    assert found.severity == "warning"
    assert "blocks.0.parts.0.weight.weight" in found.found
    assert visited(Stack(), "gradients") == []


def test_a_module_that_keeps_a_graph_after_a_step_is_named() -> None:
    (found,) = visited(Stack(lambda: Block(Remembering(detached=False))), "graph-after-step")
    assert "blocks.0.parts.0.last" in found.found
    assert visited(Stack(lambda: Block(Remembering(detached=True))), "graph-after-step") == []


def test_training_that_recomputation_changes_is_told() -> None:
    (found,) = visited(wrapped(Stack(lambda: Block(nn.BatchNorm1d(8)))), "same-training")
    assert "buffer blocks.0._checkpoint_wrapped_module.parts.0.running_mean" in found.found
    (found,) = visited(wrapped(Stack(lambda: Block(nn.Dropout(0.5))), preserve_rng_state=False), "same-training")
    assert "gradient of embed.weight" in found.found
    assert visited(wrapped(Stack()), "same-training") == []
    assert visited(Stack(lambda: Block(nn.BatchNorm1d(8))), "same-training", mode=actmem.Full()) == []


def test_a_step_that_fails_is_explained() -> None:
    (found,) = visited(wrapped(Stack(lambda: Block(BadKernel()))), "gradients")
    assert "CheckpointError" in found.found
    assert "ctx.saved_tensors" in found.change


def test_a_mode_that_is_refused_is_told_with_its_own_message() -> None:
    (found,) = visited(Stack(), "same-training", mode=actmem.Selective(save=["convolution"]))
    assert "matches nothing" in found.found
    assert "Operators that ran" in found.found


def test_a_mode_without_effect_is_told_and_one_with_effect_is_not() -> None:
    (found,) = visited(Stack().eval(), "effect", mode=actmem.Full())  # nothing is done in eval mode
    assert "bytes held when backward begins" in found.found
    visit = doctor(Stack(), batch(), mode=actmem.Budget("1GiB", optimizer=None))
    assert "same-training" in visit.passed
    assert [(s.check, s.reason.rpartition(")")[2]) for s in visit.skipped] == [
        ("effect", " saves everything in this model")
    ]
    assert visited(wrapped(Stack()), "effect") == []


def test_memory_that_grows_from_step_to_step_is_told() -> None:
    (found,) = visited(Stack(lambda: Block(Hoarding())), "growth")
    assert found.found == "384 bytes more are alive after each step"  # three blocks, 4 x 8 numbers each
    assert visited(Stack(), "growth") == []


def test_a_visit_leaves_a_real_model_as_it_was() -> None:
    case = ZOO["gpt2_dropout"]
    model = case.build()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = torch.get_rng_state()
    visit = doctor(model, case.batch(model), mode=actmem.Full(), loss=case.loss)
    assert visit.ok
    assert visit.skipped == ()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_transformers_own_checkpointing_is_recognised() -> None:
    case = ZOO["gpt2_dropout"]
    model: Any = case.build()
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    visit = doctor(model, case.batch(model))
    problems = {f.check for f in visit.findings if f.severity == "problem"}
    assert problems == {"random-numbers", "same-training"}
    assert model.is_gradient_checkpointing


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_real_models_offload_and_layers_left_out_are_recognised() -> None:
    model = ZOO["llama"].build()
    model.gradient_checkpointing_enable(every_n_layers=2, offload=True)
    visit = doctor(model, trainer_args={"activation_offloading": True})
    found = {f.check: f.found for f in visit.findings}
    assert "offload=True in transformers' gradient checkpointing" in found["stacked-offloaders"]
    assert "activation_offloading = True in trainer_args" in found["stacked-offloaders"]
    num_layers = model.config.num_hidden_layers
    assert found["every-nth-layer"].startswith(f"{-(-num_layers // 2)} of {num_layers} layers")
    assert "reentrant" in visit.passed
    model.gradient_checkpointing_enable()
    assert {"stacked-offloaders", "every-nth-layer"} <= set(doctor(model).passed)


def test_options_that_transformers_takes_for_itself_leave_the_form_to_it() -> None:
    options = {"every_n_layers": 2, "offload": True}
    setup = read_setup({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options})
    assert (setup.reentrant, setup.unknown) == (None, ())
    assert setup.every_nth and setup.offloaders
    setup = read_setup({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {**options, "debug": True}})
    assert setup.reentrant, "what is left goes to torch, which takes the reentrant form"


def test_a_model_as_from_pretrained_returns_it_is_in_eval_mode(tmp_path: Path) -> None:
    model = ZOO["llama"].build()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert [f.found for f in doctor(loaded).findings if f.check == "evaluating"] == ["model.training is False"]
    assert "evaluating" in doctor(loaded.train()).passed


def test_the_arguments_of_trl_are_known_and_an_object_has_no_unknown_ones(tmp_path: Path) -> None:
    from trl import SFTConfig

    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert read_setup(args).unknown == ()
    known = {k: v for k, v in args.to_dict().items() if k not in ("fsdp", "deepspeed")}
    assert read_setup(known).unknown == ()
    slip = read_setup({**known, "max_lenght": 3}).unknown
    assert slip == ("max_lenght in trainer_args. Did you mean 'max_length'?",)


def test_axolotls_settings_are_read_by_the_trainers_names() -> None:
    config = {"base_model": "some/model", "gradient_checkpointing": "offload", "micro_batch_size": 2, "bf16": "auto"}
    setup = read_setup(axolotl=config)
    assert setup.checkpointing and setup.offloaders == ("gradient_checkpointing = offload in axolotl",)
    assert setup.unknown == (), "its other keys are not looked at"
    assert read_setup(axolotl={**config, "gradient_checkpointing_kwargs": {"reentrant": 1}}).unknown


def test_real_adapters_under_reentrant_checkpointing_are_told_from_those_with_a_hook() -> None:
    case = ZOO["llama_lora"]
    model: Any = case.build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    hooked = doctor(model, case.batch(model))
    assert [f.severity for f in hooked.findings if f.check in ("adapters-reentrant", "gradients")] == ["note"]
    model.disable_input_require_grads()
    cut = doctor(model, case.batch(model))
    assert {f.check for f in cut.findings if f.severity == "problem"} == {"adapters-reentrant", "gradients"}
