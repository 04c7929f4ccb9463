"""Run a block twice on the same input, as torch's checkpoint does, and report what differs."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmem.engine import checksum, has_bytes
from actmem.measuring import tensors_in
from actmem.torchcompat import TorchDispatchMode, as_outside, named_modules, storage_key

__all__ = ["Call", "Repeated", "repeat"]

_NOTHING_IN_THEM = ("empty", "resize", "detach")
_SEED = 0


@dataclass(frozen=True)
class Call:
    """A block and the arguments it was called with."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Repeated:
    """What differed in the second run."""

    operator: str | None
    """The first operator that differs, and the one that ran in its place in the first run."""
    bits: str | None
    """The first operator whose result differs bitwise, although all before it agree."""
    state: tuple[str, ...]
    """Buffers, and plain numbers in modules, that both runs changed."""


class _Recorder(TorchDispatchMode):
    """Records the operators that run, with a checksum of each result."""

    only_watches = True
    """See NOTE [ in place unless watched ]."""

    def __init__(self, state: frozenset[int]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self._state = state
        """Storages of buffers: writes to them are compared separately."""
        self.listed: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with as_outside(func):
            out = func(*args, **(kwargs or {}))
        name = str(func)
        sums: tuple[int, ...] = ()
        # A view computes nothing, and may show memory that has not been written yet.
        if not getattr(func, "is_view", False) and not any(word in name for word in _NOTHING_IN_THEM):
            made = (t for t in tensors_in(out) if has_bytes(t) and t.layout is torch.strided)
            sums = tuple(checksum(t) for t in made if storage_key(t.untyped_storage()) not in self._state)
        self.listed.append((name, sums))
        return out


def repeat(call: Call) -> Repeated:
    """Run a copy of a block twice from the same seed. The block itself is not touched.

    >>> repeat(Call("0", nn.Dropout(0.5), (torch.ones(4),), {}))
    Repeated(operator=None, bits=None, state=())
    """
    module = deepcopy(call.module)
    before = _state(module)
    first = _run(module, call)
    between = _state(module)
    second = _run(module, call)
    after = _state(module)
    changed = [n for n in after if _differs(before.get(n), between.get(n)) and _differs(between.get(n), after[n])]
    operator = bits = None
    for (name, sums), (again, others) in zip(first, second, strict=False):
        if name != again:
            operator = f"{again} instead of {name}"
            break
        if sums != others:
            bits = name
            break
    else:
        if len(first) != len(second):
            operator = f"{len(second)} operators instead of {len(first)}"
    return Repeated(operator, bits, tuple(changed))


def _run(module: nn.Module, call: Call) -> list[tuple[str, tuple[int, ...]]]:
    args, kwargs = deepcopy((call.args, call.kwargs))
    torch.manual_seed(_SEED)  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
    recorder = _Recorder(frozenset(storage_key(b.untyped_storage()) for b in module.buffers()))
    with torch.no_grad(), recorder:
        module(*args, **kwargs)
    return recorder.listed


def _state(module: nn.Module) -> dict[str, Any]:
    """Copy what a module's forward may change: buffers, tensors and plain numbers."""
    return dict(_each(module))


def _each(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, buffer in module.named_buffers():
        yield name, buffer.detach().clone()
    for path, part in named_modules(module):
        for name, value in vars(part).items():
            if isinstance(value, int | float | Tensor) and not name.startswith("_"):
                yield f"{path}.{name}".strip("."), value.detach().clone() if isinstance(value, Tensor) else value


def _differs(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape != right.shape or not torch.equal(left, right)
    return bool(type(left) is not type(right) or left != right)
