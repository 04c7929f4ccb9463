"""The result of an operator lies on fake tensors as it does on a CPU, so that no copy of `contiguous()` is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from actmem.profiling.fake_model import Assuming, fake_batch
from actmem.torchcompat import FakeTensorMode

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda x: x,
    "last two exchanged": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "channels last": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
}

FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "batch_norm": ((3, 4, 5), lambda x: F.batch_norm(x, None, None, training=True)),
    "batch_norm of images": ((3, 4, 5, 6), lambda x: F.batch_norm(x, None, None, training=True)),
    "instance_norm": ((3, 4, 5), F.instance_norm),
    "group_norm": ((3, 4, 5), lambda x: F.group_norm(x, 2)),
    "layer_norm": ((3, 4, 5), lambda x: F.layer_norm(x, (5,))),
    "rms_norm": ((3, 4, 5), lambda x: F.rms_norm(x, (5,))),
    "softmax": ((3, 4, 5), lambda x: x.softmax(-1)),
    "log_softmax": ((3, 4, 5), lambda x: x.log_softmax(-1)),
    "log_softmax of a matrix": ((4, 5), lambda x: x.log_softmax(-1)),
    "gelu": ((3, 4, 5), F.gelu),
    "silu": ((3, 4, 5), F.silu),
    "logsigmoid": ((3, 4, 5), F.logsigmoid),
    "softplus": ((3, 4, 5), F.softplus),
    "glu": ((3, 4, 6), F.glu),
    "dropout": ((3, 4, 5), lambda x: F.dropout(x, 0.5)),
    "conv1d": ((3, 4, 5), lambda x: F.conv1d(x, torch.ones(2, 4, 3, requires_grad=True))),
    "conv2d": ((3, 4, 5, 6), lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3, requires_grad=True))),
    "max_pool2d": ((3, 4, 6, 6), lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": ((3, 4, 6, 6), lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool2d": ((3, 4, 6, 6), lambda x: F.adaptive_avg_pool2d(x, 2)),
    "interpolate": ((3, 4, 6, 6), lambda x: F.interpolate(x, scale_factor=2)),
    "reflection": ((3, 4, 6, 6), lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "replication": ((3, 4, 6, 6), lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate")),
    "channel_shuffle": ((3, 4, 6, 6), lambda x: F.channel_shuffle(x, 2)),
    "pixel_shuffle": ((3, 4, 6, 6), lambda x: F.pixel_shuffle(x, 2)),
    "mse_loss": ((3, 4, 5), lambda x: F.mse_loss(x, torch.zeros_like(x))),
    "smooth_l1_loss": ((3, 4, 5), lambda x: F.smooth_l1_loss(x, torch.zeros_like(x))),
    "huber_loss": ((3, 4, 5), lambda x: F.huber_loss(x, torch.zeros_like(x))),
    "attention": ((3, 4, 5, 6), lambda x: F.scaled_dot_product_attention(x, x, x)),
    "matmul": ((3, 4, 4), lambda x: x @ x),
    "sum": ((3, 4, 5), lambda x: x.sum(1)),
    "cumsum": ((3, 4, 5), lambda x: x.cumsum(1)),
    "cat": ((3, 4, 5), lambda x: torch.cat([x, x], 1)),
    "masked_fill": ((3, 4, 5), lambda x: x.masked_fill(x > 0, 0.0)),
    "where": ((3, 4, 5), lambda x: torch.where(x > 0, x, x * 2)),
}


class Compared(TorchDispatchMode):
    """Runs each operator on fake tensors of the same geometry as well, and lists those whose results lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0
        self.differ: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake_args, fake_kwargs = tree_map_only(
            Tensor, lambda t: fake_batch(t, mode, torch.device("cpu")), (args, kwargs)
        )
        real = func(*args, **kwargs)
        with mode, Assuming("balanced"):
            fake = func(*fake_args, **fake_kwargs)
        self.num_seen += 1
        for a, b in zip(_lies(real), _lies(fake), strict=True):
            if a != b:
                self.differ.append(f"{func}: {a} on a CPU, {b} on fake tensors")
        return real


def _lies(result: Any) -> list[Any]:
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return [[(n, st) for n, st in zip(t.shape, t.stride(), strict=True) if n > 1] for t in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward_results_lie_as_they_do_on_a_cpu(name: str, layout: str) -> None:
    shape, function = FUNCTIONS[name]
    x = LAYOUTS[layout](torch.randn(shape)).requires_grad_()
    with Compared() as compared:
        out = function(x)
        out.square().sum().backward()
    assert compared.num_seen > 1
    assert compared.differ == []
