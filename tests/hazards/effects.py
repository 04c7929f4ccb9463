"""Switched on, and does nothing: a policy that never matches, hooks in the way."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actmem
from tests.hazards.comparing import NON_REENTRANT, GoesWrong, Hazard, Wastes, by_hand
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


def hooked_step(model: Any) -> Tensor:
    """Train under outer hooks, such as `save_on_cpu`, and count the results of `up` that reach them."""
    results: list[Any] = []
    seen: set[int] = set()
    handles = [
        b.up.register_forward_hook(lambda _m, _a, out: results.append(out.untyped_storage())) for b in model.blocks
    ]

    def pack(t: Tensor) -> Tensor:
        seen.update(i for i, storage in enumerate(results) if storage.data_ptr() == t.untyped_storage().data_ptr())
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        loss = train(model)
    for handle in handles:
        handle.remove()
    model.num_seen = len(seen)
    return loss


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
        "hooks_around_the_model_receive_what_is_saved",
        "A2",
        "`save_on_cpu` or other hooks around the model, matmuls saved selectively",
        stack(Feed),
        hooked_step,
        by_hand("selective", use_reentrant=False, context_fn=policy(torch.ops.aten.mm.default)),
        GoesWrong(state_off="matmuls that reach the hooks"),
        pytorch(158657, 191236),
        mode=actmem.Selective(save=["aten.mm"]),
        state=lambda model: {"matmuls that reach the hooks": model.num_seen},
    ),
    Hazard(
        "hooks_inside_a_block_show_in_the_report",
        "A2",
        "Saved-tensor hooks (offloading, logging) inside the block",
        stack(Hooked),
        train,
        NON_REENTRANT,
        Wastes(held_fraction=0.95),
        pytorch(115255),
        only_told=True,
        other="exact",
    ),
)
