"""What the callbacks share: the managed run, the batch to plan with, and a library that is missing."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, TypedDict, cast
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn

from actmem.applying import Applied, apply
from actmem.errors import ActmemError, ModeError
from actmem.integrations.metrics import Metrics, Recorder
from actmem.modes import Mode
from actmem.plan import Plan
from actmem.profiling import called_as
from actmem.settings import Split

__all__ = ["ApplyOptions", "Managing", "MissingLibraryError", "missing", "planning_batch"]


class ApplyOptions(TypedDict, total=False):
    """Options that a callback passes on to `actmem.apply`."""

    blocks: str | Sequence[str] | None
    scope: Sequence[str] | None
    engine: Literal["auto", "tape", "checkpoint"]
    collectives: Literal["save", "recompute"]
    loss: Callable[[Any], Any] | None
    fake: bool
    split: Split | None


_LATEST: WeakKeyDictionary[nn.Module, ref[Managing]] = WeakKeyDictionary()
"""The callback that last applied a mode to a model. A transformers trainer that aborts notifies no callback."""


class Managing:
    """A model under a mode from the start of training to its end."""

    def __init__(
        self, mode: Mode | Plan, on_metrics: Callable[[Metrics], object] | None, options: ApplyOptions
    ) -> None:
        if on_metrics is not None and not callable(on_metrics):  # pyright: ignore[reportUnnecessaryComparison] # callers may not check
            raise ModeError(
                f"on_metrics = {on_metrics!r} is not a function. Write on_metrics=wandb.log, or leave it out."
            )
        self.mode = mode
        self.applied: Applied | None = None
        """The handle, as returned by `actmem.apply`. Its report and plan can still be read after training."""
        self._on_metrics, self._options = on_metrics, options
        self._model: nn.Module | None = None
        self._undo: finalize[[], Managing] | None = None
        self._recorder: Recorder | None = None

    def _is_on(self, model: nn.Module) -> bool:
        """Return whether the mode is applied to this model, or to one that it wraps."""
        on = self._model if self.applied is not None and self.applied.is_on else None
        return on is not None and any(module is on for module in model.modules())

    def _put_on(self, model: nn.Module, mode: Mode | Plan, example: Any = None) -> None:
        """Apply the mode to a model. It is first removed from the model that had it."""
        self._take_off()
        latest = _LATEST.get(model)
        other = None if latest is None else latest()
        if other is not None and other._model is model:
            other._take_off()  # its training was aborted, or this callback replaces it
        with called_as(f"{type(self).__name__}(actmem.Budget(...), fake=False)"):
            self.applied = apply(model, mode, example=example, **self._options)
        self._model = model
        self._undo = finalize(self, self.applied.remove)  # at the latest when the callback is garbage-collected
        self._undo.atexit = False
        _LATEST[model] = ref(self)
        self._recorder = None if self._on_metrics is None else Recorder(self.applied, self._on_metrics)

    def _take_off(self) -> None:
        """Remove the mode from the model, if it was applied."""
        if self._undo is not None:
            self._undo()
        self._model = self._undo = None

    def _step(self, number: int) -> None:
        """Report the metrics of a step, if a function was passed for them."""
        if self._recorder is not None:
            self._recorder.step(number)


_NUM_LOOKED_AT = 256


def planning_batch(loader: Any, batch_size: int) -> Any:
    """Return a batch of the longest samples of a loader's data set, built by the loader's own collator.

    At most 256 samples are examined, spread evenly over the data set, or the first ones if it can only be iterated. The
    loader itself is not iterated, and the states of the random generators are restored.

    Args:
        loader: a torch data loader, or one that accelerate derived from it.
        batch_size: number of samples in the batch.

    >>> data = [{"ids": torch.zeros(n)} for n in (3, 5, 4)]
    >>> loader = torch.utils.data.DataLoader(data, collate_fn=lambda rows: {"ids": [len(r["ids"]) for r in rows]})
    >>> planning_batch(loader, 2)
    {'ids': [5, 4]}
    """
    dataset = loader.dataset
    with _generators_untouched():
        if hasattr(dataset, "__getitem__") and isinstance(dataset, Sized):
            num = len(dataset)
            looked_at = min(num, max(_NUM_LOOKED_AT, batch_size))
            samples: list[Any] = [cast(Any, dataset)[i * num // looked_at] for i in range(looked_at)]
        else:
            rows = iter(dataset)
            if rows is dataset or iter(dataset) is rows:
                raise ModeError(
                    "the training data can be iterated only once, so a batch to plan for would be missing from "
                    "training. Pass one: example=batch."
                )
            samples = [*islice(rows, max(_NUM_LOOKED_AT, batch_size))]
        if not samples:
            raise ModeError(
                "the training data is empty, and a Budget needs a batch to plan for. Pass one: example=batch."
            )
        samples.sort(key=_length, reverse=True)
        return loader.collate_fn(samples[:batch_size])


def _length(sample: Any) -> int:
    """Return the size of the largest entry of a sample."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, Mapping):
        return max((_length(value) for value in cast("Mapping[str, Any]", sample).values()), default=0)
    if isinstance(sample, tuple):
        return max((_length(value) for value in cast("tuple[Any, ...]", sample)), default=0)
    return len(cast(Sized, sample)) if hasattr(sample, "__len__") else 1


@contextmanager
def _generators_untouched() -> Generator[None]:
    """Restore the random generators of Python, numpy and torch on exit."""
    import numpy

    own, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(own)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)


class MissingLibraryError(ActmemError, ImportError):
    """An integration needs a library that is not installed."""


def missing(module: str, *packages: str) -> MissingLibraryError:
    """Return the error for an integration whose library could not be imported.

    >>> missing("transformers", "transformers", "accelerate")
    MissingLibraryError('actmem.integrations.transformers needs transformers and accelerate, ... pip install ...')
    """
    return MissingLibraryError(
        f"actmem.integrations.{module} needs {' and '.join(packages)}, which could not be imported. Install what is "
        f"missing: pip install {' '.join(packages)}"
    )
