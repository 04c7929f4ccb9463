"""What one block call did, value by value: the raw material of the report. Holds no tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from actmem.engine.operators import Operator
from actmem.engine.values import Value

__all__ = ["Observation", "Row"]


class Row:
    """One value: where it was made, how large it is, and what became of it."""

    __slots__ = ("dtype", "held", "kind", "module", "num_bytes", "op", "replayed", "saved", "shape", "why")

    def __init__(self, module: str, op: str, kind: str, tensor: torch.Tensor, num_bytes: int, why: str | None) -> None:
        self.module = module
        """Path of the module inside the block; "" is the block's own forward."""
        self.op = op
        self.kind = kind
        """"made" by an operator, or "parameter" or "input"."""
        self.shape = tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.num_bytes = num_bytes
        self.why = why
        """None if the value may be replayed, "save" if the plan keeps it, else the reason why it is never replayed."""
        self.saved = False
        """Autograd saved it."""
        self.held = False
        """It was alive after the forward pass."""
        self.replayed = 0

    def __str__(self) -> str:
        where = f"{self.module or 'the block'} " if self.kind == "made" else ""
        return f"{where}{self.op} {list(self.shape)} {self.dtype}"


class Observation:
    """The rows of one block call."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._held: list[tuple[weakref.ref[Value], Row]] = []

    def made(self, value: Value, operator: Operator, module: str, tensor: torch.Tensor) -> None:
        """Note a value that an operator made."""
        row = Row(module, operator.name, "made", tensor, tensor.untyped_storage().nbytes(), value.why)
        self._add(value, row)

    def given(self, value: Value, tensor: torch.Tensor, num_bytes: int) -> None:
        """Note a value that came from outside."""
        origin: Any = tensor if tensor._base is None else tensor._base
        parameter = isinstance(origin, torch.nn.Parameter) or (origin.is_leaf and origin.requires_grad)
        kind = "parameter" if parameter else "input"
        self._add(value, Row("", kind, kind, tensor, num_bytes, value.why))

    def _add(self, value: Value, row: Row) -> None:
        value.row = row
        self.rows.append(row)
        self._held.append((weakref.ref(value), row))

    def saved(self, value: Value) -> None:
        """Note that autograd saved a value."""
        if value.row is not None:
            value.row.saved = True

    def settle(self) -> None:
        """Note what is still held, now that the forward pass is over and only handles keep values alive."""
        for reference, row in self._held:
            value = reference()
            row.held = value is not None and value.held is not None
            if row.held and value is not None and row.why is None:
                row.why = value.why
        self._held.clear()
