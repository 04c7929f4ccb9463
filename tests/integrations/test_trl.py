"""TRL's `SFTTrainer` takes the same callback; its default, checkpointing, is refused by name."""

from pathlib import Path
from typing import Any

import pytest

import actmem
from actmem.integrations.transformers import ActmemCallback
from tests.integrations.training import (
    arguments,
    build_llama,
    differing,
    lora_config,
    losses_of,
    weights_of,
)

pytestmark = [
    pytest.mark.usefixtures("flat_device"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning:accelerate", "ignore::UserWarning:torch.utils.data", "ignore::UserWarning:trl"
    ),
]

WORDS = [f"word{i}" for i in range(18)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(6 + i)) for i in range(12)]})


def make_sft(folder: Path, callback: Any = None, *, lora: bool = False, **given: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=build_llama(),
        args=arguments(folder, SFTConfig, max_length=32, **given),
        train_dataset=sentences(),
        processing_class=tokenizer(),
        peft_config=lora_config() if lora else None,
        callbacks=None if callback is None else [callback],
    )


@pytest.mark.parametrize(
    "lora", [pytest.param(False, marks=pytest.mark.slow, id="full"), pytest.param(True, id="lora")]
)
def test_losses_and_weights_are_those_of_plain_fine_tuning(lora: bool, tmp_path: Path) -> None:
    plain = make_sft(tmp_path, lora=lora)
    plain.train()
    sent: list[dict[str, Any]] = []
    trainer = make_sft(tmp_path, ActmemCallback(actmem.Full(), on_metrics=sent.append), lora=lora)
    trainer.train()
    assert losses_of(trainer) == losses_of(plain)
    assert len(set(losses_of(plain))) == 3
    assert differing(weights_of(plain.model), weights_of(trainer.model)) == []
    assert any("lora" in n for n in weights_of(trainer.model)) is lora
    assert len(sent) == 3 and sent[0]["recomputed_bytes"] > 0


@pytest.mark.slow
def test_a_budget_is_planned_for_what_the_trainer_tokenized_and_for_its_own_loss(tmp_path: Path) -> None:
    given = {"max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    plain = make_sft(tmp_path, **given)
    plain_bytes = actmem.measure(plain.train, model=plain.model).peak_bytes
    callback = ActmemCallback(actmem.Budget("9.5MiB", device="flat"))
    trainer = make_sft(tmp_path, callback, **given)
    peak_bytes = actmem.measure(trainer.train, model=trainer.model).peak_bytes
    assert losses_of(trainer) == losses_of(plain)
    assert callback.applied is not None and callback.applied.plan.predicted is not None
    predicted = callback.applied.plan.predicted
    assert "input_ids int64 [8, 18]" in map(str, predicted.shapes)
    assert peak_bytes <= predicted.peak_bytes <= predicted.budget_bytes < plain_bytes
    assert callback.applied.report().recomputed_bytes > 0


def test_the_default_of_its_config_is_refused_and_the_argument_named(tmp_path: Path) -> None:
    with pytest.raises(actmem.ApplyError, match=r"SFTConfig\(..., gradient_checkpointing=False\)"):
        make_sft(tmp_path, ActmemCallback(actmem.Full()), gradient_checkpointing=True)


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
def test_its_own_fused_head_needs_no_split_and_label_smoothing_is_split(tmp_path: Path) -> None:
    split = actmem.Split(loss=4)
    fused = "the output of lm_head was not split: it has not been called in training mode"
    for given, is_split in (({}, False), ({"label_smoothing_factor": 0.1, "bf16": False}, True)):
        plain = make_sft(tmp_path, **given)
        plain.train()
        callback = ActmemCallback(actmem.Full(), split=split)
        trainer = make_sft(tmp_path, callback, **given)
        trainer.train()
        assert callback.applied is not None
        (note,) = callback.applied.report().notes
        assert note.startswith("lm_head: logits in 4 chunks of tokens, for gather" if is_split else fused)
        if is_split:
            assert losses_of(trainer) == pytest.approx(losses_of(plain), rel=1e-5)
        else:
            assert losses_of(trainer) == losses_of(plain)
