"""CONTRIBUTING.md is true: what it names is there, and the walk to a gradient runs through no other file."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import actmem

ROOT = Path(__file__).parents[2]
SOURCE = Path(actmem.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
WALK = re.findall(r"^\d+\. `([\w/]+\.py)`: \S", TEXT, re.MULTILINE)


def train(model: nn.Module) -> None:
    with actmem.apply(model, actmem.Full()):
        model(torch.randn(2, 8)).sum().backward()


def built() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])


def test_the_walk_to_a_gradient_names_at_most_18_files_and_runs_through_no_other() -> None:
    train(built())  # what is imported or registered once is no part of it
    ran: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            ran.add(str(path.relative_to(SOURCE)))

    model = built()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train(model)
    finally:
        sys.setprofile(before)
    assert all(p.grad is not None for p in model.parameters())
    assert len(WALK) <= 18
    assert sorted(ran - {*WALK}) == [], "run, and not in the walk"
    assert sorted({*WALK} - ran) == [], "in the walk, and not run"


@pytest.mark.parametrize("path", sorted({*re.findall(r"`((?:\w+/)*\w+\.(?:py|toml|md)|\w+/)`", TEXT)}))
def test_every_file_that_is_named_exists(path: str) -> None:
    assert (SOURCE / path).exists() or (ROOT / path).exists()


def test_every_note_to_read_is_in_the_source() -> None:
    named = re.findall(r"`NOTE \[ ([^`]+) \]`", TEXT)
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert len(named) > 10
    assert [name for name in named if f"\nNOTE [ {name} ]\n" not in source] == []
