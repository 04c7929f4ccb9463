"""What determines the memory of a step besides the example: the model's modules, and how its parameters are trained.

A plan keeps its budget only as long as this does not change. It is checked before every forward pass, so it is a flat
list of objects to compare rather than a string.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from actmem.structure.identity import is_wrapper_of

__all__ = ["Condition", "condition", "condition_digest", "difference"]

Condition = tuple[Any, ...]
"""Classes of modules, each followed by (dtype, requires_grad, shape) of its parameters."""

_GATHERED = "gathered"
"""Ends the condition of a model under FSDP2, which gathers parameters in a different dtype than it stores them in."""


def condition(model: nn.Module) -> Condition | None:
    """Return what must not change; None if FSDP has flattened many parameters into one and it cannot be determined.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    >>> before = condition(model)
    >>> condition(model) == before, condition(model.double()) == before
    (True, False)
    """
    found: list[Any] = []
    seen: set[int] = set()
    gathered = False
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        held, kind = vars(module), type(module)
        children: dict[str, nn.Module | None] = held["_modules"]
        if not children or not is_wrapper_of(module):
            gathered = gathered or _is_fsdp(kind)
            found.append(_plain(kind))
        elif kind.__name__ == "FullyShardedDataParallel":
            return None
        parameters: dict[str, nn.Parameter | None] = held["_parameters"]
        if parameters:
            found += [
                (p.dtype, p.requires_grad, None if type(p) is not nn.Parameter and is_lazy(p) else p.shape)
                for p in parameters.values()
                if p is not None
            ]
        if children:
            stack += [m for m in children.values() if m is not None]
    return (*found, _GATHERED) if gathered else tuple(found)


def condition_digest(model: nn.Module) -> str:
    """Return a short digest that is equal for two models with equal modules and the same trained parameters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    >>> before = condition_digest(model)
    >>> condition_digest(model.double()) == before, condition_digest(model.requires_grad_(False)) == before
    (True, False)
    """
    lines = [x.__qualname__ if isinstance(x, type) else repr(x[1]) for x in condition(model) or () if x != _GATHERED]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def difference(before: Condition, after: Condition) -> str:
    """Describe how two conditions differ; "" if in nothing that matters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.GELU()).requires_grad_(False)
    >>> before = condition(model)
    >>> difference(before, condition(model.double().requires_grad_()))
    'its parameters are float64 instead of float32; 6 parameters are trained instead of 0'
    """
    if after[-1:] == (_GATHERED,) or before[-1:] == (_GATHERED,):
        before, after = (tuple(_without_dtype(x) for x in its if x != _GATHERED) for its in (before, after))
    if before == after:
        return ""
    said: list[str] = []
    old, new = (Counter(x.__name__ for x in its if isinstance(x, type)) for its in (before, after))
    if old != new:
        gone, come = (", ".join(sorted(set((a - b).elements()))) for a, b in ((old, new), (new, old)))
        said.append(f"it has {come or 'no other module'} in place of {gone or 'nothing'}")
    old, new = ({_dtype(x) for x in its if not isinstance(x, type)} for its in (before, after))
    if old != new:
        said.append(f"its parameters are {' and '.join(sorted(new))} instead of {' and '.join(sorted(old))}")
    few, many = (sum(x[2].numel() for x in its if not isinstance(x, type) and x[1] and x[2]) for its in (before, after))
    if few != many:
        said.append(f"{many:,} parameters are trained instead of {few:,}")
    return "; ".join(said) or "its modules or their parameters have changed"


def _without_dtype(entry: Any) -> Any:
    return entry if isinstance(entry, type) else (None, *entry[1:])


def _dtype(entry: Any) -> str:
    return str(entry[0]).removeprefix("torch.")


@functools.cache
def _plain(kind: type) -> type:
    """Return the original class of a module for which actmem or FSDP2 created a subclass."""
    original = vars(kind).get("_actmem_original")
    if original is not None:
        return _plain(original)
    return _plain(kind.__mro__[2]) if _is_fsdp(kind) and len(kind.__mro__) > 2 else kind


@functools.cache
def _is_fsdp(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__bases__)
