"""Step an optimizer parameter by parameter, in the backward pass or when it is called.

NOTE [ Stepping in the backward pass ]
A hook of each parameter runs when its gradient is complete: all of it, however often the parameter is used, because
autograd adds up what arrives before it accumulates. The hook steps the parameter and drops the gradient. The loop stays
as it is: `optimizer.step()` then finds no gradient where a parameter has been stepped, and steps the others.

That is not what the loop asked for where it does more with gradients than to step. Each such thing is noticed:

- a second backward pass before `optimizer.step()` (accumulation): in its first hook;
- gradients from before (`zero_grad` was left out, or filled them with zeros): in the first hook of a pass;
- clipping: torch's functions for it are asked through whether they get a parameter that was stepped;
- a gradient scaler: when it scales a loss that such a parameter leads to;
- several ranks, which average gradients after the hook: in the first hook of a pass.

A backward step that needs the old value of a parameter after it was stepped, such as one that read it by `detach()`,
gets an error from autograd, and a replay one from the tape.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from actmem.errors import ModeError, UnsupportedError
from actmem.settings import OptimizerState
from actmem.stepping.away_state import AwayState, hooks_of
from actmem.stepping.gradient_uses import notice_uses
from actmem.stepping.single_steps import check_groups, single_step

__all__ = ["OptimizerRunner"]


class OptimizerRunner:
    """Steps an optimizer parameter by parameter, until `remove`.

    Args:
        optimizer: the optimizer.
        model: what it trains.
        in_backward: whether each parameter is stepped in the backward pass.
        state: where its state is kept; None for where it is.
        device: the device of the model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        in_backward: bool,
        state: OptimizerState | None,
        device: torch.device,
    ) -> None:
        check_groups(optimizer)
        self._optimizer = optimizer
        self._state: AwayState | None = None
        self._stepped: dict[Tensor, None] = {}
        """The parameters that have been stepped since the last `optimizer.step()`, in order."""
        self._next: dict[Tensor, Tensor] = {}
        """A parameter -> the one that was stepped after it, in the step before."""
        self._saved: list[tuple[Tensor, Tensor]] = []
        """Gradients that are hidden from the optimizer's own step, because it is done."""
        self._undo: list[Callable[[], object]] = []
        own = {id(p) for p in model.parameters()}
        if not any(id(p) in own for p in _parameters(optimizer)):
            raise ModeError(
                f"{type(optimizer).__name__} has no parameter of the model. Make it of model.parameters(), and pass "
                "it: actmem.apply(model, mode, optimizer=optimizer)."
            )
        if in_backward:
            self._step_in_backward()
        if state is not None:
            self._state = AwayState(optimizer, state, device)
            self._state.adopt()
            self._undo += [hook.remove for hook in hooks_of(optimizer, self._state)]
        before = optimizer.register_step_pre_hook(self._begins)
        after = optimizer.register_step_post_hook(self._ended)
        self._undo += [before.remove, after.remove]
        self._in_backward = in_backward

    def _step_in_backward(self) -> None:
        trained = [p for p in _parameters(self._optimizer) if p.requires_grad]
        if any(p.grad is not None for p in trained):
            raise ModeError(
                "there are gradients already, and a parameter that is stepped in the backward pass would be stepped by "
                "these too. Call optimizer.zero_grad() before actmem.apply."
            )
        if _num_ranks() > 1:
            raise UnsupportedError(_RANKS)
        itself = weakref.ref(self)  # a parameter outlives what was applied to it

        def accumulated(p: Tensor) -> None:
            runner = itself()
            if runner is not None:
                runner.accumulated(p)

        for p in trained:
            parameter: Any = p  # torch leaves its hooks untyped
            self._undo.append(parameter.register_post_accumulate_grad_hook(accumulated).remove)
        end = notice_uses({id(p) for p in trained})
        self._undo.append(weakref.finalize(self, end))  # also where the optimizer is dropped without `remove`

    def accumulated(self, p: Tensor) -> None:
        """Step a parameter whose gradient is complete, and drop the gradient."""
        if p in self._stepped:
            raise UnsupportedError(
                "a parameter got a second gradient before optimizer.step(): gradients are accumulated over several "
                "backward passes, and each parameter was stepped in the first already. Leave out step_in_backward, or "
                "call optimizer.step() after each backward pass. The parameters have changed: begin again from a "
                "checkpoint."
            )
        if not self._stepped:
            self._check_pass(p)
        self._step(p)
        p.grad = None

    def _check_pass(self, p: Tensor) -> None:
        if any(q.grad is not None and q is not p and q.requires_grad for q in _parameters(self._optimizer)):
            raise UnsupportedError(
                "there were gradients before this backward pass: what is stepped in it would be the sum of both. Call "
                "optimizer.zero_grad() before the backward pass, with set_to_none=True, which is the default."
            )
        if _num_ranks() > 1:
            raise UnsupportedError(_RANKS)

    def _step(self, p: Tensor) -> None:
        state, last = self._state, next(reversed(self._stepped), None)
        if last is not None:
            self._next[last] = p
        self._stepped[p] = None
        if state is None:
            single_step(self._optimizer, p)
            return
        state.settle()
        state.arrive(p)
        following = self._next.get(p)
        if following is not None and following not in self._stepped:
            state.fetch(following)
        try:
            single_step(self._optimizer, p)
        finally:
            state.leave(p)

    def _begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Step what has a gradient, and hide the gradients: the optimizer's own step has nothing left to do."""
        if self._state is None:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UnsupportedError(
                "optimizer.step(closure) computes gradients inside of the step, and with optimizer_state the step is "
                "made before it. Compute them first, and call optimizer.step()."
            )
        for p in _parameters(self._optimizer):
            if p.grad is not None and p not in self._stepped:
                self._step(p)
                self._saved.append((p, p.grad))
                p.grad = None
        self._state.settle()
        self._state.drop_ahead()

    def _ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Put the gradients back: the loop drops them."""
        for p, gradient in self._saved:
            p.grad = gradient
        self._saved.clear()
        self._stepped.clear()

    def remove(self) -> None:
        """Let the optimizer step as it did before, with all its state here."""
        while self._undo:
            self._undo.pop()()
        if self._state is not None:
            self._state.close()
            self._state = None


_RANKS = (
    "several ranks train together: they average gradients after a parameter's own is complete, and it would be stepped "
    "before that. Leave out step_in_backward."
)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _num_ranks() -> int:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()
