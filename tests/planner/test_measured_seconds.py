"""The times of a real profile: equal layers stay equal, and the planner goes by what was measured here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import actmem
from actmem.devices import THIS_MACHINE
from actmem.planner.profile_fit import fit_profile
from actmem.profiles import Profile
from actmem.simulation.peak_moments import Timeline
from actmem.simulation.plan_effect import follow
from actmem.simulation.step_cost import cost_seconds, is_measured, resolved
from tests.planner.steps import DEVICE, peaks


class Slow(nn.Module):
    """An operator that takes far longer than its bytes say, and a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(torch.polygamma(2, x.abs() + 1)))


def profiled(*, fake: bool) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(*[Slow(64) for _ in range(6)])
    return actmem.profile(model, (torch.randn(256, 64),), loss=torch.sum, optimizer=None, fake=fake)


def num_slow_replays(profile: Profile, plan: actmem.Plan) -> int:
    replayed = follow(profile, plan).replayed
    return sum("polygamma" in profile.layers[n].calls[c].op for n, calls in enumerate(replayed) for c in calls)


def test_equal_layers_of_a_real_profile_stay_equal() -> None:
    fake, real = profiled(fake=True), profiled(fake=False)
    assert all(c.seconds is None for c in fake.costs)
    assert all(c.seconds is not None and c.seconds >= 0 for c in real.costs)
    here = resolved(THIS_MACHINE)
    families = [len(Timeline(p, cost_seconds(p, here)).families) for p in (fake, real)]
    assert families[0] == families[1] < 6


def test_measured_times_are_for_this_machine_alone() -> None:
    fake, real, here, other = profiled(fake=True), profiled(fake=False), resolved(THIS_MACHINE), actmem.device(DEVICE)
    assert [is_measured(p, d) for p in (fake, real) for d in (here, other)] == [False, False, True, False]
    assert cost_seconds(real, here) == [c.seconds or 0.0 for c in real.costs]
    assert cost_seconds(real, other) == [
        other.seconds(c.flops, c.moved_bytes, c.dtype) if c.flops or c.moved_bytes else 0.0 for c in real.costs
    ]


def test_what_was_slow_is_kept_although_it_has_few_bytes_and_no_flops() -> None:
    fake, real, here = profiled(fake=True), profiled(fake=False), resolved(THIS_MACHINE)
    full, plain = peaks(fake)
    budget = (full + plain) // 2
    by_roofline, by_times = (fit_profile([p], budget, here) for p in (fake, real))
    assert num_slow_replays(real, by_roofline) > 0
    assert num_slow_replays(real, by_times) < num_slow_replays(real, by_roofline)
    slow, fast = (actmem.predict(real, plan, here).replay_seconds for plan in (by_roofline, by_times))
    assert fast < slow


def test_one_real_profile_gives_one_plan() -> None:
    real, here = profiled(fake=False), resolved(THIS_MACHINE)
    full, plain = peaks(real)
    again = Profile.from_json(real.to_json())
    plans = [fit_profile([p], (full + plain) // 2, here).to_json() for p in (real, again)]
    assert plans[0] == plans[1]
