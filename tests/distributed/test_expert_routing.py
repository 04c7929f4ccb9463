"""What a rank with experts takes follows from how tokens are spread: measured counts predict it to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import actmem
from tests.distributed import dispatch, layouts
from tests.distributed.test_rank_profiles import MODES, builds, compare, gloo_worker
from tests.flat_device import FLAT

NUM_TOKENS, NUM_LAYERS = 64, 3
KINDS = {
    "routed_by_chance": "chance",
    "routed_to_the_first": "first",
    "routed_to_the_last": "last",
    "routed_with_gathered_counts": "chance",
}


def measured(name: str, folder: Path) -> actmem.ExpertCounts:
    path = folder / "counts.json"
    path.write_text(json.dumps(dispatch.counts_of(KINDS[name], 2, NUM_LAYERS, NUM_TOKENS)))
    return actmem.ExpertCounts.read(path)


def peak(routing: Any, rank: int, mode: str = "plain", make: Any = layouts.routed_by_chance) -> int:
    found = actmem.profile_rank(builds(make), world=2, rank=rank, routing=routing)
    return actmem.predict(found, MODES[mode], FLAT).tensor_bytes


@pytest.mark.slow
def test_measured_counts_predict_what_every_rank_takes_under_every_mode(tmp_path: Path) -> None:
    compare(layouts.ROUTED, 2, tuple(MODES), tmp_path, lambda name: measured(name, tmp_path))


@pytest.mark.slow
def test_experts_with_a_capacity_take_the_same_whatever_the_routing(tmp_path: Path) -> None:
    compare([layouts.routed_with_capacity], 2, tuple(MODES), tmp_path, lambda _: "balanced")
    assert len({peak(r, 0, "full", layouts.routed_with_capacity) for r in ("balanced", "worst")}) == 1


@pytest.mark.slow
def test_no_routing_takes_more_than_the_worst(tmp_path: Path) -> None:
    names = [make.__name__ for make in layouts.ROUTED]
    cases = [(name, mode) for name in names for mode in ("plain", "full")]
    torch.multiprocessing.spawn(gloo_worker, args=(2, cases, str(tmp_path)), nprocs=2)
    reached = False
    for rank in range(2):
        for mode in ("plain", "full"):
            worst = peak("worst", rank, mode)
            for name in names:
                real = json.loads((tmp_path / f"{name}.{mode}.{rank}.json").read_text())["bytes"]
                assert real <= worst + 64, (name, rank, mode)
                reached |= abs(real - worst) <= 64
    assert reached  # all tokens to the experts of one rank


def test_a_profile_names_its_rank_and_the_hottest(tmp_path: Path) -> None:
    found = actmem.profile_rank(
        builds(layouts.routed_to_the_last), world=2, routing=measured("routed_to_the_last", tmp_path)
    )
    assert found.routing == "measured"
    assert str(found.expert_loads) == "rank 0 receives 0 rows; rank 1, the hottest of its group of 2, 256"
    assert actmem.Profile.from_json(found.to_json()).expert_loads == found.expert_loads
    plan = actmem.fit(found, budget="1GiB", device=FLAT)
    assert "experts: rank 0 receives 0 rows; rank 1, the hottest of its group of 2, 256" in str(plan)


def test_a_quantile_lies_between_an_even_spread_and_the_worst() -> None:
    even, often, seldom, worst = (
        actmem.profile_rank(builds(layouts.routed_by_chance), world=2, rank=1, routing=routing)
        for routing in ("balanced", actmem.Quantile(0.9), actmem.Quantile(0.999), "worst")
    )
    rows = [found.expert_loads.rows[1] for found in (even, often, seldom, worst) if found.expert_loads]
    # 2 ranks send 64 tokens to 2 experts each: 128 here on average, with a deviation of 8.
    assert rows == [128, 2 * -(-(128 + 1.2816 * 8) // 2), 2 * -(-(128 + 3.0902 * 8) // 2), 256]
    peaks = [actmem.predict(found, MODES["plain"], FLAT).tensor_bytes for found in (even, often, seldom, worst)]
    assert peaks == sorted(set(peaks))
    assert often.routing == "quantile 0.9"


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "not counts"),
        ([1, "2"], "not counts"),
        ([[1, 2], [3]], "not counts"),
        ([1, -2], "not counts"),
        ([[[[1]]]], "not counts"),
    ],
)
def test_what_is_not_a_table_of_counts_is_refused(counts: Any, message: str) -> None:
    with pytest.raises(actmem.ModeError, match=message):
        actmem.ExpertCounts(counts)


@pytest.mark.parametrize("fraction", [0.5, 1.0, 99, "0.9"])
def test_what_is_not_a_quantile_is_refused(fraction: Any) -> None:
    with pytest.raises(actmem.ModeError, match=r"between 0\.5 and 1"):
        actmem.Quantile(fraction)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(actmem.ModeError, match="cannot read"):
        actmem.ExpertCounts.read(tmp_path / "none.json")
    (tmp_path / "counts.json").write_text("expert,tokens")
    with pytest.raises(actmem.ModeError, match="is not JSON"):
        actmem.ExpertCounts.read(tmp_path / "counts.json")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([32, 32, 32, 33], "129 in all"),
        ([128, 0, 0, 0], "128 at most"),
        ([[32] * 4] * 3, "3 ranks, but 2 ranks exchange"),
        ([[[32] * 4]] * 2, "in 2 layers, but 3 routers"),
        ([64, 64], "of 2 experts"),
    ],
)
def test_counts_of_another_job_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(actmem.ActmemError, match=message):
        peak(actmem.ExpertCounts(counts), 0)
