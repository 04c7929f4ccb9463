"""`CompilerBudget`: the compiler's own choice, set and put back, refused in eager, and its known defects."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import actmem
from actmem import CompilerBudget, Full, ModeError, UnsupportedError
from tests.compile.blocks import fresh_compiler
from tests.compile.compiling import Stack, Tiny, differing, distance, trained
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def budget() -> float:
    return torch._functorch.config.activation_memory_budget


def test_the_budget_of_the_compiler_is_set_while_applied_and_restored() -> None:
    before = budget()
    model = Stack(Tiny)
    with actmem.apply(model, CompilerBudget(0.5)):
        assert budget() == 0.5
    assert budget() == before
    applied = actmem.apply(model, CompilerBudget(0))
    assert budget() == 0
    applied.remove()
    assert budget() == before


def test_the_budget_of_the_compiler_changes_what_its_graphs_save() -> None:
    saved: dict[Any, int] = {}
    case = ZOO["torchtitan_like"]
    with torch._functorch.config.patch(enable_autograd_cache=False):  # its key leaves the solver out
        plain = trained(case, None, "model")
        saved["plain"] = plain.measure().saved_bytes
        for fraction in (1.0, 0.5, 0.0):
            run = trained(case, CompilerBudget(fraction), "model")
            assert run.applied is not None
            with run.applied:
                assert differing(plain.gradients, run.gradients) == []
                saved[fraction] = run.measure().saved_bytes
    assert saved[0.0] < saved[0.5] < saved[1.0] == saved["plain"]


@pytest.mark.slow
def test_the_budget_of_the_compiler_recomputes_dropout_with_other_numbers_and_a_plan_does_not() -> None:
    """A defect of torch 2.13 on a CPU that docs/compile.md names. When it is gone, this fails: strike it there."""
    case = ZOO["transformer_encoder"]
    with torch._functorch.config.patch(enable_autograd_cache=False):
        plain = trained(case, None, "model")
        budgeted = trained(case, CompilerBudget(0.5), "model")
        assert budgeted.applied is not None
        budgeted.applied.remove()
        planned = trained(case, Full(), "model")
    assert distance(plain.gradients, budgeted.gradients) > 1e-3
    assert differing(plain.gradients, planned.gradients) == []


def test_the_budget_of_the_compiler_raises_where_nothing_is_compiled() -> None:
    model = Stack(Tiny)
    with actmem.apply(model, CompilerBudget(0.5)), pytest.raises(UnsupportedError) as error:
        model(torch.ones(2, 6, 8))
    assert str(error.value) == (
        "layers.0 runs in eager, and CompilerBudget is a setting of torch.compile that does nothing there. Compile the "
        "model: model.compile(), or choose a mode of actmem's own, such as actmem.Full()."
    )


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "0.5", True, None, float("nan")])
def test_a_budget_that_is_no_fraction_is_refused(fraction: Any) -> None:
    with pytest.raises(ModeError, match=r"fraction = .* is not permitted. Expected a number from 0 to 1"):
        CompilerBudget(fraction)
