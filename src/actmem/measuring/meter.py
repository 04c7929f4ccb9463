"""Measure one step: the dispatch mode that observes it, and the entry point."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actmem.engine import record_compiled_regions
from actmem.measuring.allocations import Allocations, number_bytes
from actmem.measuring.allocator_check import checked
from actmem.measuring.flops import Formula, flop_formula
from actmem.measuring.inplace_formulas import Formulas, called_from_python, is_listed, watches
from actmem.measuring.ledger import ByteLedger, Entry, is_foreign, state_tensors, tensors_in, watching_resizes
from actmem.measuring.measurement import CATEGORIES, PHASES, Measurement, PeakOp, Sample
from actmem.measuring.phases import NO_TASK, Phases, current_task
from actmem.torchcompat import (
    FakeTensor,
    TorchDispatchMode,
    after_backward,
    as_outside,
    backward_code,
    divide,
    is_composite,
    op_name,
)

__all__ = ["measure"]


def measure(
    fn: Callable[[], object],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    check: bool = False,
) -> Measurement:
    """Run `fn` once and report exactly what it cost: bytes, FLOPs and seconds.

    The peak is what torch's allocator would see in the same step, unobserved: bytes as they are requested, before an
    allocator rounds them. The parameters, buffers and gradients of `model`, the parameters, gradients and state of
    `optimizer`, and everything that `fn` allocates are counted. A batch made beforehand is not: it is summed in
    `external_bytes`. Storages count on the device of the model, else of the optimizer, else on the CPU; `by_device` has
    the peaks of the others.

    Observing a step changes it: under a dispatch mode torch's own formulas return new tensors where they otherwise
    write in place. Those are booked as they run unobserved (NOTE [ in place unless watched ]). On a CPU, what a kernel
    allocates for itself and what is kept outside every operator, such as the states of random generators, is read from
    the allocator's log and listed in `unseen`. On an accelerator it is not seen.

    Args:
        fn: one step.
        model: the model whose parameters, buffers and gradients are counted.
        optimizer: the optimizer whose parameters, gradients and state are counted.
        check: run `fn` a second time, unobserved, and compare with the allocator (`Measurement.check`). The two steps
            must do the same: run a first one beforehand if it creates gradients or optimizer state.

    A storage has one category for its whole life, the first of these that fits:

    - parameters, buffers: it belongs to one of `model` (or to a parameter of `optimizer`) before `fn` or after it.
    - gradients: it is the `.grad` of such a parameter before `fn`, when a backward pass has ended, when an optimizer
      begins its step, or after `fn`.
    - optimizer_state: it is in the state of `optimizer`, or in an attribute of it, before or after `fn`, or of any
      optimizer when its step has ended.
    - activations: a forward operator allocated it and it is alive when the next backward pass begins, or, if none
      follows, when `fn` returns.
    - temporary: everything else, such as results that die within forward, gradients of activations, replayed values.

    Backward begins with its first operator; `saved_bytes` is measured there. With several backward passes it is the
    largest. An operator is replayed if actmem's tape or torch.utils.checkpoint runs it again in a backward pass; it
    then belongs to neither forward nor backward. FLOPs follow torch's FlopCounterMode.

    Seconds are wall time in operators and between them, without this function's own bookkeeping, but with the few
    microseconds that observing adds to each operator. On an accelerator they are the time that the program takes to
    launch its operators; what the device still has to do when `fn` returns is added to the last phase. Nothing waits
    for the device in between: that would free memory earlier than an unobserved step does.

    Parameters that FSDP gathers count as activations if they are alive when backward begins, else as temporary. No
    other profiler of torch can be started within `fn` on a CPU. Run within one, this function sees no `unseen` bytes.

    `fn` may raise: the error passes through and nothing stays behind. Its result is dropped.

    >>> import torch
    >>> weight = torch.ones(256, 256, requires_grad=True)  # 256 KiB, made beforehand
    >>> def step():
    ...     x = torch.ones(64, 256)  # 64 KiB
    ...     (x @ weight).relu().sum().backward()  # 64 KiB twice: mm saves its inputs, relu its result
    >>> m = measure(step)
    >>> m.saved_bytes == (64 + 64) * 1024 + 4 + 4  # x, the result of relu, the loss, its gradient
    True
    >>> m.forward_flops == 2 * 64 * 256 * 256
    True
    >>> m.external_bytes == 256 * 1024
    True
    """
    record_compiled_regions()
    meter = _Meter(model, optimizer)
    try:
        with meter.watching():
            result = fn()
            meter.stop()
        measurement = meter.finish()
        del result  # alive until here, so that it counts as an activation
    finally:
        meter.close()
    if not check:
        return measurement
    rise_bytes = measurement.peak_bytes - meter.start_bytes
    found = checked(fn, meter.device, step_bytes=measurement.step_bytes, rise_bytes=rise_bytes)
    return dataclasses.replace(measurement, check=found)


class _Facts(NamedTuple):
    """What is known about an operator before it runs."""

    name: str
    formula: Formula | None
    mutates: bool
    adopts: bool
    """Its argument was made a moment ago outside every operator, as `torch.tensor` does."""
    listed: bool
    """Its result may take the place of its first argument."""
    tensors: tuple[int, ...]
    """Which arguments are tensors. A number there was one before a mode saw it; the operator makes it one again."""


class _Mode(TorchDispatchMode):
    """Show every operator to a meter."""

    only_watches = True
    """See NOTE [ in place unless watched ]."""

    supports_higher_order_operators = True
    sees_regions = True
    """Sees the call of a compiled graph as one operator. See NOTE [ Compiled regions ]."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self._meter = meter

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        entered = perf_counter()
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs plain operators beneath, and those are shown to us
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            divided = divide(self, func, args, kwargs)
            if divided is not NotImplemented:
                return divided
        meter = self._meter
        facts, place = meter.before(func, args, kwargs, entered)
        with as_outside(func):
            started = perf_counter()
            result = func(*args, **kwargs)
            seconds = perf_counter() - started
        meter.after(facts, args, kwargs, result, seconds, place)
        return result


