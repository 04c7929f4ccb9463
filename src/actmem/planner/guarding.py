"""Refuse a batch, or a model that has changed, if it would break the budget, before the first block runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from actmem.amounts import size
from actmem.errors import ActmemError, BudgetError, ModeError
from actmem.plan import Plan
from actmem.planner.batches import differences, is_covered, read_shape
from actmem.planner.following import follow
from actmem.profiling import profile
from actmem.profiling.stepping import shapes_of
from actmem.structure import Condition, condition, condition_digest, difference
from actmem.torchcompat import FakeTensor

__all__ = ["Guard"]


class Guard:
    """A forward pre-hook of a model under a plan with a budget."""

    def __init__(self, model: nn.Module, plan: Plan, loss: Callable[[Any], Tensor] | None) -> None:
        self._plan, self._loss = plan, loss
        assert plan.predicted is not None
        self._planned = [read_shape(s) for s in plan.predicted.shapes]
        self._planned_for = condition(model)
        self._is_other = plan.predicted.modules not in ("", condition_digest(model))
        """The model was not planned for as it is applied to: other modules, or other parameters trained."""
        self._accepted: set[Any] = set()
        self._resting = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a batch that would break the budget."""
        if torch.compiler.is_compiling():
            return  # the blocks refuse: no compiled graph keeps a budget
        if self._resting or not model.training or not torch.is_grad_enabled():
            return
        if isinstance(next(model.parameters(), None), FakeTensor):
            return  # a copy that is being profiled
        names = _names(model)
        batch = {**{names[i] if i < len(names) else str(i): x for i, x in enumerate(args)}, **kwargs}
        shapes = shapes_of(batch)
        now = condition(model)
        if (shapes, now) in self._accepted:
            return
        planned = [s._replace(name=_named(s.name, names)) for s in self._planned]
        found = [read_shape(s) for s in shapes]
        changed = self._change(now)
        if not changed and is_covered(found, planned):
            self._accepted.add((shapes, now))
            return
        predicted = self._plan.predicted
        assert predicted is not None
        try:
            peak = self._peak(model, args if not kwargs else batch, opaque=bool(kwargs) and len(args) > len(names))
            if peak <= predicted.budget_bytes:
                self._accepted.add((shapes, now))
                return
            would = f"its predicted peak is {size(peak)}"
        except (ActmemError, RuntimeError) as error:
            would = f"its peak cannot be predicted: {' '.join(str(error).split())[:300].rstrip('.')}"
        if changed:
            raise BudgetError(
                f"the model is not as it was planned for: {changed}. With a budget of {size(predicted.budget_bytes)}, "
                f"{would}. Plan for it as it is now: plan = actmem.fit(model, batch, budget=...)."
            )
        said = differences(found, planned)
        if any(each.endswith(("is new", "is missing")) for each in said):
            repair = "Plan with a batch as training hands it to the model: actmem.fit(model, batch, budget=...)."
        else:
            repair = "Plan for both: actmem.fit(model, examples=[short, long], budget=...)."
        raise BudgetError(
            f"the plan was made for another batch, and here {', '.join(said)}. With a budget of "
            f"{size(predicted.budget_bytes)}, {would}. {repair}"
        )

    def _change(self, now: Condition | None) -> str:
        """Say in what the model differs from the one that was planned for; "" if in nothing."""
        if self._is_other:
            return "its modules are others, or other parameters of it are trained"
        before = self._planned_for
        return "" if now is None or before is None else difference(before, now)

    def _peak(self, model: nn.Module, batch: Any, *, opaque: bool) -> int:
        """Predict the step with this batch.

        Raises:
            ModeError: it is `opaque`: no dict and no tuple alone could hand it to the model; or it has no loss.
        """
        if opaque:
            raise ModeError("the model takes any number of arguments, and some are given by name. Give all by name.")
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
                blocks=",".join(path or "." for path in self._plan.blocks),
                microbatches=predicted.microbatches,
                shard=predicted.shard,
                routing="worst" if predicted.routing == "worst" else "balanced",
            )
            return follow(found, self._plan).peak_bytes
        finally:
            self._resting = False


def _names(model: nn.Module) -> list[str]:
    """Return what the positional arguments of a model are called."""
    found = inspect.signature(model.forward).parameters.values()
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _named(name: str, names: list[str]) -> str:
    """Return what an argument is called, which may be known by its position only."""
    return names[int(name)] if name.isdigit() and int(name) < len(names) else name
