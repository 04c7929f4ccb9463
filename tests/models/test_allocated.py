"""The measured peak of a model's step is what torch's profiler sees of one that nobody watches, also under Full."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import actmem
from tests.further_models import CLASSES, build
from tests.unit.measuring.allocator_programs import allocated
from tests.zoo import ZOO

QUICK = ["bert", "t5", "moe_topk", "lstm"]
"""Dropout, a value used by every layer, indexing by a router, and a kernel with a large workspace."""


def zoo_step(name: str) -> tuple[nn.Module, Callable[[], None]]:
    case = ZOO[name]
    model = case.build()
    batch = case.batch(model)

    def step() -> None:
        torch.manual_seed(0)
        case.step(model, batch).backward()
        model.zero_grad()

    return model, step


def further_step(name: str) -> tuple[nn.Module, Callable[[], None]]:
    model, batch = build(name)

    def step() -> None:
        torch.manual_seed(0)
        model(**batch).loss.backward()
        model.zero_grad()

    return model, step


def compare(model: nn.Module, step: Callable[[], None]) -> None:
    for _ in range(2):
        step()
    gc.collect()
    found = actmem.measure(step, model=model, check=True)
    assert abs(found.step_bytes - allocated(step)) <= 64
    assert found.check is not None and found.check.agrees, str(found.check)


def compare_plain_and_full(model: nn.Module, step: Callable[[], None]) -> None:
    compare(model, step)
    with actmem.apply(model, actmem.Full()):
        compare(model, step)


@pytest.mark.parametrize("name", QUICK)
def test_a_models_measured_peak_is_the_allocators(name: str) -> None:
    compare_plain_and_full(*zoo_step(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO.keys() - set(QUICK)))
def test_every_models_measured_peak_is_the_allocators(name: str) -> None:
    compare_plain_and_full(*zoo_step(name))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa is scripted
@pytest.mark.parametrize("name", CLASSES)
def test_the_measured_peak_of_further_classes_is_the_allocators(name: str) -> None:
    compare_plain_and_full(*further_step(name))
