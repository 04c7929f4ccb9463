"""What sequence parallel gathers is recomputed, as the other systems do it. Bytes on a group of eight ranks, of which
only this one exists."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import actmem
from actmem.compat import nemo, prime_rl, torchtitan
from actmem.compat.torchtitan import FullAC, SelectiveAC
from tests.compat.training import layers_of
from tests.sequence_collectives import Gathered, Scattered

NUM_RANKS, LENGTH, WIDTH, NUM_LAYERS = 8, 16, 32, 4
INPUT_BYTES = LENGTH * WIDTH * 4
HELD_BYTES = (NUM_LAYERS - 1) * INPUT_BYTES + 8
"""The inputs of the layers; the first is the batch, which is the caller's. The rest is the loss."""
GATHERED_BYTES = NUM_RANKS * INPUT_BYTES


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return Scattered.apply(self.w2(F.silu(self.w1(Gathered.apply(x)))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mlp = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm1(x))


class Model(nn.Module):
    def __init__(self, around: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(NUM_LAYERS)})
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x) if self.around is None else self.around(layer, x)
        return x


def saved_bytes(model: Model) -> int:
    x = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(x).sum().backward()

    for _ in range(2):
        step()
    return actmem.measure(step, model=model).saved_bytes


def torchs(context_fn: Any = None) -> Model:
    options = {} if context_fn is None else {"context_fn": context_fn}
    return Model(partial(checkpoint, use_reentrant=False, **options))


def titan_policy() -> Any:
    """The contexts of torchtitan's rule: what `SelectiveAC` saves, of the products every second."""
    saved, counts = SelectiveAC.Config().build().get_save_ops(), {False: 0, True: 0}
    products = (torch.ops.aten.mm.default, torch.ops.aten.linear.default)

    def policy(ctx: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += func in products
        save = counts[ctx.is_recompute] % 2 == 1 if func in products else func in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


FULL: dict[str, Callable[[Model], Any]] = {
    "FullAC": FullAC.Config().build().apply,
    "apply_ac": lambda m: torchtitan.apply_ac(m, torchtitan.ActivationCheckpoint(mode="full")),
    "nemo": lambda m: nemo.apply_full_layer_checkpointing_to_layers(m, layers_of(m)),
    "prime_rl": lambda m: prime_rl.apply_ac(m, prime_rl.ActivationCheckpointConfig()),
}


@pytest.mark.parametrize("system", FULL)
def test_full_holds_what_torchs_checkpoint_holds(system: str) -> None:
    FULL[system](model := Model())
    expected = saved_bytes(torchs())
    assert saved_bytes(model) == expected == HELD_BYTES


SELECTIVE: dict[str, Callable[[Model], Any]] = {
    "SelectiveAC": SelectiveAC.Config().build().apply,
    "nemo": lambda m: nemo.apply_selective_checkpointing_to_layers(m, layers_of(m), False),
}


@pytest.mark.parametrize("system", SELECTIVE)
def test_selective_gathers_again_and_keeps_what_the_save_list_names(system: str) -> None:
    SELECTIVE[system](model := Model())
    theirs = saved_bytes(
        torchs(titan_policy if system == "SelectiveAC" else nemo.make_selective_checkpoint_context_fn())
    )
    # They save the first product and the result of the reduce-scatter; the latter no backward step reads.
    product_bytes = LENGTH * NUM_RANKS * 16 * 4
    assert theirs == HELD_BYTES + NUM_LAYERS * (product_bytes + INPUT_BYTES)
    assert saved_bytes(model) == HELD_BYTES + NUM_LAYERS * product_bytes


SAVE: dict[str, Callable[[Model], Any]] = {
    "FullAC": lambda m: FullAC.Config().build().apply(m, collectives="save"),
    "apply_ac": lambda m: torchtitan.apply_ac(m, torchtitan.ActivationCheckpoint(mode="full"), collectives="save"),
    "nemo": lambda m: nemo.apply_full_layer_checkpointing_to_layers(m, layers_of(m), collectives="save"),
    "prime_rl": lambda m: prime_rl.apply_ac(m, prime_rl.ActivationCheckpointConfig(), collectives="save"),
}


@pytest.mark.parametrize("system", SAVE)
def test_collectives_are_kept_on_request(system: str) -> None:
    SAVE[system](model := Model())
    assert saved_bytes(model) >= NUM_LAYERS * GATHERED_BYTES


@pytest.mark.parametrize(
    "change",
    [
        lambda m, **options: nemo.apply_submodule_checkpointing(layers_of(m), False, **options),
        lambda m, **options: prime_rl.apply_ac(
            m, prime_rl.ActivationCheckpointConfig(mode="selective", targets=["norm", "mlp"]), **options
        ),
        lambda m, **options: [
            prime_rl.set_selective_activation_checkpointing(layer, ["norm", "mlp"], **options) for layer in layers_of(m)
        ],
    ],
    ids=["nemo", "prime_rl", "prime_rl_layer"],
)
def test_parts_of_a_layer_gather_again_too(change: Any) -> None:
    change(model := Model())
    change(kept := Model(), collectives="save")
    assert saved_bytes(model) == HELD_BYTES
    assert saved_bytes(kept) >= NUM_LAYERS * GATHERED_BYTES
