"""The private parts of torch.distributed that actmem uses. See `torchcompat.py`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from actmem.errors import UnsupportedError
from actmem.torchcompat import FakeTensorMode, without_fake_mode

__all__ = [
    "ColumnStyle",
    "LinkTraffic",
    "PipelineWatcher",
    "UnpinningFakeMode",
    "as_in_training",
    "column_style",
    "divides_tensors",
    "exchanged_rows",
    "fewer_microbatches",
    "forget_meshes",
    "held_messages",
    "is_loss_parallel",
    "link_traffic",
    "own_chunks",
    "place_in",
    "real_meshes",
    "silent_group",
    "silent_pipelines",
    "waited",
]

_MAKES_MESHES = ("__init__", "_flatten", "_unflatten", "_concatenate", "from_group")


class UnpinningFakeMode(FakeTensorMode):
    """A fake mode whose cache keeps nothing alive: calls that are given a storage or a process group bypass it."""

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(x, (torch.UntypedStorage, torch.ScriptObject)) for x in (*args, *kwargs.values())):
            return self._dispatch_impl(func, types, args, kwargs)
        return super()._cached_dispatch_impl(func, types, args, kwargs)


@contextlib.contextmanager
def silent_group(world: int, rank: int) -> Generator[None]:
    """Make this process one rank of a default group that communicates with nobody; destroy all groups in the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """Empty the caches of DTensor: they find a mesh by its ranks, and an old one leads to groups that are gone."""
    from torch.distributed.tensor import debug

    cast("Any", debug)._clear_sharding_prop_cache()


@contextlib.contextmanager
def real_meshes() -> Generator[None]:
    """Let device meshes be made of real tensors, although a fake mode is active.

    Of the groups of a mesh, only those that this rank is in are made: so the work does not grow with the ranks.
    """
    import torch.distributed.device_mesh as meshes

    module: Any = meshes
    group = module.new_group

    def own_group(ranks: list[int] | None = None, **settings: Any) -> Any:
        is_own = ranks is None or dist.get_rank() in ranks
        return group(ranks=ranks, **settings) if is_own else dist.GroupMember.NON_GROUP_MEMBER

    kind: Any = meshes.DeviceMesh
    before: dict[str, Any] = {name: vars(kind)[name] for name in _MAKES_MESHES if name in vars(kind)}
    for name, plain in before.items():
        setattr(kind, name, _lifted(plain))
    module.new_group = own_group
    try:
        yield
    finally:
        module.new_group = group
        for name, plain in before.items():
            setattr(kind, name, plain)


@contextlib.contextmanager
def as_in_training() -> Generator[None]:
    """Let torch.distributed take the paths that it takes in training, although a fake mode is active.

    Otherwise it assumes that a graph is being traced: collectives are waited for at once, and shards that need no
    padding are padded.
    """
    importlib.import_module("torch.distributed.tensor")  # whose modules have the name too
    name = "_are_we_tracing"
    modules = [m for key, m in list(sys.modules.items()) if key.startswith("torch.distributed.") and name in vars(m)]
    before = [vars(m)[name] for m in modules]
    for module in modules:
        setattr(module, name, _never)
    try:
        yield
    finally:
        for module, plain in zip(modules, before, strict=True):
            setattr(module, name, plain)


@contextlib.contextmanager
def own_chunks() -> Generator[None]:
    """Let FSDP2 cut only those chunks off a parameter that it looks at: its own and the first.

    It would make a view for every rank, so that building a model would take longer the more ranks there are.
    """
    import torch.distributed.fsdp._fully_shard._fsdp_param as sharding

    module: Any = sharding
    name = "_chunk_with_empty"
    plain: Any = getattr(module, name)
    setattr(module, name, _Chunks)
    try:
        yield
    finally:
        setattr(module, name, plain)


