"""The largest batch, or the longest sequence, for which some plan fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import Plan
from actmem.planner.fitting import fit

__all__ = ["Largest", "largest"]


@dataclass(frozen=True)
class Largest:
    """The outcome of `largest`."""

    size: int
    """The largest n for which a plan was found."""
    plan: Plan
    """Its plan."""
    refused: int | None
    """The smallest n that was tried and for which no plan was found; None if `most` was reached."""


def largest(
    model: nn.Module,
    make_batch: Callable[[int], dict[str, Any] | tuple[Any, ...]],
    *,
    budget: str | int | float,
    device: Device | str | None = None,
    vary: Literal["sequence", "batch"] = "sequence",
    loss: Callable[[Any], Tensor] | None = None,
    step: int | None = None,
    most: int = 2**22,
    progress: Callable[[int, bool], None] | None = None,
    **options: Any,
) -> Largest:
    """Find the longest sequence or the largest batch that fits a budget, with its plan.

    Args:
        model: the model; it may be on the meta device.
        make_batch: returns a batch of the size n.
        budget: as for `fit`.
        device: as for `fit`.
        vary: what n is. Sequences are tried in steps of 128, batches in steps of 1, unless `step` says otherwise.
        loss: as for `fit`.
        step: n is a multiple of this.
        most: n is at most this.
        progress: is told of each n that was tried, and whether it fits.
        options: anything else that `fit` takes.

    Raises:
        BudgetError: not even the smallest n fits.

    >>> import torch, actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    >>> found = actmem.largest(model, lambda n: (torch.empty(n, 64),), budget="1MiB", vary="batch", loss=torch.sum,
    ...     device="h100-80gb", step=64)
    >>> found.plan.predicted.peak_bytes <= 2**20 and found.size % 64 == 0
    True
    """
    if vary not in ("sequence", "batch"):
        raise ModeError(f"vary = {vary!r} is not known. Permitted: 'sequence' and 'batch'.")
    step = (128 if vary == "sequence" else 1) if step is None else step
    if type(step) is not int or step < 1:
        raise ModeError(f"step = {step!r} is not permitted. Expected an int of 1 or more.")
    tried: dict[int, Plan | None] = {}

    def attempt(n: int) -> Plan | None:
        if n not in tried:
            try:
                tried[n] = fit(model, make_batch(n), budget=budget, device=device, loss=loss, **options)
            except BudgetError:
                if n == step:
                    raise
                tried[n] = None
            if progress is not None:
                progress(n, tried[n] is not None)
        return tried[n]

    low, high = step, None
    attempt(low)
    while high is None and low < most:
        following = min(2 * low, most - most % step)
        if following == low:
            break
        if attempt(following) is None:
            high = following
        else:
            low = following
    while high is not None and high - low > step:
        middle = (low + high) // 2 // step * step
        if attempt(middle) is None:
            high = middle
        else:
            low = middle
    plan = tried[low]
    assert plan is not None
    return Largest(low, plan, high)
