"""On mixtures of experts a selective mode beats full recomputation: fewer FLOPs run again, and no higher a peak.

Why that can be, although every saved byte is paid in every layer:

- *Full recomputation pays for its chain.* The backward pass of a block begins with the experts. To have their input
  again, attention is replayed first, and q, k, v and all that its own backward will read stay alive while the experts'
  gradients are computed. If attention's result is saved, the replay starts behind it: q, k and v are made again after
  the experts are done. One saved value a layer is cheaper than that transient, as long as the layers are not too many.
  (Beyond that, save it in the last layers only: when the peak moves to the others, what these held is gone.) torch's
  selective checkpoint runs the whole block again at once, whatever it saved, and so has no such gain: with the same
  save set its peak is above that of full recomputation.
- *Gradients come while activations go.* Where a step makes its gradients anew, as without accumulation, the peak lies
  at the end of the backward pass, when almost all gradients are there. A mixture of experts has many parameters for
  few activations of a token. What the last layers had saved is gone by then: it costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import actmem
from actmem import Full, Measurement, Rule, Rules, Selective, every_second
from actmem.engine.replay import replaying
from actmem.modes import Mode
from actmem.structure import find_blocks, roles
from tests.zoo import causal_lm

NUM_LAYERS, TOKENS = 6, (2, 128)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": 256,
    "max_position_embeddings": TOKENS[1],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
MODELS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}


@cache
def built(name: str, num_layers: int = NUM_LAYERS) -> nn.Module:
    return causal_lm(name, **{**SIZES, **MODELS[name], "num_hidden_layers": num_layers})()


def step(model: nn.Module, *, accumulate: bool = False) -> Tensor:
    ids = torch.randint(3, 256, TOKENS, generator=torch.Generator().manual_seed(1))
    if not accumulate:
        model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Recompute every block whole, as torch does it."""
    blocks = [block.module for block in find_blocks(model)]
    for block in blocks:
        forward = block.forward
        block.forward = lambda *args, _forward=forward, **kwargs: checkpoint(
            _forward, *args, use_reentrant=False, **kwargs
        )
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@cache
def measured(name: str, accumulate: bool, mode: Mode | None, num_layers: int = NUM_LAYERS) -> Measurement:
    """Measure a step after two others: from then on all steps are alike. No mode means torch's own checkpoint."""
    model = built(name, num_layers)
    with checkpointed(model) if mode is None else actmem.apply(model, mode):
        for _ in range(2):
            step(model)
        if not accumulate:
            model.zero_grad()  # before the step, so that it makes its gradients anew
        return actmem.measure(lambda: step(model, accumulate=accumulate), model=model)


ATTENTION = Selective(save=["attention"])
PRODUCTS = Selective(save=["attention", "matmul"])
ALL_PRODUCTS = Selective(save=["attention", "matmul", "grouped_matmul"])
SECOND = Selective(save=["attention", every_second("matmul")])


@pytest.mark.parametrize(
    ("name", "accumulate", "mode", "at_most"),
    [
        # With gradients that are there before the step, the gain is what attention costs.
        ("qwen3_moe", True, ATTENTION, 0.83),
        ("deepseek_v3", True, ATTENTION, 0.93),
        # Without, the products may be saved too: what is left for Qwen3-MoE is the router.
        pytest.param("qwen3_moe", False, ATTENTION, 0.83, marks=pytest.mark.slow),
        ("qwen3_moe", False, SECOND, 0.70),
        ("qwen3_moe", False, ALL_PRODUCTS, 0.01),
        pytest.param("deepseek_v3", False, ATTENTION, 0.93, marks=pytest.mark.slow),
        ("deepseek_v3", False, SECOND, 0.70),
        ("deepseek_v3", False, PRODUCTS, 0.50),
    ],
)
def test_a_selective_mode_runs_less_again_than_full_at_no_higher_a_peak(
    name: str, accumulate: bool, mode: Mode, at_most: float
) -> None:
    full, torchs, selective = (measured(name, accumulate, m) for m in (Full(), None, mode))
    assert full.replayed_flops == torchs.replayed_flops
    assert selective.peak_bytes <= min(full.peak_bytes, torchs.peak_bytes)
    assert selective.replayed_flops <= at_most * full.replayed_flops
    assert selective.num_replayed_ops > 0
    assert selective.forward_flops == full.forward_flops
    assert selective.backward_flops == full.backward_flops


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_of_many_layers_the_last_ones_can_save_attention_below_the_peak_of_full(name: str) -> None:
    last = Rules([Rule("save", op="attention", layers="-4:"), Rule("recompute")])
    full, torchs, selective = (measured(name, True, m, num_layers=14) for m in (Full(), None, last))
    assert selective.peak_bytes <= min(full.peak_bytes, torchs.peak_bytes)
    assert 0 < selective.replayed_flops < full.replayed_flops == torchs.replayed_flops


class Choices(TorchDispatchMode):
    """Keep what every topk of a step chose, in the forward pass and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []
        self.num_again = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.chosen.append(out[1].clone())
            self.num_again += replaying()
        return out


@pytest.mark.parametrize("mode", [Full(), SECOND, pytest.param(ALL_PRODUCTS, marks=pytest.mark.slow)], ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_routed_once_and_to_the_same_experts(name: str, mode: Mode) -> None:
    model = built(name)
    routers = [
        block.module.get_submodule(path)
        for block in find_blocks(model)
        for path in roles(block.module).get("router", ())
    ]
    calls: list[nn.Module] = []
    hooks = [router.register_forward_hook(lambda module, args, out: calls.append(module)) for router in routers]

    def watched() -> tuple[Choices, dict[str, Tensor]]:
        calls.clear()
        with Choices() as choices:
            loss = step(model)
        assert calls == routers
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return choices, {"loss": loss, **gradients}

    plain, expected = watched()
    assert len(plain.chosen) >= len(routers) >= NUM_LAYERS - 1
    with actmem.apply(model, mode):
        for _ in range(2):
            managed, found = watched()
            assert managed.num_again == 0, "what was chosen is held, and not chosen again"
            assert len(managed.chosen) == len(plain.chosen) and all(map(torch.equal, managed.chosen, plain.chosen))
            assert [n for n in expected if not torch.equal(expected[n], found[n])] == []
    for hook in hooks:
        hook.remove()
