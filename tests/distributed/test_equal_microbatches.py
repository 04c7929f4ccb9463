"""What a stage of a pipeline takes is the same whether its microbatches are all profiled or one stands for others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import actmem
from actmem import Layout
from actmem.catalogue import build, example, tiny
from actmem.log_entries import OperatorEntry
from tests.flat_device import FLAT

_CARD = "h100-80gb"


def _compare(layout: Layout, *places: int) -> None:
    config = replace(tiny("llama-3.1-8b"), num_layers=layout.pp)
    model, batch = build(config, dtype=torch.float32), example(config, batch=2, sequence=16)
    stages = actmem.profile_stages(model, batch, layout)
    assert len(stages) == layout.pp
    assert stages[-1].num_profiled == 3
    for place in places:
        stage, whole = stages[place], actmem.profile_layout(model, batch, layout, rank=stages[place].rank)
        assert stage.profile.base_bytes == whole.base_bytes
        assert stage.profile.place == whole.place
        assert _schedule(stage.profile) == _schedule(whole)
        for mode in (actmem.SaveEverything(), actmem.Full()):
            short, full = (actmem.predict(p, mode, FLAT).tensor_bytes for p in (stage.profile, whole))
            assert short == full, (place, mode)
            short, full = (actmem.predict(p, mode, _CARD).peak_bytes for p in (stage.profile, whole))
            assert short == full, (place, mode, "on a card")


def _schedule(profile: actmem.Profile) -> list[tuple[object, ...]]:
    """What the stage does, in order, and the operators of each pass."""
    found: list[tuple[object, ...]] = []
    for x in profile.actions:
        costs = [profile.costs[e.cost] for e in profile.log[x.begin : x.end] if isinstance(e, OperatorEntry)]
        found.append((x.kind, x.stage, x.microbatch, x.sent_bytes, Counter(cost.op for cost in costs)))
    return found


def test_a_microbatch_stands_for_others_to_the_byte() -> None:
    _compare(Layout(pp=6, microbatches=8), 0)


def test_so_do_two_turns_of_a_schedule_for_all_of_them() -> None:
    _compare(Layout(pp=4, microbatches=8), 0, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=8, microbatches=8, dp_shard=4),
        Layout(pp=7, microbatches=12, dp_shard=4, reshard_after_forward=False),
        Layout(pp=7, microbatches=9, dp_shard=2, tp=2, sequence_parallel=True),
    ],
    ids=repr,
)
def test_sharded_stages_and_divided_ones_do_too(layout: Layout) -> None:
    _compare(layout, *range(layout.pp))
