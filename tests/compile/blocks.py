"""Blocks around an attention that can be compiled, and a compiler that counts how often what it compiled is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = ["aot_eager", "inductor"]
NUM_BLOCKS = 2
WIDTH, HEADS, LENGTH = 16, 2, 8


class Counting:
    """A backend of torch.compile that compiles as another one does, and counts every run of a compiled graph."""

    def __init__(self, backend: str) -> None:
        self.runs: Counter[str] = Counter()
        """How often a compiled "forward" or "backward" was run; "inference" is a forward that no backward follows."""
        self.graphs: Counter[str] = Counter()
        """How many of them were compiled."""
        self.backend: Any = self._inductor
        if backend == "aot_eager":
            self.backend = aot_autograd(
                fw_compiler=lambda graph, _: self._counted(make_boxed_func(graph), "forward"),
                bw_compiler=lambda graph, _: self._counted(make_boxed_func(graph), "backward"),
                inference_compiler=lambda graph, _: self._counted(make_boxed_func(graph), "inference"),
            )

    def _inductor(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # warns, so not when tests are collected

        def compiled(graph: Any, inputs: Any, **options: Any) -> Any:
            kind = "backward" if options.get("is_backward") else "forward"
            kind = "inference" if options.get("is_inference") else kind
            return self._counted(compile_fx_inner(graph, inputs, **options), kind)

        return compile_fx(graph, inputs, inner_compile=compiled)

    def _counted(self, compiled: Any, kind: str) -> Any:
        self.graphs[kind] += 1

        def run(args: Any) -> Any:
            self.runs[kind] += 1
            return compiled(args)

        run._boxed_call = True
        return run


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in plain operators, which inductor compiles forward and backward on every device."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, function: Function, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.function = function
        self.shape = 3, heads, width // heads

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4)
        return self.out(self.function(*heads.unbind()).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Send each token to its best expert. The number of tokens of each is read on the host: no graph holds that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            tokens = (chosen == index).nonzero().flatten().tolist()
            if tokens:
                out[tokens] = expert(flat[tokens]) * weights[tokens, None]
        return out.view_as(x)


class Block(nn.Module):
    def __init__(
        self, function: Function, mlp: Callable[[int], nn.Module], width: int = WIDTH, heads: int = HEADS
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(function, width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, function: Function, mlp: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(function, mlp) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MLPS: dict[str, Callable[[int], nn.Module]] = {"dense": FeedForward, "moe": Experts}


def build(function: Function, mlp: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Model(function, MLPS[mlp]).train()


def batch() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


def step(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Train once; return the loss and the gradients of the parameters and of the batch."""
    model.zero_grad()
    x = batch().requires_grad_()
    out = (model if call is None else call)(x)
    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + out.square().mean()
    loss.backward()
    assert x.grad is not None
    found = {"loss": loss.detach(), "x.grad": x.grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # an expert to which no token was sent has none
            found[f"{name.replace('_orig_mod.', '')}.grad"] = parameter.grad.clone()
    return found


def assert_same_bits(plain: dict[str, Tensor], managed: dict[str, Tensor]) -> None:
    assert plain.keys() == managed.keys()
    assert [name for name in plain if not torch.equal(plain[name], managed[name])] == []


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled, before and after; a function of an earlier test must not be found again.

    Nor one of an earlier process: a graph that comes from the cache on disk is not counted by `Counting`.
    """
    torch._dynamo.reset()
    try:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        torch._dynamo.reset()
