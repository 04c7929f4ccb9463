"""The clock of a job: textbook schedules take what textbooks say, and a bound is below every step that it bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actmem.profiles import Action
from actmem.simulation import Stretch, ends_of, in_flight, least_seconds

FORWARD, BACKWARD = 1.0, 2.0


def action(kind: str, stage: int, microbatch: int, sent_bytes: int = 0) -> Stretch:
    seconds = FORWARD if kind == "forward" else BACKWARD
    return Stretch(seconds, Action(kind, stage, microbatch, 0, 0, sent_bytes))


def gpipe(num_stages: int, num_parts: int) -> list[list[Stretch]]:
    return [
        [action(kind, stage, n) for kind in ("forward", "backward") for n in range(num_parts)]
        for stage in range(num_stages)
    ]


def one_forward_one_backward(num_stages: int, num_parts: int) -> list[list[Stretch]]:
    ranks: list[list[Stretch]] = []
    for stage in range(num_stages):
        ahead = min(num_parts, num_stages - stage)
        rank = [action("forward", stage, n) for n in range(ahead)]
        for n in range(num_parts):
            rank.append(action("backward", stage, n))
            rank += [action("forward", stage, n + ahead)] if n + ahead < num_parts else []
        ranks.append(rank)
    return ranks


def at_once(_: int) -> float:
    return 0.0


def step_of(ranks: Sequence[Sequence[Stretch]]) -> float:
    return max(done[-1] for done in ends_of(ranks, at_once))


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("num_stages", "num_parts"), [(1, 4), (2, 4), (4, 8), (8, 8)])
def test_a_balanced_pipeline_takes_its_microbatches_and_a_bubble_of_one_less_than_its_stages(
    schedule: object, num_stages: int, num_parts: int
) -> None:
    ranks = schedule(num_stages, num_parts)  # type: ignore[operator]
    assert step_of(ranks) == (num_parts + num_stages - 1) * (FORWARD + BACKWARD)


def test_early_stages_of_1f1b_hold_more_microbatches_and_all_of_gpipe_hold_all() -> None:
    for schedule, expected in ((one_forward_one_backward, [4, 3, 2, 1]), (gpipe, [8] * 4)):
        found = [in_flight([s.action for s in rank if s.action is not None])[0] for rank in schedule(4, 8)]
        assert found == expected


def test_what_is_sent_takes_its_time_and_delays_only_who_waits_for_it() -> None:
    ranks = [[action("forward", 0, 0, sent_bytes=30), Stretch(1.0)], [action("forward", 1, 0)]]
    assert ends_of(ranks, lambda num_bytes: num_bytes / 10) == [[1.0, 2.0], [5.0]]


def test_a_schedule_may_run_twice_in_a_step() -> None:
    once = one_forward_one_backward(2, 2)
    assert step_of([rank * 2 for rank in once]) <= 2 * step_of(once)


def test_ranks_that_wait_for_each_other_are_reported() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        ends_of([[action("backward", 0, 0), action("forward", 0, 0)], [action("forward", 1, 0)]], at_once)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_way_to_run_more_again_makes_a_shorter_step_than_the_bound(data: st.DataObject) -> None:
    num_stages, num_parts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    plain = data.draw(st.sampled_from([gpipe, one_forward_one_backward]))(num_stages, num_parts)
    evenly = [data.draw(st.booleans()) for _ in plain]
    again: list[list[Stretch]] = []
    more: list[float] = []
    for rank, even in zip(plain, evenly, strict=True):
        parts = [data.draw(st.integers(0, 4)) for _ in range(num_parts)]
        if even:
            parts = [parts[0]] * num_parts
        left = iter(parts)
        again.append([replace(s, seconds=s.seconds + next(left)) if s.is_backward else s for s in rank])
        more.append(float(sum(parts)))
    found = least_seconds(plain, more, at_once, evenly=evenly)
    assert step_of(plain) <= found <= step_of(again) + 1e-9
    if all(evenly):
        assert found == pytest.approx(step_of(again))
