"""Small steps, one for each place where torch writes in place unless somebody watches. Run as a child process.

Prints, for each program, what torch's profiler saw of a step that nobody watched, and what was measured of the next.
With the argument "forget", the list of formulas is emptied first: then the two differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import actmem
from actmem.measuring import inplace_formulas

SIZE = 64


class Doubled(torch.autograd.Function):
    """Its gradient is made by Python code: the engine does not write on it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 2


def rows() -> Tensor:
    return torch.arange(SIZE // 2)


def columns() -> Tensor:
    return torch.arange(SIZE * 2).reshape(SIZE, 2) % SIZE


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 1, *x.shape)
    return nnf.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(SIZE, SIZE), dropout_p=0.1)


WIDE = nn.Linear(SIZE, 8 * SIZE)
LSTM = nn.LSTM(SIZE, SIZE)
EMBEDDING = nn.Embedding(SIZE, SIZE, sparse=True)

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: x.gather(1, columns()),
    "max of a dimension": lambda x: x.max(1).values,
    "min of a dimension": lambda x: x.min(1).values,
    "median of a dimension": lambda x: x.median(1).values,
    "nanmedian of a dimension": lambda x: x.nanmedian(1).values,
    "mode": lambda x: x.mode(1).values,
    "kthvalue": lambda x: x.kthvalue(3, 1).values,
    "topk": lambda x: x.topk(3, 1).values,
    "sort": lambda x: x.sort(1).values,
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(1).values,
    "index": lambda x: x[rows()],
    "index by a mask": lambda x: x[x > 0],
    "index_select": lambda x: x.index_select(0, rows()),
    "take": lambda x: x.take(rows()),
    "masked_select": lambda x: x.masked_select(x > 0),
    "trace": lambda x: x.trace(),
    "clamp between tensors": lambda x: x.clamp(torch.zeros(SIZE, SIZE), torch.ones(SIZE, SIZE)),
    "binary cross-entropy": lambda x: nnf.binary_cross_entropy_with_logits(x, torch.ones(SIZE, SIZE)),
    "binary cross-entropy, weighed": lambda x: nnf.binary_cross_entropy_with_logits(
        x, torch.ones(SIZE, SIZE), weight=torch.ones(SIZE), pos_weight=torch.ones(SIZE)
    ),
    "a value used twice": lambda x: (x * 2).sum() + (x * 3).sum(),
    "a value used five times": lambda x: sum(((x * i).sum() for i in range(5)), start=x.new_zeros(())),
    "bias of a product that is not contiguous": lambda x: WIDE(x.view(8, 8, SIZE).transpose(0, 1)).detach(),
}
"""Programs that differ if the list of formulas is forgotten."""

AS_THEY_ARE: dict[str, Callable[[Tensor], Tensor]] = {
    "a gradient that Python made": lambda x: Doubled.apply(x) + x.cos(),
    "a gradient in two shapes": lambda x: x + x.t(),
    "scatter_reduce, which has a sum of its own": lambda x: x.scatter_reduce(1, columns(), x[:, :2], "mean"),
    "numbers that autograd saves": lambda x: ((x * 2) / 3) * 0.5,
    "the workspace of an LSTM": lambda x: LSTM(x.view(8, 8, SIZE))[0],
    "random numbers": lambda x: nnf.dropout(x, 0.5),
    "a product of batches": lambda x: torch.einsum("bij,bjk->bik", x.view(4, 16, SIZE), x.view(4, SIZE, 16)),
    "a sparse gradient": lambda x: EMBEDDING(columns()) + x.view(SIZE, 1, SIZE),
    "mask of attention with dropout": attention,
    "many uses of a value": lambda x: x.sin() + x.cos() + x.exp() + x.tanh() + x.sigmoid(),
}
"""Programs that are the same, listed or not."""


def step_of(program: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Make a step that takes something large when its backward begins, so that its peak is there."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def step() -> None:
        torch.manual_seed(0)
        large: list[Tensor] = []
        out = program(x * 1).sum()
        if out.requires_grad:
            out.register_hook(lambda _: large.append(torch.ones(16, SIZE, SIZE)))
            out.backward()
        for module in (WIDE, LSTM, EMBEDDING):
            module.zero_grad()
        x.grad = None

    return step


def allocated(step: Callable[[], None]) -> int:
    """Return the highest sum of the memory events that torch's profiler has of a step, without any mode."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(changes, initial=0))


def main() -> None:
    if "forget" in sys.argv:
        for name in inplace_formulas.FORMULAS:
            inplace_formulas.FORMULAS[name] = frozenset()
        inplace_formulas.Formulas.takes_place = lambda *_: False  # type: ignore[method-assign]
    found: dict[str, tuple[int, int]] = {}
    for name, program in (IN_PLACE | AS_THEY_ARE).items():
        step = step_of(program)
        step()
        found[name] = allocated(step), actmem.measure(step).step_bytes
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
