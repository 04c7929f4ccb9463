"""Taking a batch for planning out of a data loader, without disturbing the training that follows."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from actmem.errors import ModeError

__all__ = ["planning_batch"]

_NUM_LOOKED_AT = 256


def planning_batch(loader: Any, batch_size: int) -> Any:
    """Make a batch of the longest samples of a loader's data set, by the loader's own collator.

    Samples are looked at evenly over the data set, 256 at most, or the first ones where it can only be iterated. The
    loader itself is not iterated, and the states of the random generators are put back.

    Args:
        loader: a torch data loader, or one that accelerate made of it.
        batch_size: how many samples to take.

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
                    "the training data can be gone through only once, so a batch to plan for would be missing from "
                    "training. Give one: example=batch."
                )
            samples = [*islice(rows, max(_NUM_LOOKED_AT, batch_size))]
        if not samples:
            raise ModeError(
                "the training data is empty, and a Budget needs a batch to plan for. Give one: example=batch."
            )
        samples.sort(key=_length, reverse=True)
        return loader.collate_fn(samples[:batch_size])


def _length(sample: Any) -> int:
    """Count the numbers in a sample."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, Mapping):
        return max((_length(value) for value in cast("Mapping[str, Any]", sample).values()), default=0)
    if isinstance(sample, tuple):
        return max((_length(value) for value in cast("tuple[Any, ...]", sample)), default=0)
    return len(cast(Sized, sample)) if hasattr(sample, "__len__") else 1


@contextmanager
def _generators_untouched() -> Generator[None]:
    """Give the generators of Python, numpy and torch their states back."""
    import numpy

    own, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(own)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
