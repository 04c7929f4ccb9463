"""What a page shows is true: the curves reach the predicted peak, the plans are solved, the parts add up."""

from __future__ import annotations

import itertools

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import actmem
from actmem import catalogue
from actmem.plan import Plan
from actmem.planner.profile_fit import fit_profile
from actmem.reporting import build
from actmem.reporting.block_view import NUM_DRAWN, groups, kinds
from actmem.simulation.plan_effect import follow
from actmem.simulation.predictor import plan_of
from actmem.simulation.step_cost import cost_seconds
from actmem.simulation.step_walk import Ground, program, walk
from tests.page.conftest import DEVICE, Case, batch, stack

CASES = ("small", "llama")


@pytest.fixture(params=CASES)
def shown(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(request.param)


def test_the_curve_of_every_plan_reaches_its_predicted_peak_and_no_more(shown: Case) -> None:
    constant = sum(shown.data.constant_bytes.values())
    for view in shown.data.plans:
        totals = [constant + sum(at) for at in zip(*view.curve.series.values(), strict=True)]
        assert max(totals) == totals[view.curve.peak] == view.peak_bytes
        assert len(totals) == len(view.curve.moments) == len(view.curve.labels) <= NUM_DRAWN
        assert min(itertools.chain(*view.curve.series.values())) >= 0


def test_there_are_at_least_24_different_plans_and_each_does_what_it_says(shown: Case) -> None:
    views = shown.data.plans
    assert len(views) >= 24
    assert len({view.peak_bytes for view in views}) == len({view.plan_json for view in views}) == len(views)
    for view in views[::6]:
        found = actmem.predict(shown.profile, Plan.from_json(view.plan_json), DEVICE)
        assert (found.peak_bytes, found.num_replayed) == (view.peak_bytes, view.num_replayed)
        assert found.step_time_ratio == pytest.approx(view.step_time_ratio, rel=1e-9)
        assert view.peak_bytes <= view.budget_bytes


def test_more_memory_always_buys_time(shown: Case) -> None:
    views = shown.data.plans
    assert all(
        a.peak_bytes < b.peak_bytes and a.step_time_ratio > b.step_time_ratio for a, b in itertools.pairwise(views)
    )
    assert views[-1].step_time_ratio == 1.0


def test_no_named_mode_beats_the_plans_within_its_own_peak(shown: Case) -> None:
    for mode in shown.data.modes:
        best = min(view.step_time_ratio for view in shown.data.plans if view.peak_bytes <= mode.peak_bytes)
        assert best <= mode.step_time_ratio + 1e-9


def test_the_plan_that_was_asked_for_is_among_them_as_it_is(shown: Case) -> None:
    assert [view.plan_json for view in shown.data.plans if view.asked] == [shown.plan.to_json()]


def test_a_short_curve_is_drawn_whole_and_a_long_one_says_how_it_is_thinned(small: Case, llama: Case) -> None:
    for view in small.data.plans:
        assert view.curve.bucket == 1 and view.curve.moments == list(range(view.curve.num_moments))
    for view in llama.data.plans:
        assert view.curve.bucket > 1 and view.curve.num_moments > NUM_DRAWN


def test_a_model_with_few_plans_shows_those_and_says_that_there_are_no_more() -> None:
    found = actmem.profile(stack(2), batch(), loss=torch.sum)
    plan = actmem.fit(stack(2), batch(), loss=torch.sum, budget="64MiB", device=DEVICE)
    data = build(found, plan, DEVICE, name="two layers", num_plans=24)
    assert 2 <= len(data.plans) < 24
    assert data.exhausted


@pytest.mark.parametrize(
    "mode",
    [
        actmem.SaveEverything(),
        actmem.Full(every=2),
        actmem.Selective(save=["attention"]),
        actmem.OffloadActivations(to="host", min_bytes=0, in_flight_bytes=2**20),
        actmem.Rules(
            [actmem.Rule("offload", op="matmul"), actmem.Rule("recompute")], offload=actmem.Offload(to="host")
        ),
    ],
    ids=lambda mode: type(mode).__name__,
)
@pytest.mark.parametrize("name", CASES)
def test_the_categories_add_up_to_the_simulation_at_every_moment(
    name: str, mode: object, request: pytest.FixtureRequest
) -> None:
    profile = request.getfixturevalue(name).profile
    plan = plan_of(profile, mode)
    moments, _ = walk(Ground(profile), plan)
    fixed = sum(moments.constant_bytes.values())
    totals = [fixed + sum(at) for at in zip(*moments.by_category.values(), strict=True)]
    assert totals == [live for _, live in follow(profile, plan, timeline=True).timeline]
    assert all(min(series) >= 0 for series in moments.by_category.values())
    offloads = plan.offload is not None
    assert bool(max(moments.by_category["transfers"])) == offloads
    assert bool(max(moments.by_category["replayed"])) == ("replay" in moments.phases)


def test_values_that_are_overwritten_in_place_are_counted_once() -> None:
    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x).sigmoid()
            return y * y.detach().clone().mul_(2).add_(x)

    model = torch.nn.Sequential(*[Writes() for _ in range(3)])
    profile = actmem.profile(model, (torch.randn(16, 32),), loss=torch.sum)
    for mode in (actmem.Full(), actmem.OffloadActivations(to="disk", min_bytes=0)):
        moments, simulated = walk(Ground(profile), plan_of(profile, mode))
        assert max(moments.totals) == simulated.peak_bytes
        assert all(min(series) >= 0 for series in moments.by_category.values())


