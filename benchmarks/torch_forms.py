"""The same layers under torch's own checkpointing, whole and selective, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
MATMUL = torch.ops.aten.mm.default


def checkpoint_fully(model: Any) -> None:
    """Put every layer under `torch.utils.checkpoint`, in its non-reentrant form."""
    _wrap(_layers(model), partial(checkpoint, use_reentrant=False))


def checkpoint_selectively(model: Any) -> None:
    """Put every layer under selective checkpointing that saves attention and every second matmul of a layer.

    The gates of routers do not count, as in torchtitan, which knows them by the shape of their weight.
    """
    layers = _layers(model)
    gates = frozenset(m.weight.t().shape for path, m in layers.named_modules() if path.endswith(".mlp.gate"))

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(gates))

    _wrap(layers, partial(checkpoint, use_reentrant=False, context_fn=contexts))


def _layers(model: Any) -> nn.ModuleList:
    return model.layers if hasattr(model, "layers") else model.model.layers


def _policy(gates: frozenset[torch.Size]) -> Callable[..., CheckpointPolicy]:
    """Return a policy with its own count. Forward and recomputation are counted separately: seven matmuls are odd."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        save = func in ATTENTION
        if func is MATMUL and args[1].shape not in gates:
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _wrap(layers: nn.ModuleList, run: Callable[..., Any]) -> None:
    for layer in layers:
        layer.forward = partial(run, layer.forward)