class _Chunks:
    """What `torch.chunk` would return, filled up with empty tensors. Each chunk is made when it is asked for."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        begin, whole = number * self._size, self._tensor.size(self._dim)
        if number and begin >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._size, whole - begin))


_PARTS = {
    "all_gather_into_tensor": (0, 1),
    "_allgather_base_": (0, 1),
    "reduce_scatter_tensor": (1, 0),
    "_reduce_scatter_base_": (1, 0),
    "all_reduce": (2, 0),
    "allreduce_": (2, 0),
    "all_to_all_single": (1, 0),
    "alltoall_base_": (1, 0),
}
"""For each collective, how often what it is given, and what it returns, passes the link of a rank in one direction:
on a ring of n ranks, all but an n-th part of it."""


class LinkTraffic(NamedTuple):
    """What a collective sends."""

    num_bytes: int = 0
    """Over the link of a rank, in one direction."""
    reach: int = 0
    """How far apart the ranks of its group are: ranks 8 to 15 are 8 apart, counted from the first to the last."""
    ranks: tuple[int, ...] = ()


def link_traffic(name: str, args: tuple[Any, ...], given_bytes: int, made_bytes: int) -> LinkTraffic:
    """Return what a collective sends over a rank's link.

    Args:
        name: the operator, such as `_c10d_functional.all_reduce.default`.
        args: what it is given.
        given_bytes: bytes of the tensor that each rank gives.
        made_bytes: bytes of what it gets.

    Returns:
        Nothing, for any other operator.
    """
    namespace, _, base = name.rpartition(".")[0].partition(".")
    if namespace not in ("_c10d_functional", "c10d") or base not in _PARTS:
        return LinkTraffic()
    group = next((found for arg in args if (found := _group(arg)) is not None), None)
    if group is None:
        return LinkTraffic()
    ranks = dist.get_process_group_ranks(group)
    given, made = _PARTS[base]
    passed = given * given_bytes + made * made_bytes
    return LinkTraffic(passed * (len(ranks) - 1) // len(ranks), max(ranks) - min(ranks) + 1, tuple(ranks))


def _group(arg: object) -> Any:
    """Return the process group that an argument of a collective stands for, if it does."""
    if isinstance(arg, dist.ProcessGroup):
        return arg
    try:
        if isinstance(arg, str):
            return cast("Any", dist.distributed_c10d)._resolve_process_group(arg)
        if type(arg).__name__ == "ScriptObject":
            return cast("Any", dist.ProcessGroup).unbox(arg)
    except (RuntimeError, TypeError, ValueError):  # the name of a reduction, or another object
        return None
    return None


class PipelineWatcher(Protocol):
    """Whoever is told what the schedule of a pipeline does."""

    def met(self, ranks: tuple[int, ...], num_stages: int) -> None:
        """Note the ranks of the pipeline, and how many stages it has."""
        ...

    def began(self, kind: str, stage: int, microbatch: int) -> None:
        """Note that something is done with a microbatch. What: see `profiles.Action`."""
        ...

    def ended(self) -> None:
        """Note that it is done."""
        ...

    def sent(self, kind: str, stage: int, microbatch: int, num_bytes: int) -> None:
        """Note that the result of a "forward" or a "backward" goes to another rank."""
        ...


@contextlib.contextmanager
def silent_pipelines(watcher: PipelineWatcher) -> Generator[None]:
    """Let pipeline schedules run although no other stage answers, and tell what they do.

    Before the first step the stages vote whether to ask each other for shapes: here they do not, which takes stages
    that were given theirs.
    """
    import torch.distributed.pipelining.schedules as schedules
    from torch.distributed.pipelining._utils import InferenceMode

    module: Any = schedules
    kind: Any = module._PipelineSchedule
    vote = kind._warmup_p2p

    def no_vote(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:  # noqa: ARG001
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise UnsupportedError(
                    f"stage {stage.stage_index} of the pipeline would ask its neighbours for the shapes of their "
                    "tensors, and there are none. Name them: PipelineStage(..., input_args=..., output_args=...)."
                )
            stage._inference_mode = InferenceMode.STATIC
            group = stage.group or dist.group.WORLD
            watcher.met(tuple(dist.get_process_group_ranks(group)), stage.num_stages)

    kind._warmup_p2p = no_vote
    try:
        with _watched_stages(watcher):
            yield
    finally:
        kind._warmup_p2p = vote


@contextlib.contextmanager
def fewer_microbatches(schedule: Any, count: int, args: tuple[Any, ...], target: Tensor | None) -> Generator[None]:
    """Let the first step of a pipeline's schedule have fewer microbatches. Its stage is made ready for all of them.

    Args:
        schedule: a schedule with one stage on each rank, which has not run.
        count: how many microbatches.
        args: what the first stage is given for one microbatch.
        target: what the last stage is.
    """
    stage, whole = schedule._stage, schedule._n_microbatches
    stage.has_backward = schedule._has_backward
    schedule._initialize_stage(args, {}, target)
    schedule._n_microbatches = count
    reduce: Any = stage.perform_reduce_grad

    def reduce_whole(_: int) -> None:
        reduce(whole)  # as in later steps, so that DTensor looks for the rule of its division now

    stage.perform_reduce_grad = reduce_whole
    try:
        yield
    finally:
        schedule._n_microbatches = whole
        del stage.perform_reduce_grad


class held_messages(TorchFunctionMode):  # noqa: N801 - used as the functions above
    """Let what `isend` and `irecv` return hold the tensor, as it does in a real group and does not in a silent one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if made is not None and (func is dist.isend or func is dist.irecv):
            return _Held(made, args, kwargs)
        return made


