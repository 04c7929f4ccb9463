"""Which layouts of so many cards are worth a look, and in which order.

What a layout takes is only known from a profile, which takes seconds. So layouts are left out by a lower bound first,
and the rest is sorted by a guess. The bound is certain; the guess decides nothing but the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from actmem.devices import Device
from actmem.errors import ModeError
from actmem.layout import Layout
from actmem.parallelism import Parts, check_parts
from actmem.simulation import link_seconds
from actmem.structure import find_blocks

__all__ = ["Candidate", "Work", "candidates"]

_STATES = {"adamw": 2, "adamw_fused": 2, "adam": 2}
"""How many tensors an optimizer keeps for each parameter. Others: none that is certain."""
_PEERS = 8
"""Ranks that tensor parallel spans at most, if it is not known what joins the devices."""
_INSIDE = 34
"""A guess: numbers that a block holds for each token, as a multiple of its width."""
_LOGITS = 10
"""A guess: bytes for each logit in the loss, in bfloat16 and float32."""


@dataclass(frozen=True)
class Work:
    """What a step of the job has to do, and what a rank of it keeps."""

    parts: Parts
    num_sequences: int
    """Sequences of a step, of all ranks."""
    rows: int
    """Sequences of a microbatch."""
    length: int
    """Tokens of a sequence."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """At least."""
    dense_block_bytes: int
    """Parameters of the largest block, without its experts."""
    expert_block_bytes: int
    """Those of its experts."""

    @classmethod
    def of(cls, parts: Parts, example: dict[str, Tensor], num_sequences: int, optimizer: str | None) -> Work:
        """Find out what a model takes."""
        rows, length = example["input_ids"].shape
        trained = sum(p.nbytes for p in parts.model.parameters() if p.requires_grad)
        sizes = [_block_bytes(block.module) for block in find_blocks(parts.model, None, None)]
        dense, experts = max(sizes, key=sum)
        return cls(
            parts,
            num_sequences,
            rows,
            length,
            sum(p.nbytes for p in parts.model.parameters()),
            trained,
            trained * _STATES.get(optimizer or "", 0),
            dense,
            experts,
        )


def _block_bytes(block: nn.Module) -> tuple[int, int]:
    experts = sum(p.nbytes for n, p in block.named_parameters() if ".experts." in n)
    return sum(p.nbytes for p in block.parameters()) - experts, experts


@dataclass(frozen=True)
class Candidate:
    """A layout, and what can be said of it without a profile."""

    layout: Layout
    least_bytes: int
    """What each rank takes at least."""
    guessed_bytes: float
    guessed_seconds: float


def candidates(work: Work, num_cards: int, device: Device) -> list[Candidate]:
    """Return the layouts of so many cards that can be built for a model and its step.

    Args:
        work: the job.
        num_cards: the number of ranks.
        device: the card.
    """
    return [_candidate(work, layout, device) for layout in _layouts(work, num_cards, device)]


def _layouts(work: Work, num_cards: int, device: Device) -> Iterator[Layout]:
    peers = _PEERS if device.fabric is None else device.fabric.peers
    for tp in _divisors(num_cards, peers):
        for pp in _divisors(num_cards // tp, work.parts.num_layers):
            for cp in _divisors(num_cards // tp // pp, num_cards):
                dp_shard = num_cards // tp // pp // cp
                microbatches, left = divmod(work.num_sequences, work.rows * dp_shard)
                if left or not microbatches or (pp > 1 and microbatches < pp):
                    continue
                for ep in _expert_ranks(work, dp_shard * cp, peers):
                    sizes: dict[str, Any] = {"dp_shard": dp_shard, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
                    try:
                        layout = Layout(**sizes, sequence_parallel=tp > 1, microbatches=microbatches)
                        check_parts(work.parts, layout, work.length)
                    except ModeError:
                        continue
                    yield layout


def _divisors(number: int, most: int) -> list[int]:
    """Return the powers of two that divide a number."""
    return [2**n for n in range(number.bit_length()) if number % 2**n == 0 and 2**n <= most]


def _expert_ranks(work: Work, ranks: int, peers: int) -> list[int]:
    if not work.parts.num_experts:
        return [1]
    whole = math.gcd(work.parts.num_experts, ranks)
    return sorted({1, math.gcd(whole, peers), whole})


def _candidate(work: Work, layout: Layout, device: Device) -> Candidate:
    is_gathered = layout.dp_shard * layout.cp > 1
    block = (work.dense_block_bytes + work.expert_block_bytes / layout.ep) / layout.tp
    state = work.parameters_bytes + work.gradients_bytes + work.optimizer_bytes
    # When the optimizer steps, and while the largest block runs, gathered.
    least = state / layout.world
    if is_gathered:
        least = max(least, (work.parameters_bytes + work.optimizer_bytes) / layout.world + block)
    # From here on these are guesses.
    head: Any = getattr(work.parts.model, "lm_head", None)
    width, classes = (head.in_features, head.out_features) if head is not None else (0, 0)
    tokens = work.rows * work.length / layout.cp
    in_flight = min(layout.pp, layout.microbatches)
    stream = tokens * width * 2
    held = stream * work.parts.num_layers / layout.pp * in_flight / layout.tp
    inside = max(_INSIDE * stream / 2 / layout.tp, tokens * classes * _LOGITS)
    gathered = 2 * block if is_gathered else 0.0
    per_microbatch = 6 * work.parameters_bytes / 2 * tokens / layout.tp / layout.pp
    computing = device.seconds(int(per_microbatch), 0, "bfloat16")
    layers = work.parts.num_layers / layout.pp
    talking = link_seconds(int(8 * stream * layers * (layout.tp - 1) / layout.tp), layout.tp, device)
    gathering = link_seconds(int(3 * work.parameters_bytes / layout.tp / layout.pp), layout.world, device)
    each = max(computing, gathering if is_gathered else 0.0) + talking
    return Candidate(
        layout,
        math.ceil(least),
        state / layout.world + held + inside + gathered,
        each * (layout.microbatches + layout.pp - 1),
    )
