"""Training models of the zoo compiled, whole or block by block, under a mode or plain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem import Applied, Measurement
from actmem.compat.torchtitan import AppliedBudget, CompilerBudget
from actmem.modes import Mode
from actmem.structure import find_blocks
from tests.zoo import Batch, Case

HOW = ("model", "block.compile", "torch.compile(block)")
"""What is compiled: the whole model; each block in place; each block, put back as what torch.compile returns."""


def built(case: Case) -> tuple[nn.Module, Batch]:
    """Build a model that Dynamo can trace: without a cache, and in bf16 where its experts are grouped products."""
    model = case.build()
    batch = case.batch(model)
    if {"hf", "moe"} <= case.tags:
        model = model.bfloat16()  # in fp32 transformers runs the experts by an operator that Dynamo cannot trace
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return model, batch


def compiled(
    model: nn.Module,
    how: str,
    backend: Any = "aot_eager",
    blocks: str | None = None,
    parts: Mapping[str, Collection[str]] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Compile a model, its blocks, or `parts` of each block, by the block's path; return what to call."""
    if how == "eager":
        return model
    if how == "model":
        return torch.compile(model, backend=backend, **options)
    for block in find_blocks(model, blocks):
        if how == "parts":
            for name, module in block.module.named_modules():
                if parts and name in parts[block.path]:
                    module.compile(backend=backend, **options)
        elif how == "block.compile":
            block.module.compile(backend=backend, **options)
        else:
            parent, _, name = block.path.rpartition(".")
            whole = torch.compile(block.module, backend=backend, **options)
            holder: Any = model.get_submodule(parent)
            if isinstance(holder, (nn.ModuleList, nn.Sequential)):
                holder[int(name)] = whole
            elif isinstance(holder, nn.ModuleDict):
                holder[name] = whole
            else:
                setattr(holder, name, whole)
    return model


@dataclass
class Trained:
    """What some steps of training gave."""

    loss: Tensor
    gradients: dict[str, Tensor]
    applied: Applied | AppliedBudget | None
    step: Callable[[], Tensor]
    model: nn.Module
    measured: Measurement | None = field(default=None)

    def measure(self) -> Measurement:
        """Measure one more step. With aot_eager every operator of a compiled graph is seen, and the bytes are exact."""
        return actmem.measure(self.step, model=self.model)


def trained(
    case: Case,
    mode: Mode | CompilerBudget | None,
    how: str,
    *,
    backend: Any = "aot_eager",
    engine: Any = "auto",
    compile_first: bool = False,
    **options: Any,
) -> Trained:
    """Build, apply, compile, and train one step, all anew."""
    torch._dynamo.reset()
    model, batch = built(case)
    call: Any = compiled(model, how, backend, case.blocks, **options) if compile_first else None
    if isinstance(mode, CompilerBudget):
        applied = mode.apply(model)
    else:
        applied = None if mode is None else actmem.apply(model, mode, blocks=case.blocks, engine=engine)
    if call is None:
        call = compiled(model, how, backend, case.blocks, **options)

    def step() -> Tensor:
        model.zero_grad()
        torch.manual_seed(3)
        loss = case.step(call, batch)
        loss.backward()
        return loss.detach()

    loss = step()
    return Trained(loss, gradients(model), applied, step, model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace("_orig_mod.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """List the gradients that are not equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of any two elements, over all gradients."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@contextmanager
def dynamo_counts() -> Iterator[dict[str, int]]:
    """Count the graphs that Dynamo makes inside the block, filled in at its end."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    found: dict[str, int] = {}
    yield found
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = sum(counters["graph_break"].values())


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(make() for _ in range(num_blocks))
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))
