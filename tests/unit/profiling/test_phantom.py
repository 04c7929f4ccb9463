"""A profiled step computes what a plain one does, although autograd is given nothing to hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import actmem
from tests.flat_device import FLAT


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: found.update({name: gradient.clone()}))
    return found


def test_the_gradients_of_a_profiled_real_step_are_those_of_a_plain_step() -> None:
    model, x = build(), torch.randn(4, 8)
    found = gradients(model)
    torch.manual_seed(1)
    model(x).sum().backward()
    plain = dict(found)
    found.clear()
    model.zero_grad()
    torch.manual_seed(1)
    actmem.profile(model, (x,), loss=torch.sum, fake=False)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fake", [True, False])
def test_a_profile_holds_nothing_so_any_plan_can_be_added_to_it(fake: bool) -> None:
    model, x = build(), torch.randn(512, 8)
    profile = actmem.profile(model, (x,), loss=torch.sum, fake=fake, optimizer=None)

    def step() -> None:
        out = model(x)
        out.sum().backward()

    peaks: list[int] = []
    for mode in (actmem.Full(), actmem.SaveEverything()):
        with actmem.apply(model, mode):
            for _ in range(3):  # the first is checked, the second is the first whose program is known
                model.zero_grad()
                measured = actmem.measure(step, model=model).tensor_bytes
        assert actmem.predict(profile, mode, FLAT).tensor_bytes == measured
        peaks.append(measured)
    assert peaks[0] < peaks[1]
