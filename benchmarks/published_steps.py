"""Training steps of published peaks, predicted end to end from fake tensors. `published.py` has the filter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import actmem
from actmem.devices import Device, device
from actmem.simulation import card_memory, on_card, plan_of
from benchmarks.published_models import FusedDecoder, MegatronT5

__all__ = [
    "QWEN3",
    "PredictedPeak",
    "PublishedStep",
    "Row",
    "megatron_t5",
    "nemo_llama_1b",
    "predicted",
    "prime_rl_sft",
]

MEGATRON_WORKSPACE_BYTES = 8 * 4096 * 1024
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, in the configuration of every one of Megatron's tests."""

Row = Mapping[str, str]
"""A row of a published table."""
Built = tuple[nn.Module, Callable[[], object]]


@dataclass(frozen=True)
class PublishedStep:
    """A step, as the row and the source of its program tell it."""

    build: Callable[[], Built]
    """Makes the model and a function that runs one training step."""
    card: Device
    checkpoints: bool = False
    """Whether the program recomputes every layer in backward."""
    settings: str = ""
    """The allocator's."""
    further: tuple[int, ...] = ()
    """Bytes of other tensors that the program has on the card."""


@dataclass(frozen=True)
class PredictedPeak:
    """What a step takes of its card."""

    allocated_bytes: int
    reserved_bytes: int
    first_allocated_bytes: int
    """The allocated peak of the first step alone."""
    resting_bytes: int
    """What is allocated between two steps."""


def predicted(step: PublishedStep) -> PredictedPeak:
    """Predict what a step takes, from fake tensors."""
    found = on_card(actmem.profile_rank(step.build, world=1), step.card)
    plan = plan_of(found, actmem.Full() if step.checkpoints else actmem.SaveEverything())
    first, later = (
        card_memory(found, plan, step.card, settings=step.settings, num_steps=n, further=step.further)[0]
        for n in (1, 3)
    )
    resting = later.whole.curve[-1][0]
    return PredictedPeak(later.allocated_bytes, later.reserved_bytes, first.allocated_bytes, resting)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --------------------------------------------------------------------------------------- Megatron


class _InPlaceAdam(torch.optim.Optimizer):
    """Adam in fused kernels: its state is made in the first step, and nothing else is allocated."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # noqa: ARG002
        """Update every parameter."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p)
                    state[name].mul_(0.9)
                p.data.addcdiv_(state["exp_avg"], state["exp_avg_sq"])


T5_VOCAB = 29184
"""28,996 word pieces of BERT (cased), 100 sentinels and two marks, rounded up to a multiple of 128."""


def _build_t5(batch: int, sequence: int, decoder_sequence: int, **sizes: int) -> Built:
    with _default_dtype(torch.bfloat16):
        model = MegatronT5(vocab=T5_VOCAB, **sizes)
    trained = list(model.parameters())
    model.register_buffer("grad_data", torch.zeros(sum(p.numel() for p in trained)), persistent=False)
    main = [nn.Parameter(p.detach().float()) for p in trained]
    optimizer = _InPlaceAdam(main)
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    decoder_tokens, targets = (torch.zeros(batch, decoder_sequence, dtype=torch.long) for _ in range(2))

    def added_to_main(p: Tensor) -> None:
        p.grad = None

    for p in trained:
        p.register_post_accumulate_grad_hook(added_to_main)

    def train() -> None:
        model.get_buffer("grad_data").zero_()
        losses = model(tokens, decoder_tokens, targets)
        losses.view(-1).float().sum().backward()
        optimizer.step()
        for p, master in zip(trained, main, strict=True):
            p.data.copy_(master.data)

    return model, train


def megatron_t5(row: Row) -> PublishedStep:
    """Return the step of Megatron's T5: encoder and decoder of 12 layers, 512 and 128 tokens."""
    batch, heads, sequence = int(row["micro_batch"]), int(row["heads"]), 512
    sizes = {"width": int(row["hidden"]), "inner": int(row["ffn"]), "num_heads": heads, "positions": sequence}
    return PublishedStep(
        lambda: _build_t5(batch, sequence, 128, num_layers=12, **sizes),
        replace(device("h100-80gb"), blas_workspace_bytes=MEGATRON_WORKSPACE_BYTES),  # the same on every card
        further=(batch * heads * sequence * sequence * 2,),  # what `baddbmm` is given to add to, times 0
    )


# --------------------------------------------------------------------------------------- NeMo Automodel


def _build_nemo() -> Built:
    with _default_dtype(torch.bfloat16):
        model = FusedDecoder(16, 2048, 8192, 32, 8, 64, 128_256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    tokens, targets = (torch.zeros(8, 2048, dtype=torch.long) for _ in range(2))

    def train() -> None:
        logits = model(tokens)
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, train


def nemo_llama_1b() -> PublishedStep:
    """Return the step of Llama-3.2-1B in bf16, with the fused kernels that NeMo Automodel uses by default."""
    return PublishedStep(_build_nemo, device("h100-80gb"))


# --------------------------------------------------------------------------------------- prime-rl


QWEN3 = {
    "Qwen/Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, 151_936),
    "Qwen/Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, 151_936),
    "Qwen/Qwen3-4B-Instruct-2507": (36, 2560, 9728, 32, 8, 128, 151_936),
}
"""Layers, width, inner width, heads, key heads, width of a head, vocabulary. Their heads are tied to the embedding."""


def _build_prime_rl(name: str, sequence: int, micro_batches: int) -> Built:
    mesh = init_device_mesh("cpu", (1,))
    model = FusedDecoder(*QWEN3[name], qk_norm=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = (torch.zeros(1, sequence, dtype=torch.long) for _ in range(2))
    kept: list[Tensor] = []

    def train() -> None:
        for _ in range(micro_batches):
            kept[:] = [model(tokens).float()]  # stays in a variable of the loop until the next forward pass is over
            logits = kept[0]
            losses = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="none")
            loss = losses.mean() / micro_batches
            del logits, losses
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, train


CARDS = {"NVIDIA RTX A6000": "a6000-48gb", "NVIDIA A100-SXM4-80GB": "a100-80gb"}
"""All others have cuBLAS's workspace of Hopper."""


def prime_rl_sft(row: Row) -> PublishedStep:
    """Return the step of prime-rl's fine-tuning on one card: FSDP over one rank, every layer checkpointed."""
    name, sequence, micro_batches = row["model"], int(row["seq"]), int(row["micro_batches"])
    return PublishedStep(
        lambda: _build_prime_rl(name, sequence, micro_batches),
        device(CARDS.get(row["device"], "h100-80gb")),
        checkpoints=True,
        settings="expandable_segments:True",
    )
