"""A step of one's own loop is profiled as it is: the prediction is what is measured, and nothing is left changed."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import actmem
from actmem.errors import BudgetError, ModeError, UnsupportedError
from actmem.shapes import TensorShape
from actmem.simulation.step_walk import Ground, walk
from tests.planner.loops import LOOPS, Loop, adamw, mean
from tests.planner.steps import DEVICE, Act, rows, stack

MODES = {
    "save_everything": actmem.SaveEverything(),
    "full": actmem.Full(),
    "every_second_product": actmem.Selective(save=[actmem.every_second("matmul")]),
}
BOTH = pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])


def build(name: str) -> Loop:
    torch.manual_seed(0)
    return LOOPS[name]()


def check(name: str, modes: list[str], *, fake: bool) -> None:
    loop = build(name)
    profile = actmem.profile(loop.model, step=loop.step, fake=fake)
    for mode in (MODES[m] for m in modes):
        found, measured = actmem.predict(profile, mode, DEVICE), build(name).measured(mode)
        assert found.tensor_bytes == measured.peak_bytes
        assert found.replayed_flops == measured.replayed_flops
        assert abs(found.saved_bytes - measured.saved_bytes) <= 8


@BOTH
@pytest.mark.parametrize("name", LOOPS)
def test_the_prediction_of_a_step_is_what_its_third_run_measures(name: str, fake: bool) -> None:
    check(name, ["full" if fake else "every_second_product"], fake=fake)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("name", LOOPS)
def test_it_is_under_every_mode(name: str, fake: bool) -> None:
    check(name, [*MODES], fake=fake)


# -------------------------------------------------------------------- everything is as it was


def remembered(loop: Loop) -> list[Any]:
    """Return all that a step of the loop may change, in plain values and copies."""
    found: list[Any] = [torch.get_rng_state(), random.getstate()]
    modules = (loop.model, *(o for o in loop.others if isinstance(o, nn.Module)))
    for tensor in (t for m in modules for t in (*m.parameters(), *m.buffers())):
        assert not isinstance(tensor, FakeTensor)
        found += [id(tensor), tensor.detach().clone()]
        found += [None] if tensor.grad is None else [id(tensor.grad), tensor.grad.clone()]
    for optimizer in loop.optimizers:
        found.append([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        found.append([[id(p) for p in g["params"]] for g in optimizer.param_groups])
        for p, state in optimizer.state.items():
            found += [id(p), *(v.clone() if isinstance(v, Tensor) else v for v in state.values())]
    for other in loop.others:
        if isinstance(other, list):
            found.append([*other])
        elif not isinstance(other, nn.Module):
            found.append({k: v for k, v in vars(other).items() if isinstance(v, (int, float, list))})
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def num_fakes() -> int:
    gc.collect()
    return sum(type(t) is FakeTensor for t in gc.get_objects())


@BOTH
@pytest.mark.parametrize("name", ["usual", "gan", "in_backward", "scheduled", "averages", "scales"])
def test_all_that_a_step_changes_is_bitwise_unchanged_after_the_profile(name: str, fake: bool) -> None:
    check_unchanged(name, 1, fake=fake)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("num_steps", [0, 2], ids=["fresh", "under_way"])
@pytest.mark.parametrize("name", LOOPS)
def test_it_is_for_every_loop_whether_it_has_begun_or_not(name: str, num_steps: int, fake: bool) -> None:
    check_unchanged(name, num_steps, fake=fake)


def check_unchanged(name: str, num_steps: int, *, fake: bool) -> None:
    loop, fakes = build(name), num_fakes()
    for _ in range(num_steps):
        loop.step()
    before = remembered(loop)
    actmem.profile(loop.model, step=loop.step, fake=fake)
    assert same(before, remembered(loop))
    assert num_fakes() == fakes
    other = build(name)
    for _ in range(num_steps):
        other.step()
    for each in (loop, other):
        torch.manual_seed(1)
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), other.model.parameters(), strict=True))


class Counting(nn.Module):
    """A model that counts, caches and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Act(16) for _ in range(2)])
        self.norm = nn.BatchNorm1d(16)
        self.num_calls = 0
        self.cache: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        out = self.norm(self.layers(x))
        self.cache.append(out.detach())
        return out + torch.rand(x.shape, generator=self.generator)


@BOTH
def test_counters_caches_buffers_and_generators_of_a_model_are_as_they_were(fake: bool) -> None:
    model, (x,) = Counting(), rows(8, 16)
    state, mean_before = model.generator.get_state(), model.norm.running_mean.clone()
    actmem.profile(model, step=lambda: mean(model(x)).backward(), fake=fake)
    assert (model.num_calls, model.cache, int(model.norm.num_batches_tracked)) == (0, [], 0)
    assert torch.equal(model.norm.running_mean, mean_before)
    assert torch.equal(model.generator.get_state(), state)


MODEL, BATCH = stack(2), rows(8)[0]
COUNT, LATEST = 0, None


