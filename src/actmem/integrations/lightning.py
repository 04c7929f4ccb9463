"""A callback for Lightning's `Trainer`, whether it was imported as `lightning` or as `pytorch_lightning`.

>>> import actmem
>>> callback = ActmemCallback(actmem.Full())  # then: Trainer(..., callbacks=[callback])
>>> callback.applied is None  # until a fit begins
True
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, Unpack

from torch import nn
from typing_extensions import override

from actmem.errors import ModeError, StructureError
from actmem.integrations._managed_run import ApplyOptions, Managing, missing
from actmem.integrations.metrics import Metrics
from actmem.modes import Budget, Mode
from actmem.plan import Plan

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = object

__all__ = ["ActmemCallback"]


class ActmemCallback(Managing, Callback):
    """Train under a mode or a plan: `Trainer(..., callbacks=[ActmemCallback(actmem.Full())])`.

    It becomes a `Callback` of the package that is imported when it is created, as each package recognises only its own.
    The mode is applied in `setup`, before the strategy wraps the module, and removed when the fit ends.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create an instance that Lightning accepts as a callback."""
        return object.__new__(_as_callback(cls))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, for strategies that spawn processes."""
        return _made_anew, (getattr(type(self), "_kind", type(self)), vars(self))

    def __init__(
        self,
        mode: Mode | Plan,
        *,
        module: str = "",
        example: dict[str, Any] | tuple[Any, ...] | None = None,
        on_metrics: Callable[[Metrics], object] | None = None,
        **options: Unpack[ApplyOptions],
    ) -> None:
        """Store the mode and its options.

        Args:
            mode: what `actmem.apply` takes.
            module: the part of the LightningModule to apply the mode to, such as "model". A plan refers to the names
                of the model that it was made for, and a `Budget` runs that model's forward. Default: all of it.
            example: the batch that a `Budget` is planned for.
            on_metrics: called after each optimizer step, on every rank, with a plain dict: `found.append`, `wandb.log`.
            options: `blocks`, `scope`, `engine`, `collectives`, `loss` and `split`, as for `actmem.apply`.

        Raises:
            ModeError: a Budget has no example, or another mode has one.
        """
        if isinstance(mode, Budget) and example is None:
            raise ModeError(
                f"{mode!r} needs a batch to plan for. Write ActmemCallback({mode!r}, module='model', example=batch)."
            )
        if example is not None and not isinstance(mode, Budget):
            raise ModeError(
                f"example is for a Budget, which is planned for a batch; {type(mode).__name__} is not. Leave it out."
            )
        super().__init__(mode, on_metrics, options)
        self._path, self._example, self._num_steps = module, example, 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Apply the mode to the module, before a fit."""
        if stage == "fit":
            if isinstance(self.mode, Budget) and not self._path and _has_no_forward(pl_module):
                names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
                raise ModeError(
                    f"a Budget runs forward, and {type(pl_module).__name__} does not define it. Name the part to apply "
                    f"it to: ActmemCallback(..., module='model'). Its parts: {names}."
                )
            mode, num = self.mode, trainer.accumulate_grad_batches
            if isinstance(mode, Budget) and mode.microbatches == 1:
                mode = replace(mode, microbatches=num)
            self._put_on(self._part(pl_module), mode, self._example)
            self._num_steps = 0

    def _part(self, whole: nn.Module) -> nn.Module:
        try:
            return whole.get_submodule(self._path)
        except AttributeError:
            names = ", ".join(name for name, _ in whole.named_children()) or "none"
            raise StructureError(
                f"module = {self._path!r} is not a part of {type(whole).__name__}. Its parts: {names}. (What "
                "configure_model builds does not exist yet in setup: build it in __init__.)"
            ) from None

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Report the metrics of a step, once the optimizer has stepped."""
        if trainer.global_step != self._num_steps:
            self._num_steps = trainer.global_step
            self._step(self._num_steps)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the mode when a fit is aborted."""
        self._take_off()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the mode."""
        if stage == "fit":
            self._take_off()


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward.__qualname__.startswith(("LightningModule.", "_forward_unimplemented"))


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


@cache
def _subclass(kind: type, bases: tuple[type, ...]) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, "_kind": kind}
    return type(kind.__name__, (kind, *bases), names)


def _as_callback(kind: type) -> Any:
    """Return a subclass that is also a `Callback` of the imported packages; importing one would rename its logger."""
    modules = [sys.modules[name] for name in _PACKAGES if sys.modules.get(name) is not None] or [_first_package()]
    bases = tuple(m.Callback for m in modules if not issubclass(kind, m.Callback))
    return _subclass(kind, bases) if bases else kind


def _first_package() -> Any:
    for name in _PACKAGES:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise missing("lightning", "lightning")


def _made_anew(kind: type[ActmemCallback], state: dict[str, Any]) -> ActmemCallback:
    made = kind.__new__(kind)
    vars(made).update(state)
    return made
