"""Each hazard is a promise: torch.utils.checkpoint fails as the table says, and actmem is exact to the bit."""

import math

import pytest
import torch
from torch import Tensor, nn

import actmem
from tests.hazards import table
from tests.hazards.comparing import (
    NON_REENTRANT,
    REENTRANT,
    Form,
    GoesWrong,
    Hazard,
    Raises,
    Wastes,
    measure_row,
    share,
)
from tests.hazards.registry import HAZARDS
from tests.hazards.saved_values import SELECTIVE, Feed
from tests.hazards.stacks import stack, train


@pytest.mark.parametrize("name", HAZARDS)
def test_actmem_is_exact_where_checkpoint_is_not(name: str) -> None:
    hazard = HAZARDS[name]
    hazard.check(measure_row(hazard))


def harmless(form: Form, **changes: object) -> Hazard:
    fields = {"build": stack(Feed), "step": train, "form": form, "expected": GoesWrong(), **changes}
    return Hazard("harmless", "-", "", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [NON_REENTRANT, REENTRANT, SELECTIVE], ids=lambda form: form.name)
def test_the_comparison_finds_no_fault_where_there_is_none(form: Form) -> None:
    hazard = harmless(form)
    row = measure_row(hazard)
    assert row.torch.exact and row.actmem.exact
    with pytest.raises(AssertionError, match=r"torch\.utils\.checkpoint: exact"):
        hazard.check(row)


def test_the_comparison_does_not_accept_a_mode_that_did_nothing() -> None:
    hazard = harmless(NON_REENTRANT, mode=actmem.SaveEverything(), expected=Wastes())
    with pytest.raises(AssertionError, match="0 values replayed"):
        hazard.check(measure_row(hazard))


@pytest.mark.parametrize("what", ["loss", "gradient", "missing gradient", "buffer"])
def test_the_comparison_finds_every_planted_fault(what: str) -> None:
    def spoil(model: nn.Module) -> None:
        form_of_fault[what](model)

    def late_backward(model: nn.Module) -> Tensor:
        loss = train(model)
        if hasattr(model, "spoil"):
            model.spoil()  # type: ignore[operator]
        return loss * getattr(model, "loss_factor", 1)

    def build() -> nn.Module:
        model = stack(Feed)()
        model.register_buffer("seen", torch.ones(3))
        return model

    form_of_fault = {
        "loss": lambda m: setattr(m, "loss_factor", 2),
        "gradient": lambda m: setattr(m, "spoil", lambda: m.head.weight.grad.view(-1)[0].add_(1)),
        "missing gradient": lambda m: setattr(m, "spoil", lambda: setattr(m.head.weight, "grad", None)),
        "buffer": lambda m: setattr(m, "spoil", lambda: m.seen.view(-1)[0].add_(1)),
    }
    found = measure_row(harmless(Form("spoiled", spoil), build=build, step=late_backward)).torch
    assert not found.exact and found.error is None
    assert (found.loss_off > 0) == (what == "loss")
    assert (found.gradients_off > 0) == (what == "gradient")
    assert found.num_missing == (what == "missing gradient")
    assert bool(found.state_off) == (what == "buffer")


def test_gradients_that_are_nan_count_as_wrong() -> None:
    def spoil(model: nn.Module) -> None:
        model.head.register_full_backward_hook(lambda _m, grads, _o: tuple(g * math.nan for g in grads))

    found = measure_row(harmless(Form("spoiled", spoil))).torch
    assert found.gradients_off == math.inf
    assert "gradients are NaN" in str(found)


@pytest.mark.parametrize(("fraction", "text"), [(0.3324, "33 %"), (0.0123, "1.2 %"), (2.0, "200 %"), (1.2e-8, "1e-08")])
def test_shares_are_printed_with_two_digits(fraction: float, text: str) -> None:
    assert share(fraction) == text


def test_the_document_has_one_row_for_every_hazard() -> None:
    rows = table.rows_of(table.DOCUMENT.read_text(encoding="utf-8"))
    assert list(rows) == [table.promise(h) for h in HAZARDS.values()]
    for hazard in HAZARDS.values():
        _, does, theirs, other, ours, reported = rows[table.promise(hazard)]
        word = {Raises: "**raises**", GoesWrong: "wrong**: ", Wastes: "exact"}[type(hazard.expected)]
        assert does == hazard.does
        assert theirs.startswith(f"{hazard.form.name}: ") and word in theirs
        assert {"raises": "**raises**", "wrong": "wrong**: ", "exact": "exact", None: "-"}[hazard.other] in other
        assert ("**raises**" if hazard.refusal else "exact") in ours
        assert all(address in reported for address in hazard.reported)
