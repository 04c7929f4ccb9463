"""The comparison of a call with a step of a known program, as a Python function that is written for that step.

Comparing runs before every operator of a step, and a loop over what to compare would take longer than recording the
call does. So each step has a function of its own, in which every expected number is a constant:

>>> from actmem.engine.comparisons import source_of
>>> print(source_of([("args[0]", 3, 0, 0)], [], [1], {}, 2))
def same(tape, args, kwargs, storages, real):
    if len(args) != 2 or kwargs or default_dtype() is not tape._dtype:
        return False
    a = args[0]
    if type(a) is not Tensor or storages[3]() is not a.untyped_storage():
        return False
    if a._version != 0:
        return False
    if a.shape != s0 or a.stride() != t0 or a.storage_offset() != o0 or a.dtype is not d0:
        return False
    a = args[1]
    if a is not x1 and not equal(a, x1):
        return False
    return True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["compiled", "source_of"]

Made = tuple[str, int, int, int]
"""A tensor that the block made: where it is, its value's number, its version, and the number of its geometry."""
Given = tuple[str, int, bool, int]
"""A tensor from outside: where it is, its value's number, whether it requires grad, the number of its geometry."""


def source_of(made: list[Made], given: list[Given], rest: list[int], lists: dict[int, int], num_args: int) -> str:
    """Return the source of a comparison.

    Args:
        made: tensors that the block made.
        given: tensors from outside.
        rest: positions of the other arguments.
        lists: position and length of each list of tensors.
        num_args: how many arguments there are.
    """
    lines = [
        "def same(tape, args, kwargs, storages, real):",
        f"    if len(args) != {num_args} or kwargs or default_dtype() is not tape._dtype:",
        "        return False",
    ]
    for position, length in lists.items():
        lines += [
            f"    if type(args[{position}]) not in (list, tuple) or len(args[{position}]) != {length}:",
            "        return False",
        ]
    for where, number, version, k in made:
        lines += [
            f"    a = {where}",
            f"    if type(a) is not Tensor or storages[{number}]() is not a.untyped_storage():",
            "        return False",
            f"    if a._version != {version}:",
            "        return False",
            *_geometry(k),
        ]
    for position in rest:
        lines += [
            f"    a = args[{position}]",
            f"    if a is not x{position} and not equal(a, x{position}):",
            "        return False",
        ]
    for where, number, requires_grad, k in given:
        lines += [
            f"    a = {where}",
            f"    if not isinstance(a, Tensor) or a.requires_grad is not {requires_grad}:",
            "        return False",
            f"    v = real[{number}]",
            f"    if not tape.meets({number}, a) if v is None else not still(v, a):",
            "        return False",
            *_geometry(k),
        ]
    return "\n".join([*lines, "    return True"])


def _geometry(k: int) -> list[str]:
    return [
        f"    if a.shape != s{k} or a.stride() != t{k} or a.storage_offset() != o{k} or a.dtype is not d{k}:",
        "        return False",
    ]


def compiled(
    made: list[Made],
    given: list[Given],
    rest: list[int],
    lists: dict[int, int],
    num_args: int,
    names: dict[str, Any],
) -> Callable[..., bool]:
    """Return a comparison, with what its names stand for."""
    found: dict[str, Any] = {"Tensor": Tensor, "default_dtype": torch.get_default_dtype, **names}
    exec(source_of(made, given, rest, lists, num_args), found)
    return found["same"]
