"""What each mode runs again, for a block of known matrix products, is the number that one derives on paper.

Sizes: B sequences of S tokens, N = B * S tokens, width D, inner width F, and H heads of width D / H.

    one forward of the block          q, k, v, o: 2 N D D each     gate, up, down: 2 N D F each
                                      attention: scores 2 B S S D, weighted sum 2 B S S D
    one backward of the block         each product twice (for its input and for its weight);
                                      attention: scores again, then the gradients of scores, v, q, k: 10 B S S D

A replay leaves out what no backward step reads. Products are read as follows:

    q, k, v     by attention's backward
    attention   its own backward reads its result, o's reads it too
    o           x + o is the input of the second norm, which that norm's backward reads
    gate, up    by the backward of silu and of the product of both
    down        by nobody in the block: x + down is the block's output, and the next block's held input
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import actmem
from actmem import Full, Measurement, SaveEverything, Selective, Targets, every_second
from actmem.modes import Mode

NUM_BLOCKS = 3
B, S, D, H, INNER = 2, 6, 16, 4, 40
N = B * S
PROJECTION = 2 * N * D * D
"""One of q, k, v, o."""
FEED_FORWARD = 2 * N * D * INNER
"""One of gate, up, down."""
ATTENTION = 4 * B * S * S * D
ATTENTION_BACKWARD = 10 * B * S * S * D


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, D // H)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.attention, self.mlp = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def stepper() -> tuple[nn.Module, Callable[[], None]]:
    model = nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)])

    def step() -> None:
        x = torch.randn(B, S, D, requires_grad=True)
        model(x).square().mean().backward()
        model.zero_grad()

    return model, step


def measured(mode: Mode | None, *, call: int = 1) -> Measurement:
    """Measure one step, the first (which is observed) or a later one."""
    model, step = stepper()
    applied = None if mode is None else actmem.apply(model, mode)
    for _ in range(call):
        step()
    measurement = actmem.measure(step, model=model)
    if applied is not None:
        applied.remove()
    return measurement


QKV = 3 * PROJECTION
GATE_UP = 2 * FEED_FORWARD
# mode -> FLOPs that one block runs again
REPLAYED: dict[Mode, int] = {
    SaveEverything(): 0,
    # All but down.
    Full(): QKV + ATTENTION + PROJECTION + GATE_UP,
    # In order: q k v o gate up down. Saved are q, v, gate and down; again run k, o, up, and attention.
    Selective(save=[every_second("matmul")]): 2 * PROJECTION + FEED_FORWARD + ATTENTION,
    Selective(save=["attention", every_second("matmul")]): 2 * PROJECTION + FEED_FORWARD,
    Selective(save=["attention"]): QKV + PROJECTION + GATE_UP,
    Selective(save=["matmul"]): ATTENTION,
    Selective(save=["matmul", "attention"]): 0,
    Selective(save=["*.mlp.gate::matmul"]): QKV + ATTENTION + PROJECTION + FEED_FORWARD,
    Targets(["mlp"]): GATE_UP,
    # The sum x + o lies outside the attention module and is saved, so o is read by nobody.
    Targets(["attention"]): QKV + ATTENTION,
    Targets(["attn_proj"]): QKV,
    Targets(["attention", "mlp"]): QKV + ATTENTION + GATE_UP,
    # A norm has no products, and the products around it are saved.
    Targets(["norm"]): 0,
    Targets(["norm", "mlp"]): GATE_UP,
}


@pytest.mark.parametrize("call", [pytest.param(0, marks=pytest.mark.slow), 2], ids=["observed", "later"])
@pytest.mark.parametrize("mode", REPLAYED, ids=repr)
def test_replayed_flops_are_those_derived_on_paper(mode: Mode, call: int) -> None:
    found = measured(mode, call=call)
    forward = 4 * PROJECTION + 3 * FEED_FORWARD + ATTENTION
    assert found.forward_flops == NUM_BLOCKS * forward
    assert found.replayed_flops == NUM_BLOCKS * REPLAYED[mode]
    assert found.backward_flops == NUM_BLOCKS * (8 * PROJECTION + 6 * FEED_FORWARD + ATTENTION_BACKWARD)


def test_plain_training_runs_nothing_again() -> None:
    found = measured(None)
    assert found.replayed_flops == 0
    assert found.forward_flops == NUM_BLOCKS * (4 * PROJECTION + 3 * FEED_FORWARD + ATTENTION)
    assert found.backward_flops == NUM_BLOCKS * (8 * PROJECTION + 6 * FEED_FORWARD + ATTENTION_BACKWARD)


@pytest.mark.parametrize(("every", "first", "num_layers"), [(2, 0, 2), (2, 1, 1), (3, 0, 1), (3, 2, 1)])
def test_full_recomputation_of_some_layers_costs_those_layers(every: int, first: int, num_layers: int) -> None:
    assert measured(Full(every=every, first=first)).replayed_flops == num_layers * REPLAYED[Full()]


def test_a_frozen_projection_spares_its_own_gradient_and_no_replay() -> None:
    """Nobody reads the product of silu(gate) and up for the gradient of down's weight; but gate and up are read."""
    model, step = stepper()
    for block in model:
        block.mlp.down.requires_grad_(False)
    with actmem.apply(model, Full()):
        step()
        found = actmem.measure(step, model=model)
    assert found.replayed_flops == NUM_BLOCKS * REPLAYED[Full()]
    assert found.backward_flops == NUM_BLOCKS * (8 * PROJECTION + 5 * FEED_FORWARD + ATTENTION_BACKWARD)


@pytest.mark.parametrize("mode", [Full(), Selective(save=[every_second("matmul")]), Targets(["mlp"])], ids=repr)
def test_torchs_own_counter_agrees(mode: Mode) -> None:
    """It does not know phases; a torch before 2.15 does not count the fused attention of a CPU."""
    model, step = stepper()
    with actmem.apply(model, mode), FlopCounterMode(display=False) as counter:
        step()
    num_attentions = 1 if mode == Targets(["mlp"]) else 2
    attention = num_attentions * ATTENTION + ATTENTION_BACKWARD
    products = 12 * PROJECTION + 9 * FEED_FORWARD + REPLAYED[mode] - (num_attentions - 1) * ATTENTION
    counts_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    assert counter.get_total_flops() == NUM_BLOCKS * (products + counts_attention * attention)
