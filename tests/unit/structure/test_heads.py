"""The output head is found under its usual names, through wrappers and adapters."""

from __future__ import annotations

import pytest
from torch import nn

from actmem.structure.identity import find_head


def model_with(path: str) -> tuple[nn.Module, nn.Module]:
    head = nn.Linear(2, 4)
    inner: nn.Module = head
    for name in reversed(path.split(".")):
        outer = nn.Module()
        outer.body = nn.Linear(2, 2)
        outer.add_module(name, inner)
        inner = outer
    return inner, head


@pytest.mark.parametrize("path", ["lm_head", "output", "head", "classifier", "decoder.lm_head", "embed_out"])
def test_a_head_is_found_by_its_name(path: str) -> None:
    model, head = model_with(path)
    assert find_head(model) is head


def test_a_head_is_found_inside_wrappers_and_adapters() -> None:
    model, head = model_with("lm_head")
    adapted = nn.Module()
    adapted.base_model = nn.Module()
    adapted.base_model.model = nn.DataParallel(model)
    assert find_head(nn.DataParallel(adapted)) is head


def test_an_output_that_is_a_plain_object_with_the_embedding_in_it_is_looked_into() -> None:
    class Tied:
        def __init__(self, linear: nn.Module) -> None:
            self.linear = linear

    model = nn.Module()
    model.embedding = nn.Linear(2, 4)
    model.output = Tied(model.embedding)  # type: ignore[assignment]
    assert find_head(model) is model.embedding


def test_no_head_is_none() -> None:
    assert find_head(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) is None


def test_a_model_that_holds_itself_ends() -> None:
    model = nn.Module()
    model.model = model
    assert find_head(model) is None
