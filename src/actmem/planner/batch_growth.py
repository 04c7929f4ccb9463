"""The largest batch, or the longest sequence, for which some plan fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import Plan
from actmem.planner.budget_fit import fit
from actmem.profiling import called_as, shapes_of
from actmem.shapes import TensorShape

__all__ = ["Largest", "check_sizes", "largest"]


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
    multiple: int | None = None,
    most: int = 2**22,
    progress: Callable[[int, bool], None] | None = None,
    start: int | None = None,
    **options: Any,
) -> Largest:
    """Find the longest sequence or the largest batch that fits a budget, with its plan.

    Args:
        model: the model; it may be on the meta device.
        make_batch: returns a batch of the size n, such as n sequences or n tokens.
        budget: as for `fit`.
        device: as for `fit`.
        vary: the dimension to grow. Sequences are tried in multiples of 128, batches singly, unless `multiple` is set.
        loss: as for `fit`.
        multiple: n is a multiple of this.
        most: n is at most this.
        progress: called with each n that was tried, and whether it fits.
        start: an n that may fit, to be tried first: the search is shorter if it does.
        options: anything else that `fit` takes, except `step`.

    Raises:
        BudgetError: not even the smallest n fits.
        ModeError: an argument is not permitted, or the batch does not depend on n.

    >>> import torch, actmem
    >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    >>> found = actmem.largest(model, lambda n: (torch.empty(n, 64),), budget="1400MiB", vary="batch", loss=torch.sum,
    ...     device="h100-80gb", multiple=2**16)
    >>> found.plan.predicted.reserved_bytes <= 1400 * 2**20 and found.size % 2**16 == 0
    True
    """
    if "step" in options:
        raise ModeError(
            f"step = {options['step']!r} is not taken here: each size is a step of its own. The sizes to try are "
            "multiples of multiple=, as in multiple=64."
        )
    multiple = check_sizes(vary, multiple, most)
    tried: dict[int, Plan | None] = {}
    seen: dict[int, tuple[tuple[TensorShape, ...], tuple[Any, ...]]] = {}

    def attempt(n: int) -> Plan | None:
        if n not in tried:
            batch = make_batch(n)
            seen[n] = shapes_of(batch), _sizes(batch)
            try:
                with called_as("actmem.largest(model, make_batch, budget=..., fake=False)"):
                    tried[n] = fit(model, batch, budget=budget, device=device, loss=loss, **options)
            except BudgetError:
                if n == multiple:
                    raise
                tried[n] = None
            if progress is not None:
                progress(n, tried[n] is not None)
        return tried[n]

    low, high = multiple, None
    if start is not None and multiple < start <= most and attempt(start - start % multiple) is not None:
        low = start - start % multiple
    else:
        attempt(low)
    while high is None and low < most:
        following = min(2 * low, most - most % multiple)
        if following == low:
            break
        if attempt(following) is None:
            high = following
        else:
            if seen[low] == seen[following] and _peak(tried[low]) == _peak(tried[following]):
                raise ModeError(
                    f"make_batch({low}) and make_batch({following}) return the same batch "
                    f"({', '.join(map(str, seen[low][0]))}), so there is no largest {vary} to find. Make the batch "
                    f"from n, as in: lambda n: {{'input_ids': torch.zeros({_EXAMPLE[vary]}, dtype=torch.long)}}."
                )
            low = following
    while high is not None and high - low > multiple:
        middle = (low + high) // 2 // multiple * multiple
        if attempt(middle) is None:
            high = middle
        else:
            low = middle
    plan = tried[low]
    assert plan is not None
    return Largest(low, plan, high)


def check_sizes(vary: str, multiple: int | None, most: int) -> int:
    """Make sure that there are sizes to try. Return what they are multiples of.

    >>> check_sizes("sequence", None, 1024)
    128

    Raises:
        ModeError: there are none.
    """
    if vary not in ("sequence", "batch"):
        raise ModeError(f"vary = {vary!r} is not known. Permitted: 'sequence' and 'batch'.")
    multiple = (128 if vary == "sequence" else 1) if multiple is None else multiple
    for name, value in (("multiple", multiple), ("most", most)):
        if type(value) is not int or value < 1:
            raise ModeError(f"{name} = {value!r} is not permitted. Expected an int of 1 or more.")
    if multiple > most:
        raise ModeError(
            f"multiple = {multiple} is above most = {most}: no multiple of it is left to try. Write most={multiple} or "
            f"more, or multiple={most} or less."
        )
    return multiple


_EXAMPLE = {"sequence": "1, n", "batch": "n, 1024"}


def _sizes(batch: Any) -> tuple[Any, ...]:
    """Return the sizes of all tensors of a batch, wherever they are in it, and the numbers next to them."""
    named: Any = dict(batch.items()) if hasattr(batch, "items") else batch
    leaves = pytree.tree_leaves(named)
    return tuple(x.shape if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, int, float)))


def _peak(plan: Plan | None) -> tuple[int, int] | None:
    predicted = None if plan is None else plan.predicted
    return None if predicted is None else (predicted.peak_bytes, predicted.replayed_flops)
