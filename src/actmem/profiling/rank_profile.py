"""Profile one rank of a parallel job, in one process.

NOTE [ One rank of many ]
torch's own `fully_shard`, `parallelize_module` and pipeline schedules need a process group, and run under one that does
not communicate: its collectives return at once, with buffers of the right size. On fake tensors nobody misses the
numbers. So one process can be any rank of a job of any size, and does what that rank would do: it gathers, prefetches,
reshards, sends and receives, with the buffers that torch's code allocates for it. The code that builds the job is the
user's own.

The step runs twice, as for NOTE [ A step of one's own ], and the second time is the profile. Nothing has to be
restored: the model is made for the profile and forgotten after it, and the groups are destroyed.

Some things must stay real. A device mesh is a table of ranks that is looked up by value, so it is made outside the fake
mode; so are the integers that a program looks at (NOTE [ What is real in a fake step ]). The cache of the fake mode is
bypassed by calls that are given a storage, such as `set_`: it would keep the storage alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from actmem.collector import uncollected
from actmem.distributedcompat import (
    UnpinningFakeMode,
    as_in_training,
    held_messages,
    own_chunks,
    real_meshes,
    silent_group,
    silent_pipelines,
)
from actmem.errors import ModeError, UnsupportedError
from actmem.expert_loads import Routing, check_routing
from actmem.profiles import Place, Profile
from actmem.profiling.autocast_lists import profiled_autocast
from actmem.profiling.complaints import quiet
from actmem.profiling.fake_model import Assuming
from actmem.profiling.loops import profile_made
from actmem.profiling.numbers import Numbers
from actmem.profiling.pipeline_actions import PipelineActions
from actmem.settings import Split, check_split
from actmem.splitting import split_for_now
from actmem.structure import check_module, condition_digest, find_blocks, fingerprint

__all__ = ["profile_rank"]

Build = Callable[[], tuple[nn.Module, Callable[[], object]]]


def profile_rank(
    build: Build,
    *,
    world: int,
    rank: int = 0,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: Routing = "balanced",
    split: Split | None = None,
) -> Profile:
    """Find out what one rank of a parallel job does in a training step, without the other ranks.

    `build` is run with a default process group of `world` ranks in which this process is number `rank`. It makes the
    model, shards or parallelizes it as your trainer does, and returns it with a function that runs one whole training
    step. Both run on tensors without bytes: a model of any size is built in seconds, and nothing is communicated. The
    profile has the bytes of this rank: its shards, the parameters that it gathers and prefetches, the buffers of its
    collectives, and its part of the activations.

    Args:
        build: makes the model and returns `(model, step)`. Meshes and tensors are made on the CPU, whatever the job
            will train on.
        world: how many ranks the job has.
        rank: which of them to be.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks to use, as for `apply`.
        routing: what to assume of routers: "balanced"; "worst", where all tokens of all ranks go to this one, as far as
            they can; `Quantile(0.99)`; or measured counts, `ExpertCounts`.
        split: what the step computes in pieces of tokens, as for `apply`.

    Returns:
        The profile, for `predict`, `frontier` and `fit`.

    Raises:
        ModeError: an argument is not permitted, or this process already belongs to a group.
        UnsupportedError: the step depends on numbers, which fake tensors do not have.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> def build():
    ...     mesh = init_device_mesh("cpu", (64,))
    ...     model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)])
    ...     for block in model:
    ...         fully_shard(block, mesh=mesh)
    ...     fully_shard(model, mesh=mesh)
    ...     adam, batch = torch.optim.Adam(model.parameters()), torch.randn(32, 256)
    ...     def step():
    ...         model(batch).mean().backward()
    ...         adam.step()
    ...         adam.zero_grad()
    ...     return model, step
    >>> found = profile_rank(build, world=64)
    >>> found.parameters_bytes, len(found.layers)  # a 64th of each weight and bias
    (12336, 3)
    """
    _check(build, world, rank, routing)
    if split is not None:
        check_split(split)
    mode = UnpinningFakeMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(silent_group(world, rank))
        stack.enter_context(real_meshes())
        stack.enter_context(as_in_training())
        stack.enter_context(own_chunks())
        stack.enter_context(silent_pipelines(pipeline := PipelineActions()))
        stack.enter_context(held_messages())
        stack.enter_context(quiet())
        stack.enter_context(uncollected())
        stack.enter_context(mode)
        stack.enter_context(assuming := Assuming(routing))
        stack.enter_context(Numbers())
        stack.enter_context(profiled_autocast(torch.device("cpu")))
        model, step = _built(build)
        found = find_blocks(model, blocks, scope)
        stack.enter_context(split_for_now(model, split, found))
        facts: dict[str, Any] = {
            "fingerprint": fingerprint(model, found),
            "modules": condition_digest(model),
            "blocks": tuple(b.path for b in found),
            "fake": True,
        }

        if routing != "balanced":
            with assuming.router.rehearsal():
                step()
        seen = profile_made(model, found, torch.device("cpu"), step, mode, pipeline=pipeline, **facts)
    groups = [*([pipeline.ranks] if pipeline.ranks else []), *sorted(pipeline.groups)]
    place = Place(world, rank, pipeline.ranks, pipeline.num_stages, tuple(map(len, groups)))
    return replace(seen, routing=assuming.routing, expert_loads=assuming.router.loads, place=place)


def _check(build: object, world: object, rank: object, routing: object) -> None:
    if not callable(build):
        raise ModeError(
            f"build = {build!r} is not a function. Expected one without arguments that makes the model, parallelizes "
            "it as your trainer does, and returns (model, step)."
        )
    if type(world) is not int or world < 1:
        raise ModeError(f"world = {world!r} is not permitted. Expected the number of ranks, 1 or more.")
    if type(rank) is not int or not 0 <= rank < world:
        raise ModeError(f"rank = {rank!r} is not permitted. Expected a rank from 0 to {world - 1}.")
    check_routing(routing, by_rank=True)
    if not dist.is_available():
        raise UnsupportedError("this torch was built without torch.distributed, which a parallel job needs.")
    if dist.is_initialized():
        raise ModeError(
            f"this process is already rank {dist.get_rank()} of a group of {dist.get_world_size()}, and build() needs "
            "a default group of its own. Call profile_rank before init_process_group, or in another process."
        )


def _built(build: Build) -> tuple[nn.Module, Callable[[], object]]:
    match build():
        case (model, step) if callable(step):  # pyright: ignore[reportUnnecessaryComparison] # callers may not check
            check_module(model)
            return model, step
        case other:
            raise ModeError(
                f"build() returned {type(other).__name__}, not (model, step): the model, and a function without "
                "arguments that runs one whole training step: forward, backward and the optimizer's step."
            )
