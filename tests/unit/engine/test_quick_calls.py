"""The functions of torch that the tape calls in place of an operator run that operator, with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from actmem.engine.operators import QUICK, describe
from actmem.torchcompat import TorchDispatchMode

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def calls(name: str) -> list[Call]:
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    small, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4, 4))
    pair, numbers = (
        call(x, y),
        [
            call(x, 2.5),
            call(x, 3),
            call(x, True),
            call(torch.nn.Parameter(torch.randn(4)), x),
            call(x.double(), y),
            call(x, 1j),
        ],
    )
    half, whole = call(x.bfloat16(), 0.1), call(torch.arange(3), 2)
    return {
        "aten.add.Tensor": [pair, *numbers, half, whole, call(x, y, alpha=2), call(x, 0.5, alpha=2)],
        "aten.addmm.default": [call(torch.randn(4), small, weight), call(small, small, weight, beta=2, alpha=0.5)],
        "aten.bmm.default": [call(x, y.transpose(1, 2))],
        "aten.cat.default": [call([x, y]), call([x, y], -1), call([x, y.double()], 1)],
        "aten.clone.default": [call(x), call(x.transpose(0, 1), memory_format=torch.contiguous_format)],
        "aten.detach.default": [call(x), call(weight)],
        "aten.div.Tensor": [pair, *numbers, half, whole],
        "aten.embedding.default": [call(weight, torch.tensor([1, 2])), call(weight, torch.tensor([1, 2]), 1, True)],
        "aten.expand.default": [call(x, [5, 2, 3, 4]), call(x, [5, -1, -1, -1], implicit=True)],
        "aten.gelu.default": [call(x), call(x, approximate="tanh")],
        "aten.index_select.default": [call(small, 0, torch.tensor([1, 2]))],
        "aten.mean.dim": [call(x, [-1], True), call(x, [0, 1]), call(x, [0], dtype=torch.float64), call(x, None)],
        "aten.mm.default": [call(small, weight), call(small.t(), small)],
        "aten.mul.Tensor": [pair, *numbers, half, whole],
        "aten.native_layer_norm.default": [call(x, [4], None, None, 1e-5), call(x, [4], weight[0], weight[1], 1e-5)],
        "aten.neg.default": [call(x)],
        "aten.permute.default": [call(x, [2, 0, 1])],
        "aten.pow.Tensor_Scalar": [call(x, 2), call(x, 0.5), call(x, 2.0), call(torch.arange(3), 2)],
        "aten.rsqrt.default": [call(x)],
        "aten.select.int": [call(x, 0, 1), call(x, -1, -1)],
        "aten.sub.Tensor": [pair, call(x, 2.5), call(x, 3), half, whole, call(x, y, alpha=2)],
        "aten.sum.dim_IntList": [call(x, [-1], True), call(x, None), call(x, [0], dtype=torch.float64), call(x, [])],
        "aten.t.default": [call(weight), call(torch.randn(3))],
        "aten.transpose.int": [call(x, 0, -1)],
        "aten.unsqueeze.default": [call(x, 0), call(x, -1)],
        "aten.view.default": [call(x, [6, 4]), call(x, [-1])],
    }[name]


class Seen(TorchDispatchMode):
    """Notes each operator with its arguments."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] # torch leaves it untyped
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        self.calls.append((str(func), [shown(a) for a in args], {name: shown(a) for name, a in named.items()}))
        return func(*args, **named)


def shown(a: Any) -> Any:
    if isinstance(a, (list, tuple)):
        items: list[Any] = [*a]  # pyright: ignore[reportUnknownArgumentType]
        return [shown(x) for x in items]
    return ("tensor", id(a)) if isinstance(a, Tensor) else (type(a), repr(a))


def outcome(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Tensor]]:
    with torch.no_grad(), Seen() as seen:
        found = function(*args, **kwargs)
    return seen.calls, [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_call_runs_the_operator_itself_with_the_same_arguments(name: str) -> None:
    _, packet, overload = name.split(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    assert describe(func).call is QUICK[name]
    for args, kwargs in calls(name):
        expected, results = outcome(func, args, kwargs)
        seen, found = outcome(QUICK[name], args, kwargs)
        assert seen == expected and [op for op, _, _ in seen] == [name], (seen, expected)
        assert len(found) == len(results)
        for a, b in zip(found, results, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
