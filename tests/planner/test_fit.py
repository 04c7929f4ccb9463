"""A budget is a promise: the measured peak is the predicted one and within it, and nothing else changes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import actmem
from actmem.errors import ModeError, PlanError, UnsupportedError
from tests.planner.steps import DEVICE, Training, images, peaks, rows, stack, tokens, zoo


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


BATCHES: dict[str, Any] = {
    "llama": lambda: tokens(4, 48),
    "qwen3_moe": lambda: tokens(4, 48),
    "t5": lambda: tokens(4, 48),
    "resnet": lambda: images(4, 32),
    "unet": lambda: images(4, 32),
}
REAL = {"qwen3_moe": {"fake": False}}
"""Models whose routing is not assumed but seen."""


@cache
def trained(name: str) -> tuple[Training, int, int]:
    """Return a model, and the peaks between which its budgets lie."""
    training = zoo(name, BATCHES[name](), adamw=True, options=REAL.get(name, {}))
    return training, *peaks(training.profile())


def check(name: str, part: float) -> None:
    training, full, plain = trained(name)
    budget = int(full + part * (plain - full))
    plan = training.fit(budget)
    predicted = plan.predicted
    assert predicted is not None
    measured = training.measured(plan)
    assert measured.peak_bytes == actmem.predict(training.profile(), plan, DEVICE).tensor_bytes
    assert predicted.peak_bytes <= budget == predicted.budget_bytes
    assert measured.replayed_flops == predicted.replayed_flops
    assert 1 <= predicted.bound <= predicted.step_time_ratio + 1e-12
    assert predicted.step_time_ratio - predicted.bound == pytest.approx(predicted.gap, abs=1e-9)
    outcome = actmem.verify(training.model, training.batch, plan, loss=training.loss)
    assert outcome.ok, outcome.difference


@pytest.mark.parametrize(("name", "part"), [("llama", 0.2), ("qwen3_moe", 0.6), ("resnet", 0.3), ("unet", 0.1)])
def test_the_measured_peak_is_the_predicted_one_and_training_is_bitwise_the_same(name: str, part: float) -> None:
    check(name, part)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", BATCHES)
def test_so_it_is_for_many_budgets(name: str, part: float) -> None:
    check(name, part)


def simple(**rest: Any) -> Training:
    return Training(stack(), rows(256), mean, **rest)


def test_less_budget_never_means_more_memory_and_more_never_more_time() -> None:
    training = simple()
    full, plain = peaks(training.profile())
    found = [training.fit(full + (plain - full) * n // 6).predicted for n in range(7)]
    for less, more in pairwise(found):
        assert less is not None and more is not None
        assert less.peak_bytes <= more.peak_bytes
        assert less.step_time_ratio >= more.step_time_ratio
    assert found[0].peak_bytes < found[-1].peak_bytes
    assert found[0].step_time_ratio > found[-1].step_time_ratio == 1.0


def test_a_budget_larger_than_needed_saves_everything_and_says_so() -> None:
    training = simple()
    _, plain = peaks(training.profile())
    plan = training.fit("1GiB")
    assert plan.rules == (actmem.Rule("save"),)
    assert plan.predicted is not None
    assert (plan.predicted.peak_bytes, plan.predicted.step_time_ratio, plan.predicted.gap) == (plain, 1.0, 0.0)
    assert training.measured(plan).replayed_flops == 0
    assert "more than the step needs: everything is saved" in str(plan)


def test_a_plan_is_read_back_with_what_was_predicted(tmp_path: Path) -> None:
    training = simple()
    plan = training.fit(sum(peaks(training.profile())) // 2)
    plan.save(tmp_path / "plan.json")
    again = actmem.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.predicted == plan.predicted
    assert again.exact
    assert training.measured(again).peak_bytes == training.measured(actmem.FromPlan(tmp_path / "plan.json")).peak_bytes


def test_a_plan_is_for_its_own_model() -> None:
    training = simple()
    plan = training.fit(sum(peaks(training.profile())) // 2)
    with pytest.raises(PlanError, match="made for another model"):
        actmem.apply(stack(width=16), plan)
    assert training.measured(plan).peak_bytes > 0


def test_a_plan_says_in_few_rules_what_it_holds_and_what_it_took_for_granted() -> None:
    training, full, plain = trained("llama")
    plan = training.fit((full + plain) // 2)
    assert len(plan.rules) <= 24  # three layers of some 60 operators each
    assert not plan.rules[-1].selectors
    assert len(set(plan.rules)) == len(plan.rules)
    text = str(plan)
    assert "predicted peak:" in text
    assert "lower bound within the budget" in text
    assert "assumed: input_ids int64 [4, 48], labels int64 [4, 48]; optimizer adamw, float32" in text
    for rule in plan.rules:
        assert rule.decision in text


def test_the_optimizer_is_counted_unless_it_is_left_out() -> None:
    training = simple()
    plain = simple(optimizer=torch.optim.AdamW(stack().parameters()))
    state = plain.profile().optimizer_bytes
    assert state > 2 * sum(p.nbytes for p in training.model.parameters())
    budget = sum(peaks(training.profile())) // 2
    without, counted = training.fit(budget), training.fit(budget + state, optimizer="adamw")
    assert without.predicted is not None and counted.predicted is not None
    assert without.predicted.optimizer == "none"
    assert counted.predicted.optimizer == "adamw, float32"
    assert counted.predicted.peak_bytes - without.predicted.peak_bytes == state
    assert counted.rules == without.rules


def test_a_plan_for_several_batches_holds_for_each() -> None:
    short, long = rows(64), rows(256)
    training = simple()
    budget = sum(peaks(training.profile())) // 2
    options: Any = {"budget": budget, "loss": mean, "device": DEVICE, "headroom": 0, "optimizer": None}
    plan = actmem.fit(training.model, examples=[short, long], **options)
    assert plan == actmem.fit(training.model, examples=[long, short], **options)
    with actmem.apply(training.model, plan):
        for batch in (short, long):
            training.batch = batch
            assert training.measured().peak_bytes <= budget


def test_the_last_of_several_batches_has_the_predicted_peak() -> None:
    training = simple(num_batches=2)
    full, plain = peaks(training.profile(microbatches=2))
    plan = training.fit((full + plain) // 2, microbatches=2)
    assert plan.predicted is not None
    assert plan.predicted.microbatches == 2
    assert training.measured(plan).peak_bytes == plan.predicted.peak_bytes <= (full + plain) // 2


def test_a_part_of_a_device_is_a_budget_and_some_of_it_stays_free_if_asked() -> None:
    training = simple()
    memory = DEVICE.memory_bytes
    whole = actmem.fit(training.model, training.batch, budget=0.5, device=DEVICE, loss=mean)
    assert whole.predicted is not None
    assert (whole.predicted.headroom, whole.predicted.budget_bytes) == (0, memory // 2)
    plan = actmem.fit(training.model, training.batch, budget=0.5, device=DEVICE, loss=mean, headroom=0.05)
    assert plan.predicted is not None
    assert plan.predicted.budget_bytes == int(memory // 2 * 0.95)
    assert "5 % of the budget left free" in str(plan)


# -------------------------------------------------------------------- as a mode


def test_a_budget_is_a_mode_of_apply() -> None:
    training = simple()
    full, plain = peaks(training.profile())
    mode = actmem.Budget((full + plain) // 2, optimizer=None)  # of this machine: nothing is left to an allocator
    with actmem.apply(training.model, mode, example=training.batch, loss=mean) as applied:
        assert applied.plan.predicted is not None
        assert training.measured().peak_bytes == applied.plan.predicted.peak_bytes <= (full + plain) // 2
        assert applied.report().num_replayed > 0


def test_a_budget_needs_an_example_and_the_tape() -> None:
    training = simple()
    with pytest.raises(ModeError, match=r"needs a batch to plan for.*example=batch"):
        actmem.apply(training.model, actmem.Budget("1GiB"))
    with pytest.raises(ModeError, match="engine = 'checkpoint' runs whole blocks twice"):
        actmem.apply(training.model, actmem.Budget("1GiB"), example=training.batch, loss=mean, engine="checkpoint")
    with pytest.raises(ModeError, match="has no rules of its own"):
        actmem.Budget("1GiB").rules()


def test_a_plan_for_blocks_in_eager_is_refused_in_a_graph() -> None:
    training = simple()
    plan = training.fit(sum(peaks(training.profile())) // 2)
    with actmem.apply(training.model, plan):
        compiled = torch.compile(training.model, backend="aot_eager")
        with pytest.raises(UnsupportedError, match="keeps a budget in eager, which no compiled graph would"):
            compiled(*training.batch).sum().backward()
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["qwen3_next", "llama_lora"])
def test_models_whose_operators_write_on_each_others_results_keep_their_budgets(name: str) -> None:
    training = zoo(name)
    least, most = peaks(training.profile())
    for part in (0.02, 0.4):
        plan = training.fit(int(least + (most - least) * part))
        assert plan.predicted is not None
        assert training.measured(plan).peak_bytes == actmem.predict(training.profile(), plan, DEVICE).tensor_bytes
        assert plan.predicted.peak_bytes <= plan.predicted.budget_bytes


def test_a_budget_is_kept_where_one_value_is_larger_than_the_bound_on_copies() -> None:
    training = simple()
    full, plain = peaks(training.profile())
    tight = actmem.Offload(to="disk", min_bytes=0, in_flight_bytes=2**10)
    for nth in range(1, 5):
        budget = full + (plain - full) * nth // 5
        plan = training.fit(budget, offload=tight)
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes <= budget
