"""What is computed from the rows of a head's output, one chunk of rows at a time. See NOTE [ Logits in chunks ].

A row is one token. `Head` is how a row of hidden states becomes a row of logits; a `Formula` is what is made of it. The
values of all rows are found without all logits ever being there at once: each chunk is computed, used and let go.
"""

# pyright: reportIncompatibleMethodOverride=false
# autograd Functions: forward and backward take what `apply` is given

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmem.splitting.class_shards import ClassShards, LossParallel

__all__ = ["Formula", "Head", "row_values", "scalar_sum"]

Formula = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""A chunk of logits and the same rows of the operands -> one value, or several, for each row."""


@dataclass(frozen=True)
class Head:
    """How hidden states become logits, and the tensors that get a gradient from it."""

    module: nn.Module
    weights: tuple[Tensor, ...]
    """The parameters: of a plain linear layer its weight and bias, otherwise all that need a gradient."""
    is_linear: bool
    shards: ClassShards | None = None
    """How its classes are divided over ranks. Then the weights are those of this rank's classes."""

    @property
    def num_classes(self) -> int:
        """The length of a row of the head's output."""
        if self.shards is not None:
            return self.shards.row_length or len(self.weights[0])
        return int(self.module.out_features)  # pyright: ignore[reportArgumentType] # heads have one

    def output(self, hidden: Tensor) -> Tensor:
        """Compute what the head returns."""
        return self.rows(self.logits(hidden, self.weights))

    def rows(self, logits: Tensor) -> Tensor:
        """Return rows of logits as the head does: those of all ranks' classes, if they are divided."""
        return logits if self.shards is None else self.shards.rows(logits)

    def logits(self, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Compute rows of logits: of this rank's classes, if they are divided."""
        if self.is_linear:
            return functional.linear(hidden, *weights)
        return self.module.forward(hidden)

    def add_gradients(
        self, hidden: Tensor, weights: Sequence[Tensor], logits: Tensor, given: Tensor, sums: list[Tensor | None]
    ) -> Tensor | None:
        """Add the weights' gradients of one chunk to the sums, and return the gradient of its hidden states.

        Args:
            hidden: the chunk, as it went in.
            weights: the head's tensors.
            logits: what came out, with its graph if the head is not a plain linear layer.
            given: the gradient of the logits.
            sums: a gradient for each weight that needs one, with the chunks before this one.
        """
        if not self.is_linear:
            wanted = [(i, w) for i, w in enumerate(weights) if sums[i] is not None]
            inputs = [hidden] if hidden.requires_grad else []
            found = _gradients(logits, [*inputs, *(w for _, w in wanted)], given)
            for (i, _), gradient in zip(wanted, found[len(inputs) :], strict=True):
                if gradient is not None and (total := sums[i]) is not None:
                    total += gradient
            return found[0] if inputs else None
        if (total := sums[0]) is not None:
            total.addmm_(given.t().to(total.dtype), hidden.detach().to(total.dtype))
        if len(sums) > 1 and (total := sums[1]) is not None:
            total += given.sum(0, dtype=total.dtype)
        return given @ weights[0].detach() if hidden.requires_grad else None


def row_values(head: Head, formula: Formula, chunk_rows: int, hidden: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the formula's value of every row. In the backward pass, each chunk's logits are computed again.

    Args:
        head: how rows become logits.
        formula: rows of logits, and of the operands -> a tensor with as many rows.
        chunk_rows: how many rows make a chunk.
        hidden: a row for each token.
        operands: tensors with as many rows, such as targets.
    """
    return _applied(_RowValues, head, formula, chunk_rows, hidden, operands)


def scalar_sum(head: Head, formula: Formula, chunk_rows: int, hidden: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return the sum of the values of all rows, in float32 or wider, and find its gradients on the way.

    The backward pass multiplies them by the gradient of the sum, so no logits are computed twice.
    """
    return _applied(_ScalarSum, head, formula, chunk_rows, hidden, operands)


def _applied(
    function: type[torch.autograd.Function],
    head: Head,
    formula: Formula,
    chunk_rows: int,
    hidden: Tensor,
    operands: Sequence[Tensor],
) -> Tensor:
    apply: Any = function.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] # untyped
    return apply(head, formula, chunk_rows, len(head.weights), hidden, *head.weights, *operands)


class _Around:
    """What holds outside the chunks and must hold in the backward pass too: autocast."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._enabled = torch.is_autocast_enabled(device_type)
        self._dtype = torch.get_autocast_dtype(device_type)

    def again(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._device_type, self._dtype, enabled=self._enabled, cache_enabled=False)


def _bounds(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for begin in range(0, num_rows, chunk_rows):
        yield slice(begin, min(begin + chunk_rows, num_rows))


def _wide_sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32))


def _accumulator(weight: Tensor) -> Tensor:
    # Added up in float32: sixteen roundings to bfloat16 would cost two bits of the eight.
    dtype = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
    return torch.zeros_like(weight, dtype=dtype)


class _RowValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Head, formula: Formula, chunk_rows: int, num_weights: int, hidden: Tensor, *rest: Tensor
    ) -> Tensor:
        weights, operands = rest[:num_weights], rest[num_weights:]
        ctx.head, ctx.formula, ctx.chunk_rows, ctx.num_weights = head, formula, chunk_rows, num_weights
        ctx.around, ctx.loss_parallel = _Around(hidden.device.type), LossParallel()
        ctx.save_for_backward(hidden, *rest)
        values: Tensor | None = None
        for rows in _bounds(len(hidden), chunk_rows):
            found = formula(head.logits(hidden[rows], weights), [x[rows] for x in operands])
            if values is None:
                values = found.new_empty((len(hidden), *found.shape[1:]))
            values[rows] = found
        assert values is not None
        if not values.is_floating_point():
            ctx.mark_non_differentiable(values)
        return values

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        hidden, *rest = ctx.saved_tensors
        head: Head = ctx.head
        weights, operands = rest[: ctx.num_weights], rest[ctx.num_weights :]
        needs: tuple[bool, ...] = ctx.needs_input_grad[4:]
        sums = [_accumulator(w) if need else None for w, need in zip(weights, needs[1:], strict=False)]
        gradient = torch.empty_like(hidden) if needs[0] else None
        needed = needs[1 + len(weights) :]
        others = [torch.zeros_like(x) if need else None for x, need in zip(operands, needed, strict=True)]
        for rows in _bounds(len(hidden), ctx.chunk_rows):
            chunk = hidden[rows].detach().requires_grad_(needs[0])
            beside = [x[rows].detach().requires_grad_(need) for x, need in zip(operands, needed, strict=True)]
            with ctx.loss_parallel.again():
                with torch.enable_grad(), ctx.around.again():
                    logits = _with_graph(head, chunk, weights)
                    leaf = logits.detach().requires_grad_()
                    value = ctx.formula(leaf, beside)
                wanted = [leaf, *(x for x in beside if x.requires_grad)]
                found = _gradients(value, wanted, given[rows])
            of_logits = found.pop(0)
            for other in others:
                if other is not None and (part := found.pop(0)) is not None:
                    other[rows] = part
            del value, leaf, wanted
            if of_logits is None:
                if gradient is not None:
                    gradient[rows] = 0
                continue
            with ctx.around.again():
                part = head.add_gradients(chunk, weights, logits, of_logits, sums)
            if gradient is not None:
                gradient[rows] = 0 if part is None else part
        return None, None, None, None, gradient, *_in_dtype(sums, weights), *others


class _ScalarSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Head, formula: Formula, chunk_rows: int, num_weights: int, hidden: Tensor, *rest: Tensor
    ) -> Tensor:
        weights, operands = rest[:num_weights], rest[num_weights:]
        needs: tuple[bool, ...] = ctx.needs_input_grad[4:]
        wanted = any(needs)
        sums = [_accumulator(w) if need else None for w, need in zip(weights, needs[1:], strict=False)]
        gradient = torch.empty_like(hidden) if needs[0] else None
        total: Tensor | None = None
        for rows in _bounds(len(hidden), chunk_rows):
            chunk = hidden[rows].detach().requires_grad_(needs[0])
            beside = [x[rows] for x in operands]
            if not wanted:
                value = _wide_sum(formula(head.logits(chunk, weights), beside))
            else:
                with torch.enable_grad():
                    logits = _with_graph(head, chunk, weights)
                    leaf = logits.detach().requires_grad_()
                    value = _wide_sum(formula(leaf, beside))
                (of_logits,) = torch.autograd.grad(value, [leaf])
                value = value.detach()
                del leaf
                part = head.add_gradients(chunk, weights, logits, of_logits, sums)
                del of_logits, logits
                if gradient is not None:
                    gradient[rows] = 0 if part is None else part
            total = value if total is None else total + value
        assert total is not None
        ctx.sums = _in_dtype(sums, weights)
        ctx.gradient, ctx.num_operands, ctx.is_used = gradient, len(operands), False
        return total

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        if ctx.is_used:
            raise RuntimeError(
                "this loss was computed in chunks together with its gradients, and they have been used: a second "
                "backward pass (retain_graph=True) finds nothing. Apply the model without split."
            )
        ctx.is_used = True
        gradient, sums = ctx.gradient, ctx.sums
        del ctx.gradient, ctx.sums
        for x in (gradient, *sums):
            if x is not None:
                x.mul_(given.to(x.dtype))
        return None, None, None, None, gradient, *sums, *[None] * ctx.num_operands


def _gradients(output: Tensor, inputs: Sequence[Tensor], given: Tensor) -> list[Tensor | None]:
    """Return the gradient of each input; None where the output does not depend on it."""
    return list(torch.autograd.grad(output, inputs, given, allow_unused=True))


def _with_graph(head: Head, chunk: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if head.is_linear:  # its gradients are written out in `add_gradients`
        with torch.no_grad():
            return head.logits(chunk, weights)
    return head.logits(chunk, weights)


def _in_dtype(sums: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if x is None else x.to(w.dtype) for x, w in zip(sums, weights, strict=True)]
