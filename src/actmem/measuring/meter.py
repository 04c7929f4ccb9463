"""Measure one step: the dispatch mode that watches it, and the way in."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actmem.measuring.flops import Formula, flop_formula
from actmem.measuring.ledger import Ledger, tensors_in
from actmem.measuring.measurement import CATEGORIES, PHASES, Measurement, PeakOp, Sample
from actmem.measuring.phases import NO_TASK, Phases, current_task
from actmem.measuring.resizes import watching_resizes
from actmem.torchcompat import TorchDispatchMode, after_backward, backward_code, divide, is_composite, resolving_bits

__all__ = ["measure"]


def measure(
    fn: Callable[[], object],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Measurement:
    """Run `fn` once and report exactly what it cost: bytes, FLOPs and seconds.

    Bytes are those of live tensor storages after each operator: what tensors ask for, not what an allocator rounds it
    to, nor a kernel's own workspace. Counted are the parameters, buffers and gradients of `model`, the parameters,
    gradients and state of `optimizer`, and all that operators of `fn` allocate. A batch made beforehand is not: it is
    summed in `external_bytes`. Storages count on the device of the model, else of the optimizer, else on the CPU;
    `by_device` has the peaks of the others.

    A storage has one category for its whole life, the first of these that fits:

    - parameters, buffers: it belongs to one of `model` (or to a parameter of `optimizer`) before `fn` or after it.
    - gradients: it is the `.grad` of such a parameter before `fn`, when a backward pass has ended, when an optimizer
      begins its step, or after `fn`.
    - optimizer_state: it is in the state of `optimizer` before or after `fn`, or of any optimizer when its step has
      ended.
    - activations: a forward operator allocated it and it is alive when the next backward pass begins, or, if none
      follows, when `fn` returns.
    - temporary: all else, such as results that die within forward, gradients of activations, and replayed values.

    Backward begins with its first operator; `saved_bytes` is taken there. With several backward passes it is the
    largest. An operator is replayed if actmem's tape or torch.utils.checkpoint runs it again in a backward pass; it
    belongs neither to forward nor to backward then. FLOPs follow torch's FlopCounterMode.

    Seconds are wall time in operators and between them, without this function's own bookkeeping, but with the few
    microseconds that watching adds to each operator. On an accelerator each change of phase waits for the device.

    Not seen: memory within a kernel, a compiled function or a custom operator, tensors of an opaque layout, and the
    states of random generators (5 KB each on a CPU) that torch.utils.checkpoint keeps. Parameters that FSDP gathers
    count as activations if they are alive when backward begins, else as temporary.

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
    meter = _Meter(model, optimizer)
    try:
        with meter.watching():
            result = fn()
            meter.stop()
        measurement = meter.finish()
        del result  # alive until here, so that it counts as an activation
    finally:
        meter.close()
    return measurement


class _Facts(NamedTuple):
    """What is known of an operator before it runs."""

    name: str
    formula: Formula | None
    mutates: bool
    adopts: bool
    """Its argument was made a moment ago outside every operator, as `torch.tensor` does."""


class _Mode(TorchDispatchMode):
    """Show every operator to a meter."""

    supports_higher_order_operators = True

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
        facts = meter.before(func, args, kwargs, entered)
        with resolving_bits():
            started = perf_counter()
            result = func(*args, **kwargs)
            seconds = perf_counter() - started
        meter.after(facts, args, kwargs, result, seconds)
        return result


