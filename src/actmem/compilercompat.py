"""The private parts of torch's compiler that actmem uses. See `torchcompat.py`.

The compiler is slow to import, and nothing here does so before something is compiled.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.utils.checkpoint as _checkpoint

from actmem.torchcompat import COMPILER, dispatch_modes

__all__ = [
    "Compiler",
    "begin_versions",
    "break_graph",
    "call_past",
    "compile_with",
    "compiled_functions",
    "compiler_budget",
    "compiler_of",
    "compiles_never",
    "graph_breaks",
    "has_compiled",
    "has_hooks",
    "innermost_backend",
    "is_compiled_backward",
    "is_compiled_function",
    "keep_graph_order",
    "leave_frame",
    "many_graphs",
    "on_compiled_function",
    "on_partition",
    "replace_call",
    "replaced_call",
    "saved_by_partitioner",
    "seen_region",
    "set_compiler_budget",
    "without_kernels",
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


def has_compiled() -> bool:
    """Return whether torch's compiler has compiled anything in this process."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"])


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


# ---------------------------------------------------------------- compiling a step that is only planned


class Compiler(NamedTuple):
    """How something is compiled."""

    name: str
    """Of the backend, such as "inductor"."""
    backend: Any
    """The backend itself, with its options, or its name."""
    dynamic: bool | None = None


def compiler_of(module: torch.nn.Module) -> Compiler | None:
    """Return how a module is compiled, by `module.compile()` or `torch.compile(module)`; None if it is not.

    >>> model = torch.nn.Linear(2, 2)
    >>> model.compile(backend="aot_eager")
    >>> compiler_of(model).name, compiler_of(torch.nn.Linear(2, 2))
    ('aot_eager', None)
    """
    context: Any = vars(module).get("dynamo_ctx")  # of what `torch.compile(module)` returns
    function: Any = getattr(module, "_compiled_call_impl", None)
    if context is None and function is not None:
        names = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        context = names["self"].cell_contents
    if context is None:
        return None
    backend: Any = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name: str = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    return Compiler(name, backend, getattr(context, "_dynamic", None))


def replace_call(module: Any, call: Callable[..., Any]) -> Callable[[], None]:
    """Have a module's `__call__` ask this first; return what undoes it. Copies and pickles do not carry it over."""
    before = module._compiled_call_impl
    module._compiled_call_impl = call
    return lambda: setattr(module, "_compiled_call_impl", before)


def replaced_call(module: torch.nn.Module) -> Any:
    """Return what a module's `__call__` asks first, if anything."""
    return vars(module).get("_compiled_call_impl")


def call_past(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module past what `replace_call` or `module.compile()` has put before it."""
    return module._call_impl(*args, **kwargs)


def has_hooks(module: Any, besides: Callable[[Any], bool] = lambda _: False) -> bool:
    """Return whether hooks run when the module is called, besides those of which this is true."""
    before, after = ("_forward_pre_hooks", "_backward_pre_hooks"), ("_forward_hooks", "_backward_hooks")
    return any(not besides(hook) for name in (*before, *after) for hook in getattr(module, name).values())


def compile_with(function: types.FunctionType, compiler: Compiler) -> Callable[..., Any]:
    """Compile a copy of a function, whose graphs are its own: they are gone when it is, and count for no limit."""
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, closure=function.__closure__
    )
    return cast(Any, torch).compile(copied, backend=compiler.backend, dynamic=compiler.dynamic)


@contextlib.contextmanager
def many_graphs() -> Generator[None]:
    """Let one function have any number of graphs."""
    import torch._dynamo.config as config

    with cast(Any, config).patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
        yield


@contextlib.contextmanager
def on_partition(listener: Callable[[Any, Any, Any], None]) -> Generator[None]:
    """Call the listener with each joint graph that is partitioned, and with the forward and backward made of it."""
    import torch._functorch.partitioners as partitioners

    module: Any = partitioners
    extract = module._extract_fwd_bwd_modules

    def tell(joint_module: Any, *args: Any, **kwargs: Any) -> Any:
        found = extract(joint_module, *args, **kwargs)
        listener(joint_module, *found)
        return found

    with mock.patch.object(module, "_extract_fwd_bwd_modules", tell):
        yield


class _Kernel:
    """In place of a compiled kernel: computes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__


class _Kernels:
    """In place of inductor's `AsyncCompile`: compiles nothing."""

    def __getattr__(self, name: str) -> Callable[..., _Kernel]:
        return lambda *_, **__: _Kernel()

    def wait(self, scope: dict[str, Any]) -> None:
        """Wait for nothing."""


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _loaded(key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None) -> Any:  # noqa: ARG001
    import torch._inductor.async_compile as compiling

    module = types.ModuleType(f"actmem_{key}")
    module.__file__ = path
    names = vars(module)
    names.update(attrs or {})
    with mock.patch.object(compiling, "AsyncCompile", _Kernels):
        exec(compile(Path(path).read_text(), path, "exec"), names)  # inductor's own code, as it loads it
    names |= {"empty_strided_cpu": _empty_strided, "reinterpret_tensor": _reinterpreted}
    names |= dict.fromkeys(("assert_size_stride", "assert_alignment"), _Kernel())
    return module


@contextlib.contextmanager
def without_kernels() -> Generator[None]:
    """Have inductor write its code and compile none of its kernels, so that the code runs on fake tensors.

    What inductor writes allocates and frees its buffers in Python, and calls kernels in between. With kernels that do
    nothing it shows what is alive at each moment, and a fake tensor has no address that a kernel could be given.
    """
    import torch._inductor.config as config
    from torch._inductor.codecache import PyCodeCache

    with (
        cast(Any, config).patch(force_disable_caches=True),
        mock.patch.object(PyCodeCache, "load_by_key_path", _loaded),
    ):
        yield
