"""Run a step on tensors without bytes: a fake copy of a model, and what stands in for data that would decide shapes.

NOTE [ What is real in a fake step ]
Activations and weights are fake: shapes and dtypes, no bytes. Integers and booleans stay real as long as nothing fake
went into them: token ids, positions, masks. So a program that looks at them (is there padding? which documents?) takes
the way that it takes in training. What a router would choose depends on numbers that a fake step does not have. Its
choice is assumed, as real integers: balanced, or worst, so that the same experts get all. A balanced router is one
that prefers no expert. What experts get by it still differs, so the first and the last, where a step's peak may be, are
given three standard deviations more than the mean, and the ones between them as much less. Whatever sorts, counts and
gathers by it then runs as it would.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actmem.errors import UnsupportedError
from actmem.measuring.ledger import tensors_in
from actmem.profiling.complaints import as_plain, for_real
from actmem.profiling.layouts import LAYOUTS
from actmem.profiling.rebinding import rebind
from actmem.torchcompat import FakeTensor, TorchDispatchMode, never_compile, without_fake_mode

__all__ = ["Assuming", "fake_batch", "fake_copy"]

_MOST_REAL = 1 << 26
"""Elements up to which integers are real."""


def fake_copy(
    model: nn.Module, mode: Any, device: torch.device, same: Sequence[tuple[nn.Module, nn.Module]] = ()
) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have no bytes. The model may be on the meta device.

    Args:
        model: the model.
        mode: the fake mode.
        device: the device that the copy is said to be on.
        same: pairs of modules of which the first stands for both.
    """
    if any(isinstance(m, nn.RNNBase) for m in model.modules()):
        raise UnsupportedError(
            "the model has a recurrent layer of torch.nn, whose fused kernel keeps a workspace that no fake tensor "
            f"shows. Profile for real: {for_real()}."
        )
    memo: dict[int, Any] = {}
    left_out = {id(t) for _, other in same for t in (*other.parameters(), *other.buffers())}
    left_out -= {id(t) for first, _ in same for t in (*first.parameters(), *first.buffers())}
    for p in model.parameters():
        if id(p) not in left_out:
            memo[id(p)] = nn.Parameter(_fake(p, mode, device), requires_grad=p.requires_grad)
        if p.grad is not None:
            memo[id(p.grad)] = None
    for b in model.buffers():
        if id(b) not in left_out:
            memo[id(b)] = _fake(b, mode, device)
    for first, other in same:
        if id(first) not in memo:
            memo[id(first)] = copy.deepcopy(first, memo)
        memo[id(other)] = memo[id(first)]
    copied = copy.deepcopy(model, memo)
    rebind(copied, {id(m): memo[id(m)] for m in model.modules() if isinstance(memo.get(id(m)), nn.Module)})
    return copied


def fake_batch(batch: Any, mode: Any, device: torch.device) -> Any:
    """Return a batch in which floating tensors have no bytes."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point() or batch.is_complex() or batch.device.type == "meta":
            return _fake(batch, mode, device).requires_grad_(batch.requires_grad)
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: fake_batch(v, mode, device) for k, v in batch.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(batch, (list, tuple)):
        return type(batch)(fake_batch(v, mode, device) for v in batch)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return batch


def _fake(tensor: Tensor, mode: Any, device: torch.device) -> Tensor:
    with torch.no_grad():
        bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, bare, device)


class Assuming(TorchDispatchMode):
    """Keep integers real, and assume what a router chooses. See NOTE [ What is real in a fake step ]."""

    def __init__(self, routing: str) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves it untyped
        self.routing = routing
        self.assumed = False
        """A choice had to be assumed."""

    @never_compile
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "_overloadpacket", func))
        given = list(tensors_in((args, kwargs)))
        if not any(isinstance(t, FakeTensor) for t in given):
            return self._real(func, name, args, kwargs, given)
        if name in _CHOICES:
            self.assumed = True
            return _CHOICES[name](self.routing, func, args, kwargs)
        if name in LAYOUTS:
            return LAYOUTS[name](func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "data-dependent" in str(error) or "Dynamic" in type(error).__name__ or "DataDep" in type(error).__name__:
                raise UnsupportedError(
                    f"{name} looks at the numbers in a tensor, and a profile on fake tensors has none. Profile for "
                    f"real: {for_real()}."
                ) from error
            raise as_plain(func, args, kwargs, error) from None

    def _real(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Run what only real tensors went into: for real, if integers come out."""
        whole = all(not t.is_floating_point() and t.numel() <= _MOST_REAL for t in given)
        if given and whole and (name in _LOOKS or func._schema.is_mutable):
            with without_fake_mode():
                return func(*args, **kwargs)
        seen = func(*args, **kwargs)
        made = list(tensors_in(seen))
        if not made or any(t.is_floating_point() or t.is_complex() or t.numel() > _MOST_REAL for t in made):
            return seen
        with without_fake_mode():
            return func(*args, **kwargs)


_LOOKS = frozenset(
    {
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.is_nonzero",
        "aten.equal",
        "aten.unique_consecutive",
        "aten._unique2",
        "aten.masked_select",
        "aten.index",
        "aten.repeat_interleave",
        "aten.bincount",
        "aten.item",
    }
)
"""Operators whose result, or its shape, depends on the numbers in a tensor."""


def _top(routing: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    values, indices = func(*args, **kwargs)
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return values, _spread(indices, args[0].shape[dim], routing)


def _sorted(_: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return _identity(found)
    return (*found[:-1], _identity(found[-1]))


def _best(_: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if isinstance(found, Tensor):
        return _zeros(found)
    return (found[0], _zeros(found[1]))


def _spread(like: Tensor, num_choices: int, routing: str) -> Tensor:
    """Choose among `num_choices` for each row of the last dimension."""
    with without_fake_mode():
        width = like.shape[-1] if like.dim() else 1
        if not like.numel() or num_choices < 2:
            return torch.zeros(like.shape, dtype=torch.int64)
        if routing == "worst":
            return (torch.arange(like.numel()) % width).reshape(like.shape)
        rows = like.numel() // width
        mean = like.numel() / num_choices
        shape = torch.linspace(-1, 1, num_choices, dtype=torch.float64).abs()
        shape -= shape.mean()
        most, least = float(shape.max()), -float(shape.min())
        deviation = 3 * math.sqrt(mean * (1 - width / num_choices))
        scale = min(deviation / most, mean / least, (rows - mean) / most) if most > 1e-9 else 0.0
        loads = mean + scale * shape
        ends = loads.cumsum(0).round().to(torch.int64)
        ends[-1] = like.numel()
        chosen = torch.arange(num_choices).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
        return chosen.reshape(width, rows).t().reshape(like.shape)  # no row chooses one twice: no load is above rows


def _identity(like: Tensor) -> Tensor:
    with without_fake_mode():
        last = like.shape[-1] if like.dim() else 1
        return torch.arange(last).expand(like.shape).contiguous()


def _zeros(like: Tensor) -> Tensor:
    with without_fake_mode():
        return torch.zeros(like.shape, dtype=like.dtype)


_CHOICES: dict[str, Any] = {
    "aten.topk": _top,
    "aten.sort": _sorted,
    "aten.argsort": _sorted,
    "aten.argmax": _best,
    "aten.argmin": _best,
}
