"""The planner on random steps: as good as trying everything, and its bound is never above the optimum."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from actmem.decisions import Decision, Reason
from actmem.log_entries import (
    CallRan,
    Dropped,
    Entered,
    Entry,
    Left,
    OpRan,
    Packed,
    PhaseBegan,
    StorageDied,
    Unpacked,
)
from actmem.planner.block_program import price, tabulate
from actmem.planner.master_program import Moment, Step
from actmem.planner.placement import Chain
from actmem.planner.solver import Link, smallest_peak, solve
from actmem.planner.work import Work
from actmem.profiles import Call, Cost, Layer, Profile, Value
from actmem.simulation.flight import InFlight
from actmem.simulation.peak_moments import Timeline
from actmem.simulation.simulator import simulate

SIZES = (8, 64, 100, 200, 256, 500)
STEP_SECONDS = 100.0


class _Program:
    """A made-up step, written down as a profile would."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.log: list[Entry] = []
        self.costs = [Cost("aten.other.default", 0, 0, "float32")]
        self.seconds = [1.0]
        self.layers: list[Layer] = []
        self.sizes: dict[int, int] = {}
        self.live = 0

    def storage(self) -> int:
        self.sizes[len(self.sizes)] = self.draw(st.sampled_from(SIZES))
        return len(self.sizes) - 1

    def die(self, storage: int) -> None:
        self.log.append(StorageDied(storage))
        self.live -= self.sizes[storage]

    def op(self) -> None:
        self.log.append(OpRan(0, self.live))

    def forward(self, source: int, num_calls: int) -> int:
        draw, nth = self.draw, len(self.layers)
        size = self.sizes[source]
        values = [Value(size, source, -1, "input", Reason.EXTERNAL, (), -1, -1, False, copy_bytes=size)]
        calls: list[Call] = []
        handles: list[int] = []
        alive: list[int] = []
        self.log.append(Entered(nth, self.live))
        for c in range(num_calls):
            reads = tuple(sorted(draw(st.sets(st.sampled_from([0, *alive]), min_size=1, max_size=2))))
            for r in reads:
                self._pack(nth, handles, r)
            why = Reason.ROUTING if draw(st.integers(0, 9)) == 0 else None
            makes: list[int] = []
            for slot in range(2 if draw(st.integers(0, 5)) == 0 else 1):
                storage = self.storage()
                size = self.sizes[storage]
                makes.append(len(values))
                shown = len(values)  # a tensor for each value, which dies with its storage
                values.append(
                    Value(size, storage, c, "made", why, reads, -1, -1, False, copy_bytes=size, slot=slot, shown=shown)
                )
                alive.append(len(values) - 1)
                self.live += self.sizes[storage]
            self.costs.append(Cost(f"aten.op{c}.default", c + 1, 0, "float32"))
            self.seconds.append(float(draw(st.integers(1, 9))))
            cost = len(self.costs) - 1
            calls.append(Call(f"aten.op{c}.default", "", cost, tuple(makes), refs=reads, shown=reads, never=why))
            self.log.append(CallRan(nth, c, len(self.costs) - 1, self.live))
            for v in makes:
                self._pack(nth, handles, v)
            for v in [v for v in alive[:-1] if draw(st.booleans())]:
                alive.remove(v)
                self.die(values[v].storage)
        out = alive.pop()
        for v in alive:
            self.die(values[v].storage)
        self.log.append(Left(nth, self.live))
        self.layers.append(
            Layer(
                path=f"layers.{nth}",
                kind=nth,
                layer_type=None,
                modules=(),
                roles={},
                calls=tuple(calls),
                values=tuple(values),
                handles=tuple(handles),
                inputs_bytes=self.sizes[source] + 10_000,  # enough to reserve whatever the plan keeps
            )
        )
        return values[out].storage

    def _pack(self, nth: int, handles: list[int], v: int) -> None:
        if self.draw(st.integers(0, 2)) > 0:
            self.log.append(Packed(nth, len(handles)))
            handles.append(v)

    def backward(self, nth: int, grows: bool) -> None:
        for handle in reversed(range(len(self.layers[nth].handles))):
            self.log.append(Unpacked(nth, handle, self.live))
            workspace = self.draw(st.sampled_from((0, 50, 300)))
            self.live += workspace
            self.op()
            self.live -= workspace
            self.log.append(Dropped(nth, handle))
        if grows:
            self.live += self.draw(st.sampled_from((0, 100, 400)))
            self.op()

    def profile(self) -> Profile:
        return Profile(costs=tuple(self.costs), layers=tuple(self.layers), log=tuple(self.log), storages=self.sizes)


