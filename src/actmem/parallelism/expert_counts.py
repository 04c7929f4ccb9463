"""The part of measured expert counts that a stage of a pipeline has to do with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from actmem.catalogue import MoE
from actmem.errors import ModeError
from actmem.expert_loads import ExpertCounts, Routing
from actmem.parallelism.model_parts import Parts
from actmem.parallelism.stage_modules import Cut

__all__ = ["counts_of_stages"]


def counts_of_stages(parts: Parts, cuts: Sequence[Cut] | None, routing: Routing) -> Routing:
    """Return what to assume of the routers of some stages, from what is assumed of those of the whole model.

    Args:
        parts: the whole model.
        cuts: the stages of one rank. None: it has the whole model.
        routing: what was asked for.

    Raises:
        ModeError: the counts are not of this model's layers, or stages of one rank have different ones.
    """
    if not isinstance(routing, ExpertCounts) or cuts is None or parts.body is None:
        return routing
    layers = cast("Any", parts.model.get_submodule(parts.body)).layers
    routes = [any(isinstance(m, MoE) for m in layer.modules()) for layer in layers]
    if len(routing.table) not in (1, sum(routes)):
        raise ModeError(
            f"the counts are of {len(routing.table)} layers, but the model has {sum(routes)} layers with experts. "
            "Expected a list for each of them, or one for all."
        )
    if not any(any(routes[c.begin : c.begin + c.num_layers]) for c in cuts):
        return "balanced"
    found = {routing.of_layers(sum(routes[: c.begin]), sum(routes[: c.begin + c.num_layers])).table for c in cuts}
    if len(found) > 1:
        raise ModeError(
            "several stages of the pipeline are on one rank, and the counts of their layers differ: in which order "
            "they run is not known beforehand. Give one list of counts for all layers, or virtual=1."
        )
    return ExpertCounts(found.pop())
