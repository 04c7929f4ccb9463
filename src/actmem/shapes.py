"""The shape of a tensor that a model is called with: data, which files hold as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actmem.errors import PlanError

__all__ = ["TensorShape", "read_shape", "shapes_as_text"]


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a batch.

    >>> print(TensorShape("input_ids", "int64", (1, 128)))
    input_ids int64 [1, 128]
    """

    name: str
    """The argument that it is passed as, or its position."""
    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.dims)}"

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: Callable[..., object]) -> Any:
        from pydantic_core import core_schema  # slow to import, and only needed to read a file

        return core_schema.no_info_after_validator_function(read_shape, core_schema.str_schema())


def shapes_as_text(
    shapes: Sequence[TensorShape], calls: Sequence[Sequence[TensorShape]]
) -> dict[str, list[str] | list[list[str]]]:
    """Return these fields of a profile, or of what a plan records of one, as files hold them."""
    return {"shapes": [str(s) for s in shapes], "calls": [[str(s) for s in call] for call in calls]}


def read_shape(text: str) -> TensorShape:
    """Read a shape from a file.

    >>> read_shape("input_ids int64 [1, 128]")
    TensorShape(name='input_ids', dtype='int64', dims=(1, 128))

    Raises:
        PlanError: the text does not describe a tensor.
    """
    found = re.fullmatch(r"(.*) (\w+) \[([\d, ]*)\]", text)
    if found is None:
        raise PlanError(f"{text!r} does not describe a tensor. Expected 'input_ids int64 [1, 128]' or the like.")
    name, dtype, dims = found.groups()
    return TensorShape(name, dtype, tuple(int(n) for n in re.findall(r"\d+", dims)))
