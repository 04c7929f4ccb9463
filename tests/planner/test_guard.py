"""A batch that would break the budget is refused before its first block, with what it would take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actmem
from actmem.errors import BudgetError
from actmem.planner import Guard
from actmem.units import size
from tests.planner.steps import DEVICE, Training, peaks, rows, stack, tokens, zoo


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def trained() -> tuple[Training, actmem.Plan]:
    """Return a model, and a plan for 256 rows that recomputes some."""
    training = Training(stack(), rows(256), mean)
    full, plain = peaks(training.profile())
    return training, training.fit((full + plain) // 2)


@contextmanager
def counting(model: nn.Module) -> Iterator[list[str]]:
    """List the blocks of the model itself that run; the fake copy that predicts has the same hooks."""
    ran: list[str] = []
    names = {id(block): name for name, block in model.named_children()}
    hooks = [
        block.register_forward_pre_hook(lambda m, _: ran.append(names[id(m)]) if id(m) in names else None)
        for block in model.children()
    ]
    yield ran
    for hook in hooks:
        hook.remove()


def test_a_larger_batch_is_refused_before_its_first_block_with_the_peak_that_it_would_have() -> None:
    training, plan = trained()
    long = rows(2048)
    expected = actmem.predict(actmem.profile(training.model, long, loss=mean, optimizer=None), plan, DEVICE).peak_bytes
    with actmem.apply(training.model, plan, loss=mean), counting(training.model) as ran:
        with pytest.raises(BudgetError) as caught:
            training.model(*long)
        assert ran == []
        training.model(*training.batch)
        assert ran == list("0123")
    assert plan.predicted is not None
    assert str(caught.value) == (
        "the plan was made for another batch, and here input float32 [2048, 32] is larger than [256, 32]. With a "
        f"budget of {size(plan.predicted.budget_bytes)}, its predicted peak is {size(expected)}. Plan for both: "
        "actmem.fit(model, examples=[short, long], budget=...)."
    )
    assert expected > plan.predicted.budget_bytes


def test_a_refused_batch_changes_nothing() -> None:
    training, plan = trained()
    with actmem.apply(training.model, plan, loss=mean):
        expected = training.measured().peak_bytes
        random = torch.get_rng_state()
        with pytest.raises(BudgetError):
            training.model(*rows(2048))
        assert torch.equal(random, torch.get_rng_state())
        assert all(p.grad is None for p in training.model.parameters())
        assert training.measured().peak_bytes == expected


def test_a_batch_that_is_no_larger_trains() -> None:
    training, plan = trained()
    assert plan.predicted is not None
    with actmem.apply(training.model, plan):
        for num_rows in (256, 255, 1):
            training.batch = rows(num_rows)
            assert training.measured().peak_bytes <= plan.predicted.budget_bytes


def test_a_larger_batch_that_fits_all_the_same_trains() -> None:
    training, plan = trained()
    assert plan.predicted is not None
    small, _ = peaks(actmem.profile(training.model, rows(32), loss=mean, optimizer=None))
    plan = actmem.fit(training.model, rows(32), budget=4 * small, loss=mean, optimizer=None, device=DEVICE, headroom=0)
    assert plan.predicted is not None
    training.batch = rows(64)
    with actmem.apply(training.model, plan, loss=mean):
        assert plan.predicted.peak_bytes < training.measured().peak_bytes <= plan.predicted.budget_bytes


def test_as_many_elements_in_a_longer_sequence_are_not_taken_to_fit() -> None:
    training = zoo("t5", tokens(8, 8))
    plan = training.fit(sum(peaks(training.profile())) // 2)
    with actmem.apply(training.model, plan), pytest.raises(BudgetError, match=r"input_ids int64 \[1, 64\]"):
        training.model(**tokens(1, 64))


def test_the_state_of_the_optimizer_is_counted_in_the_dtype_that_it_was_planned_in() -> None:
    model = stack(dtype=torch.bfloat16)
    small, large = ((rows(num)[0].bfloat16(),) for num in (64, 96))
    options: Any = {"loss": torch.sum, "optimizer_dtype": torch.float32}
    _, plain = peaks(actmem.profile(model, small, **options))
    plan = actmem.fit(model, small, budget=plain, device=DEVICE, headroom=0, **options)
    with actmem.apply(model, plan, loss=torch.sum), pytest.raises(BudgetError, match="its predicted peak is"):
        model(*large)


def test_without_a_loss_a_larger_batch_is_refused_as_not_predictable() -> None:
    training, plan = trained()
    with actmem.apply(training.model, plan), pytest.raises(BudgetError, match="its peak cannot be predicted") as caught:
        training.model(*rows(2048))
    assert "Pass loss=" in str(caught.value)


def test_evaluation_is_left_alone() -> None:
    training, plan = trained()
    long = rows(2048)
    with actmem.apply(training.model, plan, loss=mean):
        with torch.no_grad():
            training.model(*long)
        training.model.eval()
        training.model(*long)
        training.model.train()
        with pytest.raises(BudgetError):
            training.model(*long)


def test_nothing_watches_the_model_any_more_once_the_plan_is_removed() -> None:
    training, plan = trained()
    before = len(training.model._forward_pre_hooks)
    applied = actmem.apply(training.model, plan, loss=mean)
    assert len(training.model._forward_pre_hooks) == before + 1
    applied.remove()
    assert len(training.model._forward_pre_hooks) == before
    mean(training.model(*rows(2048))).backward()


def test_a_batch_may_be_given_by_name_or_by_position() -> None:
    training = zoo("llama", tokens(2, 16))
    full, plain = peaks(training.profile())
    plan = training.fit((full + plain) // 2)
    with actmem.apply(training.model, plan):
        training.model(tokens(2, 16)["input_ids"], labels=tokens(2, 16)["labels"])
        training.model(**tokens(2, 16)).loss.backward()
        with pytest.raises(
            BudgetError, match=re.escape("input_ids int64 [8, 48] is larger than [2, 16], labels int64 [8, 48]")
        ):
            training.model(**tokens(8, 48))


class Masked(nn.Module):
    """Multiplies by a mask before the blocks, and gives its loss only where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack()

    def forward(self, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        if mask is not None:
            x = (x.unsqueeze(1) * mask).mean(1)
        out = self.blocks(x)
        return out if labels is None else (out - labels).square().mean()


def masked() -> tuple[Training, actmem.Plan]:
    x = rows(256)[0]
    training = Training(Masked(), {"x": x, "labels": x})
    return training, training.fit(sum(peaks(training.profile())) // 2)


def test_of_a_smaller_batch_with_other_keys_it_is_said_which_not_that_it_is_larger() -> None:
    training, plan = masked()
    x = rows(64)[0]
    with actmem.apply(training.model, plan):
        training.model(x=x, labels=x)
        with pytest.raises(BudgetError) as caught:
            training.model(x=x, labels=x, mask=torch.ones(64, 999, 32))
    assert "here mask float32 [64, 999, 32] is new. With a budget" in str(caught.value)
    assert "is larger" not in str(caught.value)
    assert "Plan with a batch as training hands it to the model: actmem.fit(model, batch, " in str(caught.value)


def test_labels_that_are_missing_are_named_where_there_is_no_loss_to_predict_with() -> None:
    training, plan = masked()
    x = rows(256)[0]
    with actmem.apply(training.model, plan), pytest.raises(BudgetError) as caught:
        training.model(x=x, mask=torch.ones(256, 1, 32))
    assert "here mask float32 [256, 1, 32] is new, labels is missing." in str(caught.value)
    assert "its peak cannot be predicted: the model returned Tensor" in str(caught.value)


def test_another_dtype_is_looked_at_and_named() -> None:
    training, plan = masked()
    x = rows(256)[0]
    with actmem.apply(training.model, plan), pytest.raises(BudgetError) as caught:
        training.model(x=x.double(), labels=x.double())
    assert "here x float64 [256, 32] has another dtype than float32 [256, 32]" in str(caught.value)


# -------------------------------------------------------------------- a model that is no longer the planned one


class Wide(nn.Module):
    """In the place of GELU: holds more, without a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * x.cos() * x.exp() * x.sigmoid()


class Activated(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


def activated(batch: Any) -> tuple[Training, actmem.Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *[Activated() for _ in range(4)])
    training = Training(model, batch, mean, blocks="1,2,3,4")
    full, plain = peaks(training.profile())
    return training, training.fit((full + plain) // 2)


def widened(model: nn.Module) -> None:
    for block in list(model.children())[1:]:
        block[1] = Wide()  # type: ignore[operator]


CHANGES: dict[str, tuple[Any, str]] = {
    "double": (lambda m: m.double(), "its parameters are float64 instead of float32"),
    "another module": (widened, "it has Wide in place of GELU"),
    "grown": (lambda m: m[4].append(nn.Linear(32, 32)), "10,560 parameters are trained instead of 9,504"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_since_is_refused_with_what_changed_and_what_it_would_take(name: str) -> None:
    change, message = CHANGES[name]
    training, plan = activated(rows(256))
    assert plan.predicted is not None
    with actmem.apply(training.model, plan, loss=mean):
        training.model(*training.batch)
        change(training.model)
        batch = tuple(x.to(next(training.model.parameters()).dtype) for x in training.batch)
        now = actmem.profile(training.model, batch, loss=mean, optimizer=None, blocks=training.blocks)
        peak = actmem.predict(now, plan, DEVICE).peak_bytes
        with (
            counting(training.model) as ran,
            pytest.raises(BudgetError, match=f"not as it was planned for: .*{message}.*{size(peak)}"),
        ):
            training.model(*batch)
        assert ran == []


def test_parameters_that_are_trained_since_are_noticed() -> None:
    torch.manual_seed(0)
    model = stack(width=128)
    for block in list(model)[:3]:  # type: ignore[call-overload]
        block.requires_grad_(False)
    training = Training(model, rows(4, 128), mean)
    _, plain = peaks(training.profile())
    plan = training.fit(plain)
    with actmem.apply(model, plan, loss=mean):
        model(*training.batch)
        model.requires_grad_(True)
        with pytest.raises(BudgetError, match="527,872 parameters are trained instead of 131,968"):
            model(*training.batch)
    # Before the plan is applied as well: it says what it was made for.
    again = actmem.Plan.from_json(plan.to_json())
    with actmem.apply(model, again, loss=mean), pytest.raises(BudgetError, match="other parameters of it are trained"):
        model(*training.batch)


def test_a_change_that_fits_all_the_same_trains_and_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = activated(rows(256))
    _, plain = peaks(training.profile())
    plan = training.fit(4 * plain)
    asked: list[int] = []
    peak_of = Guard._peak
    monkeypatch.setattr(Guard, "_peak", lambda *args, **rest: (asked.append(1), peak_of(*args, **rest))[1])
    with actmem.apply(training.model, plan, loss=mean):
        widened(training.model)
        for _ in range(3):
            training.model(*training.batch)
    assert len(asked) == 1