@st.composite
def steps(draw: Any, num_calls: tuple[tuple[int, ...], ...] = ((6,), (7,), (3, 3), (3, 4), (2, 3, 2))) -> Any:
    """A made-up step: its profile and the seconds of its costs."""
    program = _Program(draw)
    source = program.storage()
    program.live += program.sizes[source]
    program.op()
    for num in draw(st.sampled_from(num_calls)):
        out = program.forward(source, num)
        program.die(source)
        source = out
    program.op()
    program.log.append(PhaseBegan("backward", program.live))
    if draw(st.booleans()):
        program.die(source)
    grows = draw(st.booleans())
    for nth in reversed(range(len(program.layers))):
        program.backward(nth, grows)
    program.op()
    return program.profile(), program.seconds


def every_plan(profile: Profile, seconds: list[float]) -> list[tuple[float, int]]:
    """Try all decisions: the replay seconds and the peak of each."""
    num = [len(layer.calls) for layer in profile.layers]
    found: list[tuple[float, int]] = []
    for flat in itertools.product((Decision.SAVE, Decision.RECOMPUTE), repeat=sum(num)):
        rest = iter(flat)
        keeps = [[next(rest) for _ in range(n)] for n in num]
        out = simulate(profile, keeps, exact=True)
        spent = sum(
            seconds[layer.calls[c].cost]
            for layer, calls in zip(profile.layers, out.replayed, strict=True)
            for c in calls
        )
        found.append((spent, out.peak_bytes))
    return found


def keeps_of(draw: Any, profile: Profile) -> list[list[Decision]]:
    choice = st.sampled_from(Decision)
    return [draw(st.lists(choice, min_size=len(x.calls), max_size=len(x.calls))) for x in profile.layers]


relaxed = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(st.data())
def test_sums_over_layers_are_what_walking_through_the_log_gives(data: Any) -> None:
    profile, seconds = data.draw(steps())
    line = Timeline(profile, seconds)
    keeps = keeps_of(data.draw, profile)
    effects = [line.effect(line.family_of[n], keep) for n, keep in enumerate(keeps)]
    walked = simulate(profile, keeps, exact=True)
    assert line.peak(effects) == walked.peak_bytes
    in_flight = simulate(profile, keeps, exact=True, in_flight=InFlight(70))
    assert in_flight.peak_bytes <= line.peak(effects, in_flight_bytes=70)
    assert in_flight.replayed == walked.replayed
    assert tuple(e.replayed for e in effects) == walked.replayed
    assert tuple(e.held for e in effects) == walked.held


@settings(relaxed, max_examples=30)
@given(st.data())
def test_no_plan_is_better_than_the_one_found(data: Any) -> None:
    profile, seconds = data.draw(steps())
    plans = every_plan(profile, seconds)
    peaks = sorted({peak for _, peak in plans})
    least, keeps, proven = smallest_peak(profile)
    assert least == peaks[0] == simulate(profile, keeps, exact=True).peak_bytes
    assert proven <= least
    for budget in {peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) // 2], peaks[-1] - 1}:
        found = solve(profile, seconds, budget, step_seconds=STEP_SECONDS)
        if budget < peaks[0]:
            assert not found.feasible
            continue
        best = min(spent for spent, peak in plans if peak <= budget)
        assert found.feasible and found.peak_bytes <= budget
        assert found.replay_seconds == pytest.approx(best, abs=1e-6)
        assert found.bound_seconds <= best + 1e-6
        assert found.gap <= 1e-6


