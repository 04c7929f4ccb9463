"""Declare a function whose kernel torch cannot see: it is then replayed instead of having its results held."""

import numpy as np
import torch
from torch import Tensor, nn

import actmem


class Gate(torch.autograd.Function):
    """x * sigmoid(x), computed by a kernel that writes through a pointer. Numpy takes the place of Triton or C++."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Compute the gate."""
        out, sigmoid = torch.empty_like(x), torch.empty_like(x)
        np.divide(1.0, 1.0 + np.exp(-x.numpy()), out=sigmoid.numpy())
        np.multiply(x.numpy(), sigmoid.numpy(), out=out.numpy())
        ctx.save_for_backward(out, sigmoid)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        """Compute the gradient of the gate."""
        out, sigmoid = ctx.saved_tensors
        return grad * (sigmoid + out * (1 - sigmoid))


class Layer(nn.Module):
    """A layer that uses the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Project up, apply the gate, project down."""
        return x + self.down(Gate.apply(self.up(x)))


def train() -> tuple[dict[str, Tensor], int]:
    """Compute gradients under Full(); return them and the bytes held for backward in the layers."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Layer() for _ in range(4)]), torch.randn(128, 64)
    model(x).square().mean().backward()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with actmem.apply(model, actmem.Full()) as applied:
        model(x).square().mean().backward()
        report = applied.report()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())
    return plain, report.held_bytes


before, unseen_bytes = train()
actmem.replayable(Gate)  # "it reads only its arguments and writes only its results"
after, declared_bytes = train()
print(f"unseen:   {unseen_bytes:,} bytes held, because the results of an unseen kernel cannot be recomputed")
print(f"declared: {declared_bytes:,} bytes held: the kernel runs again in the backward pass")
print("and the gradients equal those of plain training both times")
assert declared_bytes < unseen_bytes
