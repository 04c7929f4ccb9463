"""From a budget to a plan: what is asked, and how the step is profiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from actmem.allocator import AllocatorSettings
from actmem.devices import Device
from actmem.errors import ModeError
from actmem.plan import Plan
from actmem.planner.allowed_measures import Variant, check_asked
from actmem.planner.budget_allowance import allowance
from actmem.planner.card_fit import check_allocator
from actmem.planner.compiled_fit import check_compiled, compilation, fit_ladder, make_ladder
from actmem.planner.fit_request import FitRequest
from actmem.planner.solver import TIME_LIMIT
from actmem.profiles import Profile
from actmem.profiling import OptimizerLike, called_as, check_step, for_card, profiles
from actmem.settings import Compiled, Offload, OptimizerState, Split, StepInBackward
from actmem.simulation import (
    dtypes_of,
    resolved,
)
from actmem.splitting import split_for_now
from actmem.structure import check_module, find_blocks

__all__ = ["fit", "requested"]


def fit(
    model: nn.Module | Profile,
    example: dict[str, Any] | tuple[Any, ...] | None = None,
    *,
    budget: str | int | float,
    step: Callable[[], object] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    device: Device | str | None = None,
    offload: str | Offload | None = None,
    optimizer: OptimizerLike = "adamw",
    optimizer_dtype: torch.dtype | None = None,
    microbatches: int = 1,
    shard: int = 1,
    examples: Sequence[dict[str, Any] | tuple[Any, ...]] = (),
    headroom: float | None = None,
    blocks: str | Sequence[str] | None = None,
    scope: Sequence[str] | None = None,
    routing: str = "balanced",
    fake: bool = True,
    time_limit: float = TIME_LIMIT,
    compiled: bool | Compiled | None = None,
    allocator: str | AllocatorSettings = "",
    split: Split | None = None,
    step_in_backward: StepInBackward | None = None,
    optimizer_state: OptimizerState | None = None,
    allow: Sequence[str] = (),
) -> Plan:
    """Find the plan that trains fastest within a memory budget, and say how far from the best possible it may be.

    The budget counts every tensor that is alive in a step, as `measure` does: parameters, gradients, optimizer state,
    activations and temporaries. On a card it is a bound on what the process takes of it: on the bytes that torch's
    caching allocator reserves, which are simulated, and on what lies outside torch. The model is not changed:
    `apply(model, plan)` does that.

    Args:
        model: the model, in training mode; it may be on the meta device. Or a profile, such as of `profile_rank`: then
            `budget`, `device`, `offload`, `headroom`, `allocator` and `time_limit` are all that is left to say.
        example: a batch: a dict for `model(**example)`, or a tuple for `model(*example)`.
        budget: such as "20GiB", a number of bytes, or a fraction of the device's memory, such as 0.9.
        step: in place of an example, a function that runs one whole training step of your own loop, as for `profile`.
            `loss`, `optimizer`, `optimizer_dtype`, `microbatches`, `shard` and `examples` cannot be combined with it.
        loss: a function of the output; by default `output.loss`, or the output itself if it is a scalar.
        device: whose speed to plan for, and whose memory a fraction is of: such as "h100-80gb". Default: this machine.
        offload: "host" or "disk", or an `Offload`, if values may be offloaded. None keeps them.
        optimizer: the optimizer to count: "adamw", "adamw_fused", "adam", "sgd", an optimizer of the model, a function
            of a list of parameters that makes one, or None for none.
        optimizer_dtype: the dtype of the state of a named one, if it is not that of the parameters.
        microbatches: how many batches gradients are accumulated over.
        shard: over how many ranks FSDP2 divides parameters, gradients and optimizer state.
        examples: several batches; the plan holds for each of them.
        headroom: the part of the budget to leave free. Default: 0.
        blocks: where the blocks are, as for `apply`.
        scope: the towers whose blocks to take, as for `apply`.
        routing: what to assume about routers: "balanced" or "worst".
        fake: profile on tensors without bytes. Otherwise a real step is run, twice, and where no other device is named
            the plan uses its measured times.
        time_limit: an emergency brake: seconds after which the solver is stopped. The best plan found by then is
            returned, and says so. Otherwise the same inputs give the same plan, however long it takes.
        compiled: whether the plan is for compiled blocks. None: if they are compiled now. True: if they are, as they
            are, and else each block by inductor; an `actmem.Compiled` says otherwise. The model is compiled under
            several plans for this, on fake tensors, or with `fake=False` for real. `step`, `examples`, `offload`,
            `shard` and `allocator` cannot be combined with it.
        allocator: on a card, what PYTORCH_CUDA_ALLOC_CONF will be when the plan is applied, such as
            "expandable_segments:True", or an `actmem.allocator.AllocatorSettings`. Default: torch's defaults, whatever
            the variable is now.
        split: what the plan computes in pieces of tokens, such as `Split(loss=16)`: it is planned with.
        step_in_backward: each parameter is stepped in the backward pass, and its gradient dropped.
        optimizer_state: where the optimizer's state is kept, such as `OptimizerState(to="disk")`.
        allow: what the plan may use, where the budget needs it or the step is then faster: "step_in_backward",
            "optimizer_state", "offload", and "split", which computes logits and loss in chunks of tokens and so changes
            the order of sums.

    Returns:
        The plan. `plan.predicted` has its peak, its step time and the proven bound.

    Raises:
        BudgetError: no plan fits. The message has the smallest peak that is possible, and what would help.
        ModeError: an argument is not permitted.

    >>> import actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    >>> plan = actmem.fit(model, (torch.randn(512, 64),), loss=torch.sum, budget="2GiB", device="h100-80gb")
    >>> plan.predicted.reserved_bytes + plan.predicted.outside_bytes <= 2 * 2**30
    True
    >>> sgd, batch = torch.optim.SGD(model.parameters()), torch.randn(512, 64)
    >>> def train():
    ...     sgd.zero_grad()
    ...     for half in batch.chunk(2):
    ...         model(half).sum().backward()
    ...     sgd.step()
    >>> plan = actmem.fit(model, step=train, budget="2GiB", device="h100-80gb")
    >>> plan.predicted.is_step
    True
    >>> print(*plan.predicted.calls[0])
    input float32 [256, 64]
    """
    return _request(
        model,
        example,
        budget=budget,
        step=step,
        loss=loss,
        device=device,
        offload=offload,
        optimizer=optimizer,
        optimizer_dtype=optimizer_dtype,
        microbatches=microbatches,
        shard=shard,
        examples=examples,
        headroom=headroom,
        blocks=blocks,
        scope=scope,
        routing=routing,
        fake=fake,
        time_limit=time_limit,
        compiled=compiled,
        allocator=allocator,
        split=split,
        step_in_backward=step_in_backward,
        optimizer_state=optimizer_state,
        allow=allow,
    ).plan(allow)


def requested(model: nn.Module | Profile, example: dict[str, Any] | tuple[Any, ...], **options: Any) -> FitRequest:
    """Return what `fit` would be asked with these arguments, for several plans of one step."""
    return _request(model, example, **{**(fit.__kwdefaults__ or {}), **options})


def _request(
    model: nn.Module | Profile,
    example: dict[str, Any] | tuple[Any, ...] | None,
    *,
    budget: str | int | float,
    step: Callable[[], object] | None,
    loss: Callable[[Any], Tensor] | None,
    device: Device | str | None,
    offload: str | Offload | None,
    optimizer: OptimizerLike,
    optimizer_dtype: torch.dtype | None,
    microbatches: int,
    shard: int,
    examples: Sequence[dict[str, Any] | tuple[Any, ...]],
    headroom: float | None,
    blocks: str | Sequence[str] | None,
    scope: Sequence[str] | None,
    routing: str,
    fake: bool,
    time_limit: float,
    compiled: bool | Compiled | None,
    allocator: str | AllocatorSettings,
    split: Split | None,
    step_in_backward: StepInBackward | None,
    optimizer_state: OptimizerState | None,
    allow: Sequence[str],
) -> FitRequest:
    """Check what `fit` was asked, and return it. Nothing is profiled yet.

    Arguments and errors are those of `fit`.
    """
    more: dict[str, Any] = {"time_limit": time_limit, "allocator": allocator}
    if isinstance(model, Profile):
        if (
            any(given is not None for given in (example, step, loss, blocks, scope, compiled, split))
            or examples
            or "split" in allow
        ):
            raise ModeError(
                "a profile already says what the step does: example, examples, step, loss, blocks, scope, compiled, "
                "split and allow=['split'] cannot be combined with it. Omit them, or pass the model itself."
            )
        known = resolved(device, dtypes_of(model))
        asked = Variant(None, step_in_backward, optimizer_state, offload)
        check_asked(asked, allow, is_compiled=False)
        return FitRequest(lambda _: [model], allowance(budget, known, headroom), known, asked, fixed=True, **more)
    check_module(model)
    batches = [*examples] if example is None else [example, *examples]
    if step is not None and examples:
        check_step(step, "examples")
    if step is None and not batches:
        raise ModeError(
            "there is no example to plan for. Give a batch, actmem.fit(model, batch, budget=...), or a function that "
            "runs one training step, actmem.fit(model, step=train, budget=...)."
        )
    for batch in batches:
        if not isinstance(batch, (dict, tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
            raise ModeError(
                f"an example is a {type(batch).__name__}. Expected a dict for model(**example), or a tuple for "
                "model(*example): write (batch,)."
            )
    if not time_limit > 0:
        raise ModeError(f"time_limit = {time_limit!r} is not permitted. Expected a number of seconds above 0.")
    known = resolved(device, {str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    allowed = allowance(budget, known, headroom)  # a wrong budget is refused before the model is profiled
    check_allocator(allocator, known)
    what = "batch" if step is None else "step=step"
    found_blocks = find_blocks(model, blocks, scope)
    how = compilation(model, found_blocks, compiled)
    if how is not None:
        check_compiled(allocator, step=step, examples=examples, offload=offload, shard=shard)
        model = cast("nn.Module", getattr(model, "_orig_mod", model))
        found_blocks = find_blocks(model, blocks, scope)
    asked = Variant(split, step_in_backward, optimizer_state, offload)
    check_asked(asked, allow, is_compiled=how is not None)

    @cache
    def profiled(split: Split | None) -> list[Profile]:
        called = f"actmem.fit(model, {what}, budget=..., fake=False)"
        with called_as(called), for_card(known.has_caching_allocator), split_for_now(model, split, found_blocks):
            return profiles(
                model,
                batches,
                step=step,
                loss=loss,
                fake=fake or how is not None,
                blocks=blocks,
                scope=scope,
                routing=routing,
                optimizer=optimizer,
                optimizer_dtype=optimizer_dtype,
                microbatches=microbatches,
                shard=shard,
            )

    def compiled_plan() -> Plan:
        assert how is not None
        ladder = make_ladder(model, found_blocks, batches[0], loss, how, profiled(None)[0], known, fake=fake)
        return fit_ladder(ladder, allowed.budget_bytes, known, how, headroom=allowed.headroom, fake=fake)

    return FitRequest(profiled, allowed, known, asked, compiled=None if how is None else compiled_plan, **more)
