"""A step of a known program as a Python function that is written for it: compare the call, run it, note its result.

This runs in place of every recorded operator of a block, and a loop over what to compare would take longer than
recording the call does. So each step has a function of its own, in which every expected number is a constant:

>>> print(source_of([("args[0]", 3, 0, 0)], [], [1], {}, 2, 7, 18))
def run(tape, args, kwargs, storages, real):
    try:
        if len(args) != 2 or kwargs or default_dtype() is not tape._dtype:
            return DIFFERENT
        a = args[0]
        if type(a) is not Tensor or storages[3]() is not a.untyped_storage() or a._version != 0:
            return DIFFERENT
        if a.shape != s0 or a.stride() != t0 or a.storage_offset() != o0 or a.dtype is not d0:
            return DIFFERENT
        a = args[1]
        if a is not x1 and not equal(a, x1):
            return DIFFERENT
    except (NotImplementedError, RuntimeError):
        return DIFFERENT
    if tape._recent:
        tape._recent.clear()
    out = call(*args)
    if type(out) is not Tensor:
        return tape.surprised(out)
    storage = out.untyped_storage()
    storages[7] = ref(storage)
    tape._born[storage._cdata] = 7
    tape._at = 18
    return out
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actmem.engine.holdings import preserve_elsewhere
from actmem.torchcompat import numerics

__all__ = ["DIFFERENT", "compiled", "source_of"]

Made = tuple[str, int, int, int]
"""A tensor that the block made: where it is, its value's number, its version, and the number of its geometry."""
Given = tuple[str, int, bool, int]
"""A tensor from outside: where it is, its value's number, whether it requires grad, the number of its geometry."""


class _Different:
    """What a step returns if the call is another than its own. Nothing has run then."""


DIFFERENT = _Different()

_NAMES: dict[str, Any] = {
    "DIFFERENT": DIFFERENT,
    "Tensor": Tensor,
    "default_dtype": torch.get_default_dtype,
    "numerics": numerics,
    "preserve_elsewhere": preserve_elsewhere,
    "ref": weakref.ref,
}


def source_of(
    made: list[Made],
    given: list[Given],
    rest: list[int],
    lists: dict[int, int],
    num_args: int,
    result: int,
    then: int,
    *,
    names: tuple[str, ...] = (),
    writes: bool = False,
    flags: bool = False,
) -> str:
    """Return the source of a step.

    Args:
        made: tensors that the block made.
        given: tensors from outside.
        rest: positions of the other arguments.
        lists: position and length of each list of tensors.
        num_args: how many arguments there are.
        result: the number of the value that it makes.
        then: the position of the next step.
        names: the arguments that are given by name.
        writes: it writes its first argument.
        flags: numerics flags are compared.
    """
    named = f"not kwargs or len(kwargs) != {len(names)}" if names else "kwargs"
    tests = [f"if len(args) != {num_args} or {named} or default_dtype() is not tape._dtype:"]
    tests += [f"if not equal(kwargs.get({name!r}), {name}_):" for name in names]
    tests += [f"if type(args[{i}]) not in (list, tuple) or len(args[{i}]) != {n}:" for i, n in lists.items()]
    for where, number, version, k in made:
        tests += [
            f"a = {where}",
            f"if type(a) is not Tensor or storages[{number}]() is not a.untyped_storage() or a._version != {version}:",
            _geometry(k),
        ]
    for i in rest:
        tests += [f"a = args[{i}]", f"if a is not x{i} and not equal(a, x{i}):"]
    for where, number, requires_grad, k in given:
        tests += [
            f"a = {where}",
            f"if not isinstance(a, Tensor) or a.requires_grad is not {requires_grad}:",
            f"v = real[{number}]",
            f"if not tape.meets({number}, a) if v is None else not still(v, a):",
            _geometry(k),
        ]
    if flags:
        tests.append("if numerics() != flags:")
    lines = ["def run(tape, args, kwargs, storages, real):", "    try:"]
    for test in tests:
        lines.append(f"        {test}")
        if test.startswith("if"):
            lines.append("            return DIFFERENT")
    lines += ["    except (NotImplementedError, RuntimeError):", "        return DIFFERENT"]
    lines += ["    if tape._recent:", "        tape._recent.clear()"]
    lines += ["    preserve_elsewhere(args[0])"] if writes else []
    lines += [
        f"    out = call(*args{', **kwargs' if names else ''})",
        "    if type(out) is not Tensor:",
        "        return tape.surprised(out)",
        "    storage = out.untyped_storage()",
        f"    storages[{result}] = ref(storage)",
        f"    tape._born[storage._cdata] = {result}",
        f"    tape._at = {then}",
        "    return out",
    ]
    return "\n".join(lines)


def _geometry(k: int) -> str:
    return f"if a.shape != s{k} or a.stride() != t{k} or a.storage_offset() != o{k} or a.dtype is not d{k}:"


def compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of a source, with what its names stand for."""
    found = {**_NAMES, **names}
    exec(source, found)
    return found["run"]
