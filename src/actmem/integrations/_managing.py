"""What every callback does: put a mode on a model in time, count steps, take it off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from torch import nn

from actmem.applying import Applied, apply
from actmem.integrations.metrics import Metrics, Recorder
from actmem.modes import Mode
from actmem.plan import Plan

__all__ = ["ApplyOptions", "Managing"]


class ApplyOptions(TypedDict, total=False):
    """What a callback hands on to `actmem.apply`."""

    blocks: str | None
    scope: Sequence[str] | None
    engine: Literal["auto", "tape", "checkpoint"]
    collectives: Literal["save", "recompute"]
    loss: Callable[[Any], Any] | None


class Managing:
    """A model under a mode from the beginning of a training to its end."""

    def __init__(
        self, mode: Mode | Plan, on_metrics: Callable[[Metrics], object] | None, options: ApplyOptions
    ) -> None:
        self.mode = mode
        self.applied: Applied | None = None
        """The handle, as from `actmem.apply`. Its report and plan can still be read when training is over."""
        self._on_metrics, self._options = on_metrics, options
        self._model: nn.Module | None = None
        self._recorder: Recorder | None = None

    def _is_on(self, model: nn.Module) -> bool:
        """Say whether the mode is on this model, or on one that it wraps."""
        return self._model is not None and any(module is self._model for module in model.modules())

    def _put_on(self, model: nn.Module, mode: Mode | Plan, example: Any = None) -> None:
        """Change a model. One that had the mode before is changed back."""
        self._take_off()
        self.applied = apply(model, mode, example=example, **self._options)
        self._model = model
        self._recorder = None if self._on_metrics is None else Recorder(self.applied, self._on_metrics)

    def _take_off(self) -> None:
        """Change the model back, if it was changed."""
        if self._model is not None and self.applied is not None:
            self.applied.remove()
        self._model = None

    def _step(self, number: int) -> None:
        """Send the metrics of a step, if anyone wants them."""
        if self._recorder is not None:
            self._recorder.step(number)