def trains_globals() -> None:
    global COUNT, LATEST, FIRST  # noqa: PLW0603
    COUNT += 1
    FIRST = LATEST = mean(MODEL(BATCH))
    LATEST.backward()


@BOTH
def test_global_variables_are_bound_as_they_were(fake: bool) -> None:
    actmem.profile(MODEL, step=trains_globals, fake=fake)
    assert (COUNT, LATEST, "FIRST" in globals()) == (0, None, False)
    assert all(p.grad is None for p in MODEL.parameters())


KINDS = [numpy.dtype, numpy.float32(1), numpy.dtype("int8"), numpy.zeros(2)]


@BOTH
def test_what_a_step_has_of_numpy_may_be_a_class_a_scalar_or_an_array(fake: bool) -> None:
    def step() -> None:
        KINDS[3][:] += 1
        mean(MODEL(BATCH)).backward()

    actmem.profile(MODEL, step=step, fake=fake)
    assert KINDS[3].tolist() == [0, 0]


class Trainer:
    """A loop in a class."""

    def __init__(self) -> None:
        self.model, self.batches = stack(2), iter([*rows(8), *rows(8), *rows(8)])
        self.optimizer = adamw(self.model)
        self.history: dict[str, list[Any]] = {"loss": []}

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = mean(self.model(next(self.batches)))
        loss.backward()
        self.optimizer.step()
        self.history["loss"].append(loss.item())
        self.last = loss


@BOTH
def test_a_method_of_a_trainer_leaves_the_trainer_as_it_was(fake: bool) -> None:
    trainer = Trainer()
    actmem.profile(trainer.model, step=trainer.step, fake=fake)
    assert trainer.history == {"loss": []}
    assert not hasattr(trainer, "last")
    assert len([*trainer.batches]) == 3


@BOTH
def test_a_step_that_raises_changes_nothing(fake: bool) -> None:
    loop = build("usual")
    before = remembered(loop)
    times = []

    def step() -> None:
        times.append(1)
        loop.step()
        if len(times) == 2:
            raise KeyError("the second time")

    with pytest.raises(KeyError, match="the second time"):
        actmem.profile(loop.model, step=step, fake=fake)
    assert same(before, remembered(loop))
    assert times == []


# -------------------------------------------------------------------- numbers on fake tensors


def deciding(decide: Callable[[Tensor], object]) -> Callable[[], None]:
    def step() -> None:
        loss = mean(MODEL(BATCH))
        loss.backward()
        decide(loss)

    return step


@pytest.mark.parametrize(
    "ask",
    [
        lambda loss: f"{loss:.3f} {loss.item():.3f} {sum([loss.item(), 2.0]) / 2}",
        lambda loss: loss.item() if not torch.isnan(loss) else 1 / 0,
        lambda loss: loss.tolist(),
        print,
    ],
    ids=["prints", "finite", "list", "repr"],
)
def test_a_loop_may_log_its_loss_on_fake_tensors(ask: Callable[[Tensor], object]) -> None:
    actmem.profile(MODEL, step=deciding(ask))


@pytest.mark.parametrize(
    "decide",
    [
        lambda loss: loss.item() < 2,
        lambda loss: bool(loss < 2),
        lambda loss: float(loss.detach()),
        lambda loss: 1 if loss.item() + 1 else 2,
    ],
    ids=["item", "bool", "float", "sum"],
)
def test_a_loop_that_decides_by_its_loss_is_refused_with_the_line(decide: Callable[[Tensor], object]) -> None:
    with pytest.raises(UnsupportedError, match=r"test_own_steps\.py, line \d+ .*fake=False"):
        actmem.profile(MODEL, step=deciding(decide))
    actmem.profile(MODEL, step=deciding(decide), fake=False)


def test_lbfgs_is_profiled_for_real_and_refused_on_fake_tensors() -> None:
    model, (x,) = stack(2), rows(8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean(model(x))
        loss.backward()
        return loss

    with pytest.raises(UnsupportedError, match="fake=False"):
        actmem.profile(model, step=lambda: optimizer.step(closure))
    found = actmem.profile(model, step=lambda: optimizer.step(closure), fake=False)
    assert found.optimizer == "LBFGS"
    assert found.optimizer_bytes > found.parameters_bytes
    assert not optimizer.state[next(model.parameters())]


# -------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"example": rows(4)}, "example"),
        ({"loss": mean}, "loss"),
        ({"optimizer": None}, "optimizer"),
        ({"optimizer_dtype": torch.float32}, "optimizer_dtype"),
        ({"microbatches": 2}, "microbatches"),
        ({"shard": 2}, "shard"),
    ],
)
def test_what_the_step_answers_itself_is_refused(given: dict[str, Any], named: str) -> None:
    for call in (actmem.profile, lambda *a, **k: actmem.fit(*a, **k, budget="1MiB", device=DEVICE)):
        with pytest.raises(ModeError, match=rf"^{named} cannot be combined with step="):
            call(MODEL, step=lambda: None, **given)


