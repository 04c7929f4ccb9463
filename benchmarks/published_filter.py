"""Which published peaks are predicted: a filter, written down before any row of a parallel job was predicted.

A row of a published table is predicted if all of this holds:

- it has a measured peak of a training process that does nothing else;
- the loss is a cross-entropy over whole logits, or a kernel of public source that never has them. Trainers with a loss
  of their own, which go through the vocabulary in chunks (prime-rl's for reinforcement learning), are out;
- model, step, batch, sequence, dtypes, layout and optimizer are stated, in the row or in the public source of the
  program and of its test. What depends on data is not stated: how many tokens a router sends to an expert of a rank,
  and sequences whose length varies. A document that does not give the number of ranks does not state the layout;
- its kernels are torch's own, those of Megatron, or fused ones whose public source states what they save and allocate
  in a few lines. Transformer Engine's linear layers, norms and unfused attention are of that kind. Not of that kind
  are: Transformer Engine's attention where the row does not say which kernel is used (it is chosen at run time, by
  version and card), attention across the ranks of a context (its buffers are inside that library), FP8 (its
  scales, transposed copies and casts, too), Megatron's own FSDP, and compiled layers that are not checkpointed;
- it is a decoder, an encoder or both, of attention and linear layers. State-space layers, latent attention, several
  models in one process and a teacher's model next to the trained one are not stated in a few lines.

How many ranks share the model does not matter, nor by which of tensor, sequence, pipeline (with virtual stages or
without) and data parallelism, a distributed optimizer or torch's FSDP; nor does it whether the program ran in eager or
compiled. Several rows of one step, on other machines and with other versions, are all predicted, even where they differ
among themselves. Rows that fail are counted by the first reason that holds. Which rows pass is decided by this file and
by `published_documents.toml` alone.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["QWEN3", "reason"]

FAILED = "no peak: the run failed"
OTHER_WORK = "other work: an inference engine lives in the same process"
SPLIT = "split loss of a trainer's own"
ROUTING = "not stated: what routers send to a rank"
NOT_STATED = "not stated: model, step or batch"
FP8 = "kernels: FP8"
CONTEXT = "kernels: attention across ranks"
SHARDED = "kernels: Megatron's own FSDP"
CHOSEN = "kernels: Transformer Engine chooses the attention at run time"
COMPILED = "kernels: compiled layers that are not checkpointed"
MODEL = "model: not attention and linear layers alone"

QWEN3 = {
    "Qwen/Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, 151_936),
    "Qwen/Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, 151_936),
    "Qwen/Qwen3-4B-Instruct-2507": (36, 2560, 9728, 32, 8, 128, 151_936),
}
"""Layers, width, inner width, heads, key heads, width of a head, vocabulary. Their heads are tied to the embedding."""

_FAMILIES = ("gpt", "bert", "t5")
_OTHER_MODELS = ("_mla", "_distill_")


def reason(table: str, row: Mapping[str, str]) -> str:
    """Return why a row of a table is not predicted; "" if it is.

    >>> reason("prime_rl", {"success": "True", "gpus": "8", "kind": "rl"})
    "split loss of a trainer's own"
    >>> row = {"success": "True", "gpus": "8", "kind": "sft", "model": "Qwen/Qwen3-0.6B", "ac": "Recompute"}
    >>> reason("prime_rl", row)
    ''
    >>> reason("megatron", {"case": "gpt/gpt3_mcore_te_tp2_pp2", "attention_backend": "unfused"})
    ''
    >>> reason("megatron", {"case": "gpt/gpt3_mcore_te_tp2_pp2"})
    'kernels: Transformer Engine chooses the attention at run time'
    """
    return _of_prime_rl(row) if table == "prime_rl" else _of_megatron(row)


def _of_prime_rl(row: Mapping[str, str]) -> str:
    if row["success"] != "True":
        return FAILED
    if row["kind"] == "rl":  # the RL trainer's head goes through the vocabulary in chunks of 2048
        return SPLIT
    if row["model"] not in QWEN3:
        return ROUTING  # the only ones besides are mixtures of experts
    return "" if row["ac"] == "Recompute" else COMPILED


def _of_megatron(row: Mapping[str, str]) -> str:
    case = row["case"]
    family, name = case.split("/")
    parallel_context = row.get("cp") not in (None, "", "1")
    reasons = (
        ("_grpo_" in name, OTHER_WORK),
        (row.get("experts"), ROUTING),
        (family not in _FAMILIES or any(each in name for each in _OTHER_MODELS), MODEL),
        (row.get("fp8"), FP8),
        (parallel_context, CONTEXT),
        (row.get("fsdp"), SHARDED),
        (row.get("attention_backend") not in ("unfused", "local") and not _of_own_layers(name), CHOSEN),
    )
    return next((why for holds, why in reasons if holds), "")


def _of_own_layers(name: str) -> bool:
    """Return whether a case has `--transformer-impl local` in its configuration: those without `te` in the name."""
    return name.startswith(("gpt3_mcore_tp", "t5_mcore_tp"))
