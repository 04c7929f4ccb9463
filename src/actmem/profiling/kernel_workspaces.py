"""What the CPU's kernels take for themselves, for a step that runs on fake tensors.

NOTE [ Workspaces on fakes ]
A fake tensor shows what an operator returns, and not what its kernel allocates and frees while it runs: the tile in
which attention multiplies, the indices that a sort moves along. So each call runs once for real, by itself, and the
allocator's log says what it took. Calls are the same if operator, shapes, memory layout and numbers are. Their tensors
are zeros, which every index may be, and masks select everything: other numbers do not take more.

A grouped product is the exception: how many rows its largest group has is a router's choice, and its kernel copies
those rows. More rows may take less, where the kernel begins to go through them piece by piece. So it runs with one
group of many sizes, up to all rows, and the most that it took is what counts, however the rows are routed.

Operators of other libraries may have effects: they do not run. The random generator is as before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actmem.measuring import workspace_bytes
from actmem.torchcompat import log_allocations, logged_allocations, never_compile, op_name, without_dispatch_modes

__all__ = ["KernelWorkspaces"]

_LIBRARIES = ("aten", "mkldnn", "prims")
_EACH, _OFTEN = 64, 512
"""Groups of a grouped product: every size up to the first number is tried, every multiple of it up to the second, and
beyond those powers of two."""


class KernelWorkspaces:
    """Remembers what each call took."""

    def __init__(self) -> None:
        self._found: dict[Hashable, int] = {}
        self._unknown: dict[str, None] = {}

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of operators that cannot be asked."""
        return tuple(self._unknown)

    @never_compile
    def taken_by(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the bytes that the kernel of a call takes for itself.

        >>> fake = torch.empty(64, 100, device="meta")
        >>> add, sort = torch.ops.aten.add.Tensor, torch.ops.aten.sort.default
        >>> KernelWorkspaces().taken_by(add, (fake, fake), {}), KernelWorkspaces().taken_by(sort, (fake,), {}) > 0
        (0, True)
        """
        if not hasattr(func, "_schema"):  # it calls another: that of a graph which keeps the generator's state, say
            at = next((n for n, arg in enumerate(args) if hasattr(arg, "_schema")), None)
            if at is not None:
                func, args = args[at], args[at + 1 :]
        if getattr(func, "is_view", False):
            return 0
        try:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key = func, spec, tuple(map(_described, leaves))
            if key not in self._found:
                self._found[key] = _measured(func, leaves, spec)
            return self._found[key]
        except (RuntimeError, TypeError, ValueError, IndexError):  # other tensors than these zeros are needed
            self._unknown[op_name(func)] = None
            return 0


def _described(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf).__name__, leaf  # True is 1, and another argument


def _measured(func: Any, leaves: list[Any], spec: Any) -> int:
    if getattr(func, "namespace", "") not in _LIBRARIES:
        raise TypeError("what other libraries do is not known")
    with without_dispatch_modes(), torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
        args, kwargs = pytree.tree_unflatten(list(map(_real, leaves)), spec)
        return max(_run(func, args, kwargs) for _ in _group_sizes(func, args, kwargs))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if not log_allocations():
        raise RuntimeError("another profiler runs")
    try:
        result = func(*args, **kwargs)
    finally:
        changes = logged_allocations()
    del result
    return workspace_bytes([change for change in changes if isinstance(change, int)])


def _group_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """Give the first group of a grouped product as many rows as it may have, one number after the other."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ends = given.get("offs")
    if ends is None:
        yield 0
        return
    one, other = given["self"], given["mat2"]
    most = other.shape[-1] if one.dim() == 3 else one.shape[-1] if other.dim() == 2 else one.shape[0]
    tried = {*range(_EACH + 1), *range(_EACH, _OFTEN + 1, _EACH), *(2**n for n in range(most.bit_length()))}
    for size in sorted(n for n in {*tried, most} if n <= most):
        ends.fill_(size)
        yield size


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    length = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    made = torch.full((length if leaf.numel() else 0,), leaf.dtype is torch.bool, dtype=leaf.dtype)
    return made.as_strided(leaf.shape, leaf.stride())
