"""Prove that a mode changes nothing but memory: same loss, gradients, buffers, names, module tree, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from actmem.applying import apply
from actmem.modes import Mode
from actmem.plan import Plan
from actmem.profiling.restoring import Restored, inputs_of
from actmem.profiling.stepping import loss_of
from actmem.report import Report
from actmem.structure import check_module
from actmem.torchcompat import named_modules

__all__ = ["Verification", "verify"]


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`."""

    difference: str | None
    """The first thing that differs, by name, or None."""
    report: Report = field(repr=False)
    """What the mode did in the compared step."""

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class _Outcome:
    loss: Tensor
    gradients: dict[str, Tensor | None]
    inputs: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    tree: dict[str, str]
    random: Tensor


def verify(
    model: nn.Module,
    batch: dict[str, Any] | tuple[Any, ...],
    mode: Mode | Plan,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    blocks: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Verification:
    """Run one plain step and one under `mode` from the same state and seed, compare them to the bit, restore the model.

    Args:
        model: the model, not applied to.
        batch: a dict for `model(**batch)`, or a tuple for `model(*batch)`.
        mode: what to compare with plain training.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        blocks: as for `apply`.
        seed: for the random operators of both steps.

    >>> import actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)])
    >>> actmem.verify(model, (torch.randn(2, 8),), actmem.Full(), loss=torch.sum).ok
    True
    """
    check_module(model)
    with Restored(model, batch):
        with Restored(model, batch):
            plain = _step(model, batch, loss, seed)
        with Restored(model, batch), apply(model, mode, blocks=blocks) as applied:
            managed = _step(model, batch, loss, seed)
            report = applied.report()
    after = _tree(model)
    difference = _first_difference(plain, managed)
    if difference is None and after != plain.tree:
        difference = "the module tree after remove()"
    return Verification(difference, report)


def _step(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, seed: int) -> _Outcome:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
    torch.clear_autocast_cache()  # else the second step finds the casts of the first, if autocast is on around both
    for p in model.parameters():
        p.grad = None
    for t in inputs_of(batch).values():
        t.grad = None
    tree = _tree(model)
    out: Any = model(**batch) if isinstance(batch, dict) else model(*batch)
    value = loss_of(out, loss)
    value.backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
    return _Outcome(
        value.detach().clone(),
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        {n: None if t.grad is None else t.grad.clone() for n, t in inputs_of(batch).items()},
        {n: b.clone() for n, b in model.named_buffers()},
        tree,
        torch.get_rng_state(),
    )


def _tree(model: nn.Module) -> dict[str, str]:
    modules = {n: type(m).__qualname__ for n, m in named_modules(model)}
    parameters = {n: f"parameter {tuple(p.shape)}" for n, p in model.named_parameters(remove_duplicate=False)}
    return modules | parameters | {f"state {k}": "key" for k in model.state_dict()}


def _first_difference(plain: _Outcome, managed: _Outcome) -> str | None:
    if not _same(plain.loss, managed.loss):
        return f"loss: {plain.loss.item()!r} plain, {managed.loss.item()!r} under the mode"
    for what in ("gradients", "inputs", "buffers"):
        a: dict[str, Tensor | None] = getattr(plain, what)
        b: dict[str, Tensor | None] = getattr(managed, what)
        for name in a | b:
            x, y = a.get(name), b.get(name)
            if not _same(x, y):
                by = (
                    ""
                    if x is None or y is None or x.shape != y.shape
                    else f", largest difference {float((x.double() - y.double()).abs().max())!r}"
                )
                return f"{what.removesuffix('s')} of {name}{by}"
    for name in plain.tree | managed.tree:
        if plain.tree.get(name) != managed.tree.get(name):
            return f"module tree at {name}"
    return None if torch.equal(plain.random, managed.random) else "the state of the random generator after the step"


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(x, y) or torch.equal(_bits(x), _bits(y))


def _bits(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
