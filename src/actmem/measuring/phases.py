"""Determine the phase of a running operator: forward, backward, replay or an optimizer's step.

NOTE [ what counts as replay ]

An operator counts as replayed if any of these holds:

- actmem's tape replays it (`actmem.engine.replay`);
- torch.utils.checkpoint recomputes: its recomputation hook is the innermost saved-tensor hook inside a backward pass;
- it records gradients inside a backward pass that does not record any itself: as reentrant checkpoints do, and every
  hand-written autograd Function that runs its forward again under `enable_grad`.

torch does not say whether a pass records gradients itself (`create_graph=True`). A pass that frees its graph does
not. For one that keeps its graph, the grad mode of its first operator decides.
"""

from __future__ import annotations

from typing import Any

import torch

from actmem.engine import replaying
from actmem.torchcompat import current_graph_task, graph_is_kept, outer_hooks

__all__ = ["NO_TASK", "Phases", "current_task"]

current_task = current_graph_task
"""Return the number of the backward pass that runs in this thread, or `NO_TASK`."""

NO_TASK = -1


class Phases:
    """Follow the phases of one step."""

    def __init__(self) -> None:
        self._records_gradients: dict[int, bool] = {}
        self._steps: list[int] = []

    def current(self, task: int) -> str:
        """Return the phase of an operator that runs in the backward pass `task`."""
        if replaying():
            return "replay"
        if self._steps and self._steps[-1] == task:
            return "optimizer"
        if task == NO_TASK:
            return "forward"
        hooks = outer_hooks()
        if hooks is not None and _is_recomputation(hooks[0]):
            return "replay"
        records = self._records_gradients.get(task)
        if records is None:
            records = self._records_gradients[task] = torch.is_grad_enabled() and graph_is_kept()
        return "replay" if torch.is_grad_enabled() and not records else "backward"

    def enter_optimizer(self) -> None:
        """Begin an optimizer's step. The task tells one inside a backward pass from a backward pass inside one."""
        self._steps.append(current_task())

    def leave_optimizer(self) -> None:
        """End the innermost step of an optimizer."""
        if self._steps:
            self._steps.pop()


def _is_recomputation(pack: Any) -> bool:
    name: str = getattr(pack, "__qualname__", "")
    return name.startswith("_recomputation_hook.") and pack.__module__ == "torch.utils.checkpoint"