@contextlib.contextmanager
def _watched_stages(watcher: PipelineWatcher) -> Generator[None]:
    """Tell what the stages of a pipeline do."""
    import torch.distributed.pipelining.stage as stages

    kind: Any = cast("Any", stages)._PipelineStageBase

    def noting(plain: Any, name_of: Callable[[dict[str, Any]], str]) -> Any:
        @functools.wraps(plain)
        def run(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            watcher.began(name_of(kwargs), stage.stage_index, chunk)
            try:
                return plain(stage, chunk, *args, **kwargs)
            finally:
                watcher.ended()

        return run

    def sending(plain: Any, name: str) -> Any:
        @functools.wraps(plain)
        def run(stage: Any, chunk: int) -> Any:
            found = plain(stage, chunk)
            watcher.sent(name, stage.stage_index, chunk, sum(operation.tensor.nbytes for operation in found))
            return found

        return run

    def backward(kwargs: dict[str, Any]) -> str:
        return "backward" if kwargs.get("full_backward", True) else "input"

    changed: dict[str, Callable[[Any], Any]] = {
        "forward_one_chunk": lambda plain: noting(plain, lambda _: "forward"),
        "backward_one_chunk": lambda plain: noting(plain, backward),
        "backward_weight_one_chunk": lambda plain: noting(plain, lambda _: "weight"),
        "get_fwd_send_ops": lambda plain: sending(plain, "forward"),
        "get_bwd_send_ops": lambda plain: sending(plain, "backward"),
    }
    before = {name: getattr(kind, name) for name in changed}
    for name, plain in before.items():
        setattr(kind, name, changed[name](plain))
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(kind, name, plain)


class _Held:
    """A send or receive that is over, and holds its tensor."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self._work, self._arguments = work, arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def exchanged_rows(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to each rank of a group, in order, and return those that they send, as autograd can follow it.

    Args:
        rows: what to send.
        received: how many rows each rank sends.
        sent: how many of the rows go to each rank.
        group: the ranks.
    """
    from torch.distributed import _functional_collectives

    private: Any = _functional_collectives
    return private.all_to_all_single_autograd(rows, received, sent, group)


def place_in(group: Any) -> tuple[tuple[int, ...], int]:
    """Return the ranks of a group as a collective names it, by their numbers in the job, and which of them this is."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    known = private._resolve_process_group(group) if isinstance(group, str) else group
    if not isinstance(known, dist.ProcessGroup):
        known = cast("Any", dist.ProcessGroup).unbox(known)
    return tuple(dist.get_process_group_ranks(known)), known.rank()


def _never() -> bool:
    return False


def _lifted(plain: Any) -> Any:
    if isinstance(plain, staticmethod):
        return staticmethod(_lifted(plain.__func__))  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        with without_fake_mode():
            return plain(*args, **kwargs)

    return make


# ---------------------------------------------------------------- modules that are divided by `parallelize_module`


def divides_tensors(hook: Any) -> bool:
    """Return whether a module's hook is one of those with which torch divides the module over ranks."""
    name = getattr(hook, "__qualname__", "")
    return getattr(hook, "__module__", "") == "torch.distributed.tensor._api" and name.startswith("distribute_module.")


class ColumnStyle(NamedTuple):
    """How a linear layer is divided by its columns: what is done to its input and to its output."""

    prepare: Callable[[Tensor], Tensor]
    """Brings the input to where the columns are."""
    layout: Any
    """How the output is divided; a name, if that is not known."""
    is_local: bool
    """Whether the output is a plain tensor, not a DTensor."""


def column_style(module: Any) -> ColumnStyle:
    """Find out how a linear layer whose parameters are DTensors is called: by torch, by transformers, or as it is."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    if "forward" in vars(module):
        return _replaced_forward(module, module.forward)
    known: Any = ColwiseParallel
    layout, is_local = Shard(-1), False
    for hook in filter(divides_tensors, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())):
        style: Any = next(f for f in inspect.getclosurevars(hook).nonlocals.values() if callable(f))
        match getattr(style, "func", style):
            case known._prepare_input_fn:
                pass
            case known._prepare_output_fn:
                (layout,), is_local = style.args
            case other:
                layout = other.__qualname__
    return ColumnStyle(functools.partial(_after_hooks, module), layout, is_local)


def _after_hooks(module: Any, given: Tensor) -> Tensor:
    for hook in module._forward_pre_hooks.values():
        found: Any = hook(module, (given,))
        if found is not None:
            given = cast("Any", found)[0] if isinstance(found, tuple) else found
    return given


def _replaced_forward(module: Any, forward: Any) -> ColumnStyle:
    """Look into the function that transformers replaces a module's forward by."""
    known: Any = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    style, mesh = known.get("self"), known.get("mesh")
    kind = f"{type(style).__module__}.{type(style).__qualname__}"
    if kind != "transformers.distributed.tensor_parallel.ColwiseParallel":
        return ColumnStyle(functools.partial(_after_hooks, module), getattr(forward, "__qualname__", "forward"), False)

    def prepare(given: Tensor) -> Tensor:
        (found,), _ = style.transform_inputs_pre_forward(module, (given,), {}, mesh)
        return found

    return ColumnStyle(prepare, style.output_layouts, style.use_local_output)


def is_loss_parallel() -> bool:
    """Return whether torch's `loss_parallel()` is active."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return False
    return torch.ops.aten._log_softmax.default in cast("Any", tensors).DTensor._op_dispatcher._custom_op_handlers


def waited(x: Tensor) -> Tensor:
    """Return the tensor that a collective returns, when it has arrived."""
    return cast("Any", x).trigger_wait() if hasattr(x, "trigger_wait") else x
