"""Which optimizer a plan counts, and how it steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from actmem.errors import ModeError
from actmem.modes import Budget, FromPlan, Mode
from actmem.plan import Plan
from actmem.settings import OptimizerState, StepInBackward, check_stepping
from actmem.stepping import OptimizerRunner

__all__ = ["OptimizerChoice", "choose_optimizer", "run_optimizer"]


class OptimizerChoice(NamedTuple):
    """What `apply` was told of the optimizer."""

    counted: Any
    """What a budget counts: a name, an optimizer, a function that makes one, or None."""
    given: Optimizer | None
    step_in_backward: StepInBackward | None
    optimizer_state: OptimizerState | None

    @property
    def settings(self) -> dict[str, Any]:
        """How it steps."""
        return {"step_in_backward": self.step_in_backward, "optimizer_state": self.optimizer_state}


def choose_optimizer(
    mode: Mode | Plan,
    optimizer: Optimizer | None,
    step_in_backward: StepInBackward | None,
    optimizer_state: OptimizerState | None,
) -> OptimizerChoice:
    """Check what `apply` was told of the optimizer.

    Raises:
        ModeError: something of it is not permitted, or missing.
    """
    check_stepping(step_in_backward, optimizer_state)
    asked = [name for name, value in _named(step_in_backward, optimizer_state) if value is not None]
    if optimizer is not None and not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance] # callers may not check
        raise ModeError(f"optimizer = {optimizer!r} is not an optimizer. Pass the one that trains the model.")
    if asked and isinstance(mode, (Plan, FromPlan)):
        raise ModeError(
            f"{' and '.join(asked)} cannot be combined with a plan, which says itself how the optimizer steps. Make "
            f"the plan with it: actmem.fit(..., {asked[0]}=...)."
        )
    if asked and optimizer is None:
        raise ModeError(_missing(asked))
    named = mode.optimizer if isinstance(mode, Budget) else None
    if optimizer is not None and not (
        named is None or named is optimizer or (isinstance(named, str) and named == "adamw")
    ):
        raise ModeError("optimizer is given twice, here and in the Budget. Leave out one of them.")
    if optimizer is not None and not asked and not isinstance(mode, (Budget, Plan, FromPlan)):
        raise ModeError(
            f"optimizer is for a Budget or a plan that counts it, or for step_in_backward and optimizer_state; "
            f"{type(mode).__name__} alone has no use for it. Leave it out."
        )
    counted = named if optimizer is None else optimizer
    return OptimizerChoice(counted, optimizer, step_in_backward, optimizer_state)


def run_optimizer(
    plan: Plan, choice: OptimizerChoice | None, model: nn.Module, device: torch.device
) -> OptimizerRunner:
    """Let the optimizer step as a plan says.

    Raises:
        ModeError: there is no optimizer, or it cannot be done here.
    """
    asked = [name for name, value in _named(plan.step_in_backward, plan.optimizer_state) if value is not None]
    if choice is None or choice.given is None:
        raise ModeError(_missing(asked))
    state = plan.optimizer_state
    if state is not None and device.type == "cpu" and not state.offload.takes_from("cpu"):
        raise ModeError(
            "optimizer_state to = 'host', but the model is on the CPU: the state is in host memory already. Write "
            "to='disk', move the model to an accelerator first, or, for a test, say copy_cpu=True."
        )
    in_backward = plan.step_in_backward is not None
    return OptimizerRunner(choice.given, model, in_backward=in_backward, state=state, device=device)


def _named(step_in_backward: Any, optimizer_state: Any) -> tuple[tuple[str, Any], ...]:
    return ("step_in_backward", step_in_backward), ("optimizer_state", optimizer_state)


def _missing(asked: list[str]) -> str:
    return f"{' and '.join(asked)} needs the optimizer: actmem.apply(model, ..., optimizer=optimizer)."
