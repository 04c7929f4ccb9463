"""`actmem.ranks` answers with layouts that fit, and says what it looked at."""

from __future__ import annotations

import pytest
import torch

import actmem
from actmem.catalogue import build, example, tiny
from actmem.parallelism import find_parts
from actmem.planner.rank_candidates import Work, candidates
from tests.flat_device import FLAT

CONFIG = tiny("llama-3.1-8b")
MODEL, BATCH = build(CONFIG, dtype=torch.float32), example(CONFIG, sequence=32)


def smallest_peak(layout: actmem.Layout) -> int:
    seen = actmem.profile_layout(MODEL, BATCH, layout)
    return actmem.frontier(seen, FLAT, num_points=2).points[0].peak_bytes


def test_the_smallest_number_of_cards_is_one_that_fits_where_half_of_them_do_not() -> None:
    one, two = (smallest_peak(actmem.Layout(dp_shard=n, microbatches=2)) for n in (1, 2))
    assert two < one
    found = actmem.ranks(MODEL, BATCH, num_sequences=4, device=FLAT, budget=(one + two) // 2, layouts=2)
    assert found.num_cards == 2
    assert found.refused == (1,)
    assert found.num_profiled <= 3 <= found.num_considered
    for option in found.options:
        assert option.layout.world == 2
        assert option.peak_bytes <= found.budget_bytes
        assert option.step_seconds > 0
    assert [o.step_seconds for o in found.options] == sorted(o.step_seconds for o in found.options)


def test_the_peak_of_a_layout_is_the_one_that_its_plan_is_predicted_to_have() -> None:
    found = actmem.ranks(MODEL, BATCH, num_sequences=2, device=FLAT, budget="64MiB", cards=2, layouts=1)
    (option,) = found.options
    seen = actmem.profile_stages(MODEL, BATCH, option.layout)
    plans = [actmem.fit(stage.profile, budget="64MiB", device=FLAT) for stage in seen]
    told = [actmem.predict(s.profile, plan, FLAT) for s, plan in zip(seen, plans, strict=True)]
    assert option.peak_bytes == max(t.live_bytes for t in told)


def test_what_cannot_fit_is_ruled_out_without_a_profile_and_refused_with_the_counts() -> None:
    with pytest.raises(actmem.BudgetError, match=r"5 can be built, 5 were ruled out .* and 0 were profiled"):
        actmem.ranks(MODEL, BATCH, num_sequences=2, device=FLAT, budget="64KiB", most=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b"])
def test_every_candidate_takes_at_least_its_lower_bound(name: str) -> None:
    config = tiny(name)
    model, batch = build(config, dtype=torch.float32), example(config, sequence=32)
    work = Work.of(find_parts(model), batch, 4, "adamw")
    found = candidates(work, 2, FLAT)
    assert {c.layout.world for c in found} == {2}
    for candidate in found:
        peaks: list[int] = []
        for pp in range(candidate.layout.pp):
            seen = actmem.profile_layout(model, batch, candidate.layout, rank=candidate.layout.rank_of(pp=pp))
            peaks.append(actmem.predict(seen, actmem.Full(), FLAT).live_bytes)
        assert max(peaks) >= candidate.least_bytes, candidate


def test_arguments_are_checked() -> None:
    with pytest.raises(actmem.ModeError, match="num_sequences = 0"):
        actmem.ranks(MODEL, BATCH, num_sequences=0, device=FLAT)
    with pytest.raises(actmem.ModeError, match="batch of tokens"):
        actmem.ranks(MODEL, {}, num_sequences=1, device=FLAT)
