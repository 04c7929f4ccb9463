"""Fine-tune with adapters: TRL's SFTTrainer, PEFT LoRA, and the same callback."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import actmem
from actmem.integrations.transformers import ActmemCallback

WORDS = ["save", "recompute", "offload", "the", "tape", "replays", "what", "backward", "needs", "once"]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
data = Dataset.from_dict({"text": [" ".join(WORDS[(i * j) % 10] for j in range(24)) for i in range(1, 17)]})


def train(callbacks: list[ActmemCallback]) -> list[float]:
    """Train adapters for three steps; return the losses."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **size))
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            gradient_checkpointing=False,  # TRL's default is True; here the mode decides
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
            callbacks=callbacks,
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


callback = ActmemCallback(actmem.Selective(save=["attention", "matmul"]))
plain, managed = train([]), train([callback])
report = callback.applied.report()
print(f"the same losses: {managed == plain}")
print(f"held for backward in the blocks: {report.held_bytes:,} bytes instead of {report.plain_bytes:,}")
assert managed == plain