class _Meter:
    """Count one step. Nothing here holds a tensor, and after `close` nothing holds the meter."""

    def __init__(self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._modules: dict[int, str] = {}
        if model is not None:
            named = cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules())
            self._modules = {id(module): name for name, module in named}
        self._device = next((parameter.device for parameter in self._parameters()), torch.device("cpu"))
        self._ledger = Ledger(self._device)
        self._phases = Phases()
        self._facts: dict[Any, _Facts] = {}
        self._task = NO_TASK
        """The outermost backward pass under way."""
        self._phase = "forward"
        self._left = 0.0
        """When the last operator's bookkeeping ended."""
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._flops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._num_ops: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._saved_bytes = 0
        self._timeline: list[Sample] = []
        self._peak_op: PeakOp | None = None

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Take stock, then watch all operators until the block is left."""
        self._stock()
        self._ledger.begin()
        self._ledger.phase = "forward"
        before = register_optimizer_step_pre_hook(self._optimizer_begins)
        after = register_optimizer_step_post_hook(self._optimizer_ended)
        try:
            with watching_resizes(self._resized), _Mode(self):
                self._left = perf_counter()
                yield
        finally:
            before.remove()
            after.remove()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], entered: float) -> _Facts:
        """Book what leads to an operator: its phase, the time since the last one, and what it reads."""
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _learn(func)
        task = current_task()
        phase = self._phases.current(task)
        if phase != self._phase:
            entered = self._change_phase(phase, entered)
        self._seconds[phase] += entered - self._left
        if task != NO_TASK and self._task == NO_TASK:
            self._backward_begins(task)
        elif task == NO_TASK and self._task != NO_TASK:
            self._task = NO_TASK  # the pass was aborted by an error, so its callback never ran
        if not facts.adopts:
            self._read(args, kwargs)
        return facts

    def after(self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, seconds: float) -> None:
        """Book what an operator did: what it returned and resized, its time and its FLOPs."""
        phase = self._phase
        if facts.mutates:
            self._read(args, kwargs)
        if isinstance(result, torch.Tensor):
            self._ledger.returned(result)
        else:
            for tensor in tensors_in(result):
                self._ledger.returned(tensor)
        self._num_ops[phase] += 1
        self._seconds[phase] += seconds
        if facts.formula is not None:
            self._flops[phase] += facts.formula(args, kwargs, result)
        self._sample(facts.name)
        self._left = perf_counter()

    def stop(self) -> None:
        """Give the time since the last operator to its phase."""
        self._seconds[self._phase] += self._synchronized(perf_counter()) - self._left

    def finish(self) -> Measurement:
        """Take stock again and report."""
        ledger = self._ledger
        self._stock_again()
        ledger.settle_forward()
        return Measurement(
            peak_bytes=ledger.main.peak_bytes,
            step_bytes=ledger.main.step_peak_bytes,
            saved_bytes=self._saved_bytes,
            external_bytes=ledger.external_bytes,
            device=str(self._device),
            by_category=ledger.by_category(CATEGORIES),
            by_device={str(device): account.peak_bytes for device, account in ledger.accounts.items()},
            peak_op=self._peak_op,
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
        """Let go of everything."""
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
        if ledger.sample():
            self._peak_op = PeakOp(name, self._phase, self._running_module())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if self._ledger.resized(storage):
            self._sample("storage.resize_")

    def _change_phase(self, phase: str, entered: float) -> float:
        """Let the phase so far have the device time it still needs. Return the time from which the new one counts."""
        now = self._synchronized(entered)
        if now != entered:
            self._seconds[self._phase] += now - self._left
            self._left = now
        self._phase = self._ledger.phase = phase
        return now

    def _synchronized(self, now: float) -> float:
        if self._device.type in ("cpu", "meta"):
            return now
        torch.accelerator.synchronize(self._device)
        return perf_counter()

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
        for tensor in tensors_in(dict(optimizer.state)):
            self._ledger.mark(tensor, "optimizer_state")

    def _parameters(self) -> Iterator[torch.Tensor]:
        if self._model is not None:
            yield from self._model.parameters()
        if self._optimizer is not None:
            yield from _parameters_of(self._optimizer)

    def _holdings(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield what model and optimizer hold now, with its category, in order of precedence."""
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
            for tensor in tensors_in(dict(self._optimizer.state)):
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
        name=str(func),
        formula=flop_formula(func),
        mutates=schema is None or bool(schema.is_mutable),
        adopts=str(func) == "aten.lift_fresh.default",
    )


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call of `Optimizer.step` runs forward and backward itself: then it is no phase of its own."""
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def _parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
