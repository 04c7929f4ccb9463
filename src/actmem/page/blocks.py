"""The blocks of a model as a page draws them: each kind once, and what a plan does with its operators."""

from __future__ import annotations

from collections.abc import Sequence

from actmem.page.data import BlockGroup, BlockKind, BlockOperator
from actmem.planner.simulating import Simulated
from actmem.planner.writing import slices
from actmem.profiles import Layer, Profile

__all__ = ["GIVEN", "groups", "kinds"]

GIVEN = "input"
"""What stands in the place of an operator for what a block is given."""


def kinds(profile: Profile, seconds: Sequence[float]) -> list[BlockKind]:
    """Return each kind of layer once, with its operators in order. What the block is given comes first.

    >>> kinds(Profile(), [])
    []
    """
    found: list[BlockKind] = []
    for layers in _by_kind(profile).values():
        layer = profile.layers[layers[0]]
        given = sum(layer.values[v].num_bytes for v in _given(layer))
        operators = [BlockOperator(op=GIVEN, module="", num_bytes=given, flops=0, seconds=0.0)]
        operators += [
            BlockOperator(
                op=call.op,
                module=call.module,
                num_bytes=sum(layer.values[v].num_bytes for v in call.makes),
                flops=profile.costs[call.cost].flops,
                seconds=seconds[call.cost],
            )
            for call in layer.calls
            if call.makes
        ]
        found.append(
            BlockKind(
                name=layer.layer_type or layer.path.rsplit(".", 1)[0],
                num_layers=len(layers),
                num_views=sum(not call.makes for call in layer.calls),
                operators=operators,
            )
        )
    return found


def groups(profile: Profile, simulated: Simulated, seconds: Sequence[float]) -> list[BlockGroup]:
    """Return what a plan does, layer by layer, with equal layers together."""
    found: list[BlockGroup] = []
    for nth, layers in enumerate(_by_kind(profile).values()):
        alike: dict[tuple[str, int, int], list[int]] = {}
        for i in layers:
            alike.setdefault(_done(profile.layers[i], simulated, i), []).append(i)
        for (letters, saved_bytes, sent_bytes), members in alike.items():
            calls = simulated.replayed[members[0]]
            layer = profile.layers[members[0]]
            found.append(
                BlockGroup(
                    kind=nth,
                    layers=slices(members),
                    num_layers=len(members),
                    decisions=letters,
                    saved_bytes=saved_bytes,
                    sent_bytes=sent_bytes,
                    replay_seconds=sum(seconds[layer.calls[c].cost] for c in calls),
                )
            )
    return found


def _by_kind(profile: Profile) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        found.setdefault(layer.kind, []).append(i)
    return found


def _given(layer: Layer) -> list[int]:
    return [v for v, value in enumerate(layer.values) if value.kind == "input"]


def _done(layer: Layer, simulated: Simulated, index: int) -> tuple[str, int, int]:
    """Return a letter for each drawn operator, and the bytes that the layer saves and sends of what it makes."""
    held, away = frozenset(simulated.held[index]), frozenset(simulated.away[index])
    again = frozenset(simulated.replayed[index])

    def kept(values: Sequence[int]) -> tuple[list[int], list[int]]:
        return [v for v in values if v in held - away], [v for v in values if v in away]

    def letter(saved: Sequence[int], gone: Sequence[int], *, replayed: bool) -> str:
        return "o" if gone else "s" if saved else "r" if replayed else "-"

    saved, gone = kept(_given(layer))
    letters = [letter(saved, gone, replayed=False)]
    saved_bytes, sent_bytes = 0, sum(layer.values[v].num_bytes for v in gone)
    for c, call in enumerate(layer.calls):
        if call.makes:
            saved, gone = kept(call.makes)
            letters.append(letter(saved, gone, replayed=c in again))
            saved_bytes += sum(layer.values[v].num_bytes for v in saved)
            sent_bytes += sum(layer.values[v].num_bytes for v in gone)
    return "".join(letters), saved_bytes, sent_bytes
