"""The blocks of a page, and its curves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from actmem.planner import slices
from actmem.profiles import Layer, Profile
from actmem.reporting.page_data import BlockGroup, BlockKind, BlockOperator, Curve, Label
from actmem.simulation import Moments, Simulated

__all__ = ["GIVEN", "NUM_DRAWN", "Labels", "curve", "groups", "kinds"]

GIVEN = "input"
"""Takes the place of the operator name for the block's inputs."""


def kinds(profile: Profile, seconds: Sequence[float]) -> list[BlockKind]:
    """Return each kind of layer once, with its operators in order. The block's inputs come first.

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
    """Return what a plan does in each layer, with equal layers grouped."""
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
    """Return a letter for each drawn operator, and the bytes that the layer saves and offloads."""
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


NUM_DRAWN = 1200
"""A curve with more moments than this is downsampled."""


class Labels:
    """A table of labels without duplicates."""

    def __init__(self, profile: Profile) -> None:
        self.rows: list[Label] = []
        self._profile = profile
        self._known: dict[tuple[int, int, str, str], int] = {}

    def index(self, moments: Moments, at: int) -> int:
        """Return the row that labels the operator running at a moment; add it if it is new."""
        key = moments.costs[at], moments.layers[at], moments.modules[at], moments.phases[at]
        if key not in self._known:
            cost, layer, module, phase = key
            self._known[key] = len(self.rows)
            block = self._profile.layers[layer].path if layer >= 0 else ""
            found = {"op": self._profile.costs[cost].op, "block": block, "module": module, "phase": phase}
            self.rows.append(Label.model_validate(found))
        return self._known[key]


def curve(moments: Moments, labels: Labels, seconds: Sequence[float]) -> Curve:
    """Return the curve of a step. Downsampling keeps the highest and lowest moment of each bucket, hence the peak."""
    totals, num = moments.totals, len(moments.totals)
    bucket = 1 if num <= NUM_DRAWN else -(-2 * num // NUM_DRAWN)
    drawn = list(range(num)) if bucket == 1 else _thinned(totals, bucket)
    backward = next((n for n, phase in enumerate(moments.phases) if phase != "forward"), num)
    end = next((n for n in range(backward, num) if moments.phases[n] == "optimizer"), num)
    clock = [0.0, *itertools.accumulate(seconds[cost] for cost in moments.costs)]
    return Curve(
        num_moments=num,
        bucket=bucket,
        moments=drawn,
        labels=[labels.index(moments, at) for at in drawn],
        series={c: [series[at] for at in drawn] for c, series in moments.by_category.items() if any(series)},
        peak=drawn.index(moments.peak),
        backward=backward,
        end=end,
        seconds=[float(f"{clock[at + 1]:.6g}") for at in drawn],
        backward_seconds=clock[backward],
        end_seconds=clock[end],
        total_seconds=clock[-1],
    )


def _thinned(totals: list[int], bucket: int) -> list[int]:
    found: set[int] = set()
    for start in range(0, len(totals), bucket):
        run = range(start, min(start + bucket, len(totals)))
        found |= {max(run, key=totals.__getitem__), min(run, key=totals.__getitem__)}
    return sorted(found)
