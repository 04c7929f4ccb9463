"""Fine-tune with the transformers Trainer: pass it a callback."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import actmem
from actmem.integrations.transformers import ActmemCallback

SENTENCES = torch.randint(3, 256, (32, 64), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": ids, "labels": ids} for ids in SENTENCES]


def train(callbacks: list[ActmemCallback], **settings: object) -> list[float]:
    """Train a small Llama for four steps; return the losses."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **settings,
        )
        trainer = Trainer(model=model, args=args, train_dataset=DATA, callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


metrics: list[dict] = []
plain = train([])
full = train([ActmemCallback(actmem.Full(), on_metrics=metrics.append)])
print(f"losses under Full() equal those of plain training: {full == plain}")
print(f"metrics of the last step: {metrics[-1]}")

# A budget is planned when training begins, for the longest samples of the trainer's own data.
callback = ActmemCallback(actmem.Budget("6.1MiB"))
budget = train([callback])
print(f"and under a budget: {budget == plain}; predicted peak {callback.applied.plan.predicted.peak_bytes:,} bytes")
assert plain == full == budget

# Two recomputation mechanisms at once are refused; the message names the argument to set.
try:
    train([ActmemCallback(actmem.Full())], gradient_checkpointing=True)
except actmem.ApplyError as error:
    print(f"\n{error}")
