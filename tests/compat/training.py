"""Train a zoo model two steps and compare, for the tests of compat."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import Case

Gradients = list[dict[str, Tensor]]
REQUIRED = inspect.Parameter.empty


def gradients(case: Case, model: nn.Module, num_steps: int = 2) -> Gradients:
    """Two steps: the first is observed, the second holds the smallest cut."""
    batch = case.batch(model)
    found: Gradients = []
    for _ in range(num_steps):
        model.zero_grad()
        torch.manual_seed(5)
        case.step(model, batch).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def assert_trains_the_same(case: Case, change: Callable[[nn.Module], Any]) -> Any:
    """Compare with plain training, bit by bit, and return what `change` returned."""
    expected, model = gradients(case, case.build()), case.build()
    names = [name for name, _ in model.named_parameters()]
    changed = change(model)
    assert names == [name for name, _ in model.named_parameters()]
    for want, got in zip(expected, gradients(case, model), strict=True):
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)
    return changed


def parameters_of(function: Any) -> dict[str, tuple[str, Any]]:
    """name -> (kind, default) of the parameters of a function or class."""
    short = {"POSITIONAL_OR_KEYWORD": "any", "KEYWORD_ONLY": "keyword", "VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    found = inspect.signature(function).parameters.values()
    return {p.name: (short[p.kind.name], p.default) for p in found}


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers, or of one like torchtitan's."""
    inner: Any = model
    while not hasattr(inner, "layers"):
        inner = inner.language_model if hasattr(inner, "language_model") else inner.model
    return list(inner.layers.children())
