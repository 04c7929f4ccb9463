"""Compiled functions inside a block: each call of a graph is one operator of the tape.

NOTE [ Compiled regions ]
What torch.compile makes of a function with a gradient is an autograd Function whose forward calls a compiled graph. The
graph is a pure function of its inputs and of the generator: it returns the function's results, and after them what its
own backward will need. So the tape records the call as it records an operator, and a replay calls the same graph. The
Function keeps what it saves with `save_for_backward`, which goes through the hooks of the tape like any other saved
tensor.

inductor's graphs are taken so. Those of `aot_eager` run operator by operator, and the tape sees each of them, which is
more: a plan can name what is inside.

A graph is not replayed if it communicates, adds in an order that is not fixed, calls operators that torch calls
nondeterministic on an accelerator, or some whose effects nobody knows. Its source says so, and then what it makes is
held. A graph that decides routing is replayed: all that it makes comes from one run of the same kernels on the same
bits, so that no tie can break differently for a part of it.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from actmem.compilercompat import begin_versions, on_compiled_function, seen_region
from actmem.decisions import Reason
from actmem.engine.operators import UNREPEATABLE_ON_ACCELERATOR, Operator
from actmem.engine.values import storages_of, tensors
from actmem.engine.whole_calls import record_call, recording
from actmem.errors import UnsupportedError
from actmem.torchcompat import never_compile, storage_key

__all__ = ["declared_pure", "record_compiled_regions"]

_NAME = "higher_order.inductor_compiled_code"
"""What torch calls a compiled graph that is seen as one operator."""

_NEVER = (
    (Reason.COLLECTIVE, re.compile(r"_c10d_functional\.|\bc10d\.|symm_mem")),
    (Reason.UNREPEATABLE, re.compile(r"\batomic_add\(")),
    (Reason.OPAQUE, re.compile(r"torch\.ops\.(?!(aten|prims|inductor|mkldnn|mkl|quantized|onednn)\.)\w+\.")),
)
"""What the source of a graph must not contain if it is to run again."""
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)")


class Region:
    """A compiled graph, in place of itself: calls are recorded where a tape records."""

    def __init__(self, call: Any, graph: Any, metadata: Any) -> None:
        self.call = call
        """The graph, or what was wrapped around it."""
        self.graph = graph
        self.operator = Operator(self._again, _NAME)
        self.written = tuple(metadata.mutated_graph_handled_indices)
        self.metadata = metadata
        self.never = _never(graph.source_code)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    @never_compile
    def __call__(self, args: list[Any]) -> Any:
        """Call the graph."""
        tape = recording()
        if tape is None:
            return seen_region(self.call, args)
        if _is_in_a_pool(self.graph):
            raise UnsupportedError(
                "a compiled function inside an applied block uses CUDA graphs (mode='reduce-overhead' or "
                "'max-autotune'): its results lie in a pool that the next call overwrites, so they can neither be kept "
                "nor replayed. Compile it with mode='default' or 'max-autotune-no-cudagraphs'."
            )
        never = None if self.never is Reason.OPAQUE and is_declared_pure() else self.never
        out = record_call(tape, self.operator, self._first, (args,), {}, written=self.written, never=never)
        if self.metadata.num_tensors_saved_with_no_vc_check:
            # What a Function in the graph has put on its `ctx` itself: no hook of autograd sees it, and torch holds it.
            tape.held_elsewhere(out[self.metadata.tensors_saved_for_backwards_no_vc_check_slice])
        return out

    def _first(self, args: list[Any]) -> Any:
        out = seen_region(self.call, list(args))
        given = storages_of([a for a in args if isinstance(a, Tensor)])
        # A kernel that writes its result with `out=` leaves it at version 1: the tape would take it for overwritten.
        begin_versions([t for t in tensors(out) if t._version and storage_key(t.untyped_storage()) not in given])
        return out

    def _again(self, args: list[Any]) -> Any:
        return seen_region(self.call, list(args))


_declared = threading.local()


def is_declared_pure() -> bool:
    """Return whether the function that runs now was declared pure by whoever wrote it."""
    return getattr(_declared, "depth", 0) > 0


def declared_pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled function whose graphs are pure even if they call operators that nobody knows.

    Its graphs are recorded as they are, one by one: around them, autograd saves what their backward needs.
    """

    @never_compile
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _declared.depth = getattr(_declared, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _declared.depth -= 1

    return run


class DividedRegion:
    """A compiled graph that runs operator by operator, in place of itself: notes for the report that it ran."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    @never_compile
    def __call__(self, *args: Any) -> Any:
        """Call the graph."""
        tape = recording()
        if tape is not None and tape.observation is not None:
            tape.observation.divided.append(tape.address)
        return self.call(*args)


def _never(source: str) -> Reason | None:
    """Return why a graph may not run again, by its source; None if it may.

    >>> _never("buf0 = torch.ops.aten.topk.default(arg0_1, 2)"), _never("buf1 = torch.ops.mine.counted.default(buf0)")
    (None, 'opaque')
    >>> _never("atomic_add(&out_ptr0[0], tmp1);"), _never("torch.ops._c10d_functional.all_reduce_.default(buf0)")
    ('unrepeatable', 'collective')
    """
    found = next((reason for reason, pattern in _NEVER if pattern.search(source)), None)
    if found is None and torch.accelerator.is_available() and not torch.are_deterministic_algorithms_enabled():
        called = {match.group(1) for match in _ATEN.finditer(source)}
        found = Reason.UNREPEATABLE if called & UNREPEATABLE_ON_ACCELERATOR else None
    return found


def _is_in_a_pool(graph: Any) -> bool:
    """Return whether a graph runs as a CUDA graph.

    >>> from types import SimpleNamespace
    >>> [_is_in_a_pool(SimpleNamespace(fx_kwargs={"cudagraphs": True}, device_types={d})) for d in ("cuda", "cpu")]
    [True, False]
    """
    kwargs: dict[str, Any] = getattr(graph, "fx_kwargs", {})
    return bool(kwargs.get("cudagraphs")) and bool({"cuda", "xpu"} & set(getattr(graph, "device_types", ())))


def record_compiled_regions() -> bool:
    """Have the compiled graphs of this process recorded where a tape records. False if this torch does not let us."""
    return on_compiled_function(_take)


def _take(kind: Any) -> None:
    graph = _graph_in(kind.compiled_fw)
    if graph is None:
        kind.compiled_fw = DividedRegion(kind.compiled_fw)
    elif not kind.metadata.tokens:
        kind.compiled_fw = Region(kind.compiled_fw, graph, kind.metadata)
        kind._backward_impl = staticmethod(_seen_backward(kind._backward_impl))


def _seen_backward(original: Any) -> Any:
    @never_compile
    def backward(ctx: Any, args: list[Any]) -> Any:
        return seen_region(lambda args: original(ctx, args), args)

    return backward


def _graph_in(call: Any, depth: int = 4) -> Any:
    """Return inductor's graph, from inside the functions that torch or a backend wrapped around it; None if none is."""
    if type(call).__name__ == "CompiledFxGraph":
        return call
    inside: list[Any] = []
    if isinstance(call, FunctionType):
        inside = [cell.cell_contents for cell in call.__closure__ or ()]
    elif isinstance(call, functools.partial):
        inside = [call.func, *call.args]
    found = (_graph_in(x, depth - 1) for x in inside if depth)
    return next((graph for graph in found if graph is not None), None)
