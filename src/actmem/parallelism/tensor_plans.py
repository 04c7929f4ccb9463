"""Tensor parallel, with or without sequence parallel, for the layers that Llama's descendants have in common."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from actmem.torchcompat import named_modules

__all__ = ["divide_tensors"]

_BY_COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_BY_ROWS = frozenset({"o_proj", "down_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_SEQUENCE, _HEADS = 1, 2
"""Dimensions of (batch, positions, ...) and of (batch, positions, heads, width)."""


def divide_tensors(
    body: nn.Module, head: nn.Module | None, mesh: DeviceMesh, *, sequence: bool, built_in: bool
) -> None:
    """Divide the matrices of a decoder over the ranks of a mesh, by torch's `parallelize_module`.

    Between the modules the residual stream is a plain tensor: all of it, or this rank's part of the sequence, as a
    pipeline can send it.

    Args:
        body: the module with embedding, layers and norm, each of which may be missing.
        head: the head, if it is here.
        mesh: one dimension.
        sequence: divide the sequence between the matrices.
        built_in: whether it is a model of the catalogue, which calls its attention by position.
    """
    between: Any = Shard(_SEQUENCE) if sequence else Replicate()
    known: Any = body
    for layer in known.layers:
        parallelize_module(layer, mesh, _layer_plan(layer, between, sequence=sequence, built_in=built_in))
    if getattr(known, "embed_tokens", None) is not None:
        whole = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        parallelize_module(known.embed_tokens, mesh, whole)
    if sequence and isinstance(known.norm, nn.Module) and not isinstance(known.norm, nn.Identity):
        parallelize_module(known.norm, mesh, SequenceParallel())
    if head is not None:
        parallelize_module(head, mesh, ColwiseParallel(input_layouts=between, output_layouts=Replicate()))


def _layer_plan(layer: nn.Module, between: Any, *, sequence: bool, built_in: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for path, _ in named_modules(layer):
        name = path.rpartition(".")[2]
        if name in _BY_COLUMNS:
            plan[path] = ColwiseParallel()
        elif name in _BY_ROWS:
            plan[path] = RowwiseParallel(output_layouts=between)
        elif name in _HEAD_NORMS:
            plan[path] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        elif sequence and "." not in path and name.endswith("norm"):
            plan[path] = SequenceParallel()
    if sequence:
        plan["mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        plan["self_attn"] = _attention_inputs(between, built_in=built_in)
    return plan


def _attention_inputs(between: Any, *, built_in: bool) -> Any:
    """Gather the sequence before attention: the first of its arguments, or `hidden_states`."""
    if built_in:
        rest: tuple[Any, ...] = (None, None)
        given: Any = (between, *rest)
        return PrepareModuleInput(input_layouts=given, desired_input_layouts=(Replicate(), *rest))
    named = {"hidden_states": between}
    return PrepareModuleInput(input_kwarg_layouts=named, desired_input_kwarg_layouts=dict.fromkeys(named, Replicate()))
