"""Triton's launches: seen by their launcher, with the arguments that they write.

torch does not dispatch a launch, so a kernel that writes into a tensor which the tape knows would go unnoticed, and a
replay would start from other bytes than the forward had. The launcher is a method of a few classes of Triton, which is
wrapped where a process has imported them. What a kernel writes is read in its source (`written_parameters`): where a
parameter is part of an address that is stored to.

An output that was born uninitialised stays what it is, a value that is not replayed. In Triton's interpreter a launch
runs torch's operators on copies of all arguments: these are not recorded either.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from actmem.decisions import Reason
from actmem.engine.holding_rules import others_reach
from actmem.engine.holdings import storage_of
from actmem.engine.operators import Operator
from actmem.engine.tape import Tape
from actmem.engine.values import take_apart
from actmem.engine.whole_calls import record_call, recording, unrecorded
from actmem.torchcompat import FakeTensor

__all__ = ["record_launches", "written_by_launch", "written_parameters"]

_LAUNCHERS = {
    "triton.runtime.jit": ("JITFunction",),
    "triton.runtime.interpreter": ("InterpretedFunction",),
    "triton.runtime.autotuner": ("Autotuner", "Heuristics"),
}
_seen: set[Any] = set()
"""The classes whose launches are noticed by now."""
_FILLED = (Reason.UNINITIALISED, Reason.CONSTANT)


def record_launches() -> None:
    """Have the Triton launches of this process noticed where a tape records, if it has imported Triton."""
    for module, names in _LAUNCHERS.items():
        for name in names:
            kind: Any = getattr(sys.modules.get(module), name, None)
            if kind is not None and kind not in _seen:
                _seen.add(kind)
                kind.run = _watched(kind.run)


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, FakeTensor) for a in (*args, *kwargs.values())):
            return None  # there are no bytes to write
        tape = recording()
        if tape is None:
            return original(self, *args, **kwargs)
        return _launch(tape, self, functools.partial(original, self), args, kwargs)

    return run


def _launch(tape: Tape, kernel: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a launch unrecorded, and make a new version of each known value that it writes."""
    if tape.observation is not None:
        tape.observation.launched()
    parameters = _parameters_of(_function(kernel))
    names = range(len(args)) if parameters is None else parameters.names
    named: dict[Any, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    changed = [
        a for name, a in named.items() if isinstance(a, Tensor) and (parameters is None or name in parameters.written)
    ]
    known = {id(a) for a in changed if _is_known(tape, a)}
    if not known:
        return unrecorded(tape, call, args, kwargs)
    leaves: list[Any] = []
    take_apart((args, kwargs), leaves)
    where = [i for i, leaf in enumerate(leaves) if id(leaf) in known]
    name = getattr(_function(kernel), "__name__", "kernel")
    return record_call(tape, Operator(call, f"triton.{name}"), call, args, kwargs, written=where, never=Reason.OPAQUE)


def _is_known(tape: Tape, tensor: Tensor) -> bool:
    """Return whether a write to a tensor matters to the tape: others may read, or already hold, its present bytes."""
    if storage_of(tensor) is None:
        return False
    value = tape._lookup(tensor)
    if value is None or value.why not in _FILLED or value.held is not None or value.reserved:
        return True
    value.coverage = value.pending = None  # what other operators filled is no longer all that is in it
    return others_reach(value, 2)


# -------------------------------------------------------------------- what a kernel writes


def _function(kernel: Any) -> Any:
    """Return the Python function of a kernel, from inside what autotunes or interprets it."""
    for _ in range(8):
        inner = getattr(kernel, "fn", None)
        if inner is None:
            break
        kernel = inner
    return kernel


def written_by_launch(kernel: Any) -> frozenset[str] | None:
    """Return the parameters that a Triton kernel may write; None if its source cannot be read."""
    found = _parameters_of(_function(kernel))
    return None if found is None else found.written


@dataclass(frozen=True)
class _Parameters:
    """The parameters of a kernel, in order, and those that it may write."""

    names: tuple[str, ...]
    written: frozenset[str]


@functools.cache
def _parameters_of(function: Any) -> _Parameters | None:
    """Return what is known of a kernel's parameters; None if its source cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        names = tuple(inspect.signature(function).parameters)
    except (OSError, TypeError, ValueError):
        return None
    scope: dict[str, Any] = getattr(function, "__globals__", {})

    def helper(name: str) -> _Parameters | None:
        first, _, rest = name.partition(".")
        found = scope.get(first)
        for part in filter(None, rest.split(".")):
            found = getattr(found, part, None)
        inner = _function(found)
        return None if inner is found or inner is function else _parameters_of(inner)

    return _Parameters(names, written_parameters(source, helper))


def written_parameters(source: str, helper: Callable[[str], _Parameters | None] = lambda _: None) -> frozenset[str]:
    """Return the parameters of a kernel that it may write, by its source.

    A parameter is written if it is part of an address that is stored to, or that is given to a function of which
    nothing is known. What was loaded is not an address.

    Args:
        source: the kernel's definition.
        helper: returns the parameters of another kernel that it calls, by the name that it has here.

    >>> sorted(written_parameters('''
    ... def kernel(x_ptr, out_ptr, count_ptr, n):
    ...     at = tl.arange(0, 64)
    ...     row = out_ptr + at
    ...     x = tl.load(x_ptr + at, mask=at < n)
    ...     tl.store(row, x * 2, mask=at < n)
    ...     tl.atomic_add(count_ptr, 1)
    ... '''))
    ['count_ptr', 'out_ptr']
    """
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    arguments = tree.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    found = _Addresses({name: {name} for name in names}, helper)
    size = -1
    while size != (size := found.size):  # until nothing is added: addresses may be passed on in a loop
        for statement in tree.body:
            found.visit(statement)
    return frozenset(found.written)


_PURE = frozenset({"tl", "triton", "range", "min", "max", "float", "int", "abs", "len", "libdevice", "math"})
"""What may be called, or whose functions may be, without anything being stored."""
_STORES = ("store", "atomic_", "async_", "inline_asm")


class _Addresses(ast.NodeVisitor):
    """Follows the parameters of a kernel through its assignments."""

    def __init__(self, roots: dict[str, set[str]], helper: Callable[[str], _Parameters | None]) -> None:
        self._roots, self._helper = roots, helper
        self.written: set[str] = set()

    @property
    def size(self) -> int:
        """How much is known."""
        return len(self.written) + sum(map(len, self._roots.values()))

    def visit_Assign(self, node: ast.Assign) -> None:
        """Pass on what an expression may point into."""
        for target in node.targets:
            self._assign(target, node.value)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Pass on what an expression may point into."""
        self._assign(node.target, node.value)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Pass on what an expression may point into."""
        if node.value is not None:
            self._assign(node.target, node.value)
            self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """Pass on what an expression may point into."""
        self._assign(node.target, node.value)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """Find stores, and calls that may store."""
        called = ast.unparse(node.func)
        by_name = {k.arg: k.value for k in node.keywords}
        if called.rpartition(".")[2].startswith(_STORES):
            self._write(node.func, *node.args[:1], *by_name.values())
        elif called.partition(".")[0] not in _PURE and not (
            isinstance(node.func, ast.Attribute) and self._of(node.func)
        ):
            inner = self._helper(called)
            if inner is None:
                self._write(*node.args, *by_name.values())
            else:
                given = {**dict(zip(inner.names, node.args, strict=False)), **by_name}
                self._write(*(x for name, x in given.items() if name in inner.written))
        self.generic_visit(node)

    def _write(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.written |= self._of(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self._roots.setdefault(name.id, set()).update(self._of(value))

    def _of(self, node: ast.AST) -> set[str]:
        """Return the parameters that an expression may be an address into."""
        if isinstance(node, ast.Name):
            return self._roots.get(node.id, set())
        if isinstance(node, ast.Compare):  # a mask
            return set()
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "load":
            return set()
        return set[str]().union(*(self._of(child) for child in ast.iter_child_nodes(node)))