watches(__file__)


class _Meter:
    """Count one step. Nothing here holds a tensor, and after `close` nothing holds the meter."""

    def __init__(self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._modules: dict[int, str] = {}
        if model is not None:
            named = cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules())
            self._modules = {id(module): name for name, module in named}
        self.device = next((parameter.device for parameter in self._parameters()), torch.device("cpu"))
        self.start_bytes = 0
        """What was counted before the step."""
        self._ledger = ByteLedger(self.device)
        self._phases = Phases()
        self._formulas = Formulas()
        self._allocations = Allocations(watches=self.device.type == "cpu" and not _is_fake(self._parameters()))
        self._facts: dict[Any, _Facts] = {}
        self._task = NO_TASK
        """The outermost backward pass in progress."""
        self._phase = "forward"
        self._left = 0.0
        """When the last operator's bookkeeping ended."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._flops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._num_ops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._saved_bytes = 0
        self._timeline: list[Sample] = []
        self._logged: list[int] = []
        """The events that the log of allocations has marks for: operators, and not resizes."""
        self._step_live_bytes: list[int] = []
        self._running: list[str | None] = []
        """The innermost module of the model at each event."""

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Take stock, then observe all operators until the block is left."""
        self._stock()
        self._ledger.begin()
        self.start_bytes = self._ledger.main.live_bytes
        self._ledger.phase = "forward"
        before = register_optimizer_step_pre_hook(self._optimizer_begins)
        after = register_optimizer_step_post_hook(self._optimizer_ended)
        try:
            with watching_resizes(self._resized), _Mode(self):
                self._allocations.open()
                self._left = perf_counter()
                yield
        finally:
            before.remove()
            after.remove()

    def before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entered: float
    ) -> tuple[_Facts, Entry | None]:
        """Book what leads to an operator: its phase, the time since the last one, and what it reads.

        Returns:
            What is known of the operator, and the storage whose place its result will take, if any.
        """
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _learn(func)
        task = current_task()
        phase = self._phases.current(task)
        self._phase = self._ledger.phase = phase
        self._seconds[phase] += entered - self._left
        if task != NO_TASK and self._task == NO_TASK:
            self._backward_begins(task)
        elif task == NO_TASK and self._task != NO_TASK:
            self._task = NO_TASK  # the pass was aborted by an error, so its callback never ran
        if not facts.adopts or is_foreign(args[0]):
            self._read(args, kwargs)
        if task != NO_TASK:
            self._formulas.enter(self._ledger.event)
        place = self._ledger.entry_of(args[0]) if facts.listed else None
        if place is not None and not self._formulas.takes_place(facts.name, args, place):
            place = None
        self._allocations.begins(self._ledger.booked)
        return facts, place

    def after(
        self,
        facts: _Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        seconds: float,
        place: Entry | None,
    ) -> None:
        """Book what an operator did: what it returned, resized and used for itself, its time and its FLOPs."""
        self._allocations.ends()
        phase = self._phase
        if facts.mutates:
            self._read(args, kwargs)
        held = self._task != NO_TASK and called_from_python()
        for tensor in tensors_in(result):
            self._ledger.returned(tensor, facts.name, held_by_python=held)
        if place is not None:
            self._ledger.replaced(place)
        self._num_ops[phase] += 1
        self._seconds[phase] += seconds
        if facts.formula is not None:
            self._flops[phase] += facts.formula(args, kwargs, result)
        own_bytes = sum(number_bytes(args[i]) for i in facts.tensors if i < len(args))
        self._allocations.booked(facts.name, self._ledger.booked, own_bytes)
        self._logged.append(self._ledger.event)
        self._sample(facts.name)
        self._left = perf_counter()

    def stop(self) -> None:
        """Add the time since the last operator, and what the device still has to do, to the current phase."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)
        self._seconds[self._phase] += perf_counter() - self._left

    def finish(self) -> Measurement:
        """Take stock again and report."""
        ledger = self._ledger
        self._stock_again()
        ledger.settle_forward()
        tensor_bytes = ledger.main.peak_bytes
        unseen = self._add_unseen()
        at = ledger.main.peak_event
        return Measurement(
            peak_bytes=ledger.main.peak_bytes,
            tensor_bytes=tensor_bytes,
            step_bytes=ledger.main.step_peak_bytes,
            saved_bytes=self._saved_bytes,
            external_bytes=ledger.external_bytes,
            device=str(self.device),
            by_category=ledger.by_category(CATEGORIES),
            unseen=unseen,
            by_device={str(device): account.peak_bytes for device, account in ledger.accounts.items()},
            peak_op=None if at < 0 else PeakOp(self._timeline[at].op, self._timeline[at].phase, self._running[at]),
            timeline=tuple(self._timeline),
            forward_flops=self._flops["forward"],
            backward_flops=self._flops["backward"],
            replayed_flops=self._flops["replay"],
            optimizer_flops=self._flops["optimizer"],
            forward_seconds=self._seconds["forward"],
            backward_seconds=self._seconds["backward"],
            replay_seconds=self._seconds["replay"],
            optimizer_seconds=self._seconds["optimizer"],
            num_ops=sum(self._num_ops.values()),
            num_replayed_ops=self._num_ops["replay"],
        )

    def close(self) -> None:
        """Release everything."""
        self._allocations.close()
        self._ledger.close()
        self._model = self._optimizer = None

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = self._ledger.read
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                read(value)
            elif isinstance(value, (list, tuple)):
                for tensor in tensors_in(value):
                    read(tensor)

    def _sample(self, name: str) -> None:
        ledger = self._ledger
        self._timeline.append(Sample(ledger.event, self._phase, name, ledger.main.live_bytes))
        self._step_live_bytes.append(ledger.main.step_live_bytes)
        self._running.append(self._running_module())
        ledger.sample()

    def _add_unseen(self) -> dict[str, int]:
        """Add what only the allocator saw to the timeline, and find the peak again. Return the peak's share of it."""
        main = self._ledger.main
        found: dict[str, int] = {}
        unseen = self._allocations.close()
        for event, its in zip(self._logged, unseen, strict=False):
            sample = self._timeline[event]
            live_bytes = sample.live_bytes + its.num_bytes
            workspace_bytes = its.workspace_bytes + its.passing_bytes
            self._timeline[event] = sample._replace(
                live_bytes=live_bytes - workspace_bytes, workspace_bytes=workspace_bytes
            )
            main.step_peak_bytes = max(main.step_peak_bytes, self._step_live_bytes[event] + its.num_bytes)
            if live_bytes > main.peak_bytes or (main.peak_event == event and its.num_bytes):
                main.peak_bytes, main.peak_event, main.peak_unseen_bytes = live_bytes, event, its.num_bytes
                found = dict(its.held)
                if its.workspace_bytes:
                    found[sample.op] = found.get(sample.op, 0) + its.workspace_bytes
        return found

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if self._ledger.resized(storage):
            self._sample("storage.resize_")

    def _backward_begins(self, task: int) -> None:
        self._task = task
        self._saved_bytes = max(self._saved_bytes, self._ledger.settle_forward())
        after_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._task = NO_TASK
        self._mark_gradients(self._parameters())

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._mark_gradients(_parameters_of(optimizer))
        if not _has_closure(args, kwargs):
            self._phases.enter_optimizer()

    def _optimizer_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):
            self._phases.leave_optimizer()
        for tensor in state_tensors(optimizer):
            self._ledger.mark(tensor, "optimizer_state")

    def _parameters(self) -> Iterator[torch.Tensor]:
        if self._model is not None:
            yield from self._model.parameters()
        if self._optimizer is not None:
            yield from _parameters_of(self._optimizer)

    def _holdings(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield the tensors that model and optimizer hold now, with their categories, in order of precedence."""
        parameters = tuple(self._parameters())
        for parameter in parameters:
            yield parameter, "parameters"
        if self._model is not None:
            for buffer in self._model.buffers():
                yield buffer, "buffers"
        for parameter in parameters:
            if parameter.is_leaf and parameter.grad is not None:
                yield parameter.grad, "gradients"
        if self._optimizer is not None:
            for tensor in state_tensors(self._optimizer):
                yield tensor, "optimizer_state"

    def _stock(self) -> None:
        for tensor, role in self._holdings():
            self._ledger.add_base(tensor, role)

    def _stock_again(self) -> None:
        for tensor, role in self._holdings():
            self._ledger.mark(tensor, role)

    def _mark_gradients(self, parameters: Iterator[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.is_leaf and parameter.grad is not None:
                self._ledger.mark(parameter.grad, "gradients")

    def _running_module(self) -> str | None:
        """Find the innermost module of the model that this thread is calling, within the backward pass if in one.

        The frame that is read never rebinds its locals: reading them holds nothing longer than the call does.
        """
        if not self._modules:
            return None
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not _RUN_BACKWARD:
            if frame.f_code is _CALL_MODULE:
                path = self._modules.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            frame = frame.f_back
        return None


_CALL_MODULE: Any = torch.nn.Module.__call__.__code__
_RUN_BACKWARD = backward_code


def _learn(func: Any) -> _Facts:
    schema = getattr(func, "_schema", None)
    return _Facts(
        name=op_name(func),
        formula=flop_formula(func),
        mutates=schema is None or bool(schema.is_mutable),
        adopts=str(func) == "aten.lift_fresh.default",
        listed=is_listed(str(func)),
        tensors=() if schema is None else tuple(i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"),
    )


def _is_fake(parameters: Iterator[torch.Tensor]) -> bool:
    return any(isinstance(parameter, FakeTensor) for parameter in parameters)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `Optimizer.step` runs forward and backward itself, so that it is not its own phase."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
