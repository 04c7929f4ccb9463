"""FlexAttention for the blocks of these tests, and the patch that lets it train on a CPU where no inductor is used."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.compile.blocks import Function


def causal(length: int, device: str) -> BlockMask:
    return create_block_mask(
        lambda batch, head, q, k: q >= k, None, None, length, length, device=device, BLOCK_SIZE=max(length // 2, 4)
    )


def flex(length: int, device: str = "cpu") -> Function:
    """Make a causal attention. The mask is made here, once: its own making is no part of what is compiled."""
    mask = causal(length, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    return attend


def frozen(function: Function) -> Function:
    """Let no gradient through: without one, FlexAttention runs on a CPU, compiled too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q.detach(), k.detach(), v.detach())

    return attend


@contextmanager
def trainable_on_cpu() -> Iterator[None]:
    """Take away the check by which torch refuses to train FlexAttention on a CPU.

    It stands there for inductor, which has no kernel of the backward pass for a CPU. The plain operators have one.
    """
    check = flex_module._validate_device
    flex_module._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        flex_module._validate_device = check


def accelerator() -> str | None:
    found = torch.accelerator.current_accelerator()
    return None if found is None else str(found)
