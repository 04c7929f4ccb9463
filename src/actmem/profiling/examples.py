"""Example batches: the loss of a model's output, and the shapes of the tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from actmem.errors import ModeError, UnsupportedError
from actmem.shapes import TensorShape

__all__ = ["argument_names", "loss_of", "named_arguments", "shapes_of"]


def loss_of(out: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the loss of a model's output."""
    try:
        value: Any = getattr(out, "loss", None) if loss is None else loss(out)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error} This happened in loss=: if it ends in .item() or float(), return the tensor itself."
        ) from error
    if loss is None and value is None and isinstance(out, Tensor) and out.dim() == 0:
        value = out
    if loss is None and value is None:
        kind = "Tensor" if isinstance(out, Tensor) else type(out).__name__
        how = 'out["loss"]' if isinstance(out, dict) and "loss" in out else "out.float().pow(2).mean()"
        raise ModeError(
            f"the model returned {kind}, which is neither a scalar nor has a .loss. Pass loss=, a function of the "
            f"output, such as loss=lambda out: {how}."
        )
    whose = "the .loss of the output" if loss is None else "what loss= returned"
    if not isinstance(value, Tensor):
        raise ModeError(
            f"{whose} is a {type(value).__name__}, but a backward pass starts from a tensor. Return the tensor, "
            "without .item() or float(), such as loss=lambda out: out.float().pow(2).mean()."
        )
    if value.numel() != 1:
        raise ModeError(
            f"{whose} has the shape {list(value.shape)}, but a backward pass starts from one number. Reduce it, "
            "such as loss=lambda out: out.mean()."
        )
    if not value.requires_grad:
        raise ModeError(
            f"{whose} depends on nothing that is trained: it was detached (.detach(), .data, torch.no_grad()), "
            "or uses no parameter that requires a gradient. Return the loss that you call .backward() on."
        )
    return value


def shapes_of(batch: Any) -> tuple[TensorShape, ...]:
    """Return the shapes of the tensors in a batch. A ragged dimension has no size, and counts as 0."""
    named: Any = batch.items() if hasattr(batch, "items") else enumerate(batch)
    tensors = [(str(name), x) for name, x in named if isinstance(x, Tensor)]
    return tuple(
        TensorShape(name, str(x.dtype).removeprefix("torch."), tuple(n if type(n) is int else 0 for n in x.shape))
        for name, x in tensors
    )


def argument_names(model: nn.Module) -> list[str]:
    """Return the names of a model's positional arguments."""
    found = inspect.signature(model.forward).parameters.values()
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def named_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, or by number where they have no name.

    >>> named_arguments(["x"], (1, 2), {"y": 3})
    {'x': 1, '1': 2, 'y': 3}
    """
    return {**{names[i] if i < len(names) else str(i): x for i, x in enumerate(args)}, **kwargs}
