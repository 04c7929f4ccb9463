"""What may be done with saved values: read twice, overwritten, used by a second backward."""

from typing import Any

import torch
from torch import Tensor, nn

import actmem
from tests.hazards.comparing import NON_REENTRANT, GoesWrong, Hazard, Raises, by_hand
from tests.hazards.running_twice import MATMUL, issue, pytorch, saving
from tests.hazards.stacks import DIM, loss_of, stack, train

SELECTIVE = by_hand("selective", use_reentrant=False, context_fn=saving(*MATMUL))
MUTATING = by_hand(
    "selective, allow_cache_entry_mutation=True",
    use_reentrant=False,
    context_fn=saving(*MATMUL, allow_cache_entry_mutation=True),
)
SAVE_MATMUL = actmem.Selective(save=["matmul"])


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + Scaled.apply(torch.tanh(self.up(x)), torch.sigmoid(self.gate(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x).tanh_()))


class WritesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        halves = [wide[..., : DIM // 2], wide[..., DIM // 2 :]]
        torch._foreach_tanh_(halves)
        return x + self.down(torch.cat([half.square() for half in halves], dim=-1))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def twice(model: nn.Module) -> Tensor:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def split(model: Any) -> Tensor:
    """Run backward for the input first and for the weights later, as zero-bubble pipelines do."""
    hidden: list[Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    loss = loss_of(model)
    handle.remove()
    weights = [p for m in (model.blocks, model.head) for p in m.parameters()]
    (at_input,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights, retain_graph=True), strict=True):
        weight.grad = gradient
    hidden[0].backward(at_input)
    return loss


HAZARDS = (
    Hazard(
        "a_function_may_read_its_saved_tensors_twice",
        "A5",
        "An `autograd.Function` reads `ctx.saved_tensors` twice in its backward",
        stack(Kernel),
        train,
        NON_REENTRANT,
        Raises("already unpacked once"),
        (*pytorch(82156), "https://github.com/state-spaces/mamba/pull/909"),
        other="exact",
    ),
    Hazard(
        "the_result_of_a_saved_operator_may_be_overwritten",
        "A6",
        "`linear(x).tanh_()` where matmuls are saved selectively",
        stack(InPlace),
        train,
        SELECTIVE,
        Raises("has been mutated"),
        (*pytorch(119590, 113737), issue("mindspore-ai/hyper-parallel", 937)),
        mode=SAVE_MATMUL,
    ),
    Hazard(
        "overwriting_a_saved_result_needs_no_permission",
        "A6",
        "The same with `allow_cache_entry_mutation=True`, which silences the error",
        stack(InPlace),
        train,
        MUTATING,
        GoesWrong(gradients_off=0.01),
        pytorch(70135, 180924),
        mode=SAVE_MATMUL,
    ),
    Hazard(
        "an_operator_may_write_to_a_list_of_views",
        "A7",
        "`torch._foreach_tanh_([a, b])` on two slices of a tensor, where matmuls are saved selectively",
        stack(WritesList),
        train,
        SELECTIVE,
        GoesWrong(gradients_off=0.01),
        mode=SAVE_MATMUL,
    ),
    Hazard(
        "backward_may_run_twice_with_retain_graph",
        "D4",
        "`loss.backward(retain_graph=True)`, then `loss.backward()`, matmuls saved selectively",
        stack(Feed),
        twice,
        SELECTIVE,
        Raises("backward an extra time"),
        pytorch(142862),
        mode=SAVE_MATMUL,
    ),
    Hazard(
        "backward_may_be_split_into_inputs_and_weights",
        "D4",
        "Gradients of the inputs first, of the weights later (zero-bubble pipelines), matmuls saved selectively",
        stack(Feed),
        split,
        SELECTIVE,
        Raises("backward an extra time"),
        (*pytorch(136766), issue("mindspore-ai/hyper-parallel", 205)),
        mode=SAVE_MATMUL,
    ),
)
