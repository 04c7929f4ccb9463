"""Write down every operator of a step, what is alive after it, and when the program lets go of what a block made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from actmem.measuring.flops import Formula, flop_formula
from actmem.measuring.ledger import Entry, Ledger, tensors_in
from actmem.profiles import Cost
from actmem.torchcompat import TorchDispatchMode, divide, is_composite, never_compile, num_bytes, resolving_bits

__all__ = ["Chronicle"]

_ASKS_DEVICE: Any = torch.ops.prim.device.default
"""What `tensor.device` is on a fake tensor."""


class _Ledger(Ledger):
    """A ledger that numbers the storages it meets, and tells when one of them dies."""

    def __init__(self, device: torch.device, log: list[tuple[Any, ...]]) -> None:
        super().__init__(device)
        self._log = log
        self._watched: dict[int, int] = {}
        """Key of a living storage -> its number."""
        self.sizes: dict[int, int] = {}

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage that a block made or read."""
        entry = self._live.get(id(storage))
        if entry is None:
            entry = self._open(storage, storage.device, external=True)
        found = self._watched.get(entry.key)
        if found is None:
            found = self._watched[entry.key] = len(self.sizes)
            # What was not counted when it was alive takes no room: it is the caller's.
            self.sizes[found] = 0 if entry.external else entry.nbytes
        return found

    def _died(self, entry: Entry) -> None:
        super()._died(entry)
        number = self._watched.pop(entry.key, None)
        if number is not None:
            self._log.append(("die", number))


class Chronicle(TorchDispatchMode):
    """Keep the log of a step. See NOTE [ The log ] in `profiles.py`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __init__(self, device: torch.device, *, timed: bool) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self.log: list[tuple[Any, ...]] = []
        self.ledger = _Ledger(device, self.log)
        self.costs: dict[Cost, int] = {}
        self.paused = False
        """Operators run unseen: they are the profiler's own."""
        self._names: list[str] = []
        self._claim: tuple[str, tuple[int, int], Callable[[int, int], None]] | None = None
        self._timed = timed
        self._formulas: dict[Any, tuple[str, Formula | None, bool, bool]] = {}

    @contextlib.contextmanager
    def pause(self) -> Generator[None]:
        """Let operators run unseen."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def note(self, *entry: Any) -> None:
        """Add an entry."""
        self.log.append(entry)

    def claim(self, op: str, call: tuple[int, int], tell: Callable[[int, int], None]) -> int:
        """Make the operator that was seen last a call of a block, or else the next one. Return its cost.

        An operator that writes is announced before it runs: then `tell` gets its cost when it has run.
        """
        at = len(self.log) - 1
        while at >= 0 and self.log[at][0] not in ("op", "call"):  # deaths may stand behind it
            at -= 1
        if at >= 0 and self.log[at][0] == "op" and self._names[self.log[at][1]] == op:
            _, cost, live = self.log[at]
            self.log[at] = ("call", *call, cost, live)
            return cost
        self._claim = (op, call, tell)
        return -1

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if self.paused or func is _ASKS_DEVICE:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and is_composite(func):
            divided = divide(self, func, args, kwargs)
            if divided is not NotImplemented:
                return divided
        facts = self._formulas.get(func)
        if facts is None:
            facts = self._formulas[func] = _learn(func)
        name, formula, mutates, adopts = facts
        ledger = self.ledger
        if not adopts:
            for tensor in tensors_in((args, kwargs)):
                ledger.read(tensor)
        with resolving_bits():
            started = perf_counter()
            result = func(*args, **kwargs)
            seconds = perf_counter() - started if self._timed else None
        if mutates:
            for tensor in tensors_in((args, kwargs)):
                ledger.read(tensor)
        moved, computes_in = 0, ""
        for tensor in tensors_in(result):
            ledger.returned(tensor)
            moved += num_bytes(tensor)
            if tensor.is_floating_point() or tensor.is_complex():
                computes_in = computes_in or _name(tensor)
        for tensor in tensors_in((args, kwargs)):
            moved += num_bytes(tensor)
            computes_in = computes_in or (_name(tensor) if tensor.is_floating_point() else "")
        view = not mutates and _shares(args, result)
        flops = 0 if formula is None else formula(args, kwargs, result)
        cost = Cost(name, flops, 0 if view else moved, computes_in, seconds)
        number = self.costs.setdefault(cost, len(self.costs))
        if number == len(self._names):
            self._names.append(name)
        ledger.event += 1
        claim, self._claim = self._claim, None
        if claim is not None and claim[0] == name:
            claim[2](claim[1][1], number)
            self.log.append(("call", *claim[1], number, ledger.main.live_bytes))
        else:
            self.log.append(("op", number, ledger.main.live_bytes))
        return result


def _learn(func: Any) -> tuple[str, Formula | None, bool, bool]:
    schema = getattr(func, "_schema", None)
    name = str(func)
    return name, flop_formula(func), schema is None or bool(schema.is_mutable), name == "aten.lift_fresh.default"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shares(args: tuple[Any, ...], result: Any) -> bool:
    """Tell whether a call only returned another view of its first tensor."""
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is None or not isinstance(result, Tensor):
        return False
    try:
        return result.untyped_storage() is first.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
