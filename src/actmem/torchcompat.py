"""The one place that uses private parts of torch; those of its compiler are in `compilercompat.py`.

Every private name that actmem relies on is imported here, once. A torch version that lacks one fails at import and
names it, instead of failing somewhere in the middle of a backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.fx.traceback as _traceback
import torch.nn.attention as _torch_attention
import torch.utils.checkpoint as _checkpoint
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format as _suggest
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,  # pyright: ignore[reportPrivateUsage]
    is_traceable_wrapper_subclass,
)

__all__ = [
    "COMPILER",
    "BackwardCFunction",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "active_compiler",
    "active_fake_mode",
    "after_backward",
    "alias",
    "alias_in_handler",
    "all_operator_names",
    "allocation_mark",
    "apart_from_graphs",
    "as_outside",
    "attention_backends",
    "backward_code",
    "below_autograd",
    "checkpoint",
    "compiling",
    "compute_intensive",
    "counting_versions",
    "current_autograd_node",
    "current_graph_task",
    "dispatch_modes",
    "divide",
    "function_call",
    "functorch_transform",
    "graph_is_kept",
    "hand_out_parameters",
    "has_storage",
    "in_fake_mode",
    "is_compiler_new",
    "is_composite",
    "is_traceable_wrapper_subclass",
    "is_wrapper",
    "log_allocations",
    "logged_allocations",
    "module_call",
    "module_stack",
    "named_buffers",
    "named_modules",
    "never_compile",
    "num_bytes",
    "num_storage_uses",
    "numerics",
    "op_name",
    "opened_parameter",
    "outer_hooks",
    "restore_numerics",
    "saves_for_graph",
    "selective_contexts",
    "sizes",
    "start_memory_history",
    "storage_key",
    "suggested_format",
    "taken_memory_history",
    "with_attention_backends",
    "without_autocast",
    "without_dispatch_modes",
    "without_fake_mode",
    "without_overrides",
    "without_wrapper",
    "wrapper_tensor",
    "writes_list",
]

_attention: Any = _torch_attention
_checkpointing: Any = _checkpoint
_compiler: Any = torch.compiler
checkpoint: Any = _checkpointing.checkpoint
selective_contexts: Any = _checkpointing.create_selective_checkpoint_contexts
apart_from_graphs: Any = _compiler.disable
"""Three public functions that torch leaves untyped."""

active_fake_mode: Any = detect_fake_mode
"""Return the fake mode that is active, or None."""
without_fake_mode: Any = unset_fake_temporarily
"""Return a context in which tensors are real, although a fake mode is active."""

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_FAKE: Any = _C._TorchDispatchModeKey.FAKE
_get_mode: Callable[[Any], Any] = _C._get_dispatch_mode

try:
    below_autograd: Callable[[], Any] = _C._AutoDispatchBelowAutograd
    without_autocast: Callable[[], Any] = _C._DisableAutocast
    without_dispatch_modes: Callable[[], Any] = _C._DisableTorchDispatch
    current_autograd_node: Callable[[], Any] = _C._current_autograd_node
    _top_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks
    _exclude_key: Callable[[Any, bool], Any] = _C._SetExcludeDispatchKeyGuard
    _ADINPLACE: Any = _C.DispatchKey.ADInplaceOrView
    _CONJUGATE: Any = _C.DispatchKey.Conjugate
    _NEGATIVE: Any = _C.DispatchKey.Negative
    _COMPOSITE: Any = _C.DispatchKey.CompositeImplicitAutograd
    _is_dispatched: Callable[[str], bool] = _C._dispatch_has_kernel
    _has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
    _eval_frame: Any = _C._dynamo.eval_frame
    _SKIP: Any = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
    _SKIP_ALONE: Any = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
    _get_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter
    _set_precision: Callable[[str, str, str], Any] = _C._set_fp32_precision_setter
    _no_dispatch: Any = _C._disabled_torch_dispatch_impl
    has_storage: Callable[[torch.Tensor], bool] = _C._has_storage
    _num_uses: Callable[[int], int] = _C._storage_Use_Count
    _begin_log: Callable[[Any], None] = _C._autograd._enable_profiler_legacy
    _end_log: Callable[[], list[list[Any]]] = _C._autograd._disable_profiler_legacy
    _record: Callable[[str], Any] = _C._profiler._RecordFunctionFast
    _log_is_open: Callable[[], bool] = _C._autograd._profiler_enabled
    _MEMORY_ONLY: Any = _C._profiler.ProfilerConfig(
        _C._profiler.ProfilerState.CPU, False, True, False, False, False, _C._profiler._ExperimentalConfig()
    )
    current_graph_task: Callable[[], int] = _C._current_graph_task_id
    graph_is_kept: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
    backward_code: Any = torch.autograd.graph._engine_run_backward.__code__  # pyright: ignore[reportPrivateUsage]
    _module: Any = torch.nn.Module
    module_call: Any = _module._wrapped_call_impl.__code__
    _function: Any = torch.autograd.Function
    function_call: Any = _function.apply.__func__.__code__
    _engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    _peek_functorch: Callable[[], Any] = _C._functorch.peek_interpreter_stack
except AttributeError as missing:  # pragma: no cover - depends on the installed torch
    raise ImportError(
        f"actmem needs a part of torch that torch {torch.__version__} does not have: {missing}. "
        "It is tested with torch 2.13; install that version or a newer actmem."
    ) from missing


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without history that shares the storage and the version counter of `tensor`.

    For code outside a dispatch handler. No dispatch mode sees the operator, as nothing is computed.
    """
    if type(tensor) is not torch.Tensor and getattr(type(tensor), "__torch_dispatch__", None) is not _no_dispatch:
        return tensor.detach()  # its own dispatch must run, or the result is a bare tensor without bytes
    with without_dispatch_modes():
        return tensor.detach()