@pytest.mark.parametrize("options", [{}, {"microbatches": 4}, {"shard": 8}, {"optimizer": None}], ids=str)
def test_gradients_are_none_when_backward_begins_and_all_at_its_end(options: dict[str, int]) -> None:
    model = catalogue.build(catalogue.tiny("llama-3.1-8b"))
    profile = actmem.profile(model, catalogue.example(catalogue.tiny("llama-3.1-8b"), sequence=32), **options)
    found = program(profile)
    every = profile.gradients_bytes // profile.shard
    assert found.gradients[found.backward] == (every if "microbatches" in options else 0)
    assert found.gradients[found.end] == every
    assert sum(found.constant_bytes.values()) + found.gradients[0] == profile.base_bytes
    assert all(a <= b for a, b in itertools.pairwise(found.gradients))


def test_every_layer_is_drawn_in_one_group_and_has_a_decision_for_every_operator(shown: Case) -> None:
    for view in shown.data.plans:
        assert sum(group.num_layers for group in view.groups) == shown.data.num_layers
        for group in view.groups:
            assert len(group.decisions) == len(shown.data.kinds[group.kind].operators)
            assert set(group.decisions) <= set("sro-")


def test_full_recomputation_is_drawn_as_a_saved_input_and_nothing_else_saved(small: Case) -> None:
    plan = plan_of(small.profile, actmem.Full())
    seconds = cost_seconds(small.profile, actmem.device(DEVICE))
    (kind,) = kinds(small.profile, seconds)
    drawn = groups(small.profile, follow(small.profile, plan), seconds)
    assert kind.num_layers == sum(group.num_layers for group in drawn) == 12
    assert all(group.decisions[0] == "s" and "s" not in group.decisions[1:] for group in drawn)
    assert all("r" in group.decisions for group in drawn)
    away = plan_of(small.profile, actmem.OffloadActivations(to="host", min_bytes=0))
    assert "o" in groups(small.profile, follow(small.profile, away), seconds)[0].decisions


def test_the_plans_of_a_model_that_may_offload_send_values_away() -> None:
    model = catalogue.build("llama-3.1-8b", layers=4)
    profile = actmem.profile(model, catalogue.example("llama-3.1-8b", sequence=4096))
    most, least = (
        actmem.predict(profile, mode, DEVICE).peak_bytes for mode in (actmem.SaveEverything(), actmem.Full())
    )
    plan = fit_profile([profile], least + 3 * (most - least) // 10, actmem.device(DEVICE), offload="host")
    data = build(profile, plan, DEVICE, name="four layers", num_plans=3, offload="host")
    assert data.offload == "host"
    (asked,) = [view for view in data.plans if view.asked]
    assert asked.sent_bytes > 0
    for view in data.plans:
        assert view.sent_bytes == sum(group.sent_bytes * group.num_layers for group in view.groups)
        assert ("transfers" in view.curve.series) == bool(view.sent_bytes)


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    model, example = stack(4), batch()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    profile = actmem.profile(model, example, loss=torch.sum)
    most = actmem.predict(profile, actmem.SaveEverything(), DEVICE).peak_bytes
    least = actmem.predict(profile, actmem.Full(), DEVICE).peak_bytes
    plan = actmem.fit(model, example, loss=torch.sum, budget=(most + least) // 2, device=DEVICE, headroom=0)

    def step() -> None:
        out = model(*example)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with actmem.apply(model, plan):
        for _ in range(2):
            step()
        measured = actmem.measure(step, model=model, optimizer=optimizer)
    data = build(profile, plan, DEVICE, name="four layers", num_plans=2, measured=measured)
    assert data.measured is not None
    rows = {row.name: (row.predicted, row.measured) for row in data.measured}
    assert rows["Peak"] == (plan.predicted.peak_bytes, measured.tensor_bytes)  # type: ignore[union-attr]
    for name in ("Peak", "Parameters", "Optimizer state"):
        assert rows[name][0] == rows[name][1]


def test_what_cannot_be_shown_is_refused_with_the_line_that_repairs_it(
    small: Case, snapshot: SnapshotAssertion
) -> None:
    named = plan_of(small.profile, actmem.Full())
    other = actmem.profile(stack(), batch(), loss=torch.sum, optimizer=None)
    messages: list[str] = []
    for profile, plan, options in (
        (small.profile, named, {}),
        (other, small.plan, {}),
        (small.profile, small.plan, {"num_plans": 1}),
    ):
        with pytest.raises(actmem.ModeError) as raised:
            build(profile, plan, DEVICE, name="refused", **options)
        messages.append(str(raised.value))
    assert messages == snapshot
