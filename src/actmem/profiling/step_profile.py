"""Profile one step of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from actmem.collector import uncollected
from actmem.devices import Device
from actmem.devices import device as find_device
from actmem.engine import tensors
from actmem.errors import ActmemError, ModeError
from actmem.expert_loads import check_routing
from actmem.modes import check_optimizer
from actmem.profiles import Profile
from actmem.profiling.autocast_lists import for_card, profiled_autocast
from actmem.profiling.complaints import called_as, quiet, told
from actmem.profiling.equal_blocks import identity
from actmem.profiling.examples import argument_names, named_arguments, shapes_of
from actmem.profiling.fake_model import Assuming, fake_batch, fake_copy
from actmem.profiling.loops import profile_loop
from actmem.profiling.optimizer_state import OptimizerLike, optimizer_of
from actmem.profiling.packed_batches import documents_of
from actmem.profiling.restored_state import Restored
from actmem.profiling.session import Session
from actmem.profiling.shards import with_optimizer, without_gradients
from actmem.settings import Split, check_split
from actmem.splitting import split_for_now
from actmem.structure import (
    Block,
    check_module,
    condition_digest,
    find_blocks,
    fingerprint,
    named_parameters,
    parameters_of,
)
from actmem.torchcompat import FakeTensorMode

__all__ = ["check_step", "profile", "profiles"]


def profile(
    model: nn.Module,
    example: dict[str, Any] | tuple[Any, ...] | None = None,
    *,
    step: Callable[[], object] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    fake: bool = True,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: str = "balanced",
    optimizer: OptimizerLike = "adamw",
    optimizer_dtype: torch.dtype | None = None,
    microbatches: int = 1,
    shard: int = 1,
    device: Device | str | None = None,
    split: Split | None = None,
) -> Profile:
    """Find out what one training step of a model does, value by value.

    Args:
        model: the model, in training mode; on the meta device too, if `fake`.
        example: a batch: a dict for `model(**example)`, or a tuple for `model(*example)`.
        step: instead of an example, a function that runs one whole training step of your own loop, as for `measure`:
            any number of forward and backward passes, clipping, the optimizer's step. It is run twice, and everything
            it changed is restored: parameters, gradients, optimizer state, buffers, random generators, and the contents
            of the objects that it reaches. Its optimizers are counted, so `loss`, `optimizer`, `optimizer_dtype`,
            `microbatches` and `shard` cannot be combined with it.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        fake: run on tensors without bytes, which takes no memory and computes nothing. Otherwise a real step is run
            twice and its operators are timed; this takes up to twice the memory of plain training.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks to use, as for `apply`.
        routing: what a fake step assumes of routers: "balanced", or "worst", where the same experts get every token.
        optimizer: the optimizer whose state and step are counted: "adamw", "adamw_fused", "adam", "sgd", or None for
            none. Or an optimizer of the model, or a function of a list of parameters that makes one, such as
            `torch.optim.Adafactor`: its step is run on tensors without bytes, and nothing of it changes.
        optimizer_dtype: the dtype of the state of a named one, if it differs from that of the parameters.
        microbatches: how many batches a step accumulates gradients over. With more than one, gradients stay in between.
        shard: over how many ranks FSDP2 divides parameters, gradients and optimizer state.
        device: the device that the profile is for, such as "h100-80gb". If it is a card, the step is run in the dtypes
            that autocast has there, under `torch.autocast("cpu")` too. Under `torch.autocast("cuda")` it always is.
            Default: the model's.
        split: what the step computes in pieces of tokens, as for `apply`.

    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
    >>> found = profile(model, (torch.randn(2, 8),), loss=torch.sum)
    >>> len(found.layers), found.parameters_bytes
    (3, 864)
    >>> adam, batch = torch.optim.Adam(model.parameters()), torch.randn(2, 8)
    >>> def train():
    ...     adam.zero_grad()
    ...     for _ in range(4):
    ...         model(batch).sum().backward()
    ...     adam.step()
    >>> found = profile(model, step=train)
    >>> len(found.layers), found.optimizer, len(adam.state)
    (12, 'Adam', 0)
    """
    options: dict[str, Any] = {
        "loss": loss,
        "fake": fake,
        "blocks": blocks,
        "scope": scope,
        "routing": routing,
        "optimizer": optimizer,
        "optimizer_dtype": optimizer_dtype,
        "microbatches": microbatches,
        "shard": shard,
    }
    if step is None and example is None:
        raise ModeError(
            "there is nothing to profile. Pass a batch, actmem.profile(model, batch), or a function that runs one "
            "training step, actmem.profile(model, step=train)."
        )
    known = find_device(device) if isinstance(device, str) else device
    is_for_card = known is not None and known.has_caching_allocator
    if split is not None:
        check_split(split)
    pieces = (
        contextlib.nullcontext() if split is None else split_for_now(model, split, find_blocks(model, blocks, scope))
    )
    with for_card() if is_for_card else contextlib.nullcontext(), pieces:
        return profiles(model, [] if example is None else [example], step=step, **options)[0]


@uncollected()
def profiles(
    model: nn.Module,
    examples: Sequence[dict[str, Any] | tuple[Any, ...]],
    *,
    step: Callable[[], object] | None = None,
    loss: Callable[[Any], Tensor] | None,
    fake: bool,
    blocks: str | Sequence[str] | None,
    scope: Sequence[str] | None,
    routing: str,
    optimizer: OptimizerLike,
    optimizer_dtype: torch.dtype | None,
    microbatches: int,
    shard: int,
) -> list[Profile]:
    """Profile a step of each example, or the step itself. The optimizer has state for what any of them trains."""
    if step is not None:
        given = {
            "example": bool(examples),
            "loss": loss is not None,
            "optimizer": not (isinstance(optimizer, str) and optimizer == "adamw"),
            "optimizer_dtype": optimizer_dtype is not None,
            "microbatches": microbatches != 1,
            "shard": shard != 1,
        }
        check_step(step, *(name for name, is_given in given.items() if is_given))
    _check(model, examples, routing=routing, microbatches=microbatches, shard=shard, fake=fake)
    check_optimizer(optimizer)
    found = find_blocks(model, blocks, scope)
    if optimizer_dtype is not None and not (optimizer is None or isinstance(optimizer, str)):
        raise ModeError(
            "optimizer_dtype is for an optimizer that is named: one that is given makes its state itself, and the "
            "dtypes of that are seen. Omit it."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if step is not None:
        facts: dict[str, Any] = _facts(model, found, fake=fake)
        with called_as("actmem.profile(model, step=step, fake=False)"), profiled_autocast(device):
            return [profile_loop(model, found, device, step, routing, **facts)]
    with profiled_autocast(device):
        seen = [_seen(model, found, device, example, loss, routing, microbatches, fake=fake) for example in examples]
    unused = frozenset[str].intersection(*(its for _, its in seen))
    named = dict(named_parameters(model))
    absent = sum(p.nbytes for name, p in named.items() if name in unused)
    found_optimizer = optimizer_of(
        optimizer, named, unused, dtype=optimizer_dtype, together=device.type not in ("cpu", "meta")
    )
    return [with_optimizer(without_gradients(p, absent), found_optimizer, shard) for p, _ in seen]


def _check(
    model: nn.Module, examples: Sequence[Any], *, routing: str, microbatches: int, shard: int, fake: bool
) -> None:
    """Refuse what cannot be profiled."""
    check_module(model)
    if not model.training:
        raise ModeError("the model is in eval mode, but a profile needs a training step. Call model.train() first.")
    if not any(t.requires_grad for t in chain(model.parameters(), tensors(examples))):
        raise ModeError(
            f"{type(model).__name__} is frozen: none of its parameters requires a gradient, so no step trains anything "
            "and nothing is held for a backward pass. Unfreeze what should be trained first, such as "
            "model.requires_grad_(True)."
        )
    check_routing(routing)
    if not fake and any(p.is_meta for p in model.parameters()):
        raise ModeError(
            "fake = False runs a real step, but the model is on the meta device, where it has no numbers. Build it on "
            "a real device, or omit fake=False."
        )
    _check_count("microbatches", microbatches)
    _check_count("shard", shard)
    if any(hasattr(p, "device_mesh") for p in parameters_of(model)):
        raise ModeError(
            "the model is already sharded (its parameters are DTensors), and an example does not say what the other "
            "ranks do. Profile a step of one rank, without the others: actmem.profile_rank(build, world=N), where "
            "build() makes the model, shards it and returns (model, step)."
        )
    wrapper = type(model).__name__
    if fake and isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ModeError(
            f"the model is wrapped in {wrapper}, which cannot be run on fake tensors. Profile and plan what it wraps, "
            "model.module, and apply the plan before it is wrapped."
        )


def check_step(step: object, *given: str) -> None:
    """Refuse arguments that cannot be combined with a step of the user's own loop.

    Raises:
        ModeError: the step cannot be called, or an argument is given that the step itself determines.
    """
    if not callable(step):
        raise ModeError(
            f"step = {step!r} is not a function. Expected one without arguments that runs one whole training step: "
            "forward, backward and the optimizer's step."
        )
    if given:
        raise ModeError(
            f"{' and '.join(given)} cannot be combined with step=: the batches, the loss and the optimizer are those "
            f"of the step itself. Omit {'it' if len(given) == 1 else 'them'}."
        )


def _facts(model: nn.Module, found: Sequence[Block], *, fake: bool) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint(model, found),
        "modules": condition_digest(model),
        "blocks": tuple(b.path for b in found),
        "fake": fake,
    }


def _seen(
    model: nn.Module,
    found: Sequence[Block],
    device: torch.device,
    example: Any,
    loss: Callable[[Any], Tensor] | None,
    routing: str,
    microbatches: int,
    *,
    fake: bool,
) -> tuple[Profile, frozenset[str]]:
    """Run one step. Return what was observed, without an optimizer, and the parameters that got no gradient."""
    facts = _facts(model, found, fake=fake)
    is_named = hasattr(example, "items")
    named = dict(example.items()) if is_named else named_arguments(argument_names(model), tuple(example), {})
    facts |= {"shapes": (*shapes_of(example), *documents_of(named)), "routing": "real", "microbatches": microbatches}
    if not fake:
        least_seconds: dict[Hashable, float] = {}
        first, second = (
            Session(
                model,
                found,
                device,
                accumulates=microbatches > 1,
                least_seconds=least_seconds,
                finds_workspaces=is_second,
            )
            for is_second in (False, True)
        )
        for step in (first, second):  # see NOTE [ Measured seconds ] in `chronicle.py`
            with Restored(model, example):
                step.run(example, loss)
        seen = second.profile(**facts)
        assert seen is not None
        return seen, second.unused
    device = torch.device("cpu") if device.type == "meta" else device
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    example = fake_batch(example, mode, device)
    identities = [identity(b.module, b.kind) for b in found]
    for shares, skips in ((True, True), (False, True), (False, False)):
        copied = fake_copy(model, mode, device, _same(found, identities) if shares else ())
        blocks_copied = tuple(replace(b, module=copied.get_submodule(b.path)) for b in found)
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(uncollected())
            stack.enter_context(mode)
            stack.enter_context(assuming := Assuming(routing))
            step = Session(
                copied,
                blocks_copied,
                device,
                accumulates=microbatches > 1,
                identities=dict(zip((b.path for b in found), identities, strict=True)) if skips else {},
                original=model,
            )
            try:
                step.run(example, loss)
            except Exception as error:
                if step.has_skipped:
                    continue  # perhaps something needs what a skipped block would have left behind
                if isinstance(error, ActmemError):
                    raise
                raise told(error, facts["shapes"]) from error.__cause__
            seen = step.profile(**{**facts, "routing": assuming.routing})
            if seen is not None:
                return seen, step.unused
    raise AssertionError("a step without skipped blocks has a profile")


def _same(found: Sequence[Block], identities: Sequence[Any]) -> list[tuple[nn.Module, nn.Module]]:
    """Return the pairs of equal blocks, with the first of each kind first."""
    firsts: dict[Any, Block] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for block, its in zip(found, identities, strict=True):
        first = firsts.setdefault(its, block)
        if first is not block:
            pairs.append((first.module, block.module))
    return pairs


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ModeError(f"{name} = {value!r} is not permitted. Expected an int of 1 or more.")
