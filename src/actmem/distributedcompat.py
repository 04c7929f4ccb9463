"""The private parts of torch.distributed that actmem uses. See `torchcompat.py`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Generator
from typing import Any, cast

import torch.distributed as dist

from actmem.errors import UnsupportedError
from actmem.torchcompat import without_fake_mode

__all__ = ["as_in_training", "real_meshes", "silent_group", "silent_pipelines"]

_MAKES_MESHES = ("__init__", "_flatten", "_unflatten", "_concatenate", "from_group")


@contextlib.contextmanager
def silent_group(world: int, rank: int) -> Generator[None]:
    """Make this process one rank of a default group that communicates with nobody; destroy all groups in the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
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
def silent_pipelines() -> Generator[None]:
    """Let pipeline schedules run although no other stage answers.

    Before the first step the stages vote whether to ask each other for shapes: here they do not, which takes stages
    that were given theirs. And a send or a receive holds its tensor until it is waited for, as it does in a real group.
    """
    import torch.distributed.pipelining.schedules as schedules
    from torch.distributed.pipelining._utils import InferenceMode

    module: Any = schedules
    kind: Any = module._PipelineSchedule
    vote, batch = kind._warmup_p2p, module._batch_p2p

    def no_vote(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:  # noqa: ARG001
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                raise UnsupportedError(
                    f"stage {stage.stage_index} of the pipeline would ask its neighbours for the shapes of their "
                    "tensors, and there are none. Name them: PipelineStage(..., input_args=..., output_args=...)."
                )
            stage._inference_mode = InferenceMode.STATIC

    def held(operations: list[Any], desc: str | None = None) -> list[Any]:
        return [_Held(o.tensor) for o in operations] if batch(operations, desc) else []

    kind._warmup_p2p, module._batch_p2p = no_vote, held
    try:
        yield
    finally:
        kind._warmup_p2p, module._batch_p2p = vote, batch


class _Held:
    """A send or receive that is over, and holds its tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def wait(self) -> bool:
        return True


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
