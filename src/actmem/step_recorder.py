"""Record a step on a CUDA device: one file with what its allocator did, the plan, the prediction, and versions.

Nothing here has run on a card yet. What can be checked without one is checked: the refusal, the form of the file, and
that the file is written although the step fails.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch

from actmem import torchcompat
from actmem.allocator import Attachment, write_recording
from actmem.errors import ModeError, UnsupportedError
from actmem.plan import Plan
from actmem.simulation import Prediction

__all__ = ["check_card", "record"]


def check_card() -> None:
    """Check that there is a card whose allocator can be recorded.

    Raises:
        UnsupportedError: if torch finds no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "there is no CUDA device here, and only CUDA's allocator keeps a record of its decisions. Run it where "
            "torch.cuda.is_available() is true. Without one, actmem.measure(step, model=model) counts a step's bytes, "
            "and actmem.allocator.simulate says what a card's allocator would make of them."
        )


@contextmanager
def record(
    path: str | os.PathLike[str], *, plan: Plan | None = None, prediction: Prediction | None = None
) -> Generator[None]:
    """Record what CUDA's allocator does inside the `with`, in one file for `actmem snapshot`.

    Run a few steps first: the first ones allocate gradients, optimizer state and workspaces. The file is written even
    if the step fails, so an out-of-memory error is recorded too. A recording of torch's own that is under way ends.

    >>> with record("step.pickle.xz"):  # doctest: +SKIP
    ...     train_step()

    Args:
        path: The file to write; it must end in .pickle.xz.
        plan: The plan in force, such as `applied.plan`.
        prediction: What `actmem.predict` says of the step.

    Raises:
        ModeError: if the file has another ending, or cannot be written.
        UnsupportedError: if there is no CUDA device.
    """
    if not os.fspath(path).endswith(".pickle.xz"):
        raise ModeError(f"the recording {os.fspath(path)!r} must end in .pickle.xz, such as step.pickle.xz.")
    check_card()
    torchcompat.start_memory_history()
    try:
        yield
    finally:
        attachment = Attachment(
            _versions(),
            None if plan is None else plan.to_json(),
            None if prediction is None else prediction.peak_bytes,
            () if prediction is None else prediction.timeline,
        )
        write_recording(os.fspath(path), torchcompat.taken_memory_history(), attachment)


def _versions() -> dict[str, str]:
    cuda: Any = torch.cuda  # torch leaves the next function untyped
    card = cuda.get_device_properties()
    return {
        "actmem": metadata.version("actmem"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "card": str(card.name),
        "card_bytes": str(card.total_memory),
        "settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")),
    }
