"""Training steps of published peaks, predicted end to end from fake tensors. `published_filter.py` says which."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import actmem
from actmem.devices import Device, device
from actmem.simulation import card_memory, on_card, plan_of
from benchmarks.megatron_steps import (
    MegatronStep,
    default_dtype,
    further_bytes,
    megatron_card,
    megatron_profile,
    megatron_step,
)
from benchmarks.published_filter import QWEN3
from benchmarks.published_models import CutLoss, FusedDecoder
from benchmarks.titan_steps import build_titan

__all__ = [
    "CARDS",
    "PredictedPeak",
    "PublishedStep",
    "Row",
    "megatron_peak",
    "nemo_llama_1b",
    "predicted",
    "prime_rl_sft",
    "torchtitan_8b",
]

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
    world: int = 1
    """How many ranks the model is divided among."""


@dataclass(frozen=True)
class PredictedPeak:
    """What a step takes of its card."""

    allocated_bytes: int
    reserved_bytes: int
    first_allocated_bytes: int
    """The allocated peak of the first step alone."""
    first_reserved_bytes: int
    resting_bytes: int
    """What is allocated between two steps."""


def predicted(step: PublishedStep) -> PredictedPeak:
    """Predict what a step takes, from fake tensors."""
    found = actmem.profile_rank(step.build, world=step.world)
    mode = actmem.Full() if step.checkpoints else actmem.SaveEverything()
    return _peak(found, mode, step.card, settings=step.settings)


def _peak(
    profile: actmem.Profile,
    mode: actmem.Full | actmem.SaveEverything,
    card: Device,
    *,
    settings: str = "",
    further: tuple[int, ...] = (),
) -> PredictedPeak:
    found = on_card(profile, card)
    plan = plan_of(found, mode)
    first, later = (card_memory(found, plan, card, settings=settings, num_steps=n, further=further)[0] for n in (1, 3))
    resting = later.whole.curve[-1][0]
    return PredictedPeak(
        later.allocated_bytes, later.reserved_bytes, first.allocated_bytes, first.reserved_bytes, resting
    )


# --------------------------------------------------------------------------------------- Megatron


def megatron_peak(row: Row) -> PredictedPeak:
    """Predict a row of Megatron's table. Rows of the same step and the same workspaces are predicted once."""
    step = megatron_step(row)
    return _megatron_peak(step, megatron_card(row), further_bytes(step, row))


@functools.cache
def _megatron_peak(step: MegatronStep, card: Device, further: tuple[int, ...]) -> PredictedPeak:
    return _peak(megatron_profile(step), actmem.SaveEverything(), card, further=further)


# --------------------------------------------------------------------------------------- NeMo Automodel


def _build_nemo(ranks: int, *, parts: bool, cut: bool) -> Built:
    with default_dtype(torch.bfloat16):
        model = FusedDecoder(16, 2048, 8192, 32, 8, 64, 128_256)
    for layer in (
        model.layers if parts else ()
    ):  # components/distributed/parallelizer.py wraps these four, not the layer
        for name in ("mlp", "self_attn", "input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not model.layers[-1])
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    tokens, targets = (torch.zeros(8, 2048, dtype=torch.long) for _ in range(2))

    def train() -> None:
        if cut:
            loss = CutLoss.apply(model(tokens, hidden=True), model.embed_tokens.weight)
        else:
            logits = model(tokens)
            loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, train


def nemo_llama_1b(ranks: int = 1, *, parts: bool = False, cut: bool = False) -> PublishedStep:
    """Return the step of Llama-3.2-1B in bf16, with the fused kernels that NeMo Automodel uses by default.

    Args:
        ranks: how many FSDP divides the model among.
        parts: whether attention, MLP and both norms of each layer are checkpointed, each by itself.
        cut: whether the loss is cut cross-entropy.
    """
    return PublishedStep(lambda: _build_nemo(ranks, parts=parts, cut=cut), device("h100-80gb"), world=ranks)


# --------------------------------------------------------------------------------------- prime-rl


def _build_prime_rl(name: str, sequence: int, micro_batches: int, ranks: int) -> Built:
    mesh = init_device_mesh("cpu", (ranks,))
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
    """Return the step of prime-rl's fine-tuning: FSDP over all cards, every layer checkpointed."""
    name, sequence, micro_batches, ranks = row["model"], int(row["seq"]), int(row["micro_batches"]), int(row["gpus"])
    return PublishedStep(
        lambda: _build_prime_rl(name, sequence, micro_batches, ranks),
        device(CARDS.get(row["device"], "h100-80gb")),
        checkpoints=True,
        settings="expandable_segments:True",
        world=ranks,
    )


# --------------------------------------------------------------------------------------- torchtitan


def torchtitan_8b(ranks: int, batch: int, *, selective: bool = True, raised: bool = True) -> PublishedStep:
    """Return the step of torchtitan's Llama 3 8B under FSDP, in eager.

    Args:
        ranks: how many FSDP divides the model among.
        batch: sequences of 8192 tokens.
        selective: whether each layer is checkpointed, with every second matrix product saved.
        raised: whether the loss has its logits in float32. In an earlier version it did not.
    """
    build = functools.partial(build_titan, ranks, batch, selective=selective, raised=raised)
    return PublishedStep(build, device("h100-80gb"), world=ranks)
