"""Inspect the source of a model's autograd functions for a backward that reads its saved tensors twice."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.autograd import Function

from actmem.diagnosis.findings import Finding, NotMadeError, paths
from actmem.diagnosis.regions import Case

__all__ = ["saved_tensors_twice"]

_MAX_DEPTH = 3
_IN_LOOP = 2


def saved_tensors_twice(case: Case) -> Iterator[Finding]:
    """Look for functions whose backward reads `ctx.saved_tensors` more than once on some path."""
    users: dict[type[Function], list[str]] = {}
    for path, module in case.modules:
        for function in _functions_of(type(module)):
            users.setdefault(function, []).append(path)
    unread: list[str] = []
    for function, where in users.items():
        try:
            num_reads = _num_reads(function)
        except (OSError, TypeError, SyntaxError):
            unread.append(function.__qualname__)
            continue
        if num_reads > 1:
            yield Finding(
                check="saved-tensors-twice",
                severity="problem" if case.checkpointing and case.reentrant is None else "note",
                found=f"{function.__module__}.{function.__qualname__}.backward reads ctx.saved_tensors more than once "
                f"(used at {paths(where)})",
                why="Non-reentrant checkpointing returns each saved tensor only once: “Unpack is being triggered for a "
                "tensor that was already unpacked once”.",
                change="x, weight = ctx.saved_tensors, once, at the top of backward.",
                actmem="Saved tensors may be read as often as in plain training.",
            )
    if unread:
        raise NotMadeError(f"no source is available for {', '.join(unread)}")


def _functions_of(kind: type[nn.Module]) -> set[type[Function]]:
    """Find the autograd functions that a class's methods refer to, directly or through other functions."""
    found: set[type[Function]] = set()
    seen: set[int] = set()
    methods = [f for base in kind.__mro__ if not _is_torch(base.__module__) for f in vars(base).values()]
    _follow((f for f in methods if isinstance(f, FunctionType)), found, seen, _MAX_DEPTH)
    return found


def _follow(functions: Iterable[FunctionType], found: set[type[Function]], seen: set[int], depth: int) -> None:
    for function in functions:
        if id(function) in seen:
            continue
        seen.add(id(function))
        named = list(_named_in(function))
        found.update(v for v in named if isinstance(v, type) and issubclass(v, Function) and v is not Function)
        if depth:
            further = (v for v in named if isinstance(v, FunctionType) and not _is_torch(v.__module__))
            _follow(further, found, seen, depth - 1)


def _named_in(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function's global names refer to; for modules, also the attributes it uses."""
    names, attributes = set[str](), set[str]()
    _collect(function.__code__, names, attributes)
    cells = inspect.getclosurevars(function).nonlocals.values() if function.__closure__ else ()
    for value in (*(function.__globals__[n] for n in names if n in function.__globals__), *cells):
        yield value
        if isinstance(value, ModuleType) and not _is_torch(value.__name__):
            yield from (vars(value)[n] for n in attributes if n in vars(value))


def _collect(code: CodeType, names: set[str], attributes: set[str]) -> None:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(instruction.argval))
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, names, attributes)


def _is_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "builtins")


def _num_reads(function: type[Function]) -> int:
    """Return the largest number of reads of `saved_tensors` on any path through a backward."""
    backward: Any = inspect.unwrap(vars(function).get("backward", function.backward))
    source = textwrap.dedent(inspect.getsource(getattr(backward, "__func__", backward)))
    return _reads(ast.parse(source).body)


def _reads(nodes: Iterable[ast.AST]) -> int:
    total = 0
    listed = list(nodes)
    for index, node in enumerate(listed):
        if isinstance(node, ast.Attribute) and node.attr == "saved_tensors":
            total += 1
        elif isinstance(node, ast.If):
            total += _reads([node.test])
            if isinstance(node.body[-1], ast.Return | ast.Raise):  # the code after it belongs to the other path
                return total + max(_reads(node.body), _reads([*node.orelse, *listed[index + 1 :]]))
            total += max(_reads(node.body), _reads(node.orelse))
        elif isinstance(node, ast.IfExp):
            total += _reads([node.test]) + max(_reads([node.body]), _reads([node.orelse]))
        elif isinstance(node, ast.For | ast.While):
            total += _IN_LOOP * _reads(node.body) + _reads(node.orelse)
            total += _reads([node.iter]) if isinstance(node, ast.For) else _IN_LOOP * _reads([node.test])
        else:
            total += _reads(ast.iter_child_nodes(node))
    return total
