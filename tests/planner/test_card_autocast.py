"""A step under autocast that is planned for a card runs in the card's dtypes, wherever it is planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.profiles import Profile
from actmem.profiling import card_autocast
from actmem.profiling.autocast_lists import CARD_LISTS

H100 = actmem.device("h100-80gb")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).exp()


def profiled(cast: Callable[[], Any], **options: Any) -> Profile:
    model = nn.Sequential(*(Normed() for _ in range(2))).to("meta")
    batch = torch.empty(512, 64, device="meta")
    sgd = torch.optim.SGD(model.parameters())

    def step() -> None:
        with cast():
            loss = model(batch).sum()
        loss.backward()
        sgd.step()
        sgd.zero_grad()

    return actmem.profile(model, step=step, **options)


def saved(profile: Profile) -> int:
    return actmem.predict(profile, actmem.SaveEverything(), H100).saved_bytes


def on_cuda() -> Any:
    return torch.autocast("cuda", torch.bfloat16)


def on_cpu() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast_for_cuda_is_profiled_with_the_lists_of_a_card() -> None:
    as_on_card = saved(profiled(card_autocast))
    assert saved(profiled(on_cuda)) == as_on_card
    assert saved(profiled(lambda: torch.autocast("cuda", torch.bfloat16, enabled=False))) == saved(
        profiled(lambda: torch.autocast("cpu", torch.bfloat16, enabled=False))
    )


def test_autocast_for_the_cpu_is_profiled_with_the_lists_of_the_device_that_is_planned_for() -> None:
    as_on_card = saved(profiled(card_autocast))
    assert saved(profiled(on_cpu, device="h100-80gb")) == as_on_card
    assert saved(profiled(on_cpu, device=H100)) == as_on_card
    assert saved(profiled(on_cpu)) != as_on_card


def test_a_plan_for_a_card_needs_no_further_argument() -> None:
    model, batch = nn.Sequential(*(Normed() for _ in range(2))), torch.randn(512, 64)
    peaks = []
    for cast in (on_cuda, on_cpu, card_autocast):

        def step(cast: Any = cast) -> None:
            with cast():
                loss = model(batch).sum()
            loss.backward()
            model.zero_grad()

        told = actmem.fit(model, step=step, budget="2GiB", device=H100).predicted
        assert told is not None
        peaks.append(told.peak_bytes)
    assert len(set(peaks)) == 1
    with on_cpu():  # around the example, as a trainer has it
        told = actmem.fit(model, (batch,), loss=torch.sum, budget="2GiB", device=H100, optimizer=None).predicted
        plain = actmem.fit(model, (batch,), loss=torch.sum, budget="2GiB", device=H100.tensors_only(), optimizer=None)
    assert told is not None and plain.predicted is not None
    assert told.peak_bytes > plain.predicted.peak_bytes


def test_nothing_of_it_stays() -> None:
    profiled(on_cuda)
    x = torch.ones(2, 2)
    with on_cpu():
        assert (x @ x).exp().dtype is torch.bfloat16
    with pytest.warns(UserWarning, match="Disabling autocast"):
        off = torch.autocast("cuda", torch.bfloat16)
    with off:
        assert (x @ x).dtype is torch.float32


@pytest.mark.skipif(not hasattr(torch._C, "_dispatch_has_kernel_for_dispatch_key"), reason="torch does not say it")
def test_the_lists_have_every_operator_that_torch_runs_in_float32_on_a_card() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    listed = {name for names in CARD_LISTS.values() for name in names}
    for macro in ("AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"):
        body = text.split(f"#define {macro}(_)")[1].split("\n\n")[0]
        names = [".".join(map(str.strip, found.split(","))) for found in re.findall(r"_\(([\w, ]+)\)", body)]
        assert len(names) > 8
        missing = [
            name
            for name in names
            if name not in listed and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
        ]
        assert missing == []
