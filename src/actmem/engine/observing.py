"""What one block call did, value by value: the raw material of the report. Holds no tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from actmem.engine.operators import Operator
from actmem.engine.values import Value
from actmem.torchcompat import storage_key

__all__ = ["Observation", "Row"]


class Row:
    """One value: where it was made, how large it is, and what became of it."""

    __slots__ = (
        "cause",
        "copied",
        "dtype",
        "held",
        "index",
        "kind",
        "module",
        "num_bytes",
        "offloaded",
        "op",
        "overwritten",
        "parents",
        "replayed",
        "saved",
        "shape",
        "storage",
        "why",
    )

    def __init__(self, module: str, op: str, kind: str, tensor: torch.Tensor, num_bytes: int, why: str | None) -> None:
        self.module = module
        """Path of the module inside the block; "" is the block's own forward."""
        self.op = op
        self.kind = kind
        """"made" by an operator, a parameter or buffer ("state"), or any other "input"."""
        self.shape = () if tensor.is_nested else tuple(tensor.shape)  # a strided nested tensor has none
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.num_bytes = num_bytes
        self.why = why
        """None if the value may be replayed, "save" if the plan keeps it, else the reason why it is never replayed."""
        self.saved = False
        """Autograd saved it."""
        self.held = False
        """It was alive after the forward pass."""
        self.replayed = 0
        self.cause: str | None = None
        """For a value that is held in the place of one that is never replayed: why that one is not."""
        self.index = -1
        """Position of its operator in the block call; -1 if it came from outside."""
        self.copied = False
        """It was copied before an operator overwrote it, because a replay may still need it."""
        self.offloaded = False
        """It was sent away when the forward was over."""
        self.overwritten = False
        """A later operator wrote on its storage."""
        self.storage: weakref.ref[Any] | None = None
        """Which storage it lies on. Blocks may share one; weak references to one object are one object themselves."""
        self.parents: tuple[Row, ...] = ()
        """The values that a replay of its operator reads."""

    def __str__(self) -> str:
        where = f"{self.module or 'the block'} " if self.kind == "made" else ""
        return f"{where}{self.op} {list(self.shape)} {self.dtype}"


class Observation:
    """The rows of one block call."""

    def __init__(self, state: frozenset[int]) -> None:
        self._state = state
        """Storages of the model's parameters and buffers, which are alive whatever the tape holds."""
        self.rows: list[Row] = []
        self.funcs: list[Any] = []
        """The operators of the call, in order, without views."""
        self._values: list[tuple[weakref.ref[Value], Row]] = []
        self._handles: list[tuple[weakref.ref[Any], Row]] = []

    def begin(self, func: Any) -> None:
        """Note that an operator ran."""
        self.funcs.append(func)

    def made(self, value: Value, operator: Operator, module: str, tensor: torch.Tensor) -> None:
        """Note a value that an operator made."""
        row = Row(module, operator.name, "made", tensor, tensor.untyped_storage().nbytes(), value.why)
        row.index = len(self.funcs) - 1
        if value.node is not None:
            row.parents = value.node.parents
        self._add(value, row)

    def given(self, value: Value, tensor: torch.Tensor, num_bytes: int) -> None:
        """Note a value that came from outside."""
        origin = tensor if tensor._base is None else tensor._base  # pyright: ignore[reportPrivateUsage]
        kind = "state" if storage_key(tensor.untyped_storage()) in self._state else "input"
        parameter = isinstance(origin, torch.nn.Parameter) or (origin.is_leaf and origin.requires_grad)
        name = ("parameter" if parameter else "buffer") if kind == "state" else "input"
        self._add(value, Row("", name, kind, tensor, num_bytes, value.why))

    def _add(self, value: Value, row: Row) -> None:
        value.row = row
        row.storage = value.storage
        self.rows.append(row)
        self._values.append((weakref.ref(value), row))

    def saved(self, value: Value, handle: Any) -> None:
        """Note that autograd saved a value."""
        if value.row is not None:
            self._handles.append((weakref.ref(handle), value.row))

    def settle(self) -> None:
        """Note what is saved and held now, when only handles keep values alive.

        Done when the forward is over, and again when backward begins: a branch without a gradient dies in between.
        """
        for row in self.rows:
            row.saved = row.held = False
        for reference, row in self._handles:
            handle = reference()
            if handle is not None:
                (handle.value.row or row).saved = True
        for reference, row in self._values:
            value = reference()
            row.held = value is not None and value.held is not None
            if row.held and value is not None and row.why is None:
                row.why = value.why

    def signature(self) -> Any:
        """Return what is equal for calls that ran the same program on values of the same size."""
        return tuple(self.funcs), tuple((r.num_bytes, r.why, r.saved, r.held) for r in self.rows)

    def forget_program(self) -> None:
        """Keep the rows, and let go of how they hang together."""
        self.funcs.clear()
        for row in self.rows:
            row.parents = ()