@settings(relaxed, max_examples=5)
@given(st.data())
def test_the_bound_holds_and_the_gap_is_honest_where_not_everything_is_tried(data: Any) -> None:
    profile, seconds = data.draw(steps(num_calls=((10,), (5, 5), (4, 3, 3))))
    plans = every_plan(profile, seconds)
    peaks = sorted({peak for _, peak in plans})
    least, _, proven = smallest_peak(profile)
    assert proven <= peaks[0] <= least
    for budget in {peaks[len(peaks) // 4], peaks[len(peaks) // 2]}:
        best = min(spent for spent, peak in plans if peak <= budget)
        found = solve(profile, seconds, budget, step_seconds=STEP_SECONDS)
        assert found.feasible and found.peak_bytes <= budget
        assert found.bound_seconds <= best + 1e-6
        assert found.replay_seconds >= best - 1e-6
        assert found.replay_seconds - best <= found.gap * STEP_SECONDS + 1e-6


@settings(relaxed, max_examples=15)
@given(st.data())
def test_below_the_smallest_peak_the_result_says_so(data: Any) -> None:
    profile, seconds = data.draw(steps())
    least, _, proven = smallest_peak(profile)
    found = solve(profile, seconds, proven - 1, step_seconds=STEP_SECONDS)
    assert not found.feasible
    assert found.peak_bytes == least
    assert found.least_peak_bytes is not None and found.least_peak_bytes <= least


@settings(relaxed, max_examples=15)
@given(st.data())
def test_sending_away_never_costs_more_than_not_sending(data: Any) -> None:
    profile, seconds = data.draw(steps())
    least, _, _ = smallest_peak(profile)
    everything = simulate(profile, [["save"] * len(x.calls) for x in profile.layers], exact=True).peak_bytes
    budget = (least + everything) // 2
    without = solve(profile, seconds, budget, step_seconds=STEP_SECONDS)
    link = Link(out_bytes_per_second=1e4, in_bytes_per_second=1e4, in_flight_bytes=0)
    found = solve(profile, seconds, budget, step_seconds=STEP_SECONDS, offload=link, candidates=[without.keeps])
    assert found.feasible and found.peak_bytes <= budget
    assert found.bound_seconds <= found.replay_seconds + found.stall_seconds + 1e-9
    assert found.replay_seconds + found.stall_seconds <= without.replay_seconds + 1e-9


@settings(relaxed, max_examples=50)
@given(steps(), st.data())
def test_the_bound_of_a_chain_is_never_above_the_optimum(step: Any, data: Any) -> None:
    profile, seconds = step
    plans = every_plan(profile, seconds)
    budget = data.draw(st.sampled_from(sorted({peak for _, peak in plans})))
    least = min(spent for spent, peak in plans if peak <= budget)
    program = Step(Timeline(profile, seconds), Work())
    unpacks = [int(j) for j in (program.timeline.asked >= 0).nonzero()[0]]
    program.add_rows([Moment(j, within=False) for j in range(len(program.timeline.live))])
    program.add_rows([Moment(j, within=True) for j in unpacks])
    assert Chain(program, budget).bound() <= least + 1e-9


@settings(relaxed, max_examples=50)
@given(steps(), st.data())
def test_the_table_of_a_block_has_the_optimum_of_its_program(step: Any, data: Any) -> None:
    profile, seconds = step
    line = Timeline(profile, seconds)
    for problem, family in zip(Step(line, Work()).problems, line.families, strict=True):
        if not problem.units:
            continue
        events = data.draw(st.sets(st.integers(0, len(family.events) - 1), min_size=1, max_size=3))
        prices = [(k, data.draw(st.sampled_from((0.001, 0.01, 0.1)))) for k in sorted(events)]
        table = tabulate(problem, [k for k, _ in prices])
        least = (table.seconds + sum(p * table.bytes_after[k] for k, p in prices)).min()
        assert least == pytest.approx(price(problem, prices, work=Work()).bound, rel=1e-5, abs=1e-5)