def is_wrapper(kind: type) -> bool:
    """Return whether a tensor class has its own dispatch and no bytes of its own. Fake tensors count as plain."""
    dispatch: Any = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not _no_dispatch and not issubclass(kind, FakeTensor)


def counting_versions() -> Any:
    """Return a context in which operators inside `__torch_dispatch__` share and bump version counters, as outside."""
    return _exclude_key(_ADINPLACE, False)


@contextlib.contextmanager
def as_outside(func: Any) -> Generator[None]:
    """Let an operator do inside `__torch_dispatch__` what it does outside: honour conj and neg bits, count versions.

    torch calls a dispatch mode with the keys that do so excluded. Kernels that take a conjugate view and call further
    operators on it, as those of `linalg` do, would then compute with unconjugated numbers. And an operator that writes
    to a list would leave its versions as they were: a view in the list keeps the history from before the write, and
    gradients are wrong.
    """
    counting = counting_versions() if writes_list(func) else contextlib.nullcontext()
    with _exclude_key(_CONJUGATE, False), _exclude_key(_NEGATIVE, False), counting:
        yield


@functools.cache
def writes_list(func: Any) -> bool:
    """Return whether an operator writes to the tensors of a list.

    >>> writes_list(torch.ops.aten._foreach_tanh_.default), writes_list(torch.ops.aten.tanh_.default)
    (True, False)
    """
    arguments: Any = getattr(getattr(func, "_schema", None), "arguments", ())
    written = (a for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return any(str(a.type) == "List[Tensor]" for a in written)


def without_wrapper(func: Any) -> Any:
    """Return what an operator overload calls: the overload itself is Python code around it, and costs a call."""
    return func._op if type(func) is OpOverload else func  # pyright: ignore[reportPrivateUsage]


def is_composite(func: Any) -> bool:
    """Return whether torch decomposes an operator into others above every backend, unless autograd is excluded."""
    name = func.name()
    if getattr(func, "_schema", None) is None or not _is_dispatched(name):  # higher-order, or TorchScript only
        return False
    return _has_kernel(name, "CompositeImplicitAutograd") and not _has_kernel(name, "CPU")


def divide(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite operator inside a mode's handler, so that the mode sees its parts.

    Returns:
        The result, or NotImplemented for nested tensors, which have their own kernels.
    """
    if any(isinstance(t, torch.Tensor) and t.is_nested for t in (*args, *kwargs.values())):
        return NotImplemented
    with as_outside(func), mode:
        # Not `decompose`: some of its Python versions give different bits.
        return func._op_dk(_COMPOSITE, *args, **kwargs)


def alias_in_handler(tensor: torch.Tensor) -> torch.Tensor:
    """Do what `alias` does, for code inside `__torch_dispatch__`."""
    with _exclude_key(_ADINPLACE, False):
        return tensor.detach()


def after_backward(callback: Callable[[], None]) -> None:
    """Register a callback for the end of the backward pass that runs in this thread."""
    _engine.queue_callback(callback)


def in_fake_mode() -> bool:
    """Return whether operators run on fake tensors now: in a profile, or where torch only infers shapes."""
    return _get_mode(_FAKE) is not None


def dispatch_modes() -> list[Any]:
    """Return the active dispatch modes of this thread, outermost first."""
    return _get_current_dispatch_mode_stack()


def outer_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the saved-tensor hooks that are active now, or None."""
    return _top_hooks(True)


def functorch_transform() -> str | None:
    """Return the name of the innermost active functorch transform, such as "Grad" or "Vmap", or None."""
    layer = _peek_functorch()
    return None if layer is None else str(layer.key()).rsplit(".", 1)[-1]


def all_operator_names() -> frozenset[str]:
    """Return the packet names of all operators registered so far, such as "aten.mm"."""
    names: list[str] = _C._dispatch_get_all_op_names()
    return frozenset(name.split(".", 1)[0].replace("::", ".") for name in names)


Fn = TypeVar("Fn", bound=Callable[..., Any])


def never_compile(function: Fn) -> Fn:
    """Keep Dynamo out of a function and everything that it calls.

    The engine runs between the operators of functions that are being compiled. torch's own guard for dispatch modes
    wraps each call and costs more than a microsecond; marking the code object costs nothing.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


def active_compiler() -> Any:
    """Return what turns the frames that run now into compiled ones; None if nothing does."""
    found = _eval_frame.get_eval_frame_callback()
    return found if callable(found) else None


_eval_frame.set_code_exec_strategy(active_compiler.__code__, _SKIP_ALONE)


def compiling(function: Callable[..., Any], compiler: Any) -> Callable[..., Any]:
    """Return a function whose frames are compiled, if there is a compiler, although it is called by one that is not."""
    if compiler is None:
        return function

    @never_compile
    def compiled(*args: Any, **kwargs: Any) -> Any:
        before = _eval_frame.set_eval_frame(compiler)
        try:
            return function(*args, **kwargs)
        finally:
            _eval_frame.set_eval_frame(before)

    return compiled


def is_compiler_new() -> bool:
    """Return whether torch's compiler was loaded, and nobody watches yet what it compiles."""
    module = sys.modules.get(COMPILER)
    return module is not None and not hasattr(module, "_actmem_watches")


COMPILER = "torch._functorch._aot_autograd.runtime_wrappers"
"""The module that makes compiled functions."""


def saves_for_graph() -> bool:
    """Return whether autograd is saving what a compiled graph needs for its backward. For hooks of saved tensors."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for _ in range(6):
        if frame is not None and frame.f_code is function_call:
            return hasattr(frame.f_locals["cls"], "_aot_id")
        frame = None if frame is None else frame.f_back
    return False


def named_modules(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return `module.named_modules()` as a list, with the types that torch omits."""
    return list(module.named_modules())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]


def wrapper_tensor(kind: type, shape: Any, **options: Any) -> Any:
    """Make a tensor of a subclass that has a shape, a dtype and a device, and no bytes."""
    return cast(Any, torch.Tensor)._make_wrapper_subclass(kind, shape, **options)


def without_overrides() -> Any:
    """Have torch functions do what they do for plain tensors, while it is entered."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]


def named_buffers(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor | None]]:
    """Return the owner, the name and the tensor of every buffer, so that a replaced one can be put back."""
    places: list[dict[str, Any]] = [vars(m)["_buffers"] for m in module.modules()]
    return [(place, name, buffer) for place in places for name, buffer in place.items()]


def storage_key(storage: Any) -> int:
    """Return a number that is unique among living storages. It may be reused once the storage is dead."""
    return storage._cdata


_FLAGS: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_PRECISIONS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("cuda", "matmul"), ("cuda", "conv"))


@contextlib.contextmanager
def cuda_autocast_on_cpu(entered: Callable[[], None]) -> Generator[None]:
    """Let `torch.autocast("cuda")` switch the CPU's autocast on and off too, even where torch has no CUDA.

    Args:
        entered: called each time that one is entered.
    """
    kind: Any = torch.autocast
    init, enter, leave = kind.__init__, kind.__enter__, kind.__exit__
    on_cpu: list[Any] = []

    def make(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        is_card = device_type == "cuda"
        init(self, device_type, dtype, enabled and not is_card, cache_enabled)
        if is_card:
            self._enabled = enabled  # torch turns it off, with a warning, where it has no CUDA

    def enter_both(self: Any) -> Any:
        found = enter(self)
        if self.device == "cuda":
            entered()
            on_cpu.append(kind("cpu", self.fast_dtype, self._enabled, self._cache_enabled))
            enter(on_cpu[-1])
        return found

    def leave_both(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            leave(on_cpu.pop(), *error)
        return leave(self, *error)

    kind.__init__, kind.__enter__, kind.__exit__ = make, enter_both, leave_both
    try:
        yield
    finally:
        kind.__init__, kind.__enter__, kind.__exit__ = init, enter, leave


def numerics() -> tuple[Any, ...]:
    """Return the flags that change the bits of a matrix product or a convolution: one object for all that are equal."""
    flags = (
        _C._get_mkldnn_enabled(),
        # Not `_get_float32_matmul_precision`: it raises once a program has set `torch.backends.*.fp32_precision`.
        *[_get_precision(*where) for where in _PRECISIONS],
        _C._get_deterministic_algorithms(),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
    )
    return _FLAGS.setdefault(flags, flags)


def restore_numerics(flags: tuple[Any, ...]) -> None:
    """Set the flags that `numerics` returned."""
    mkldnn, *precisions, deterministic, cudnn, benchmark, cudnn_deterministic = flags
    _C._set_mkldnn_enabled(mkldnn)
    for where, precision in zip(_PRECISIONS, precisions, strict=True):
        if _get_precision(*where) != precision:
            _set_precision(*where, "none")  # the default unless set: inherit from the whole backend
            if _get_precision(*where) != precision:
                _set_precision(*where, precision)
    _C._set_deterministic_algorithms(deterministic, warn_only=_C._get_deterministic_algorithms_warn_only())
    _C._set_cudnn_enabled(cudnn)
    _C._set_cudnn_benchmark(benchmark)
    _C._set_cudnn_deterministic(cudnn_deterministic)


@functools.cache
def compute_intensive() -> frozenset[str] | None:
    """Return the operators that torch's own partitioner considers expensive; None if it does not say."""
    try:
        from torch._functorch.partitioners import get_default_op_list

        listed: Any = get_default_op_list().compute_intensive_ops
    except (ImportError, AttributeError):
        return None
    return frozenset(str(op) for op in listed)


def num_storage_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and Python objects hold a storage."""
    return _num_uses(storage._cdata)  # pyright: ignore[reportPrivateUsage]


def allocation_mark(name: str) -> Any:
    """Return a context whose name stands in the log of allocations where it is entered."""
    _MARKS.add(name)
    return _record(name)


_MARKS: set[str] = set()


def log_allocations() -> bool:
    """Have torch write down each allocation of this thread in the CPU's memory. Say whether it does.

    The profiler that torch has had before Kineto is used: it can be switched on for a single operator, within two
    microseconds, and its events are the same each time. It does not run where another profiler does.
    """
    if _log_is_open():
        return False
    _begin_log(_MEMORY_ONLY)
    return True


def logged_allocations() -> list[int | str]:
    """End what `log_allocations` began. Return the bytes of each allocation, of each release as less than 0, and marks.

    Other threads have logs of their own: the one that is returned is that of the thread that marks are from.
    """
    found: list[int | str] = []
    for events in _end_log():
        here: list[int | str] = []
        marked = False
        for event in events:
            kind = event.kind()
            if kind == "memory_alloc":
                if event.cpu_memory_usage():
                    here.append(event.cpu_memory_usage())
            elif kind == "push" and event.name() in _MARKS:
                here.append(event.name())
                marked = True
        if marked or not found:
            found = here
        if marked:
            break
    return found


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that most kernels give their result: channels-last if the tensor is, else contiguous.

    >>> suggested_format(torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last))
    torch.channels_last
    """
    found: Any = _suggest(tensor)
    return found


def sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape as numbers. A symbolic size gets the value it had during tracing, without adding a guard."""
    return tuple(n if type(n) is int else int(cast("Any", n).node.hint or 0) for n in tensor.shape)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, even if its sizes are symbolic; 0 for a nested tensor without sizes."""
    if tensor.is_nested:
        return 0
    return math.prod(sizes(tensor)) * tensor.element_size()


def module_stack() -> dict[str, Any] | None:
    """Return the ids of the modules around the operator that is being traced into a graph, outermost first."""
    return _traceback.current_meta.get("nn_module_stack")


def op_name(func: Any) -> str:
    """Return the full name of an operator, such as "aten.mm.default"; a function that is recorded whole has its own.

    >>> op_name(torch.ops.aten.mm.default), op_name(torch.ops.higher_order.cond), op_name("replayable.f")
    ('aten.mm.default', 'higher_order.cond', 'replayable.f')
    """
    if isinstance(func, str) or hasattr(func, "_schema"):
        return str(func)
    return f"higher_order.{func.name()}"


def attention_backends() -> Any:
    """Return the backends that scaled dot product attention may choose from."""
    return _attention._cur_sdpa_kernel_backends(with_priority=True)


def with_attention_backends(backends: Any) -> Any:
    """Return a context in which attention chooses from these backends only."""
    return _attention.sdpa_kernel(backends, set_priority=True)


class _Opened(threading.local):
    parameters: list[torch.nn.Parameter] | None = None
    """Parameters that a hook returned while `saved_tensors` of a Python Function was being read."""


_OPENED = _Opened()


def opened_parameter(parameter: torch.nn.Parameter) -> None:
    """Announce that a saved-tensor hook is about to return a parameter."""
    if _OPENED.parameters is not None:
        _OPENED.parameters.append(parameter)


def hand_out_parameters() -> None:
    """Make `ctx.saved_tensors` in the backward of a Python Function return parameters as the same objects.

    Without hooks it does so anyway. With hooks around the forward pass, torch wraps what they return in a new tensor,
    and attributes that a program has set on its parameters, such as `weight.main_grad`, are not visible there. Done
    once; what other hooks return is unaffected.
    """
    if isinstance(BackwardCFunction.__dict__.get("saved_tensors"), property):
        return
    read: Any = _C._FunctionBase.saved_tensors.__get__

    def saved_tensors(ctx: Any) -> Any:
        before, _OPENED.parameters = _OPENED.parameters, []
        try:
            found = read(ctx)
            opened = _OPENED.parameters
        finally:
            _OPENED.parameters = before
        return tuple(next((p for p in opened if _shows(t, p)), t) for t in found) if opened else found

    cast("Any", BackwardCFunction).saved_tensors = property(saved_tensors)


def _shows(tensor: torch.Tensor | None, parameter: torch.nn.Parameter) -> bool:
    return (
        tensor is not None
        and has_storage(tensor)
        and tensor.untyped_storage() is parameter.untyped_storage()
        and tensor.requires_grad == parameter.requires_grad
        and tensor.is_leaf
        and (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        == (parameter.shape, parameter.stride(), parameter.storage_offset(), parameter.dtype)
    )


_memory: Any = torch.cuda.memory


def start_memory_history() -> None:
    """Let CUDA's allocator record every allocation, with its stack, from now on. Not run on a card yet."""
    _memory._record_memory_history(clear_history=True)


def taken_memory_history() -> dict[str, Any]:
    """Return what CUDA's allocator has recorded, and stop the recording. Not run on a card yet."""
    torch.cuda.synchronize()
    try:
        return _memory._snapshot()
    finally:
        _memory._record_memory_history(enabled=None)
