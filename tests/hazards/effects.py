"""Switched on, and does nothing: a policy that never matches, hooks in the way."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actmem
from tests.hazards.comparing import NON_REENTRANT, Hazard, Wastes, by_hand
from tests.hazards.running_twice import pytorch
from tests.hazards.stacks import DIM, stack, train


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(torch.sin(self.up(x))))


class Hooked(Feed):
    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().forward(x)


def policy(*ops: Any) -> Any:
    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(decide)


HAZARDS = (
    Hazard(
        "an_operator_may_be_named_without_its_overload",
        "A2",
        "Save `torch.ops.aten.mm` (not `aten.mm.default`) selectively",
        stack(Feed),
        train,
        by_hand("selective", use_reentrant=False, context_fn=policy(torch.ops.aten.mm)),
        Wastes(rerun_fraction=0.25),
        pytorch(176065),
        mode=actmem.Selective(save=["aten.mm"]),
        at_most=Wastes(held_fraction=0.8, rerun_fraction=0.0),
    ),
    Hazard(
        "a_mode_that_matches_nothing_is_refused",
        "A2",
        "Save an operator that does not run in this model",
        stack(Feed),
        train,
        by_hand("selective", use_reentrant=False, context_fn=policy(torch.ops.aten.bmm.default)),
        Wastes(rerun_fraction=0.25),
        ("https://github.com/hao-ai-lab/FastVideo/pull/1716",),
        mode=actmem.Selective(save=["aten.bmm"]),
        refusal="ModeError.*matches nothing",
    ),
    Hazard(
        "hooks_inside_a_block_show_in_the_report",
        "A2",
        "Saved-tensor hooks (offloading, logging) inside the block",
        stack(Hooked),
        train,
        NON_REENTRANT,
        Wastes(held_fraction=0.95),
        pytorch(147449),
        only_told=True,
        other="exact",
    ),
)
