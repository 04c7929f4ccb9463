"""What a user is told when a step on fake tensors fails: the error of plain training first, then the line to write."""

from __future__ import annotations

import linecache
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from actmem.shapes import TensorShape
from actmem.torchcompat import FakeTensor, without_fake_mode

__all__ = ["as_plain", "asking_line", "called_as", "for_real", "quiet", "told"]

_CALL: ContextVar[str] = ContextVar("_CALL", default="")
_PACKAGE = str(Path(__file__).parents[1])
_FAKE_PARTS = (
    *("_subclasses", "_meta_registrations", "_prims", "_refs", "_decomp", "_ops.py"),
    *("_python_dispatch", "_dynamo", "_compile.py"),
)
_SAME = "Plain training raises the same."
_MOST_TRIED = 1 << 24
"""Elements up to which an operator that failed is tried on real tensors."""


@contextmanager
def called_as(line: str) -> Generator[None]:
    """Record the call that the user made, written so that it profiles a real step. The outermost one counts."""
    before = _CALL.set(_CALL.get() or line)
    try:
        yield
    finally:
        _CALL.reset(before)


def for_real() -> str:
    """Return what to write in place of the user's call so that a real step is profiled.

    >>> for_real()
    'actmem.profile(model, example, fake=False)'
    """
    return _CALL.get() or "actmem.profile(model, example, fake=False)"


@contextmanager
def quiet() -> Generator[None]:
    """Keep torch from logging the traceback of its shape rules: the error itself is raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def asking_line() -> str:
    """Return the line of user code that is running: file, line number and text."""
    own, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith((own, torchs)):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    said = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}{f' ({said})' if said else ''}:"


def as_plain(func: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> Exception:
    """Return the error that an operator raises on real tensors of these shapes, if it raises one, else `error`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [t for t in leaves if isinstance(t, Tensor)]
    if sum(t.numel() for t in given) > _MOST_TRIED:
        return error
    with without_fake_mode(), torch.no_grad(), suppress(NotImplementedError):
        stand_ins = [torch.zeros((), dtype=t.dtype).expand(t.shape) if isinstance(t, FakeTensor) else t for t in leaves]
        again, options = pytree.tree_unflatten(stand_ins, spec)
        try:
            func(*again, **options)
        except RuntimeError as plain:
            plain.add_note(_SAME)
            return plain
    return error


def told(error: Exception, shapes: Sequence[TensorShape]) -> Exception:
    """Return the error of a fake step as a user should see it: without the frames of actmem and of fake tensors."""
    batch = ", ".join(map(str, shapes)) or "a batch without tensors"
    if _SAME in getattr(error, "__notes__", ()):
        error.add_note(f"The batch: {batch}.")
    else:
        error.add_note(
            f"It occurred in a step on fake tensors, for {batch}. If plain training accepts this batch, profile a real "
            f"step: {for_real()}"
        )
    return error.with_traceback(_pruned(error.__traceback__))


def _pruned(trace: TracebackType | None) -> TracebackType | None:
    if trace is None:
        return None
    file, rest = trace.tb_frame.f_code.co_filename, _pruned(trace.tb_next)
    torchs = str(Path(torch.__file__).parent)
    if file.startswith(_PACKAGE) or (file.startswith(torchs) and any(part in file for part in _FAKE_PARTS)):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
