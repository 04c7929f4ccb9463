"""Mixtures of experts whose routing must not change, and number formats that depend on context or history."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.comparing import NON_REENTRANT, GoesWrong, Hazard, Raises
from tests.hazards.running_twice import issue
from tests.hazards.stacks import DIM, loss_of, stack, train

# ---------------------------------------------------------------- E1: routing


class Experts(nn.Module):
    """Send each token to one expert, one expert after the other."""

    num_experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, self.num_experts)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weight = self.choose(self.router(flat).softmax(-1))
        parts = [torch.tanh(expert(flat[chosen == i])) for i, expert in enumerate(self.experts)]
        back = torch.argsort(torch.argsort(chosen, stable=True), stable=True)
        return x + (torch.cat(parts)[back] * weight).view_as(x)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Balanced(Experts):
    """Balance the load by a bias that moves after every forward, without an auxiliary loss."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(self.num_experts))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.topk(scores + self.bias, 1).indices
        load = torch.bincount(chosen[:, 0], minlength=self.num_experts).float()
        with torch.no_grad():
            self.bias += 0.2 * torch.sign(load.mean() - load)
        return chosen[:, 0], scores.gather(1, chosen)


class Jittered(Experts):
    """Break ties by noise from a generator that all ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(7)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand(scores.shape, generator=self.noise)
        chosen = torch.topk(scores + 0.2 * noise, 1).indices
        return chosen[:, 0], scores.gather(1, chosen)


class Gathered(Jittered):
    """The same with one matrix per token: shapes do not depend on the routing, so nothing can notice."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weight = self.choose(self.router(flat).softmax(-1))
        matrices = torch.stack([e.weight for e in self.experts])[chosen]
        return x + (torch.tanh(torch.bmm(matrices, flat[..., None])[..., 0]) * weight).view_as(x)


ROUTING = (
    Hazard(
        "a_router_bias_may_move_in_forward",
        "E1",
        "A router balances its experts by a bias that each forward updates",
        stack(Balanced),
        train,
        NON_REENTRANT,
        Raises("different metadata"),
        (issue("pytorch/torchtitan", 1117), issue("NVIDIA-NeMo/Automodel", 3325)),
        state=lambda model: {"bias": model.blocks[0].bias},
        other="wrong",
    ),
    Hazard(
        "tokens_go_to_the_same_experts_in_backward",
        "E1",
        "A router breaks ties by noise from a generator of its own",
        stack(Jittered),
        train,
        NON_REENTRANT,
        Raises("different metadata"),
        ("https://github.com/NVIDIA-NeMo/Automodel/pull/3140", issue("NVIDIA-NeMo/RL", 1203)),
        other="wrong",
    ),
    Hazard(
        "gathered_experts_are_the_same_in_backward",
        "E1",
        "The same with experts gathered into one batched matmul: all shapes agree",
        stack(Gathered),
        train,
        NON_REENTRANT,
        GoesWrong(gradients_off=0.01),
        ("https://github.com/NVIDIA-NeMo/Automodel/pull/3156",),
        other="wrong",
    ),
)

# ---------------------------------------------------------------- E3: number formats

_format = threading.local()


@contextmanager
def low_precision() -> Iterator[None]:
    """Make `Rounding` blocks multiply in float16: a context of a library, of which torch knows nothing."""
    _format.on = True
    try:
        yield
    finally:
        _format.on = False


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(_format, "on", False):
            return x + torch.tanh(self.up(x))
        return x + torch.tanh(F.linear(x.half(), self.up.weight.half()).float() + self.up.bias)


class Quantised(nn.Module):
    """Round to the float32 numbers that 8 bits can hold, in the same context: dtypes do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if getattr(_format, "on", False):
            h = h + (h.detach().to(torch.float8_e4m3fn).float() - h.detach())
        return x + torch.tanh(h * h)


class Delayed(nn.Module):
    """Scale by the largest value of the calls before, as fp8 recipes do."""

    amax: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.register_buffer("amax", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.amax.max()
        self.amax.copy_(torch.cat([x.detach().abs().max()[None], self.amax[:-1]]))
        return x + torch.tanh(self.up((x / scale).clamp(-1, 1)) * scale)


def low_precision_step(model: nn.Module) -> Tensor:
    with low_precision():
        loss = loss_of(model)
    loss.backward()
    return loss


FORMATS = (
    Hazard(
        "a_precision_context_of_a_library_is_kept",
        "E3",
        "Forward runs in a library's low-precision context, backward outside it",
        stack(Rounding),
        low_precision_step,
        NON_REENTRANT,
        Raises("different metadata|different number"),
        (issue("NVIDIA/TransformerEngine", 415),),
        other="wrong",
    ),
    Hazard(
        "a_quantisation_context_of_a_library_is_kept",
        "E3",
        "The same where values are only rounded: dtypes and shapes agree",
        stack(Quantised),
        low_precision_step,
        NON_REENTRANT,
        GoesWrong(gradients_off=1e-4),
        ("https://github.com/NVIDIA/Megatron-LM/pull/7538",),
        other="wrong",
    ),
    Hazard(
        "delayed_scaling_uses_the_scale_of_forward",
        "E3",
        "fp8-like delayed scaling: a history of largest values, updated in forward",
        stack(Delayed),
        train,
        NON_REENTRANT,
        GoesWrong(gradients_off=1e-3, state_off="amax"),
        (issue("NVIDIA/TransformerEngine", 1190),),
        state=lambda model: {"amax": model.blocks[0].amax},
        other="wrong",
    ),
)

HAZARDS = (*ROUTING, *FORMATS)
