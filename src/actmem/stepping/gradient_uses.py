"""Notice what would use gradients that are dropped in the backward pass: clipping, and gradient scalers.

A gradient that is gone makes no noise: torch clips what is there, and a scaler finds nothing to check only after the
parameters were stepped by scaled gradients. So while parameters are stepped in the backward pass, torch's functions
that do either ask here first. They are reached through the module that defines them, whatever name they were imported
by.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree

from actmem.errors import UnsupportedError

__all__ = ["notice_uses"]

_owners: list[set[int]] = []
"""Parameters that are stepped in the backward pass, of each runner."""
_restore: list[Callable[[], None]] = []


def notice_uses(parameters: set[int]) -> Callable[[], None]:
    """Raise where gradients of these parameters are clipped or scaled, until the returned function is called."""
    if not _owners:
        _install()
    _owners.append(parameters)

    def end() -> None:
        _owners.remove(parameters)
        if not _owners:
            while _restore:
                _restore.pop()()

    return end


def _install() -> None:
    module: Any = clip_grad
    missing = [name for name in (_BY_NORM, _GROUPING) if not hasattr(module, name)]
    if missing:
        raise UnsupportedError(
            f"this torch ({torch.__version__}) clips gradients in a way that is not known ({', '.join(missing)} is not "
            "there), so clipping would not be noticed. Leave out step_in_backward."
        )
    _wrap(module, _BY_NORM, _refuse_norm)
    _wrap(torch.nn.utils, _BY_NORM.removeprefix("_"), _refuse_norm)
    _wrap(module, _GROUPING, _refuse_value)
    _wrap(GradScaler, "scale", _refuse_scaling)


_BY_NORM, _GROUPING = "_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype"


def _wrap(owner: Any, name: str, check: Callable[[tuple[Any, ...]], None]) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def asked(*args: Any, **kwargs: Any) -> Any:
        check((*args, *kwargs.values()))
        return plain(*args, **kwargs)

    setattr(owner, name, asked)
    _restore.append(lambda: setattr(owner, name, plain))


def _is_stepped(tensor: object) -> bool:
    return any(id(tensor) in owned for owned in _owners)


def _refuse_norm(args: tuple[Any, ...]) -> None:
    """Refuse to clip by a norm: the parameters come first."""
    given: Iterable[Any] = [args[0]] if isinstance(args[0], Tensor) else args[0]
    if any(_is_stepped(p) for p in given):
        raise UnsupportedError(_CLIPPED)


def _refuse_value(args: tuple[Any, ...]) -> None:
    """Refuse to clip by value: only the gradients are seen, and there are none."""
    if sys._getframe(2).f_code.co_name == "clip_grad_value_" and not any(args[0]):  # pyright: ignore[reportPrivateUsage]
        raise UnsupportedError(_CLIPPED)


_CLIPPED = (
    "gradients are clipped, but each was dropped in the backward pass, when its parameter was stepped: clipping needs "
    "all of them at once, before any parameter is stepped. Leave out step_in_backward, or the clipping (in trainers: "
    "max_grad_norm=0). The parameters have been stepped without it: begin again from a checkpoint."
)


def _refuse_scaling(args: tuple[Any, ...]) -> None:
    """Refuse to scale a loss that leads to a parameter that would be stepped by its scaled gradient."""
    scaler, outputs = cast("GradScaler", args[0]), args[1]
    if not scaler.is_enabled():
        return
    waiting = [t.grad_fn for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _is_stepped(getattr(node, "variable", None)):
            raise UnsupportedError(
                "a GradScaler scales the loss, and each parameter would be stepped by its scaled gradient in the "
                "backward pass, before the scaler can undo that or skip the step. Leave out step_in_backward, or train "
                "in bfloat16 without a scaler: GradScaler(enabled=False)."
            )
        waiting += [following for following, _ in node.next_functions]
