"""`CompilerBudget`: the compiler's own choice, set and put back, refused in eager, and its known defects."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actmem import Full, ModeError, UnsupportedError
from actmem.compat.torchtitan import CompilerBudget
from tests.compile.blocks import fresh_compiler
from tests.compile.compiling import HOW, Stack, Tiny, compiled, differing, distance, dynamo_counts, trained
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
    with CompilerBudget(0.5).apply(model):
        assert budget() == 0.5
    assert budget() == before
    applied = CompilerBudget(0).apply(model)
    assert budget() == 0
    applied.remove()
    applied.remove()
    assert budget() == before
    assert not model._forward_pre_hooks


def test_of_several_budgets_the_latest_is_in_force_whichever_is_removed_first() -> None:
    before = budget()
    first, second, third = (CompilerBudget(f).apply(Stack(Tiny)) for f in (0.25, 0.5, 0.75))
    second.remove()
    assert budget() == 0.75
    third.remove()
    assert budget() == 0.25
    first.remove()
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
    with CompilerBudget(0.5).apply(model):
        with pytest.raises(UnsupportedError) as error:
            model(torch.ones(2, 6, 8))
        with torch.no_grad():
            model(torch.ones(2, 6, 8))
        model.eval()(torch.ones(2, 6, 8))
    assert str(error.value) == (
        "Stack runs in eager, and CompilerBudget is a setting of torch.compile that does nothing there. Compile the "
        "model: model.compile(), or choose a mode of actmem's own, such as actmem.Full()."
    )


@pytest.mark.parametrize("how", HOW)
def test_the_budget_of_the_compiler_takes_a_model_that_is_compiled_in_any_way(how: str) -> None:
    model = Stack(Tiny)
    with CompilerBudget(0.5).apply(model), dynamo_counts() as counts:
        compiled(model, how)(torch.ones(2, 6, 8)).sum().backward()
    assert counts["graphs"] > 0 and counts["breaks"] == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "0.5", True, None, float("nan")])
def test_a_budget_that_is_no_fraction_is_refused(fraction: Any) -> None:
    with pytest.raises(ModeError, match=r"fraction = .* is not permitted. Expected a number from 0 to 1"):
        CompilerBudget(fraction)
