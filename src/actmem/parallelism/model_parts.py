"""Find the parts of a decoder that a layout divides, and say which layouts can be built for it.

The models of the catalogue and most causal language models of transformers have the same names for their parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue import IGNORED, CausalLM, next_token_loss
from actmem.errors import ModeError
from actmem.layout import Layout, Limits, checked_layout, nearest_layout
from actmem.structure import find_blocks

__all__ = ["Parts", "check_parts", "find_parts"]

_BODY = ("embed_tokens", "layers", "norm")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Parts:
    """A model, and where its parts are."""

    model: nn.Module
    body: str | None
    """Path of the module with the embedding, the layers and the last norm. None: there is none."""
    num_layers: int
    tp_divides: tuple[tuple[str, int], ...] = ()
    """What tensor parallel divides, as in `Limits`."""
    num_experts: int = 0
    is_tied: bool = False
    """Whether the head and the embedding are one parameter."""
    is_uniform: bool = True
    """Whether all layers have the same kind of attention."""
    labels_of_mean: float | None = None
    """If labels are those of a part of the sequence, already moved to the position that predicts them: what the sum of
    their losses is divided by."""

    @property
    def has_ring(self) -> bool:
        """Whether its attention can be spread over a ring of ranks."""
        if not isinstance(self.model, CausalLM):
            return False
        config = self.model.model.config
        return config.window is None and not config.sinks

    @property
    def is_built_in(self) -> bool:
        """Whether it is a decoder of the catalogue."""
        return isinstance(self.model, CausalLM)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss from what the last stage of a pipeline returns, as the model itself does."""
        if self.labels_of_mean is not None:
            terms = functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            return terms / self.labels_of_mean
        if self.is_built_in:
            return next_token_loss(logits, labels)
        model = cast("Any", self.model)
        return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.get_text_config().vocab_size)


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model.

    >>> from actmem.catalogue import build
    >>> parts = find_parts(build("llama-3.1-8b"))
    >>> parts.body, parts.num_layers, parts.tp_divides[1]
    ('model', 32, ('key and value heads', 8))
    """
    body = next((n for n, m in model.named_children() if all(hasattr(m, part) for part in _BODY)), None)
    head = getattr(model, "lm_head", None)
    if body is None or not isinstance(head, nn.Linear):
        return Parts(model, None, len(find_blocks(model, None, None)))
    inner: Any = model.get_submodule(body)
    config: Any = inner.config
    if isinstance(model, CausalLM):
        heads, groups, width = config.num_heads, config.num_kv_heads, config.intermediate_size
        num_experts = 0 if config.experts is None else config.experts.num_experts
        kinds = {"full_attention"}  # each layer knows its own
    else:
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "intermediate_size", None) or heads
        num_experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
        kinds = set(getattr(config, "layer_types", None) or ())
    return Parts(
        model,
        body,
        len(inner.layers),
        (("heads", heads), ("key and value heads", groups), ("columns in its feed-forward layers", width)),
        num_experts,
        is_tied=inner.embed_tokens.weight is head.weight,
        is_uniform=len(kinds) < 2,
    )


def check_parts(parts: Parts, layout: Layout, sequence: int | None) -> None:
    """Refuse a layout that the model does not permit, or that cannot be built for it.

    Raises:
        ModeError: it names the nearest layout that is possible.
    """
    limits = Limits(
        num_layers=parts.num_layers, tp_divides=parts.tp_divides, num_experts=parts.num_experts, sequence=sequence
    )
    first = next(_obstacles(parts, layout), None)
    if first is None:
        checked_layout(layout, limits)
        return
    nearest = layout
    while (found := next(_obstacles(parts, nearest), None)) is not None:
        nearest = found[1]
    raise ModeError(f"{first[0]}\nThe nearest possible layout: {nearest_layout(nearest, limits)!r}")


def _obstacles(parts: Parts, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield why a layout cannot be built, each with a layout that can be, as far as that goes."""
    name = type(parts.model).__name__
    if layout.cp > 1 and not parts.has_ring:
        why = "its attention has windows or sinks" if parts.is_built_in else "it is not of the catalogue"
        text = (
            f"cp = {layout.cp} cannot be built for {name}: actmem has a ring of ranks for decoders of its catalogue "
            f"that attend to all earlier positions, and {why}. For a ring of your own, use "
            "actmem.profile_rank(build, world=N)."
        )
        yield text, _without(layout, "cp")
    divided = [dimension for dimension in ("tp", "pp", "ep") if getattr(layout, dimension) > 1]
    if parts.body is None and divided:
        text = (
            f"{' and '.join(divided)} cannot be built for {name}: it has no lm_head, or no module with embed_tokens, "
            "layers and norm. It can be sharded: dp_shard, dp_replicate."
        )
        yield text, _without(layout, *divided)
    if parts.is_tied and (tied := [dimension for dimension in divided if dimension != "ep"]):
        text = f"{' and '.join(tied)} cannot be built for {name}: its embedding and its head are one parameter."
        yield text, _without(layout, *tied)
    if layout.tp > 1 and parts.num_experts:
        text = (
            f"tp = {layout.tp} cannot be built for {name}: no plan divides the matrices of its {parts.num_experts} "
            "experts."
        )
        yield text, _without(layout, "tp")
    if layout.ep > 1 and parts.num_experts and not parts.is_built_in:
        text = (
            f"ep = {layout.ep} cannot be built for {name}: actmem exchanges tokens between ranks for the models of its "
            "catalogue. With an exchange of your own, use actmem.profile_rank(build, world=N)."
        )
        yield text, replace(layout, ep=1)
    if layout.pp > 1 and not parts.is_uniform:
        text = (
            f"pp = {layout.pp} cannot be built for {name}: its layers differ in their attention, and a stage of them "
            "would take the first ones' for its own."
        )
        yield text, _without(layout, "pp")
    if layout.pp > 1 and layout.sequence_parallel and not parts.is_built_in:
        text = (
            f"sequence_parallel with pp = {layout.pp} cannot be built for {name}: its stages would take the length of "
            "their part for that of the whole sequence."
        )
        yield text, replace(layout, sequence_parallel=False)


def _without(layout: Layout, *dimensions: str) -> Layout:
    """Return the layout without some dimensions, whose ranks shard instead."""
    freed = math.prod(getattr(layout, name) for name in dimensions if name != "ep")
    changes: dict[str, Any] = dict.fromkeys(dimensions, 1)
    if "tp" in dimensions:
        changes["sequence_parallel"] = False
    if "pp" in dimensions:
        changes |= {"schedule": "", "virtual": 0}
    return replace(layout, dp_shard=layout.dp_shard * freed, **changes)
