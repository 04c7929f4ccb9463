"""Noticing, before its first block runs, that a batch is larger than the plan was made for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmem.amounts import size
from actmem.errors import ActmemError, BudgetError
from actmem.plan import Plan
from actmem.planner.following import follow
from actmem.profiling import profile
from actmem.profiling.stepping import shapes_of

__all__ = ["Guard"]


class Guard:
    """A forward pre-hook of a model under a plan with a budget."""

    def __init__(self, plan: Plan, loss: Callable[[Any], Tensor] | None) -> None:
        self._plan, self._loss = plan, loss
        assert plan.predicted is not None
        self._planned = [_sizes(s) for s in plan.predicted.shapes]
        self._accepted: set[tuple[str, ...]] = set()
        self._resting = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a batch that would break the budget."""
        if self._resting or not model.training or not torch.is_grad_enabled():
            return
        names = _names(model)
        batch = {**{names[i] if i < len(names) else str(i): x for i, x in enumerate(args)}, **kwargs}
        shapes = shapes_of(batch)
        if shapes in self._accepted:
            return
        planned = [(names[int(n)] if n.isdigit() and int(n) < len(names) else n, dims) for n, dims in self._planned]
        if not _exceeds([_sizes(s) for s in shapes], planned):
            self._accepted.add(shapes)
            return
        predicted = self._plan.predicted
        assert predicted is not None
        peak = self._peak(model, args if not kwargs else None if len(args) > len(names) else batch)
        if peak is not None and peak <= predicted.budget_bytes:
            self._accepted.add(shapes)
            return
        would = "its peak cannot be predicted" if peak is None else f"its predicted peak is {size(peak)}"
        raise BudgetError(
            f"a batch of {', '.join(shapes if kwargs else shapes_of(args))} is larger than the plan was made for "
            f"({', '.join(predicted.shapes)}), and "
            f"{would}, with a budget of {size(predicted.budget_bytes)}. Plan for both: "
            "actmem.fit(model, examples=[short, long], budget=...)."
        )

    def _peak(self, model: nn.Module, batch: Any) -> int | None:
        if batch is None:
            return None
        predicted = self._plan.predicted
        assert predicted is not None
        name, _, dtype = predicted.optimizer.partition(", ")
        self._resting = True
        try:
            found = profile(
                model,
                batch,
                loss=self._loss,
                optimizer=None if name == "none" else name,
                optimizer_dtype=getattr(torch, dtype, None),
                blocks=",".join(self._plan.blocks),
                microbatches=predicted.microbatches,
                shard=predicted.shard,
                routing="worst" if predicted.routing == "worst" else "balanced",
            )
            return follow(found, self._plan).peak_bytes
        except (ActmemError, RuntimeError):
            return None
        finally:
            self._resting = False


def _names(model: nn.Module) -> list[str]:
    """Return what the positional arguments of a model are called."""
    found = inspect.signature(model.forward).parameters.values()
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _sizes(shape: str) -> tuple[str, tuple[int, ...]]:
    name, rest = shape.split(" ", 1)
    return name, tuple(int(n) for n in re.findall(r"\d+", rest[rest.index("[") :]))


def _exceeds(found: Sequence[tuple[str, tuple[int, ...]]], planned: Sequence[tuple[str, tuple[int, ...]]]) -> bool:
    """Tell whether a tensor is new, or larger in some dimension than any that was planned for."""
    for name, dims in found:
        known = [d for n, d in planned if n == name and len(d) == len(dims)]
        if not any(all(a <= b for a, b in zip(dims, d, strict=True)) for d in known):
            return True
    return False
