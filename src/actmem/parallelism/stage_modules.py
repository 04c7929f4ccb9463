"""The stages of a pipeline: some layers of a decoder, with its embedding or its head where it begins or ends."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from actmem.layout import Layout, layers_of_stages
from actmem.parallelism.model_parts import Parts

__all__ = ["Cut", "Stage", "cuts_on_rank", "paths_on_rank", "stage_of"]


class Stage(nn.Module):
    """A part of a decoder. It takes tokens or the residual stream, and returns the residual stream or logits."""

    def __init__(self, body: nn.Module, head: nn.Module | None, *, is_first: bool, length: int, built_in: bool) -> None:
        super().__init__()
        self.model, self.lm_head = body, head
        self._is_first, self._length, self._built_in = is_first, length, built_in

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        if self._built_in:
            x = self.model(x, self._length)
        else:
            given: dict[str, Any] = {"input_ids" if self._is_first else "inputs_embeds": x}
            positions = torch.arange(self._length, device=x.device).unsqueeze(0)
            x = self.model(**given, position_ids=positions, use_cache=False).last_hidden_state
        return x if self.lm_head is None else self.lm_head(x)


@dataclass(frozen=True)
class Cut:
    """Which layers of a model are a stage, and where it is in a pipeline."""

    index: int
    num_stages: int
    begin: int
    """The first of its layers."""
    num_layers: int


def cuts_on_rank(parts: Parts, layout: Layout, pp: int) -> tuple[Cut, ...]:
    """Return the stages on a rank of a pipeline."""
    counts = layers_of_stages(parts.num_layers, layout.num_stages)
    return tuple(Cut(i, layout.num_stages, sum(counts[:i]), counts[i]) for i in layout.stages_of(pp))


def paths_on_rank(cuts: Sequence[Cut]) -> tuple[str, ...]:
    """Return the paths of the blocks of these stages, in order.

    >>> paths_on_rank([Cut(0, 2, 0, 2)])
    ('model.layers.0', 'model.layers.1')
    """
    prefixes = [""] if len(cuts) == 1 else [f"{n}." for n in range(len(cuts))]
    return tuple(f"{p}model.layers.{n}" for p, c in zip(prefixes, cuts, strict=True) for n in range(c.num_layers))


def stage_of(parts: Parts, cut: Cut, length: int) -> Stage:
    """Take one stage out of a model. Its modules are those of the model.

    Args:
        parts: the model.
        cut: which layers.
        length: tokens of a sequence.
    """
    assert parts.body is not None
    is_first, is_last = cut.index == 0, cut.index == cut.num_stages - 1
    body = copy.copy(parts.model.get_submodule(parts.body))
    known: Any = body
    known.__dict__["_modules"] = dict(cast("dict[str, Any]", vars(body)["_modules"]))
    known.layers = known.layers[cut.begin : cut.begin + cut.num_layers]
    if not is_first:
        known.embed_tokens = None
    if not is_last:
        known.norm = None if parts.is_built_in else nn.Identity()
    head = cast("nn.Module", cast("Any", parts.model).lm_head) if is_last else None
    return Stage(body, head, is_first=is_first, length=length, built_in=parts.is_built_in)
