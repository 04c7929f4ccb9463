"""The largest batch, or the longest sequence, for which some plan fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actmem.devices import Device
from actmem.errors import BudgetError, ModeError
from actmem.plan import Plan
from actmem.planner.budget_fit import requested
from actmem.planner.fit_request import FitRequest
from actmem.profiling import called_as, shapes_of

__all__ = ["Growth", "Largest", "check_sizes", "largest"]


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
    allow = options.get("allow", ())
    options |= {"budget": budget, "device": device, "loss": loss}
    return Growth(model, make_batch, vary, multiple=multiple, most=most, progress=progress, **options).find(
        allow, start
    )


class Growth:
    """A search for the largest size that fits, with any measures.

    That the plan which recomputes every block fits is a prediction, and quick. It brackets the size by doubling and
    bisecting. Only from the largest size where it fits are plans searched for, in growing steps.
    """

    def __init__(
        self,
        model: nn.Module,
        make_batch: Callable[[int], dict[str, Any] | tuple[Any, ...]],
        vary: str,
        *,
        multiple: int | None = None,
        most: int = 2**22,
        progress: Callable[[int, bool], None] | None = None,
        **options: Any,
    ) -> None:
        if "step" in options:
            raise ModeError(
                f"step = {options['step']!r} is not taken here: each size is a step of its own. The sizes to try are "
                "multiples of multiple=, as in multiple=64."
            )
        self._multiple = check_sizes(vary, multiple, most)
        self._most = most - most % self._multiple
        self._model, self._make_batch, self._vary, self._options = model, make_batch, vary, options
        self._progress = progress
        self._requests: dict[int, FitRequest] = {}
        self._seen: dict[int, Any] = {}

    def find(self, allow: Sequence[str] = (), start: int | None = None) -> Largest:
        """Find the largest size that fits with some measures.

        Args:
            allow: the measures.
            start: a size that may fit, to be tried first.

        Raises:
            BudgetError: not even the smallest size fits.
            ModeError: the batch does not depend on the size.
        """
        with called_as("actmem.largest(model, make_batch, budget=..., fake=False)"):
            return self._find(allow, self._multiple if start is None else start - start % self._multiple)

    def _find(self, allow: Sequence[str], first: int) -> Largest:
        low, high = self._bracket(lambda n: self._is_predicted(n, allow), min(max(first, self._multiple), self._most))
        if not low:
            low = self._multiple
            self._request(low).plan(allow)
            self._tell(low, fits=True)
        if high is not None:
            low, high = self._climb(lambda n: self._is_planned(n, allow), low)
        return Largest(low, self._plan(low, allow), high)

    def _bracket(self, fits: Callable[[int], bool], first: int) -> tuple[int, int | None]:
        """Return the largest size that is predicted to fit, 0 if none is, and the next one that is not."""
        low, n = 0, first
        while fits(n):
            if n == self._most:
                return n, None
            self._check_growth(low, n)
            low, n = n, min(2 * n, self._most)
        return self._bisect(fits, low, n)

    def _climb(self, fits: Callable[[int], bool], low: int) -> tuple[int, int | None]:
        """Return the largest size for which a plan is found, from one that fits on, and the next one."""
        step = self._multiple
        while low < self._most:
            n = min(low + step, self._most)
            if not fits(n):
                return self._bisect(fits, low, n)
            self._check_growth(low, n)
            low, step = n, 4 * step
        return low, None

    def _bisect(self, fits: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
        while high - low > self._multiple:
            middle = (low + high) // 2 // self._multiple * self._multiple
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low, high

    def _is_predicted(self, n: int, allow: Sequence[str]) -> bool:
        found = self._request(n).reach(allow)
        return self._tell(n, fits=found is not None and found.fits)

    def _is_planned(self, n: int, allow: Sequence[str]) -> bool:
        try:
            self._request(n).plan_with(allow)
        except BudgetError:
            return self._tell(n, fits=False)
        return self._tell(n, fits=True)

    def _plan(self, n: int, allow: Sequence[str]) -> Plan:
        """Return the plan with no more measures than it needs."""
        try:
            return self._request(n).plan(allow)
        except BudgetError:
            return self._request(n).plan_with(allow)

    def _tell(self, n: int, *, fits: bool) -> bool:
        if self._progress is not None:
            self._progress(n, fits)
        return fits

    def _request(self, n: int) -> FitRequest:
        """Return what is asked of a size. Profiles are large: those of a few sizes are kept."""
        if n not in self._requests:
            batch = self._make_batch(n)
            self._seen[n] = shapes_of(batch), _sizes(batch)
            self._requests[n] = requested(self._model, batch, **self._options)
        found = self._requests[n] = self._requests.pop(n)
        while len(self._requests) > _NUM_KEPT:
            del self._requests[next(iter(self._requests))]
        return found

    def _check_growth(self, low: int, n: int) -> None:
        """Refuse batches that do not depend on the size.

        Raises:
            ModeError: two sizes have the same tensors, and the same peak.
        """
        if not low or self._seen[low] != self._seen[n]:
            return
        smaller, larger = (self._request(each).reach(()) for each in (low, n))
        if smaller == larger:
            shapes, example = ", ".join(map(str, self._seen[low][0])), _EXAMPLE[self._vary]
            raise ModeError(
                f"make_batch({low}) and make_batch({n}) return the same batch ({shapes}), so there is no largest "
                f"{self._vary} to find. Make the batch from n, as in: lambda n: {{'input_ids': torch.zeros({example}, "
                "dtype=torch.long)}."
            )


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


_NUM_KEPT = 4
_EXAMPLE = {"sequence": "1, n", "batch": "n, 1024"}


def _sizes(batch: Any) -> tuple[Any, ...]:
    """Return the sizes of all tensors of a batch, wherever they are in it, and the numbers next to them."""
    named: Any = dict(batch.items()) if hasattr(batch, "items") else batch
    leaves = pytree.tree_leaves(named)
    return tuple(x.shape if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, int, float)))
