"""Check, on the values of a call, that a module treats every token by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from actmem.splitting.call_tokens import Tokens

__all__ = ["why_not_by_token"]

_SAMPLE = 128
"""How many tokens are looked at: the check must not take what pieces are to save."""
_ULPS = 8
"""By how many units in the last place, of the largest element, a row may change where others do: experts compute
their tokens together, so that another row may come to lie in another part of a product."""


def why_not_by_token(
    module: nn.Module, tokens: Tokens, args: tuple[Any, ...], kwargs: dict[str, Any], *, bitwise: bool = False
) -> str | None:
    """Return what speaks against running a module in pieces of tokens; None if nothing does on this example.

    The first tokens of a call are divided into two halves. With other values in one half, the results of the other must
    not change; and each half by itself must have the results that it has together with the other: up to rounding, or
    `bitwise`.

    >>> x = torch.randn(2, 8, 4)
    >>> why_not_by_token(nn.Linear(4, 4), Tokens.of((x,), {}), (x,), {})
    >>> class Shifted(nn.Module):
    ...     def forward(self, x):
    ...         return x + x.roll(1, dims=1)
    >>> why_not_by_token(Shifted(), Tokens.of((x,), {}), (x,), {})
    'its tokens see one another: a token has other results when other tokens have other values'
    """
    num = min(tokens.num, _SAMPLE) // 2 * 2
    half, dim = num // 2, tokens.num_dims - 1
    sample: dict[int, Tensor] = {id(x): tokens.flat(x).narrow(dim, 0, num).clone() for x in tokens.tensors}
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    kept = {name: b.clone() for name, b in buffers.items()}
    device = tokens.tensors[0].device
    kinds = [] if device.type == "cpu" else [device]
    forked = cast(Any, torch.random).fork_rng
    with forked(devices=[d.index or 0 for d in kinds], device_type=device.type if kinds else "cuda"):
        states = _states(device)

        def run(take: Callable[[Tensor], Tensor]) -> list[Tensor]:
            def taken(x: Tensor) -> Tensor:
                return take(sample[id(x)])

            given, named = tokens.taken(args, kwargs, taken)
            return list(_tensors(functional_call(module, buffers, given, named)))

        def first_half(x: Tensor) -> Tensor:
            return x.narrow(dim, 0, half)

        def second_half(x: Tensor) -> Tensor:
            return x.narrow(dim, half, half)

        def mixed(x: Tensor) -> Tensor:  # the second half has the values of the first, in reverse
            return torch.cat([first_half(x), first_half(x).flip(dim)], dim)

        def mixed_before(x: Tensor) -> Tensor:
            return torch.cat([second_half(x).flip(dim), second_half(x)], dim)

        whole = run(Tensor.contiguous)
        if any(not torch.equal(one, other) for one, other in zip(states, _states(device), strict=True)):
            return "it draws random numbers, and pieces would draw others"
        if any(not torch.equal(buffers[name], b) for name, b in kept.items()):
            return "it writes to its buffers, and pieces would write more often"
        if any(x.dim() <= dim or x.shape[dim] != num for x in whole):
            return "what it returns does not have a row for each token"
        halves = [run(first_half), run(second_half)]
        changed = [run(mixed), run(mixed_before)]
    for i in range(2):
        for x, alone, beside in zip(whole, halves[i], changed[i], strict=True):
            rows = x.narrow(dim, i * half, half)
            if not _is_near(rows, beside.narrow(dim, i * half, half)):
                return "its tokens see one another: a token has other results when other tokens have other values"
            if alone.shape != rows.shape or not _is_near(rows, alone):
                return "a piece of its tokens has other results alone than among the others"
            if bitwise and not (torch.equal(rows, alone) and torch.equal(rows, beside.narrow(dim, i * half, half))):
                return "exact = True, and on this machine fewer tokens give other bits"
    return None


def _is_near(x: Tensor, y: Tensor) -> bool:
    if torch.equal(x, y):
        return True
    if not x.is_floating_point():
        return False
    far = (x.double() - y.double()).abs().nan_to_num(torch.inf).max()
    return bool(far <= _ULPS * torch.finfo(x.dtype).eps * x.double().abs().max())


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for x in cast("list[Any]", out):
            yield from _tensors(x)


def _states(device: torch.device) -> list[Tensor]:
    found = [torch.get_rng_state()]
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        found.append(module.get_rng_state(device))
    return found
