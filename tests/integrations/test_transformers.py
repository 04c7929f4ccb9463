"""The callback of `Trainer`: what is trained is what is trained without it, to the bit."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import actmem
from actmem.integrations.transformers import ActmemCallback
from tests.integrations.training import (
    Sentences,
    arguments,
    build_llama,
    build_lora,
    differing,
    losses_of,
    make_trainer,
    padded,
    weights_of,
)

pytestmark = [
    pytest.mark.usefixtures("flat_device"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning:accelerate", "ignore::FutureWarning:accelerate", "ignore::UserWarning:torch.utils.data"
    ),
]

SELECTIVE = actmem.Selective(save=["attention", actmem.every_second("matmul")])
BUDGET = actmem.Budget("520KiB", device="flat")


@pytest.mark.parametrize(
    ("build", "mode", "given"),
    [
        pytest.param(build_llama, actmem.Full(), {}, id="full"),
        pytest.param(build_lora, SELECTIVE, {}, id="lora"),
        pytest.param(build_llama, SELECTIVE, {"bf16": True}, id="bf16"),
    ],
)
def test_losses_and_weights_are_those_of_plain_training_at_every_step(
    build: Callable[[], nn.Module], mode: Any, given: dict[str, Any], tmp_path: Path
) -> None:
    plain = make_trainer(tmp_path, build(), **given)
    plain.train()
    sent: list[dict[str, Any]] = []
    model = build()
    callback = ActmemCallback(mode, on_metrics=sent.append)
    kinds = {type(m) for m in model.modules()}
    trainer = make_trainer(tmp_path, model, callback, **given)
    assert {type(m) for m in model.modules()} != kinds, "changed when the trainer is made, before anything is wrapped"
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert len(set(losses_of(plain))) == 3
    assert losses_of(trainer, "grad_norm") == losses_of(plain, "grad_norm")
    assert differing(weights_of(plain.model), weights_of(model)) == []
    assert {type(m) for m in model.modules()} == kinds, "changed back when training is over"
    assert [m["step"] for m in sent] == [1, 2, 3]
    assert all(m["rank"] == 0 and m["recomputed_bytes"] > 0 and m["num_replayed"] > 0 for m in sent)
    assert sent[0]["held_bytes"] < sent[0]["plain_bytes"]
    assert callback.applied is not None
    assert callback.applied.report().recomputed_bytes == sent[-1]["recomputed_bytes"]


def test_evaluation_checkpoints_and_resuming_are_those_of_plain_training(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": Sentences(),
        "save_strategy": "steps",
        "save_steps": 2,
    }
    plain = make_trainer(tmp_path / "plain", build_llama(), **given)
    plain.train()
    trainer = make_trainer(tmp_path / "managed", build_llama(), ActmemCallback(actmem.Full()), **given)
    trainer.train()
    assert losses_of(trainer, "eval_loss") == losses_of(plain, "eval_loss")
    assert len(losses_of(plain, "eval_loss")) == 2
    saved = [_saved(tmp_path / who / "checkpoint-4") for who in ("plain", "managed")]
    assert differing(*saved) == []

    sent: list[dict[str, Any]] = []
    callback = ActmemCallback(actmem.Full(), on_metrics=sent.append)
    resumed = make_trainer(tmp_path / "managed", build_llama(), callback, **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "managed" / "checkpoint-2"))
    assert losses_of(resumed) == losses_of(plain), "two read back, two trained again"
    assert differing(weights_of(resumed.model), weights_of(plain.model)) == []
    assert [m["step"] for m in sent] == [3, 4]
    assert sent[0]["recomputed_bytes"] > 0


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - this is no dict


def test_a_budget_is_planned_for_the_longest_samples_and_kept_while_the_losses_stay(tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_dataset": Sentences(uneven=True), "data_collator": padded}
    plain = make_trainer(tmp_path, build_llama().eval(), **given)
    plain_bytes = actmem.measure(plain.train, model=plain.model).peak_bytes
    callback = ActmemCallback(BUDGET)
    # As from_pretrained leaves a model: the trainer switches training mode on with its first step.
    trainer = make_trainer(tmp_path, build_llama().eval(), callback, **given)
    assert callback.applied is None, "planned when training begins, with the trainer's settings in force"
    peak_bytes = actmem.measure(trainer.train, model=trainer.model).peak_bytes
    assert losses_of(trainer) == losses_of(plain), "taking a sample drew no random number"
    assert callback.applied is not None
    predicted = callback.applied.plan.predicted
    assert predicted is not None
    assert predicted.microbatches == 2, "as gradient_accumulation_steps says"
    assert "input_ids int64 [2, 21]" in map(str, predicted.shapes)
    assert peak_bytes <= predicted.peak_bytes <= predicted.budget_bytes < plain_bytes
    assert callback.applied.report().recomputed_bytes > 0


@pytest.mark.slow
def test_a_batch_may_be_named_for_a_budget(tmp_path: Path) -> None:
    ids = torch.full((2, 16), 5)
    callback = ActmemCallback(BUDGET, example={"input_ids": ids, "labels": ids})
    make_trainer(tmp_path, build_llama(), callback, max_steps=1).train()
    assert callback.applied is not None and callback.applied.plan.predicted is not None
    assert "input_ids int64 [2, 16]" in map(str, callback.applied.plan.predicted.shapes)


def test_a_second_training_a_new_model_and_a_late_callback_are_managed_too(tmp_path: Path) -> None:
    def again(callback: Any, **given: Any) -> list[float]:
        trainer = make_trainer(tmp_path, None, model_init=partial(build_llama, 2), max_steps=1, **given)
        if callback is not None:
            trainer.add_callback(callback)
        found = []
        for _ in range(2):
            trainer.train()
            found += losses_of(trainer)
        return found

    sent: list[dict[str, Any]] = []
    assert again(ActmemCallback(actmem.Full(), on_metrics=sent.append)) == again(None)
    assert len(sent) == 2 and all(m["recomputed_bytes"] > 0 for m in sent)


def test_offloading_to_disk_is_counted_step_by_step(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path, build_llama())
    plain.train()
    sent: list[dict[str, Any]] = []
    mode = actmem.OffloadActivations(to="disk", min_bytes=0, directory=str(tmp_path))
    trainer = make_trainer(tmp_path, build_llama(), ActmemCallback(mode, on_metrics=sent.append))
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    first, _, last = sent
    assert 0 < first["sent_bytes"] == first["fetched_bytes"] < last["sent_bytes"] == last["fetched_bytes"]
    assert list(tmp_path.glob("actmem*")) == [], "the file is gone when training is over"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks, where a graph breaks
def test_with_torch_compile_the_compiler_carries_the_mode_out_and_the_losses_stay(tmp_path: Path) -> None:
    given = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2}
    plain = make_trainer(tmp_path, build_llama(), **given)
    plain.train()
    sent: list[dict[str, Any]] = []
    trainer = make_trainer(tmp_path, build_llama(), ActmemCallback(actmem.Full(), on_metrics=sent.append), **given)
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert sent[-1]["num_graphs"] == 1

    callback = ActmemCallback(BUDGET, engine="tape")
    trainer = make_trainer(tmp_path, build_llama(), callback, **given)
    trainer.train()
    assert callback.applied is not None and callback.applied.report().recomputed_bytes > 0
    torch.testing.assert_close(losses_of(trainer), losses_of(plain))


def test_after_a_training_that_broke_off_or_a_removal_the_next_one_is_managed(tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise KeyError("stop")

    model = build_llama()
    with pytest.raises(KeyError, match="stop"):
        make_trainer(tmp_path, model, ActmemCallback(actmem.Full(), on_metrics=fail)).train()
    sent: list[dict[str, Any]] = []
    callback = ActmemCallback(actmem.Full(), on_metrics=sent.append)
    trainer = make_trainer(tmp_path, model, callback, max_steps=1)
    assert callback.applied is not None
    callback.applied.remove()
    trainer.train()
    assert [m["recomputed_bytes"] > 0 for m in sent] == [True]


def test_a_trainer_that_is_forgotten_leaves_a_plain_model_and_keeps_none_alive(tmp_path: Path) -> None:
    model = build_llama()
    kinds = {type(m) for m in model.modules()}
    trainer = make_trainer(tmp_path, model, ActmemCallback(actmem.Full()))
    assert {type(m) for m in model.modules()} != kinds
    del trainer
    gc.collect()
    assert {type(m) for m in model.modules()} == kinds
    alive = weakref.ref(model)
    trainer = make_trainer(tmp_path, model, ActmemCallback(actmem.Full()))
    del trainer, model
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------- what is refused


def test_checkpointing_by_the_trainer_is_refused_and_the_argument_named(tmp_path: Path) -> None:
    told = r"TrainingArguments.gradient_checkpointing = True.*TrainingArguments\(..., gradient_checkpointing=False\)"
    with pytest.raises(actmem.ApplyError, match=told):
        make_trainer(tmp_path, build_llama(), ActmemCallback(actmem.Full()), gradient_checkpointing=True)


def test_checkpointing_that_is_on_in_the_model_is_refused(tmp_path: Path) -> None:
    model = build_llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(actmem.ApplyError, match=r"model.gradient_checkpointing_disable\(\)"):
        make_trainer(tmp_path, model, ActmemCallback(actmem.Full()))


def test_a_budget_beside_settings_that_cannot_keep_it_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    callback = ActmemCallback(BUDGET)
    args.torch_compile = True
    with pytest.raises(actmem.ModeError, match=r"torch_compile = True.*ActmemCallback\(..., engine='tape'\)"):
        callback.on_init_end(args, None, None, model=build_llama())  # type: ignore[arg-type]
    args.torch_compile, args.fsdp = False, True
    with pytest.raises(actmem.ModeError, match=r"fsdp = True.*actmem.fit\(model, batch, budget=..., shard=num_ranks"):
        callback.on_init_end(args, None, None, model=build_llama())  # type: ignore[arg-type]
    args.fsdp_config = {"activation_checkpointing": True}
    with pytest.raises(actmem.ApplyError, match=r"fsdp_config\['activation_checkpointing'\] = True"):
        ActmemCallback(actmem.Full()).on_init_end(args, None, None, model=build_llama())  # type: ignore[arg-type]


def test_an_example_beside_a_mode_that_needs_none_is_refused() -> None:
    with pytest.raises(actmem.ModeError, match=r"example is for a Budget.*Full is not. Leave it out"):
        ActmemCallback(actmem.Full(), example={})
