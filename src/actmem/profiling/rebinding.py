"""Point functions that were put on a model at a copy of it.

Libraries replace the forward of one model by a function that remembers that model: in its closure, as the object that a
method is bound to, or in a partial. `copy.deepcopy` copies no function, so the copy would go on to run the original.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

from torch import nn

__all__ = ["rebind"]


def rebind(copied: nn.Module, originals: dict[int, nn.Module]) -> None:
    """Exchange the modules that functions on a copy remember for their copies.

    Args:
        copied: the copy.
        originals: id of a module of the original -> its copy.

    >>> model = nn.Linear(2, 2)
    >>> model.forward = lambda x: model.weight  # type: ignore[assignment]
    >>> import copy
    >>> again = copy.deepcopy(model)
    >>> again.forward(None) is model.weight
    True
    >>> rebind(again, {id(model): again})
    >>> again.forward(None) is again.weight
    False
    """
    for module in copied.modules():
        for name, found in [*vars(module).items()]:
            if isinstance(found, (types.FunctionType, types.MethodType, partial)):
                changed = _rebound(found, originals, {})  # pyright: ignore[reportUnknownArgumentType]
                if changed is not found:
                    vars(module)[name] = changed


def _rebound(found: Any, originals: dict[int, nn.Module], seen: dict[int, Any]) -> Any:
    """Return a function, method, partial or module that speaks of the copies; itself if it speaks of none."""
    key = id(found)
    if key in seen:
        return seen[key]
    seen[key] = found  # a function that remembers itself
    if isinstance(found, nn.Module):
        return originals.get(id(found), found)
    changed: Any = found
    if isinstance(found, types.MethodType):
        owner, function = (_rebound(x, originals, seen) for x in (found.__self__, found.__func__))
        if owner is not found.__self__ or function is not found.__func__:
            changed = types.MethodType(function, owner)
    elif isinstance(found, partial):
        held: list[Any] = [found.func, *found.args, *found.keywords.values()]  # pyright: ignore[reportUnknownMemberType]
        now = [_rebound(x, originals, seen) for x in held]
        if any(a is not b for a, b in zip(held, now, strict=True)):
            num = 1 + len(found.args)
            changed = partial(now[0], *now[1:num], **dict(zip(found.keywords, now[num:], strict=True)))
    elif isinstance(found, types.FunctionType):
        changed = _function(found, originals, seen)
    else:
        return found
    seen[key] = changed
    return changed


def _function(found: types.FunctionType, originals: dict[int, nn.Module], seen: dict[int, Any]) -> Any:
    def content(cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not filled yet
            return cell

    cells = found.__closure__ or ()
    defaults, named = found.__defaults__ or (), found.__kwdefaults__ or {}
    held = [*(content(cell) for cell in cells), *defaults, *named.values()]
    now = [_rebound(x, originals, seen) for x in held]
    wrapped = getattr(found, "__wrapped__", None)
    if all(a is b for a, b in zip(held, now, strict=True)):
        return found
    num, last = len(cells), len(cells) + len(defaults)
    closure = tuple(c if a is b else types.CellType(b) for c, a, b in zip(cells, held[:num], now[:num], strict=True))
    given = found.__defaults__ and tuple(now[num:last])
    changed = types.FunctionType(found.__code__, found.__globals__, found.__name__, given, closure)
    changed.__kwdefaults__ = found.__kwdefaults__ and dict(zip(named, now[last:], strict=True))
    changed.__dict__.update(found.__dict__)
    if wrapped is not None:
        changed.__dict__["__wrapped__"] = _rebound(wrapped, originals, seen)
    return changed
