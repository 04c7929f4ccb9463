"""Tiny models, data and trainers, for comparing a training under a mode with the plain one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCAB = 64


def build_llama(num_layers: int = 2) -> LlamaForCausalLM:
    """Make a Llama of 25,000 parameters or so, with dropout: the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
        )
    )


def build_lora() -> nn.Module:
    """Make the same with adapters, as PEFT puts them in."""
    from peft import get_peft_model

    model = build_llama()
    torch.manual_seed(1)
    return get_peft_model(model, lora_config())


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)


class Sentences(Dataset[dict[str, Tensor]]):
    """Sixteen sentences of one length, or the last ones longer than the others."""

    def __init__(self, *, uneven: bool = False) -> None:
        self.uneven = uneven

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        num_tokens = 6 + index if self.uneven else 12
        ids = torch.randint(3, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate sentences of several lengths."""
    ids = nn.utils.rnn.pad_sequence([r["input_ids"] for r in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([r["labels"] for r in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **given: Any) -> TrainingArguments:
    """Say how to train: three steps of two microbatches, a loss logged at each."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    return kind(**(settings | given))


def make_trainer(folder: Path, model: nn.Module | None, callback: Any = None, **given: Any) -> Trainer:
    """Make a trainer; `Trainer`'s own arguments are taken out of `given`."""
    own: dict[str, Any] = {"train_dataset": Sentences()}
    own |= {n: given.pop(n) for n in ("train_dataset", "eval_dataset", "data_collator", "model_init") if n in given}
    callbacks = None if callback is None else [callback]
    return Trainer(model=model, args=arguments(folder, **given), callbacks=callbacks, **own)


def losses_of(trainer: Any, name: str = "loss") -> list[float]:
    """Return what a trainer logged, step by step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def differing(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    """Name what is not the same to the bit, or is in one only."""
    return [n for n in wanted | got if n not in wanted or n not in got or not torch.equal(wanted[n], got[n])]


def train_loop(model: nn.Module, step: Callable[[nn.Module, Any, int], Tensor], num_steps: int = 4) -> list[float]:
    """Run `step` on batches of two sentences. Return the losses."""
    data = Sentences()
    found: list[float] = []
    for n in range(num_steps):
        torch.manual_seed(n)
        found.append(float(step(model, padded([data[2 * n], data[2 * n + 1]]), n).detach()))
    return found
