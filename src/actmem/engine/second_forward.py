"""Keeping results of a forward that will run twice, and putting them back the second time: eager checkpointing.

torch's own pair of modes does the same for most models. This one also copies a kept value before the block writes to it
(the probabilities of a router, say, which are normalised in place), names what was written to unseen, and lets a
graph be used more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from actmem.decisions import Reason
from actmem.engine.holdings import storage_of
from actmem.engine.operators import Operator, describe
from actmem.engine.overwrites import written_by
from actmem.engine.values import KEPT, put_together, take_apart
from actmem.errors import VersionError
from actmem.torchcompat import TorchDispatchMode, alias_in_handler, graph_is_kept, storage_key

__all__ = ["Keeping", "Repeating"]

Answer = Callable[[Operator, tuple[Any, ...], dict[str, Any], Any], Reason | None]
"""From an operator, its arguments and its result to why that is kept; None to run it again."""

_Kept = dict[tuple[int, int], tuple[Any, list[Any], list[int | None]]]
"""(identity of the operator, how often it ran before) -> how its result is put together, leaves, their versions."""


class _Aware(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function inside the block run compiled."""
        return True

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        self._seen: Counter[int] = Counter()

    def __enter__(self) -> Any:
        self._seen.clear()
        return super().__enter__()

    def _key(self, func: Any) -> tuple[int, int]:
        key = id(func), self._seen[id(func)]
        self._seen[id(func)] += 1
        return key


class Keeping(_Aware):
    """The first run: keep what the answer says."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self.kept: _Kept = {}
        self._places: dict[int, list[tuple[tuple[int, int], int]]] = {}
        """Storage -> the kept values on it: key, and position among its leaves."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and keep its result if it must not run again."""
        operator = describe(func)
        if operator.writes and self._places:
            self._copy_before(operator, args, kwargs or {})
        out = operator.call(*args, **(kwargs or {}))
        key = self._key(func)
        why = self._answer(operator, args, kwargs or {}, out)
        if why is not None:
            leaves: list[Any] = []
            spec = take_apart(out, leaves)
            held = [_hold(leaf, why) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.kept[key] = spec, held, [_version(leaf) for leaf in held]
            for position, leaf in enumerate(held):
                if isinstance(leaf, Tensor) and (storage := storage_of(leaf)) is not None:
                    self._places.setdefault(storage_key(storage), []).append((key, position))
        return out

    def _copy_before(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the kept values whose storage an operator is about to write to."""
        for _, _, tensor in written_by(operator, args, kwargs):
            for key, position in self._places.pop(storage_key(tensor.untyped_storage()), ()):
                _, held, versions = self.kept[key]
                held[position] = held[position].clone()
                versions[position] = _version(held[position])


class Repeating(_Aware):
    """The second run: put back what was kept, and run the rest."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Put back the result of an operator, or run it."""
        key = self._key(func)
        found = self._kept.get(key)
        if found is None:
            return describe(func).call(*args, **(kwargs or {}))
        spec, held, versions = found
        again = graph_is_kept()
        if not again:
            del self._kept[key]
        for leaf, version in zip(held, versions, strict=True):
            if _version(leaf) != version:
                raise VersionError(
                    f"what {describe(func).name} made is saved by the plan, but the program has written on it since, "
                    "and torch's checkpoint can only put back what is there now. Leave engine='checkpoint' out: the "
                    f"tape copes. Or let it be recomputed: Rule('recompute', op='{describe(func).packet}')."
                )
        return put_together(spec, (leaf.clone() if again and isinstance(leaf, Tensor) else leaf for leaf in held))


def _hold(tensor: Tensor, why: Reason) -> Tensor:
    """Hold what the plan keeps as it is, and what must not run again as a copy."""
    return alias_in_handler(tensor) if why in KEPT else tensor.detach().clone()


def _version(leaf: Any) -> int | None:
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return None
    return leaf._version
