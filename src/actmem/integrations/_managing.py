"""What every callback does: put a mode on a model in time, count steps, take it off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict
from weakref import WeakKeyDictionary, finalize, ref

from torch import nn

from actmem.applying import Applied, apply
from actmem.errors import ModeError
from actmem.integrations.metrics import Metrics, Recorder
from actmem.modes import Mode
from actmem.plan import Plan
from actmem.profiling.complaints import called_as

__all__ = ["ApplyOptions", "Managing"]


class ApplyOptions(TypedDict, total=False):
    """What a callback hands on to `actmem.apply`."""

    blocks: str | Sequence[str] | None
    scope: Sequence[str] | None
    engine: Literal["auto", "tape", "checkpoint"]
    collectives: Literal["save", "recompute"]
    loss: Callable[[Any], Any] | None
    fake: bool


_LATEST: WeakKeyDictionary[nn.Module, ref[Managing]] = WeakKeyDictionary()
"""Who put a mode on a model last. A trainer of transformers that breaks off tells no callback."""


class Managing:
    """A model under a mode from the beginning of a training to its end."""

    def __init__(
        self, mode: Mode | Plan, on_metrics: Callable[[Metrics], object] | None, options: ApplyOptions
    ) -> None:
        if on_metrics is not None and not callable(on_metrics):  # pyright: ignore[reportUnnecessaryComparison] # callers may not check
            raise ModeError(f"on_metrics = {on_metrics!r} is no function. Write on_metrics=wandb.log, or leave it out.")
        self.mode = mode
        self.applied: Applied | None = None
        """The handle, as from `actmem.apply`. Its report and plan can still be read when training is over."""
        self._on_metrics, self._options = on_metrics, options
        self._model: nn.Module | None = None
        self._undo: finalize[[], Managing] | None = None
        self._recorder: Recorder | None = None

    def _is_on(self, model: nn.Module) -> bool:
        """Say whether the mode is on this model, or on one that it wraps."""
        on = self._model if self.applied is not None and self.applied.is_on else None
        return on is not None and any(module is on for module in model.modules())

    def _put_on(self, model: nn.Module, mode: Mode | Plan, example: Any = None) -> None:
        """Change a model. One that had the mode before is changed back."""
        self._take_off()
        latest = _LATEST.get(model)
        other = None if latest is None else latest()
        if other is not None and other._model is model:
            other._take_off()  # its training broke off, or this one is to take its place
        with called_as(f"{type(self).__name__}(actmem.Budget(...), fake=False)"):
            self.applied = apply(model, mode, example=example, **self._options)
        self._model = model
        self._undo = finalize(self, self.applied.remove)  # at the latest when the trainer is forgotten
        self._undo.atexit = False
        _LATEST[model] = ref(self)
        self._recorder = None if self._on_metrics is None else Recorder(self.applied, self._on_metrics)

    def _take_off(self) -> None:
        """Change the model back, if it was changed."""
        if self._undo is not None:
            self._undo()
        self._model = self._undo = None

    def _step(self, number: int) -> None:
        """Send the metrics of a step, if anyone wants them."""
        if self._recorder is not None:
            self._recorder.step(number)
