"""Compare the native core with the Python tape on a few small programs: gradients bit for bit, and what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from actmem.decision_rules import Rule
from actmem.engine import Tape, resolve, unpack

__all__ = ["difference", "held_bytes"]

Program = Callable[[Tensor, Tensor], Tensor]


def _norm(x: Tensor, w: Tensor) -> Tensor:
    scale = (x.pow(2).mean(-1, keepdim=True)).add_(1e-6).rsqrt()
    return functional.silu((x * scale) @ w) * x


def _attention(x: Tensor, w: Tensor) -> Tensor:
    q, k = (x @ w).view(2, 4, 2, 4).transpose(1, 2), (x @ w.t()).view(2, 4, 2, 4).transpose(1, 2)
    q = torch.cat((-q[..., 2:], q[..., :2]), -1)
    return functional.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(-2) + x


def _several(x: Tensor, w: Tensor) -> Tensor:
    normed = functional.layer_norm(x, (8,), w[0], w[1])
    return functional.dropout(torch.cumsum(normed.softmax(-1), 1), 0.25) @ w + torch.topk(x, 8).values


def _writes(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    z = y.tanh()
    filled = torch.empty_like(y)
    filled[:, :2] = z[:, :2]
    filled[:, 2:] = y[:, 2:]
    y.mul_(z.detach()).relu_()
    index = torch.arange(3)
    return (filled * y)[:, index].sum(1, keepdim=True) + x.masked_fill(x > 0, 0.5)


_PROGRAMS: tuple[Program, ...] = (_norm, _attention, _several, _writes)
_RULES = {
    "recompute everything": (Rule("recompute"),),
    "save products": (Rule("save", op="aten.mm", nth="::2"), Rule("save", op="aten.bmm"), Rule("recompute")),
}


def difference(native: type[Tape]) -> str | None:
    """Say what a tape does differently from the Python tape; None if nothing."""
    for name, rules in _RULES.items():
        for program in _PROGRAMS:
            runs = [_run(kind, rules, program) for kind in (None, Tape, native)]
            if not all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0][0], run[0], strict=True)):
                return f"other gradients than those of plain training: {program.__name__}, {name}"
            if runs[1][1] != runs[2][1]:
                return f"{runs[2][1]} bytes held, the Python tape holds {runs[1][1]}: {program.__name__}, {name}"
    return None


def _run(kind: Any, rules: tuple[Rule, ...], program: Program) -> tuple[list[Tensor], int]:
    with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        torch.default_generator.manual_seed(0)
        x, w = torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        if kind is None:
            out, held = program(x, w), 0
        else:
            verdicts = resolve(rules, layer=0, num_layers=1, modules={"": ""}, roles={})
            tape = kind(verdicts, None, inputs=[x], trainable=frozenset)
            packed: list[Any] = []

            def pack(tensor: Tensor) -> Any:
                packed.append(handle := tape.pack(tensor))
                return handle

            with torch.autograd.graph.saved_tensors_hooks(pack, getattr(kind, "unpack", unpack)), tape:
                out = program(x, w)
            tape.close()
            held = held_bytes(packed)
            packed.clear()
        out.pow(2).sum().backward()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        assert x.grad is not None
        assert w.grad is not None
        return [out.detach(), x.grad, w.grad, torch.default_generator.get_state()], held


def held_bytes(handles: list[Any]) -> int:
    """Return the bytes of all storages that handles hold, or can reach through what would be replayed."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [handle.value for handle in handles if hasattr(handle, "value")]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value.held, Tensor):
            sizes[value.held.untyped_storage().data_ptr()] = value.held.untyped_storage().nbytes()
        elif value.node is not None:
            waiting += [ref[2] for ref in value.node.refs if ref[2] is not None]
    return sum(sizes.values())
