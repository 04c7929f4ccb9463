"""Step one parameter of an optimizer, by the optimizer's own step.

NOTE [ One parameter at a time ]
For the moment of its step, a parameter is the only one of its group, and its group the only one of the optimizer. So
the update, the learning rate of the group and the state are those of the optimizer itself, whatever it is, and its
`state_dict` is what it always is. What cannot be stepped so is noticed: an optimizer that changes its group in a step,
such as by a counter of its own, would change it once for each parameter; one that looks at all gradients, as LBFGS
does, is refused by name, and so is one that keeps tensors in attributes of its own, which may go by the place of a
parameter among all.

Hooks of the instance belong to `optimizer.step()`, which the loop still calls, once in a step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from actmem.errors import UnsupportedError

__all__ = ["check_groups", "single_step"]

_KNOWN = ("state", "param_groups", "defaults")
"""Attributes of every optimizer, whose tensors are found by parameter or group."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check_groups(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step one parameter at a time.

    Raises:
        UnsupportedError: it is such a one.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS looks at all gradients at once, and cannot step one parameter at a time. Take another optimizer, or "
            "leave out step_in_backward and optimizer_state."
        )
    for name, value in vars(optimizer).items():
        if name not in _KNOWN and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps tensors in {name!r}, and not in its state by parameter: it may take "
                "another parameter's where it steps one at a time. Keep them in optimizer.state[parameter], or leave "
                "out step_in_backward and optimizer_state."
            )


def single_step(optimizer: Optimizer, parameter: Tensor) -> None:
    """Step one parameter. See NOTE [ One parameter at a time ].

    Raises:
        UnsupportedError: the optimizer keeps something in its groups that a step changes.

    >>> first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> sgd = torch.optim.SGD([first, second], lr=0.5)
    >>> first.grad, second.grad = torch.ones(1), torch.ones(1)
    >>> single_step(sgd, first); first.item(), second.item()
    (0.5, 1.0)
    """
    groups = optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    members, before = group["params"], dict(group)
    own: Any = vars(optimizer)
    hooks = {name: own[name] for name in _HOOKS if name in own}
    version = parameter._version
    group["params"] = [parameter]
    optimizer.param_groups = [group]
    own.update({name: OrderedDict[Any, Any]() for name in hooks})
    try:
        type(optimizer).step(optimizer)  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
    finally:
        group["params"] = members
        optimizer.param_groups = groups
        own.update(hooks)
    if parameter._version == version:  # written through `.data`: a backward step that still needs it must notice
        torch.autograd.graph.increment_version(parameter)
    changed = [name for name, value in before.items() if name != "params" and not _is_same(group.get(name), value)]
    if changed:
        raise UnsupportedError(
            f"{type(optimizer).__name__} changes {', '.join(map(repr, changed))} of a parameter group in each step, "
            "which would happen once for each parameter: it cannot step one parameter at a time. Take another "
            "optimizer, or leave out step_in_backward and optimizer_state. The first parameter has been stepped: begin "
            "again from a checkpoint."
        )


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return False
    return bool(now == before)
