"""Refuse a batch, or a model that has changed, if it would break the budget, before the first block runs.

NOTE [ What the guard compares ]
A plan for examples is checked against each batch that the model is called with: one that is at most as large as one of
them passes, and any other is profiled, and passes if its predicted peak does; from then on, what is not larger than it
passes too. The sizes of a batch are those of its tensors, and those of the documents in it, where it is packed: see
NOTE [ Packed batches ]. So batches that are packed differently pass without a prediction, unless none that fitted so
far had as long a document, as many of them and as many tokens. A plan for a step of the user's own loop was made
from all calls of the model in that step. A call passes if one of those was as large in every tensor. Any other is
refused: the step that it belongs to is in progress, and cannot be profiled from within. How often the model is called
in a step is not seen, nor is a step that calls only parts of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from actmem.errors import ActmemError, BudgetError, ModeError
from actmem.modes import OPTIMIZERS
from actmem.plan import Plan
from actmem.profiling import (
    OptimizerLike,
    argument_names,
    documents_of,
    for_card,
    named_arguments,
    profile,
    shapes_of,
)
from actmem.shapes import TensorShape
from actmem.simulation import follow, with_stepping
from actmem.structure import Condition, condition, condition_digest, difference
from actmem.torchcompat import FakeTensor
from actmem.units import size

__all__ = ["Guard", "differences", "is_covered"]

_MOST_ACCEPTED = 1024


class Guard:
    """A forward pre-hook of a model under a plan with a budget."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Callable[[Any], Tensor] | None,
        optimizer: OptimizerLike = None,
    ) -> None:
        assert plan.predicted is not None
        self._plan, self._predicted, self._loss = plan, plan.predicted, loss
        self._optimizer = optimizer
        self._planned_for = condition(model)
        self._is_other = self._predicted.modules not in ("", condition_digest(model))
        """The model differs from the one that was planned for: other modules, or other parameters trained."""
        self._accepted: set[Any] = set()
        self._fitting: list[tuple[Condition | None, tuple[TensorShape, ...]]] = []
        """Batches that were predicted to fit, and the model as it was then: what is not larger fits too."""
        self._resting = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a batch that would break the budget."""
        if torch.compiler.is_compiling():
            return  # blocks refuse a plan that is not for graphs; sizes are not seen where the model is one graph
        if self._resting or not model.training or not torch.is_grad_enabled():
            return
        if isinstance(next(model.parameters(), None), FakeTensor):
            return  # a copy that is being profiled
        names = argument_names(model)
        batch = named_arguments(names, args, kwargs)
        shapes = shapes_of(batch)
        if not self._predicted.is_step and not self._predicted.compiled:
            shapes = (*shapes, *documents_of(batch))
        now = condition(model)
        if (shapes, now) in self._accepted:
            return
        if self._predicted.is_step:
            self._check_call(shapes, now)
            self._accept(shapes, now)
            return
        planned = [replace(s, name=_named(s.name, names)) for s in self._predicted.shapes]
        changed = self._change(now)
        if self._predicted.compiled:
            self._check_sizes(shapes, planned, changed)
            self._accept(shapes, now)
            return
        others = [[replace(s, name=_named(s.name, names)) for s in each] for each in self._predicted.examples]
        fitting = [each for when, each in self._fitting if when == now]
        if any(is_covered(shapes, each) for each in ([] if changed else [planned, *others]) + fitting):
            self._accept(shapes, now)
            return
        budget = self._predicted.budget_bytes
        try:
            peak = self._peak(model, args if not kwargs else batch, opaque=bool(kwargs) and len(args) > len(names))
            if peak <= budget:
                self._accept(shapes, now)
                self._fitting = [(when, each) for when, each in self._fitting if not is_covered(each, shapes)]
                self._fitting.append((now, shapes))
                return
            would = f"its predicted peak is {size(peak)}"
        except (ActmemError, RuntimeError) as error:
            would = f"its peak cannot be predicted: {' '.join(str(error).split())[:300].rstrip('.')}"
        if changed:
            raise BudgetError(
                f"the model is not as it was planned for: {changed}. With a budget of {size(budget)}, "
                f"{would}. Plan for it as it is now: plan = actmem.fit(model, batch, budget=...)."
            )
        if {s.name for s in shapes} != {p.name for p in planned}:
            repair = "Plan with a batch as training hands it to the model: actmem.fit(model, batch, budget=...)."
        else:
            repair = "Plan for both: actmem.fit(model, examples=[short, long], budget=...)."
        said = ", ".join(differences(shapes, planned))
        raise BudgetError(
            f"the plan was made for another batch, and here {said}. With a budget of {size(budget)}, {would}. {repair}"
        )

    def _accept(self, shapes: tuple[TensorShape, ...], now: Condition | None) -> None:
        """Remember a batch, so that the next one like it is not looked at. Packed ones may all differ."""
        if len(self._accepted) >= _MOST_ACCEPTED:
            self._accepted.clear()
        self._accepted.add((shapes, now))

    def _check_sizes(self, found: Sequence[TensorShape], planned: Sequence[TensorShape], changed: str) -> None:
        """Refuse a batch of other sizes: it has another graph."""
        if changed:
            said = f"the model is not as it was planned for: {changed}"
        elif sorted(found, key=str) == sorted(planned, key=str):
            return
        else:
            sizes = ", ".join(map(str, found))
            said = f"the plan is for compiled blocks and {', '.join(map(str, planned))}, and here the batch is {sizes}"
        raise BudgetError(
            f"{said}. That makes another graph, and whether it keeps the budget of "
            f"{size(self._predicted.budget_bytes)} is not known. Pad batches to the planned sizes, or plan for this "
            "one: actmem.fit(model, batch, budget=...)."
        )

    def _check_call(self, found: Sequence[TensorShape], now: Condition | None) -> None:
        """Refuse a call of the model unless the planned step had the same or a larger one."""
        changed = self._change(now)
        if not changed and any(is_covered(found, call) for call in self._predicted.calls):
            return
        if changed:
            said = f"the model is not as it was planned for: {changed}"
        elif self._predicted.calls:
            fewest = min((differences(found, call) for call in self._predicted.calls), key=len)
            said = f"the plan was made for a step with other batches, and here {', '.join(fewest)}"
        else:
            said = "the plan was made for a step that never calls the model as a whole, as it is called here"
        raise BudgetError(
            f"{said}. Whether it keeps its budget of {size(self._predicted.budget_bytes)} is not known. Plan for "
            "a step with the largest batch, on the model as it is now: actmem.fit(model, step=step, budget=...)."
        )

    def _change(self, now: Condition | None) -> str:
        """Return how the model differs from the one that was planned for; "" if it does not."""
        if self._is_other:
            return "its modules are others, or other parameters of it are trained"
        before = self._planned_for
        return "" if now is None or before is None else difference(before, now)

    @property
    def _beside_bytes(self) -> int:
        """What a card needs besides the bytes of tensors, as it was when the plan was made."""
        predicted = self._predicted
        if predicted.reserved_bytes is None:
            return 0
        return predicted.reserved_bytes + predicted.outside_bytes - predicted.peak_bytes

    def _peak(self, model: nn.Module, batch: Any, *, opaque: bool) -> int:
        """Predict the step with this batch.

        Raises:
            ModeError: it is `opaque`: neither a dict nor a tuple alone could pass it to the model; or it has no loss.
        """
        if opaque:
            raise ModeError("the model takes any number of arguments, and some are given by name. Give all by name.")
        predicted = self._predicted
        name, _, dtype = predicted.optimizer.partition(", ")
        named = name == "none" or name in OPTIMIZERS
        if not named and self._optimizer is None:
            raise ModeError(f"the plan counts {name}, which is not here. Write apply(..., optimizer=optimizer).")
        self._resting = True
        try:
            with for_card(predicted.reserved_bytes is not None):
                found = profile(
                    model,
                    batch,
                    loss=self._loss,
                    optimizer=self._optimizer if not named else None if name == "none" else name,
                    optimizer_dtype=getattr(torch, dtype, None) if named else None,
                    blocks=",".join(path or "." for path in self._plan.blocks),
                    microbatches=predicted.microbatches,
                    shard=predicted.shard,
                    routing="worst" if predicted.routing == "worst" else "balanced",
                )
            return follow(with_stepping(found, self._plan), self._plan).peak_bytes + self._beside_bytes
        finally:
            self._resting = False


def _named(name: str, names: list[str]) -> str:
    """Return the name of an argument that may be known only by its position."""
    return names[int(name)] if name.isdigit() and int(name) < len(names) else name


def is_covered(found: Iterable[TensorShape], planned: Sequence[TensorShape]) -> bool:
    """Return whether every tensor was planned for: by its name, with its dtype, and no smaller in any dimension."""
    return all(any(_covers(p, shape) for p in planned) for shape in found)


def differences(found: Sequence[TensorShape], planned: Sequence[TensorShape]) -> list[str]:
    """List the differences, tensor by tensor: those that are new, missing, of another dtype, or of other sizes.

    >>> planned = [TensorShape("input_ids", "int64", (4, 128)), TensorShape("labels", "int64", (4, 128))]
    >>> found = [TensorShape("input_ids", "int64", (2, 256)), TensorShape("mask", "bool", (2, 256))]
    >>> differences(found, planned)
    ['input_ids int64 [2, 256] is larger than [4, 128]', 'mask bool [2, 256] is new', 'labels is missing']
    """
    said: list[str] = []
    for shape in found:
        known = [p for p in planned if p.name == shape.name]
        if any(_covers(p, shape) for p in known):
            continue
        if not known:
            said.append(f"{shape} is new")
        elif known[0].dtype != shape.dtype:
            said.append(f"{shape} has another dtype than {known[0].dtype} {list(known[0].dims)}")
        elif len(known[0].dims) != len(shape.dims):
            said.append(f"{shape} has another number of dimensions than {list(known[0].dims)}")
        else:
            said.append(f"{shape} is larger than {list(known[0].dims)}")
    present = {shape.name for shape in found}
    return said + [f"{p.name} is missing" for p in planned if p.name not in present]


def _covers(planned: TensorShape, found: TensorShape) -> bool:
    return (
        planned.name == found.name
        and planned.dtype == found.dtype
        and len(planned.dims) == len(found.dims)
        and all(a <= b for a, b in zip(found.dims, planned.dims, strict=True))
    )