def test_several_examples_and_what_is_no_function_are_refused() -> None:
    with pytest.raises(ModeError, match=r"^examples cannot be combined with step="):
        actmem.fit(MODEL, step=lambda: None, examples=[rows(4)], budget="1MiB", device=DEVICE)
    with pytest.raises(ModeError, match="step = 3 is not a function"):
        actmem.profile(MODEL, step=3)  # type: ignore[arg-type]
    with pytest.raises(ModeError, match="nothing to profile"):
        actmem.profile(MODEL)


# -------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    "name", ["accumulates", *(pytest.param(n, marks=pytest.mark.slow) for n in ("usual", "two_forwards", "gan"))]
)
def test_a_plan_for_a_step_keeps_its_budget_and_takes_what_is_predicted(name: str) -> None:
    loop = build(name)
    profile = actmem.profile(loop.model, step=loop.step)
    full, plain = (actmem.predict(profile, m, DEVICE).peak_bytes for m in (actmem.Full(), actmem.SaveEverything()))
    for part in (0.4, 0.8):
        budget = int(full + part * (plain - full))
        plan = actmem.fit(loop.model, step=loop.step, budget=budget, device=DEVICE, headroom=0)
        assert plan.predicted is not None
        assert build(name).measured(plan).peak_bytes == plan.predicted.peak_bytes <= budget


def test_a_budget_is_applied_from_a_step_and_refuses_a_larger_batch() -> None:
    model, sizes = stack(), [64]
    optimizer = adamw(model)

    def step() -> None:
        for num in sizes:
            mean(model(*rows(num))).backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = actmem.profile(model, step=step)
    budget = int(0.9 * actmem.predict(profile, actmem.SaveEverything(), DEVICE).peak_bytes)
    with actmem.apply(model, actmem.Budget(budget, device=DEVICE), step=step) as applied:
        assert applied.plan.predicted is not None
        assert applied.plan.predicted.calls == ((TensorShape("input", "float32", (64, 32)),),)
        for _ in range(2):
            step()
        assert actmem.measure(step, model=model, optimizer=optimizer).tensor_bytes <= budget
        sizes[:] = [32, 48]
        step()
        sizes[:] = [65]
        with pytest.raises(BudgetError, match=r"input float32 \[65, 32\] is larger than \[64, 32\].*step="):
            step()
        model.requires_grad_(False)
        next(model.parameters()).requires_grad_(True)
        sizes[:] = [64]
        with pytest.raises(BudgetError, match=r"not as it was planned for.*step="):
            step()


def test_a_budget_takes_an_example_or_a_step_and_other_modes_take_neither() -> None:
    with pytest.raises(ModeError, match="example cannot be combined with step="):
        actmem.apply(MODEL, actmem.Budget("1MiB"), example=rows(4), step=lambda: None)
    with pytest.raises(ModeError, match="for a Budget"):
        actmem.apply(MODEL, actmem.Full(), step=lambda: None)
    with pytest.raises(ModeError, match="optimizer and microbatches cannot be combined with step="):
        actmem.apply(MODEL, actmem.Budget("1MiB", optimizer=None, microbatches=2), step=lambda: None)


@pytest.mark.parametrize("name", ["usual", "accumulates", "gan", "in_backward"])
def test_the_bytes_of_a_step_are_divided_into_what_is_measured(name: str) -> None:
    loop = build(name)
    profile = actmem.profile(loop.model, step=loop.step, fake=False)
    with actmem.apply(build(name).model, actmem.SaveEverything()) as applied:
        moments, _ = walk(Ground(profile), applied.plan)
    for at, total in enumerate(moments.totals):
        parts = [series[at] for series in moments.by_category.values()]
        assert min(parts) >= 0
        assert sum(parts) + sum(moments.constant_bytes.values()) == total
    measured = build(name).measured(actmem.SaveEverything()).by_category
    assert moments.constant_bytes["parameters"] == measured["parameters"]
    assert moments.constant_bytes["optimizer"] == measured["optimizer_state"]
    assert max(moments.by_category["gradients"]) <= profile.gradients_bytes


def test_the_gradients_of_an_accumulating_step_are_shown_from_pass_to_pass() -> None:
    loop = build("accumulates")
    profile = actmem.profile(loop.model, step=loop.step, fake=False)
    with actmem.apply(build("accumulates").model, actmem.SaveEverything()) as applied:
        moments, _ = walk(Ground(profile), applied.plan)
    gradients = moments.by_category["gradients"]
    runs = [(phase, [gradients[n] for n in run]) for phase, run in _runs(moments.phases)]
    forwards = [series for phase, series in runs if phase == "forward"]
    assert set(forwards[0]) == {0}
    assert {*forwards[1], *forwards[2]} == {profile.gradients_bytes}
    assert [phase for phase, _ in runs][:6] == ["forward", "backward"] * 3


def _runs(phases: list[str]) -> list[tuple[str, list[int]]]:
    return [(phase, list(run)) for phase, run in groupby(range(len(phases)), key=phases.__getitem__)]
