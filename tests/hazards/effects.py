"""Switched on, and does nothing or too much: a policy that never matches, hooks in the way, two wrappers at once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actmem
from tests.hazards.comparing import NON_REENTRANT, Hazard, Wastes, both, by_hand
from tests.hazards.libraries import HF_NON_REENTRANT
from tests.hazards.running_twice import issue, pytorch
from tests.hazards.stacks import DIM, stack, train
from tests.zoo import ZOO, padded_tokens


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Hooked(Feed):
    def forward(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().forward(x)


def policy(*ops: Any) -> Any:
    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(decide)


def llama_step(model: nn.Module) -> Tensor:
    loss = model(**padded_tokens(model), use_cache=False).loss
    loss.backward()
    return loss


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
        at_most=Wastes(held_fraction=1.0, rerun_fraction=0.0),
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
        "hooks_inside_a_block_do_not_switch_it_off",
        "A2",
        "Saved-tensor hooks (offloading, logging) inside the block",
        stack(Hooked),
        train,
        NON_REENTRANT,
        Wastes(held_fraction=0.95),
        pytorch(147449),
        at_most=Wastes(held_fraction=0.8, rerun_fraction=1.0),
    ),
    Hazard(
        "recomputing_twice_over_is_refused",
        "A2",
        "transformers' switch is on and the layers are wrapped too (Trainer and FSDP plugin)",
        ZOO["llama"].build,
        llama_step,
        both("both non-reentrant", HF_NON_REENTRANT, NON_REENTRANT),
        Wastes(rerun_fraction=1.2),
        (issue("linkedin/Liger-Kernel", 1064), "https://github.com/Lightning-AI/pytorch-lightning/pull/18006"),
        refusal="ApplyError.*gradient_checkpointing",
    ),
)
