"""Programs for which a naive tape silently gives wrong gradients: each is right here, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from tests.engine.cases import (
    MODES,
    RECOMPUTE,
    SAVE_MATMUL,
    AddFirst,
    Program,
    batch,
    compare,
    outcome,
    simple_step,
    stack,
    total,
)

both = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)

# -------------------------------------------------------------------- A2: compiled functions inside a block

COMPILED = {
    "exp": lambda x, w: (x @ w).exp(),
    "two products": lambda x, w: ((x @ w).sin() @ w).relu(),
    "norm": lambda x, w: F.layer_norm(x @ w, (8,)) * x,
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["unwrapped", "wrapped"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds
def test_a_compiled_function_inside_a_block_is_replayed_as_a_whole(name: str, wrapped: bool) -> None:
    torch._dynamo.reset()
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=wrapped):
        function = torch.compile(COMPILED[name])
        for mode in MODES.values():
            replays = ["aten.sin", "higher_order.inductor_compiled_code"]
            compare(lambda: stack(lambda block, h: (function(h.sin(), block.v) + 1).cos()), mode, replays=replays)


# -------------------------------------------------------------------- A3 to A6: changed after the forward pass


def mutated_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x * 1
    out = model(x)
    loss = total(out) + total(x.mul_(3))
    loss.backward()
    return loss.detach()


@both
def test_a_block_input_that_is_changed_in_place_before_backward_is_refused(mode: Any) -> None:
    model = nn.Sequential(AddFirst())
    outcome(model, batch(), mutated_input)  # plain training permits it
    with (
        actmem.apply(model, mode, blocks="0"),
        pytest.raises(actmem.VersionError, match=r"changed in place.*version 1, expected version 0"),
    ):
        outcome(model, batch(), mutated_input)


def two_ways(block: Program, h: Tensor) -> Any:
    product = h @ block.v
    return product, (product + 1).sin()


def mutated_output(model: nn.Module, x: Tensor) -> Tensor:
    product, other = model(x)
    loss = total(other) + total(product.mul_(3))
    loss.backward()
    return loss.detach()


def test_a_recomputed_block_output_may_be_changed_in_place() -> None:
    compare(
        lambda: stack(two_ways, num_blocks=1),
        RECOMPUTE,
        blocks="0",
        step=mutated_output,
        replays=["aten.mm", "aten.add"],
    )


def test_a_kept_block_output_that_is_changed_in_place_is_refused() -> None:
    model = stack(two_ways, num_blocks=1)
    with (
        actmem.apply(model, SAVE_MATMUL, blocks="0"),
        pytest.raises(actmem.VersionError, match=r"aten\.mm\.default \[6, 8\] float32 was changed"),
    ):
        outcome(model, batch(), mutated_output)


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8) * 0.5)

    def forward(self, pair: Any) -> Any:
        product, other = pair
        return product.mul_(2) @ self.w, other


@both
def test_a_kept_output_that_the_next_block_changes_in_place_is_right(mode: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(stack(two_ways, num_blocks=1)[0], InPlaceFirst())

    compare(build, mode, blocks="*", replays=["aten.add"])


@both
def test_an_optimizer_step_between_forward_and_backward_is_refused(mode: Any) -> None:
    model = stack(lambda block, h: (h @ block.v).sin())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = total(model(x))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outcome(model, batch(), step)
    with (
        actmem.apply(model, mode),
        pytest.raises(actmem.VersionError, match=r"parameter \[8, 8\] float32 was changed.*optimizer step"),
    ):
        outcome(model, batch(), step)


def reads_detached(block: Program, h: Tensor) -> Tensor:
    scaled = (h * (block.v.detach() * 2).exp().sum(0)).sin().exp()
    return scaled + h @ block.v  # this product's backward runs first, and the weight is then complete


def step_in_backward(model: nn.Module, x: Tensor) -> Tensor:
    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(0.1 * p.grad)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    try:
        return simple_step(model, x)
    finally:
        for handle in handles:
            handle.remove()


@both
def test_an_optimizer_inside_backward_may_update_a_weight_that_was_also_read_detached(mode: Any) -> None:
    compare(lambda: stack(reads_detached), mode, step=step_in_backward)


# -------------------------------------------------------------------- A7 to A10: writes and aliases inside the block


def noise_then_changed(block: Program, h: Tensor) -> Tensor:
    noise = torch.randn_like(h)
    out = (h + noise).exp()
    noise.mul_(0.5)
    return out @ block.v * noise


def foreach(block: Program, h: Tensor) -> Tensor:
    a, b = (h @ block.v) * 2, h + 2
    kept = a + 1, b + 1
    torch._foreach_mul_([a, b], 3.0)
    return (kept[0] * a).sin() + (kept[1] * b).cos()


def unsafe_pieces(block: Program, h: Tensor) -> Tensor:
    first, second = torch.unsafe_chunk(h @ block.v, 2, dim=-1)
    first.mul_(2.0)
    return torch.cat([first.sin(), (second * first).cos()], -1)


def split_and_written(block: Program, h: Tensor) -> Tensor:
    first, second = torch.unsafe_split(h @ block.v, 4, dim=-1)
    second.mul_(0.5)
    return torch.cat([first.sin() * second, second.exp()], -1)


WRITES = {
    "random value used, then changed": noise_then_changed,
    "alpha dropout": lambda block, h: F.alpha_dropout(h @ block.v, 0.3, training=True).sin(),
    "feature alpha dropout": lambda block, h: (
        F.feature_alpha_dropout((h @ block.v).view(2, 3, 8), 0.3, True).sin().view(6, 8)
    ),
    "foreach in place": foreach,
    "unsafe_chunk written in place": unsafe_pieces,
    "unsafe_split written in place": split_and_written,
    "unsafe_view written in place": lambda block, h: (
        torch.ops.aten._unsafe_view(h @ block.v, [3, 16]).mul_(2).sin().view(6, 8)
    ),
}


@both
@pytest.mark.parametrize("name", WRITES)
def test_writes_inside_a_block_are_replayed_in_order(name: str, mode: Any) -> None:
    compare(lambda: stack(WRITES[name]), mode)


@both
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers(kind: Any, mode: Any) -> None:
    compare(
        lambda: stack(
            lambda block, h: block.parts["rnn"](h.view(2, 3, 8))[0].sin().reshape(6, 8),
            parts=lambda: {"rnn": kind(8, 8, batch_first=True)},
        ),
        mode,
    )
