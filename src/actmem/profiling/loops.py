"""Profile a step of the user's own loop: a function that runs one whole training step.

NOTE [ A step of one's own ]
The step runs twice, and the second time is the profile: by then optimizer state, gradients and whatever else a first
step makes exist, as they do from then on in training. The profile counts the parameters, buffers and gradients of the
model, the parameters, gradients and state of every optimizer that the step reaches or that steps, and everything its
operators allocate, as `measure` does. Afterwards everything is as it was: see NOTE [ What a step reaches ] for the
contents of objects, and `Preserved` for the bytes of tensors. Only what is outside the process, such as files and
loggers, and iterators that cannot be copied, such as generators, have advanced by two steps.

On fake tensors, the parameters, buffers, gradients and all other floating-point tensors that the step reaches are
exchanged for stand-ins without bytes while it runs, in place. Numbers are assumed: see NOTE [ Assumed numbers ].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actmem.errors import ActmemError
from actmem.log_entries import Entered, Entry, GradientsCounted, PhaseBegan
from actmem.measuring import NO_TASK, current_task, state_tensors, tensors_in, watches
from actmem.profiles import Profile
from actmem.profiling.chronicle import Chronicle
from actmem.profiling.complaints import quiet, told
from actmem.profiling.examples import argument_names, named_arguments, shapes_of
from actmem.profiling.fake_model import Assuming, StandIns, refuse_recurrent
from actmem.profiling.numbers import Numbers
from actmem.profiling.optimizer_trial import refuse_fakes
from actmem.profiling.pipeline_actions import PipelineActions
from actmem.profiling.reach import Reach
from actmem.profiling.restored_state import Preserved
from actmem.profiling.session import Session
from actmem.shapes import TensorShape
from actmem.structure import Block
from actmem.torchcompat import (
    FakeTensor,
    FakeTensorMode,
    after_backward,
    is_traceable_wrapper_subclass,
    never_compile,
)

__all__ = ["profile_loop", "profile_made"]


def profile_loop(
    model: nn.Module,
    found: Sequence[Block],
    device: torch.device,
    step: Callable[[], object],
    routing: str,
    *,
    fake: bool,
    **facts: Any,
) -> Profile:
    """Run a step and return what was observed. Everything is restored afterwards. See NOTE [ A step of one's own ].

    Args:
        model: the model.
        found: its blocks.
        device: the model's device.
        step: one whole training step.
        routing: what a fake step assumes of routers.
        fake: run on tensors without bytes.
        facts: what else is known about the profile.
    """
    loop = _Loop(model, step)
    if not fake:
        try:
            return loop.profile(found, device, least_seconds={}, **facts)
        finally:
            loop.restore()
    refuse_recurrent(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        seen = _faked(loop, found, device, mode, routing, **facts)
    finally:
        loop.restore()
    del loop
    refuse_fakes(mode)
    return seen


def profile_made(
    model: nn.Module,
    found: Sequence[Block],
    device: torch.device,
    step: Callable[[], object],
    mode: Any,
    *,
    pipeline: PipelineActions,
    **facts: Any,
) -> Profile:
    """Profile a step whose model was made under a fake mode, which is active. Nothing is restored."""
    return _Loop(model, step, restores=False).profile(found, device, mode=mode, pipeline=pipeline, **facts)


def _faked(loop: _Loop, found: Sequence[Block], device: torch.device, mode: Any, routing: str, **facts: Any) -> Profile:
    device = torch.device("cpu") if device.type == "meta" else device
    loop.exchange(StandIns(mode))
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(mode)
        stack.enter_context(assuming := Assuming(routing))
        stack.enter_context(Numbers())
        try:
            seen = loop.profile(found, device, mode=mode, **facts)
        except ActmemError:
            raise
        except Exception as error:  # noqa: BLE001  # re-raise whatever the loop raises, without frames of fake tensors
            raise told(error, loop.shapes) from error.__cause__
    return replace(seen, routing=assuming.routing)


class _Loop:
    """A step, what it reaches, and what was observed."""

    def __init__(self, model: nn.Module, step: Callable[[], object], *, restores: bool = True) -> None:
        self._model, self._step = model, step
        self._reach, self._preserved = Reach(), Preserved() if restores else None
        self._stand_ins: StandIns | None = None
        self._calls: dict[tuple[TensorShape, ...], None] = {}
        self._names: dict[str, None] = {}
        """Classes of the optimizers that stepped."""
        self._meet(model)
        self._meet(step)

    @property
    def shapes(self) -> tuple[TensorShape, ...]:
        """The tensors of all calls of the model."""
        return tuple(dict.fromkeys(shape for call in self._calls for shape in call))

    def exchange(self, stand_ins: StandIns) -> None:
        """Replace tensors by stand-ins, now and wherever more are found later."""
        self._stand_ins = stand_ins
        self._reach.exchange(stand_ins)

    def restore(self) -> None:
        """Put everything back."""
        if self._preserved is not None:
            self._preserved.restore()
        self._reach.restore()

    def profile(
        self,
        found: Sequence[Block],
        device: torch.device,
        *,
        least_seconds: dict[Hashable, float] | None = None,
        mode: Any = None,
        pipeline: PipelineActions | None = None,
        **facts: Any,
    ) -> Profile:
        """Run the step twice, and return what was observed the second time."""
        preserved = contextlib.nullcontext() if self._preserved is None else self._preserved
        with self._arrivals(None), preserved:
            self._step()
        chronicle = _Phased(device, least_seconds=least_seconds, mode=mode, holdings=self._holdings)
        session = Session(self._model, found, device, accumulates=False, chronicle=chronicle)
        if pipeline is not None:
            pipeline.note = chronicle.note
        with self._arrivals(chronicle), preserved:
            session.run_step(self._step, self._holdings)
        seen = session.profile(
            **facts,
            routing="real",
            shapes=self.shapes,
            calls=tuple(self._calls),
            is_step=True,
            optimizer=" and ".join(self._names) or "none",
            gradients_bytes=max((e.num_bytes for e in chronicle.log if isinstance(e, GradientsCounted)), default=0),
        )
        chronicle.close()
        if pipeline is not None:
            pipeline.note, pipeline.groups = None, chronicle.groups
        assert seen is not None
        return seen

    def _meet(self, value: Any) -> None:
        """Remember what can be reached from an object, if it is new."""
        if self._reach.has(value):
            return
        known = len(self._reach.modules)
        self._reach.add(value)
        if self._preserved is not None:
            for module in self._reach.modules[known:]:
                for buffer in module.buffers(recurse=False):
                    self._preserved.keep(buffer)
        if self._stand_ins is not None:
            self._reach.exchange(self._stand_ins)

    @contextlib.contextmanager
    def _arrivals(self, chronicle: _Phased | None) -> Generator[None]:
        """Notice modules that are called and optimizers that step although no walk found them."""

        def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._meet(optimizer)
            self._names[type(optimizer).__name__] = None
            if chronicle is not None:
                chronicle.optimizer_begins(has_closure=_has_closure(args, kwargs))

        def ended(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            if chronicle is not None:
                chronicle.optimizer_ended(has_closure=_has_closure(args, kwargs))

        def called(module: nn.Module, _: Any) -> None:
            self._meet(module)

        def given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled():
                self._calls[shapes_of(named_arguments(argument_names(module), args, kwargs))] = None

        hooks: list[Any] = [
            register_optimizer_step_pre_hook(begins),
            register_optimizer_step_post_hook(ended),
            register_module_forward_pre_hook(called),
            self._model.register_forward_pre_hook(given, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _holdings(self) -> Iterator[tuple[Tensor, str]]:
        """Yield what the model and the optimizers hold now, with its role, as `measure` counts it."""
        optimizers: list[Optimizer] = self._reach.optimizers
        trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        parameters: list[Tensor] = [*self._model.parameters(), *trained]
        for parameter in parameters:
            yield parameter, "parameters"
        for buffer in self._model.buffers():
            yield buffer, "buffers"
        for parameter in parameters:
            if parameter.is_leaf and parameter.grad is not None:
                yield parameter.grad, "gradients"
        for optimizer in optimizers:
            for tensor in state_tensors(optimizer):
                yield tensor, "optimizer_state"


class _Phased(Chronicle):
    """A chronicle that notes where backward passes and the steps of optimizers begin and end."""

    def __init__(
        self,
        device: torch.device,
        *,
        least_seconds: dict[Hashable, float] | None,
        mode: Any,
        holdings: Callable[[], Iterator[tuple[Tensor, str]]],
    ) -> None:
        super().__init__(device, least_seconds=least_seconds, finds_workspaces=mode is None)
        self._mode, self._holdings = mode, holdings
        self._task = NO_TASK
        self._gradients = -1

    def close(self) -> None:
        """Release what the step holds."""
        self._holdings = lambda: iter(())

    def note(self, entry: Entry) -> None:
        """Add an entry; before a block or a phase, also the current bytes of gradients, if they changed."""
        if isinstance(entry, (Entered, PhaseBegan)):
            gradients = {id(t): t for t, role in self._holdings() if role == "gradients"}
            # A gradient that is divided over ranks takes what this one has of it.
            now = sum(_own_bytes(t) for t in gradients.values())
            if now != self._gradients:
                self._gradients = now
                super().note(GradientsCounted(now, self.live_bytes))
        super().note(entry)

    def _note_phase(self, name: str) -> None:
        self.note(PhaseBegan(name, self.live_bytes))

    def optimizer_begins(self, *, has_closure: bool) -> None:
        """Note that an optimizer steps, unless it does so in a backward pass, or runs one itself."""
        if self._task == NO_TASK and not has_closure:
            self._note_phase("optimizer")

    def optimizer_ended(self, *, has_closure: bool) -> None:
        """Note that an optimizer has stepped."""
        if self._task == NO_TASK and not has_closure:
            self._note_phase("forward")

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the phase, then continue as usual."""
        if not self.paused:
            task = current_task()
            if task != NO_TASK and self._task == NO_TASK:
                self._task = task
                self._note_phase("backward")
                after_backward(self._backward_ended)
            elif task == NO_TASK and self._task != NO_TASK:
                self._backward_ended()  # an error ended the pass, and its callback never ran
            if self._mode is not None:
                self._convert(args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _backward_ended(self) -> None:
        self._task = NO_TASK
        self._note_phase("end")
        self._note_phase("forward")

    def _convert(self, args: Any, kwargs: Any) -> None:
        """Register the fake version of a tensor that no walk found: like the original, it is not part of the step."""
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
                continue
            if tensor.is_floating_point():
                self.ledger.read(self._mode.from_tensor(tensor))


watches(__file__)  # its handler comes between torch's and the chronicle's


def _own_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of one that is divided over ranks, the bytes of this rank's part."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    names: list[str] = cast("Any", tensor).__tensor_flatten__()[0]
    return sum(_own_bytes(part) for name in names if isinstance(part := getattr(tensor, name), Tensor))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))
