"""The tokens of a module's call: which arguments have a row for each, and how they are divided into pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Tokens"]


class Tokens:
    """Which arguments of a call have a row for each token, and how they are divided."""

    def __init__(self, shape: torch.Size, tensors: list[Tensor]) -> None:
        self.shape = shape
        """The dimensions that count tokens: all but the last of the first tensor."""
        self.tensors = tensors
        self.num_dims = len(shape)
        self.num = shape.numel()
        self.sizes: list[int] = []
        """How many tokens each piece has."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens | None:
        """Find the tokens of a call; None if there are not several."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not given or given[0].dim() < 2:
            return None
        shape = given[0].shape[:-1]
        return None if shape.numel() < 2 else cls(shape, [x for x in given if x.shape[: len(shape)] == shape])

    def lead(self) -> tuple[int, ...]:
        """Return the dimensions before that of the tokens in a piece."""
        return (1,) * (self.num_dims - 1)

    def flat(self, x: Tensor) -> Tensor:
        """Return a tensor with all tokens in one dimension, and as many dimensions as before."""
        return x.reshape(*self.lead(), self.num, *x.shape[self.num_dims :])

    def taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], take: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `take` of every tensor that has tokens."""

        def each(x: Any) -> Any:
            return take(x) if isinstance(x, Tensor) and x.shape[: self.num_dims] == self.shape else x

        return tuple(map(each, args)), {name: each(x) for name, x in kwargs.items()}

    def pieces(
        self, num: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Divide the arguments into calls on about as many tokens each."""
        rows = -(-self.num // num)
        parts = {id(x): torch.split(self.flat(x), rows, dim=self.num_dims - 1) for x in self.tensors}
        self.sizes = [min(rows, self.num - begin) for begin in range(0, self.num, rows)]

        def nth(i: int) -> Callable[[Tensor], Tensor]:
            def piece(x: Tensor) -> Tensor:
                return parts[id(x)][i]

            return piece

        return [self.taken(args, kwargs, nth(i)) for i in range(len(self.sizes))]
