"""The private parts of torch's compiler that actmem uses. See `torchcompat.py`.

The compiler is slow to import, and nothing here does so before something is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.utils.checkpoint as _checkpoint

from actmem.torchcompat import COMPILER, dispatch_modes

__all__ = [
    "begin_versions",
    "break_graph",
    "compiled_functions",
    "compiler_budget",
    "compiles_never",
    "graph_breaks",
    "innermost_backend",
    "is_compiled_backward",
    "is_compiled_function",
    "keep_graph_order",
    "leave_frame",
    "on_compiled_function",
    "saved_by_partitioner",
    "seen_region",
    "set_compiler_budget",
]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_eval_frame: Any = _C._dynamo.eval_frame
_BITS = (_C.DispatchKey.Conjugate, _C.DispatchKey.Negative)
_set_versions: Callable[[Any, Any], None] = _C._autograd._unsafe_set_version_counter


def break_graph() -> None:
    """End a graph here, while a frame is being compiled."""
    torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]


def leave_frame() -> Any:
    """Return what tells Dynamo to run one frame as it is, now, and to look at those that it calls."""
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn(apply_to_code=False)


def graph_breaks() -> dict[str, int]:
    """Count the graph breaks of this process by their reason, in torch's words: the first line of each."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    found: dict[str, int] = {}
    for reason, count in ({} if dynamo is None else dict(dynamo.counters["graph_break"])).items():
        first = str(reason).strip().partition("\n")[0]
        found[first] = found.get(first, 0) + count
    return found


def compiles_never(code: Any) -> bool:
    """Return whether Dynamo never begins a graph in this code: torch's own, and that of Python."""
    import torch._dynamo.trace_rules as rules

    return bool(cast(Any, rules).check(code))


def innermost_backend(compiler: Any) -> Any:
    """Return the backend that a compiler of frames compiles graphs with."""
    import torch._dynamo.eval_frame as eval_frame

    return cast(Any, eval_frame).innermost_backend(compiler)


def saved_by_partitioner(listener: Callable[[list[Any]], None]) -> None:
    """Call the listener once, with the nodes that the next partitioned graph saves for its backward pass."""
    import torch._functorch.partitioners as partitioners  # imported late: it is slow, and only compiling needs it

    module: Any = partitioners
    _PARTITION_LISTENER[:] = [listener]  # every block of a graph asks for the same one
    clean = module.cleanup_recompute_tags
    if clean.__name__ != _CLEANING:

        def clean_all(joint_module: Any, *, is_default_partition: bool) -> Any:
            # torch's default partitioner drops values it merely prefers to save if no backward step reads them itself.
            module.cleanup_recompute_tags = clean
            for node in joint_module.graph.nodes if is_default_partition else ():
                if node.meta.get("recompute") == _checkpoint.CheckpointPolicy.PREFER_SAVE:
                    node.meta["recompute"] = _checkpoint.CheckpointPolicy.MUST_SAVE
            return clean(joint_module, is_default_partition=is_default_partition)

        clean_all.__name__ = _CLEANING
        module.cleanup_recompute_tags = clean_all
    extract = module._extract_fwd_bwd_modules
    if extract.__name__ == _TELLING:
        return

    def tell(joint_module: Any, saved_values: list[Any], *args: Any, **kwargs: Any) -> Any:
        module._extract_fwd_bwd_modules = extract
        found = extract(joint_module, saved_values, *args, **kwargs)  # removes what no backward step needs
        while _PARTITION_LISTENER:
            _PARTITION_LISTENER.pop()(list(saved_values))
        return found

    tell.__name__ = _TELLING
    module._extract_fwd_bwd_modules = tell


def compiled_functions() -> Iterator[Any]:
    """Yield the autograd Functions that torch.compile has made in this process: one for each graph with a backward."""
    for kind in torch.autograd.Function.__subclasses__():
        if hasattr(kind, "_aot_id") and hasattr(kind, "compiled_fw"):
            yield kind


def is_compiled_function(function: Any) -> bool:
    """Return whether a function is what torch.compile made of another.

    >>> is_compiled_function(torch.sin)
    False
    """
    return hasattr(function, "_torchdynamo_orig_callable")


def is_compiled_backward(node: Any) -> bool:
    """Return whether a backward step is that of a compiled graph."""
    return hasattr(getattr(node, "_forward_cls", None), "_aot_id")


def on_compiled_function(listener: Callable[[Any], None]) -> bool:
    """Call the listener with every Function that torch.compile makes from now on. False if this torch cannot tell.

    Nothing is compiled before its compiler is imported, so nothing is done before that either.
    """
    module: Any = sys.modules.get(COMPILER)
    if module is None:
        return True
    module._actmem_watches = True
    factory: Any = getattr(module, "_AOTDispatchAutogradFunctionFactory", None)
    build: Any = getattr(factory, "build", None)
    if build is None:
        return False
    if build.__name__ == _BUILDING:
        return True

    def build_and_tell(self: Any) -> Any:
        kind = build(self)
        listener(kind)
        return kind

    build_and_tell.__name__ = _BUILDING
    factory.build = build_and_tell
    for kind in compiled_functions():
        listener(kind)
    return True


def seen_region(call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    """Call a compiled graph so that the active dispatch modes see it as one operator, if all of them can."""
    modes = dispatch_modes()
    if not modes or not all(getattr(mode, "sees_regions", False) for mode in modes):
        return call(args)
    from torch._higher_order_ops.wrap import InductorCompiledCallable, inductor_compiled_code

    region: Any = inductor_compiled_code
    for key in _BITS:  # torch has no kernel for them: a graph reads a conjugated view like any other tensor
        region.fallthrough(key)
    return region(InductorCompiledCallable(call), args)


def begin_versions(tensors: list[torch.Tensor]) -> None:
    """Set the version counters of tensors that nobody has saved yet to 0."""
    _set_versions(tuple(tensors), (0,) * len(tensors))


_BUILDING = "build_and_tell"
_TELLING = "tell_what_is_saved"
_CLEANING = "save_what_is_preferred"
_PARTITION_LISTENER: list[Callable[[list[Any]], None]] = []


def keep_graph_order() -> Callable[[], None]:
    """Make Dynamo try the graphs of a function in the order of their creation, not most recently used first.

    A second run of a block must find the graph that its first run found.

    Returns:
        A function that undoes it.
    """
    _eval_frame._set_lru_cache(False)
    return lambda: _eval_frame._set_lru_cache(True)


def compiler_budget() -> float:
    """Return the memory budget of the compiler's partitioner: which fraction of the activations its graphs may save."""
    import torch._functorch.config as config

    return cast(Any, config).activation_memory_budget


def set_compiler_budget(fraction: float) -> float:
    """Set that budget, for every graph that is compiled from now on. Return the one before."""
    import torch._functorch.config as config

    before = compiler_budget()
    cast(Any, config).activation_memory_budget = float(fraction)
    return before
