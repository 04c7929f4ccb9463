"""Profiles, plans and pages that the tests of this folder share; each is made once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem import catalogue
from actmem.plan import Plan
from actmem.planner.profile_fit import fit_profile
from actmem.profiles import Profile
from actmem.reporting import PageData, build
from tests.flat_device import FLAT

DEVICE = FLAT


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def stack(num_layers: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Mlp() for _ in range(num_layers)])


def batch() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randn(256, 64),)


@dataclass(frozen=True)
class Case:
    profile: Profile
    plan: Plan
    data: PageData


def case(profile: Profile, name: str, **options: object) -> Case:
    most = actmem.predict(profile, actmem.SaveEverything(), DEVICE).peak_bytes
    least = actmem.predict(profile, actmem.Full(), DEVICE).peak_bytes
    plan = fit_profile([profile], (most + least) // 2, actmem.device(DEVICE))
    return Case(profile, plan, build(profile, plan, DEVICE, name=name, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def small() -> Case:
    """Twelve equal layers: few enough operators that all are drawn."""
    return case(actmem.profile(stack(), batch(), loss=torch.sum), "twelve </script> layers")


@pytest.fixture(scope="session")
def llama() -> Case:
    """Six layers of Llama-3.1-8B: so many operators that the curve is thinned."""
    model = catalogue.build("llama-3.1-8b", layers=6)
    return case(actmem.profile(model, catalogue.example("llama-3.1-8b", sequence=8192)), "llama")
